"""Every message stays short, whatever value a public parameter is given: values in messages are cut."""

from __future__ import annotations

import ast
import contextlib
import inspect
import logging
import os
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

import hf_compat
from helpers import toy
from hf_compat import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

PACKAGE = Path(hf_compat.__file__).parent
LONGEST = 2000


class Huge:
    """A value whose text is long."""

    def __repr__(self):
        return "huge" * 25_000


class ReprError(Exception):
    """Is raised by the `repr` of a value, and must not take the place of our error."""


class Unshown:
    """A value that has no text."""

    def __repr__(self):
        raise ReprError("no text")


VALUES = {
    "a long text": "word" * 5_000,
    "many rows": [{"text": "a row of a data set", "label": "one"} for _ in range(10_000)],
    "a large tensor": torch.arange(90_000.0).reshape(300, 300),
    "a large dict": {f"name {number}": [number] * 100 for number in range(1000)},
    "a long repr": Huge(),
    "a repr that raises": Unshown(),
}
# One kind in every run, the others with `-m matrix`
KINDS = [pytest.param(kind, marks=[] if kind == "many rows" else pytest.mark.matrix) for kind in VALUES]
# Parameters whose value becomes a text anyway: a name, a prefix, a member of an enum
BECOME_TEXT = {
    "split", "metric_key_prefix", "description", "name", "value",
}  # fmt: skip
# What the other parameters of a call get, by their names
BASE = {
    "model": toy.Classifier, "features": lambda: toy.rows(2), "folder": lambda: "none", "split": lambda: "train",
    "callback": hf_compat.PrinterCallback, "callbacks": list, "processing_class": lambda: None, "lr_scheduler": None,
    "optimizer": lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), "metrics": dict, "seed": int,
    "name": lambda: "linear", "num_warmup_steps": int, "num_training_steps": lambda: 4, "start_time": float,
    "predictions": lambda: torch.ones(2).numpy(), "label_ids": lambda: torch.ones(2).numpy(), "logs": dict,
    "dataclass_types": lambda: TrainingArguments, "args": lambda: arguments(), "num_samples": int, "value": float,
    "global_step": int, "training_loss": float, "inputs": dict, "dataloader": lambda: torch.utils.data.DataLoader([1]),
    "description": lambda: "Evaluation", "test_dataset": lambda: toy.rows(2), "prediction_loss_only": bool,
    "model_id": lambda: "me/mine", "epoch_iterator": lambda: iter([]), "num_batches": int, "logger": lambda: None,
}  # fmt: skip


