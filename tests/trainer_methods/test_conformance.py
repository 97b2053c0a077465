"""An override of any method in upstream's classes is called when upstream calls it, or the class is refused."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from dataclasses import dataclass, field

import pytest
import transformers
from torch import nn
from transformers import trainer_callback

import hf_compat
from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.errors import ArgumentError, HfCompatWarning, OverrideError
from hf_compat.hf import callbacks, state
from hf_compat.interop.former_names import REFUSED_OVERRIDES

METHODS = [name for name, value in vars(transformers.Trainer).items() if inspect.isfunction(value) and name[1] != "_"]
CLASSES = [
    (transformers.Trainer, Trainer),
    (transformers.TrainingArguments, TrainingArguments),
    (trainer_callback.TrainerState, state.TrainerState),
    (trainer_callback.TrainerControl, state.TrainerControl),
    (trainer_callback.TrainerCallback, callbacks.TrainerCallback),
    (trainer_callback.CallbackHandler, callbacks.CallbackHandler),
    (trainer_callback.ExportableState, state.ExportableState),
]
# Upstream's helper, which subclasses do not override.
INNER = {
    "_apply_legacy_fsdp_to_config",
    "_dict_dtype_to_str",
    "_no_sync_in_gradient_accumulation",
    "_process_fsdp_args",
    "is_torch_greater_or_equal_than_2_8",
}
# Called in a search on ray alone: test_search_backends.py.
NOT_YET = {"_tune_save_checkpoint"}


def counting(base, calls):
    """Make a subclass of a Trainer that overrides every method, counts calls, and calls the base class."""

    def override(name):
        inherited = getattr(base, name)

        @functools.wraps(inherited)
        def method(self, *args, **kwargs):
            calls[name] += 1
            return inherited(self, *args, **kwargs)

        return method

    refused = REFUSED_OVERRIDES if base is Trainer else ()
    names = [name for name in METHODS if inspect.isfunction(inspect.getattr_static(base, name, None))]
    names = [name for name in names if name not in refused]
    return type("Counting", (base,), {name: override(name) for name in names})


def make_model():
    return toy.Classifier()


def calls_of(api, folder):
    """Train, evaluate, predict, save and resume. Return the number of calls of each method."""
    calls = Counter()
    kind = counting(api.Trainer, calls)
    values = {"output_dir": str(folder), "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    values |= {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 2}
    values |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "load_best_model_at_end": True}
    data = {
        "train_dataset": toy.rows(48),
        "eval_dataset": toy.rows(16),
        "compute_metrics": lambda prediction: {"a": 1.0},
    }
    trainer = kind(model_init=make_model, args=api.TrainingArguments(max_steps=4, **values), **data)
    trainer.train()
    trainer.evaluate()
    trainer.predict(toy.rows(8))
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", {"a": 1.0})
    trainer.save_metrics("train", {"a": 1.0})
    trainer = kind(toy.Classifier(), api.TrainingArguments(max_steps=6, **values), **data)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert trainer.state.global_step == 6
    return calls


def test_an_override_is_called_or_refused(tmp_path, capsys):
    theirs, ours = calls_of(transformers, tmp_path / "theirs"), calls_of(hf_compat, tmp_path / "ours")
    called_there, called_here = set(theirs), set(ours)
    with capsys.disabled():
        print(f"\n{len(METHODS)} methods: upstream calls {len(called_there)}, here are called", end=" ")
        print(f"{len(called_here & called_there)} of these, {len(called_there - called_here)} are refused")
    assert called_there - called_here == called_there & set(REFUSED_OVERRIDES)
    assert len(called_there) > 60
    same = {"training_step", "compute_loss", "prediction_step", "evaluation_loop", "_save_checkpoint", "_wrap_model"}
    same |= {
        "_prepare_inputs",
        "_prepare_input",
        "log",
        "_maybe_log_save_evaluate",
        "_load_rng_state",
        "get_batch_samples",
    }
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}


@pytest.mark.parametrize("theirs, ours", CLASSES, ids=lambda kind: kind.__name__)
def test_nothing_is_missing(theirs, ours):
    missing = {name for name in dir(theirs) if not name.startswith("__") and not hasattr(ours, name)}
    assert missing <= set(REFUSED_OVERRIDES) | INNER | NOT_YET


@pytest.mark.parametrize("theirs, ours", CLASSES, ids=lambda kind: kind.__name__)
def test_what_the_base_class_receives_it_accepts(theirs, ours):
    """An override passes its arguments on, by position or by name, so each parameter has upstream's position."""
    differing = []
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if (name.startswith("__") and name != "__init__") or not hasattr(ours, name):
            continue
        taken = list(inspect.signature(getattr(ours, name)).parameters.values())
        if [p.kind for p in taken][-2:] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
            continue
        for place, parameter in enumerate(inspect.signature(method).parameters.values()):
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            by_place = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            names = [one.name for one in taken]
            if is_named and (parameter.name not in names or (by_place and names.index(parameter.name) != place)):
                differing.append((name, parameter.name))
    assert differing == []


def test_attributes_that_subclasses_read_are_there(tmp_path):
    values = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    theirs = transformers.Trainer(toy.Classifier(), transformers.TrainingArguments(**values))
    ours = Trainer(toy.Classifier(), TrainingArguments(**values))
    assert {name for name in vars(theirs) if not hasattr(ours, name)} == set()
    assert {name for name in vars(theirs.args) if not hasattr(ours.args, name)} <= {"_n_gpu"}
    assert {name for name in vars(theirs.callback_handler) if not hasattr(ours.callback_handler, name)} == set()


@pytest.mark.parametrize("name", REFUSED_OVERRIDES)
def test_a_class_with_an_override_that_nothing_calls_is_refused(name):
    with pytest.raises(OverrideError, match=f"Own overrides `{name}`"):
        type("Own", (Trainer,), {name: lambda self, *args: None})
    mixin = type("Mixin", (), {name: lambda self, *args: None})
    with pytest.raises(OverrideError, match="Hint: "):
        type("Own", (mixin, Trainer), {})


@pytest.mark.parametrize("where, former", [("instance", "_log"), ("class", "_training_step")])
def test_an_override_that_nothing_calls_is_refused_wherever_it_is_put(make_args, where, former, monkeypatch):
    trainer = Trainer(toy.Classifier(), make_args(max_steps=1), train_dataset=toy.rows(8))
    holder = trainer if where == "instance" else Trainer
    monkeypatch.setattr(holder, former, lambda *args: None, raising=False)
    with pytest.warns(HfCompatWarning, match=f"Trainer has a method `{former}`"):
        trainer.train()
    monkeypatch.setattr(holder, "_run_epoch", lambda *args: None, raising=False)
    with pytest.raises(OverrideError, match="Trainer overrides `_run_epoch`"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_devices_that_arguments_claim_make_the_batch_larger(tmp_path):
    class Own(TrainingArguments):
        @property
        def n_gpu(self):
            return 2

    args = Own(str(tmp_path), per_device_train_batch_size=3, per_device_eval_batch_size=5, use_cpu=True)
    assert (args.train_batch_size, args.eval_batch_size) == (6, 10)


def test_a_model_that_is_wrapped_is_refused(make_args):
    class Wraps(Trainer):
        def _wrap_model(self, model, training=True, dataloader=None):
            return nn.Sequential(model)

    with pytest.raises(OverrideError, match="_wrap_model returned a Sequential"):
        Wraps(toy.Classifier(), make_args(), train_dataset=toy.rows(8)).train()


def test_an_accelerator_that_is_changed_after_it_was_made(make_args):
    class Own(Trainer):
        def create_accelerator_and_postprocess(self):
            assert isinstance(self.model, toy.Classifier) and self.args.max_steps == 1
            super().create_accelerator_and_postprocess()
            self.accelerator.even_batches = False

    trainer = Own(toy.Classifier(), make_args(max_steps=1), train_dataset=toy.rows(8))
    assert trainer.accelerator.even_batches is False and trainer.train().global_step == 1


def test_counts_may_be_a_plain_tuple(make_args):
    class Shorter(Trainer):
        def set_initial_training_values(self, args, dataloader):
            *counts, max_steps = super().set_initial_training_values(args, dataloader)
            return (*counts, max_steps - 3)

        def get_total_train_batch_size(self, args):
            return 100 * super().get_total_train_batch_size(args)

    trainer = Shorter(toy.Classifier(), make_args(max_steps=5), train_dataset=toy.rows(8))
    assert trainer.train().global_step == 2


@pytest.mark.parametrize("hands_on", [False, True])
def test_random_states_are_restored_as_the_override_says(make_args, hands_on):
    seen = []

    class Own(Trainer):
        def _load_rng_state(self, checkpoint):
            seen.append(checkpoint)
            if hands_on:
                super()._load_rng_state(checkpoint)

    def losses(kind, resume=None, **values):
        args = make_args(max_steps=6, save_strategy="steps", save_steps=3, logging_steps=1, **values)
        trainer = kind(toy.Classifier(), args, train_dataset=toy.rows(48))
        trainer.train(resume_from_checkpoint=resume)
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    whole = losses(Trainer)
    checkpoint = make_args().output_dir + "/checkpoint-3"
    assert (losses(Own, checkpoint) == whole) is hands_on  # dropout draws from them
    assert seen == [checkpoint]


def test_every_part_of_a_batch_is_prepared_by_the_override(make_args):
    shapes = []

    class Own(Trainer):
        def _prepare_input(self, data):
            if not hasattr(data, "shape"):
                return super()._prepare_input(data)
            shapes.append(tuple(data.shape))
            return super()._prepare_input(data * 0)

    trainer = Own(toy.Classifier(dropout=0.0), make_args(max_steps=1), train_dataset=toy.rows(4))
    trainer.train()
    assert sorted(shapes) == [(4,), (4, 8)]


def test_events_of_a_script_are_called(make_args):
    seen = []

    class Watches(hf_compat.TrainerCallback):
        def on_custom(self, args, state, control, word=None, **kwargs):
            seen.append((state.global_step, word))
            control.should_training_stop = True

    class Own(Trainer):
        def training_step(self, *args, **kwargs):
            handler = self.callback_handler
            self.control = handler.call_event("on_custom", self.args, self.state, self.control, word="hello")
            return super().training_step(*args, **kwargs)

    watches = Watches()
    watches.on_step_end = lambda *args, **kwargs: None
    trainer = Own(toy.Classifier(), make_args(max_steps=3), train_dataset=toy.rows(16), callbacks=[watches])
    assert trainer.train().global_step == 1 and seen == [(0, "hello")]


@dataclass
class OwnArguments(TrainingArguments):
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]
    model_init_kwargs: dict | str | None = field(default=None)
    margin: float = 1.0

    def _validate_args(self):
        super()._validate_args()
        if self.margin < 0:
            raise ValueError("margin below 0")


def test_names_of_arguments_that_subclasses_extend():
    args = OwnArguments("out", model_init_kwargs='{"dtype": "auto", "layers": "3", "deep": {"tied": "true"}}')
    assert args.model_init_kwargs == {"dtype": "auto", "layers": 3, "deep": {"tied": True}}
    assert OwnArguments("out", model_init_kwargs="file.json").model_init_kwargs == "file.json"
    assert args._setup_devices == args.device and args.default_optim == args.optim
    with pytest.raises(ArgumentError, match=r"(?s)model_init_kwargs.*not valid JSON"):
        OwnArguments("out", model_init_kwargs="{nonsense")
    with pytest.raises(ValueError, match="margin below 0"):
        OwnArguments("out", margin=-1.0)