def arguments(kind=TrainingArguments, **values):
    quiet = {"output_dir": "out", "use_cpu": True, "max_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    return kind(**{**quiet, **values})


@pytest.fixture
def messages(tmp_path, monkeypatch, caplog):
    """Calls what it is given, and notes each message that is long, or whose making has failed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = os.environ.copy()
    caplog.set_level(logging.DEBUG)
    found = []

    @contextlib.contextmanager
    def listening(function, parameter):
        place = f"{function}({parameter}=…)"
        caplog.clear()
        texts = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                yield
            except ReprError:
                found.extend([f"{place}: the value's own error"] if parameter not in BECOME_TEXT else [])
            except BaseException as error:
                texts.append(str(error))
        texts += [str(one.message) for one in warned] + [record.getMessage() for record in caplog.records]
        found.extend(f"{place}: {len(text):,}: {text[:200]}" for text in texts if len(text) > LONGEST)

    yield listening
    torch.use_deterministic_algorithms(False)
    os.environ.clear()
    os.environ.update(before)
    assert found == []


def parameters(function):
    """The names that a call may give, and which of them it must."""
    taken = inspect.signature(function).parameters.values()
    named = [one for one in taken if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name != "self"]
    needed = [one.name for one in named if one.default is one.empty]
    return [one.name for one in named], needed


def call(function, name, value):
    _, needed = parameters(function)
    return function(
        **{one: BASE[one]() if BASE[one] is not None else None for one in needed if one != name}, **{name: value}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_argument(messages, kind):
    value = VALUES[kind]
    for name in inspect.signature(Seq2SeqTrainingArguments).parameters:
        with messages("Seq2SeqTrainingArguments", name):
            arguments(Seq2SeqTrainingArguments, **{name: value})
        args = arguments(Seq2SeqTrainingArguments)
        with messages("assigned", name):
            setattr(args, name, value)
            Trainer(toy.Classifier(), args, train_dataset=toy.rows(2))
    for method in (name for name in dir(TrainingArguments) if name.startswith("set_")):
        for name in parameters(getattr(TrainingArguments, method))[0]:
            with messages(method, name):
                call(getattr(arguments(), method), name, value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_of_the_constructor(messages, kind):
    value = VALUES[kind]
    for trainer in (Trainer, Seq2SeqTrainer):
        for name in parameters(trainer)[0]:
            of_kind = arguments(Seq2SeqTrainingArguments)
            given = {
                "model": toy.Classifier(),
                "args": of_kind,
                "train_dataset": toy.rows(2),
                "eval_dataset": toy.rows(2),
            }
            with messages(trainer.__name__, name):
                trainer(**{**given, name: value}).train()


def public_methods(kind):
    for name in dir(kind):
        method = getattr(kind, name, None)
        home = next((base.__module__ for base in kind.__mro__ if name in vars(base)), "")
        if not name.startswith("_") and inspect.isroutine(method) and home.startswith("hf_compat."):
            yield name


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_of_the_methods(messages, kind):
    value = VALUES[kind]
    for method in public_methods(Seq2SeqTrainer):
        for name in parameters(getattr(Seq2SeqTrainer, method))[0]:
            trainer = Seq2SeqTrainer(
                toy.Classifier(),
                arguments(Seq2SeqTrainingArguments),
                train_dataset=toy.rows(2),
                eval_dataset=toy.rows(2),
            )
            with messages(method, name):
                call(getattr(trainer, method), name, value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_of_the_public_names(messages, kind):
    value = VALUES[kind]
    for name in hf_compat.__all__:
        public = getattr(hf_compat, name)
        if not (inspect.isfunction(public) or isinstance(public, type)) or name in ("LightningOptions", "Trainer"):
            continue
        for parameter in parameters(public)[0]:
            with messages(name, parameter):
                call(public, parameter, value)


@pytest.mark.parametrize("kind", KINDS)
def test_native_modules_and_adapters(messages, kind):
    value = VALUES[kind]
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "max_steps": 1,
        "limit_val_batches": 1,
        "accelerator": "cpu",
    }
    for name in parameters(hf_compat.HFDataModule)[0]:
        with messages("HFDataModule", name):
            data = hf_compat.HFDataModule(**{"args": arguments(), "train_dataset": toy.rows(2), name: value})
            pl.Trainer(**quiet).fit(hf_compat.HFModule(toy.Classifier(), arguments()), data)
    for name in parameters(hf_compat.HFModule)[0]:
        with messages("HFModule", name):
            module = hf_compat.HFModule(**{"model": toy.Classifier(), "args": arguments(), name: value})
            pl.Trainer(**quiet).fit(module, hf_compat.HFDataModule(arguments(), toy.rows(2)))


# Where a value's `repr` is not a part of a message
MAKES_NO_MESSAGE = {"__init__.py", "hf/fields.py", "optim/prepared.py"}


def test_no_message_has_a_value_s_own_repr():
    """`brief` formats it like `repr`, cuts it, and copes with a `repr` that raises."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith("tools/") and any(
            (isinstance(node, ast.FormattedValue) and node.conversion == ord("r"))
            or (isinstance(node, ast.Constant) and "%r" in str(node.value))
            for node in ast.walk(ast.parse(path.read_text()))
        ):
            found.add(file)
    assert found == MAKES_NO_MESSAGE
