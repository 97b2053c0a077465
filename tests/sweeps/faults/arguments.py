"""Gives every training argument wrong, odd and borderline values, in every way in which a value can come.

    python tests/sweeps/faults/arguments.py COUNT SEED [--every N] [--show]

Each of the systematic tries gives one argument one value of a list that is the same for all; COUNT random tries give
one to three arguments random ones. What constructs is dumped, copied, explained and given to a Trainer; a sample trains
two updates. An error of ours that names the argument is good, a foreign one is not, nor is one without the name: the
status is 1 then. `--every N` leaves out all but each N-th systematic try.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import decimal
import enum
import fractions
import io
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import types
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ["HF_HUB_OFFLINE"] = "1"  # arguments that ask for pushes reach nobody

from helpers import toy
from hf_compat import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, explain
from hf_compat.cli.main import main as command
from hf_compat.errors import HfCompatError
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.hf.rows import OWN_ARGUMENTS

LIMIT_SECONDS = 60
FIELDS = {field.name: field for field in dataclasses.fields(TrainingArguments)}
DICTS = ("deepspeed", "fsdp_config", "accelerator_config", "lr_scheduler_kwargs", "gradient_checkpointing_kwargs")
ENUMS = {
    "eval_strategy": ["no", "steps", "epoch"],
    "logging_strategy": ["no", "steps", "epoch"],
    "save_strategy": ["no", "steps", "epoch", "best"],
    "lr_scheduler_type": ["linear", "cosine", "polynomial", "constant", "warmup_stable_decay", "greedy"],
    "optim": ["adamw_torch", "sgd", "adafactor", "adamw_bnb_8bit"],
    "hub_strategy": ["end", "checkpoint"],
    "fsdp": ["full_shard auto_wrap", "offload", "no_shard"],
    "report_to": ["tensorboard", "all", "none", "wandb"],
    "debug": ["underflow_overflow"],
    "include_for_metrics": ["inputs", "loss"],
    "include_num_input_tokens_seen": ["all", "no", "non_padding"],
}
OPTIONS = {
    "lr_scheduler_kwargs": ["num_cycles", "min_lr", "min_lr_rate", "power", "lr_end", "num_decay_steps", "patience"],
    "accelerator_config": ["split_batches", "even_batches", "gradient_accumulation_kwargs", "dispatch_batches"],
    "fsdp_config": ["version", "min_num_params", "cpu_offload", "transformer_layer_cls_to_wrap", "auto_wrap_policy"],
    "deepspeed": ["zero_optimization", "optimizer", "scheduler", "bf16", "train_batch_size", "gradient_clipping"],
    "gradient_checkpointing_kwargs": ["use_reentrant", "context_fn"],
}


# ---- values ----


class Hostile:
    """Answers every question with an error."""

    def _fail(self, *_: object) -> None:
        raise RuntimeError("a value of the user's raises")

    __repr__ = __str__ = __eq__ = __bool__ = __float__ = __int__ = __iter__ = __len__ = __index__ = _fail
    __hash__ = None


class Colour(enum.Enum):
    RED = "red"


class Word(str, enum.Enum):  # noqa: UP042 - as transformers' own
    STEPS = "steps"
    COSINE = "cosine"


class Few(enum.IntEnum):
    TWO = 2


class Text(str):
    __slots__ = ()


def nested(depth: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


def circles() -> list[object]:
    inner: list[object] = []
    inner.append(inner)
    outer: dict[str, object] = {}
    outer["a"] = outer
    return [inner, outer]


def systematic_values() -> list[object]:
    numbers = [0, 1, -1, 2, -7, 3.7, 0.5, 1.0, 3.0, -0.0, 1e308, 5e-324, 10**30, 10**400, 2**63, -(2**70)]
    numbers += [float("nan"), float("inf"), float("-inf"), 1j, decimal.Decimal("0.5"), fractions.Fraction(1, 3)]
    words = ["", " ", "abc", "0", "1", " 3 ", "-1", "0.5", "5e-5", "1e3", "1_000", "0x10", "nan", "inf", "1e999", "٣"]
    words += ["True", "false", "no", "yes", "maybe", "None", "null", "auto", "ü", "日本", "\0", "a\0b", "\ud800"]
    words += ["x" * 5000, "9" * 5000, "{", "{}", '{"a": 1}', "[", "[]", '["labels"]', "[" * 20_000, '{"a": NaN}']
    words += ["a,b", "a=b", "lr=x", "momentum=0.9", "nesterov=maybe", "/dev/null", "no/such/file.json", "..", "%s{0}"]
    containers = [[], [1], ["a"], [None], ["labels", "x"], (), ("a",), {}, {"a": 1}, {1: 2}, {"a": float("nan")}, set()]
    containers += [{"a"}, frozenset("a"), range(3), [[]], [{}], {"a": object()}, nested(900), *circles()]
    scalars = [np.float32(0.5), np.int64(3), np.bool_(True), np.array(3), np.array([1, 2]), np.float64("nan")]
    scalars += [np.str_("steps"), np.array("steps"), np.datetime64("2020-01-01"), torch.tensor(3), torch.tensor(0.5)]
    scalars += [
        torch.tensor(True),
        torch.tensor([1, 2]),
        torch.empty((), device="meta"),
        torch.float32,
        torch.tensor(1j),
    ]
    objects = [object(), len, lambda: 1, int, Path("folder"), b"x", bytearray(b"x"), Colour.RED, Word.STEPS, Few.TWO]
    objects += [
        torch.float32,
        Text("steps"),
        (n for n in "a"),
        ValueError("x"),
        Hostile(),
        unittest.mock.MagicMock(),
        types,
        ...,
    ]
    return [None, True, False, *numbers, *words, *containers, *scalars, *objects]


def own_values(name: str) -> list[object]:
    """Values that are near to what an argument takes."""
    known = list(ENUMS.get(name, ())) + list(FIELDS[name].metadata.get("choices", ())) if name in FIELDS else []
    found: list[object] = [form(word) for word in known for form in (str, str.upper, str.title, " {} ".format)]
    found += [[word] for word in known] + [(word, "x") for word in known]
    for key in OPTIONS.get(name, ()):
        found += [{key: value} for value in (None, "x", 0.5, -1, [], {}, float("nan"), "1", True)]
        found.append(json.dumps({key: "x"}))
    return found


def random_value(name: str, draw: random.Random) -> object:
    values = [*systematic_values(), *own_values(name)]
    makers: list[Callable[[], object]] = [
        lambda: draw.choice(values),
        lambda: draw.choice(values),
        lambda: draw.uniform(-3, 3) * 10 ** draw.randint(-12, 12),
        lambda: str(draw.uniform(-3, 3) * 10 ** draw.randint(-12, 12)),
        lambda: draw.randint(-5, 40),
        lambda: "".join(chr(draw.randrange(1, 0x2FFF)) for _ in range(draw.randint(0, 8))),
        lambda: {draw.choice(OPTIONS.get(name, ["a"])): draw.choice(values) for _ in range(draw.randint(0, 3))},
        lambda: [draw.choice(values) for _ in range(draw.randint(0, 3))],
        lambda: FIELDS[name].default if name in FIELDS else None,
    ]
    return draw.choice(makers)()


# ---- ways in which a value comes ----


@dataclass
class Own(TrainingArguments):
    """A subclass with fields and a `__post_init__` of its own."""

    temperature: float = 0.9
    bf16: bool | None = None
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.save_steps = self.save_steps or 1


class Setting:
    """Everything that a try needs, made once."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self.folder = folder
        base = {"per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1, "eval_strategy": "steps"}
        steps = {"eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        plain = {"output_dir": str(folder / "out"), "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
        self.base: dict[str, object] = {**base, **steps, **plain}
        self.theirs = transformers.TrainingArguments(**self.base)
        self.parser = HfArgumentParser(TrainingArguments)
        self.rows, self.model = toy.rows(8), toy.Classifier()

    def construct(self, values: dict[str, object]) -> TrainingArguments:
        return TrainingArguments(**{**self.base, **values})

    def subclass(self, values: dict[str, object]) -> TrainingArguments:
        return Own(**{**self.base, **values})

    def assign(self, values: dict[str, object]) -> TrainingArguments:
        args = TrainingArguments(**self.base)
        for name, value in values.items():
            setattr(args, name, value)
            getattr(args, name)
        return args

    def replace(self, values: dict[str, object]) -> TrainingArguments:
        return dataclasses.replace(TrainingArguments(**self.base), **values)

    def parse(self, values: dict[str, object]) -> TrainingArguments:
        return self.parser.parse_dict({**self.base, **values})[0]

    def adopt(self, values: dict[str, object]) -> TrainingArguments:
        theirs = copy.copy(self.theirs)
        vars(theirs).update(values)
        return Trainer(self.model, theirs, train_dataset=self.rows, eval_dataset=self.rows).args

    def words(self, values: dict[str, object]) -> TrainingArguments | None:
        """Parse a command line; argparse's own errors name the option and end the process."""
        line = [f"--{name}={value}" for name, value in {**self.base, **values}.items()]
        told = io.StringIO()
        try:
            with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
                return self.parser.parse_args_into_dataclasses(line, look_for_args_file=False)[0]
        except SystemExit as ended:
            raise HfCompatError(told.getvalue()) from ended

    def command(self, values: dict[str, object]) -> None:
        """Run `hf-compat explain`."""
        told = io.StringIO()
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            status = command(["explain", *(f"{name}={value}" for name, value in values.items())])
        if status == 2:
            raise HfCompatError(told.getvalue())

    # ---- what becomes of arguments that construct ----

    def use(self, args: TrainingArguments) -> None:
        args.to_json_string()
        args.to_sanitized_dict()
        assert args == copy.copy(args), "a copy differs"
        repr(args)
        for name in OLD_NAMES:
            getattr(args, name)
        explanation = explain(args, parameters=1e6)
        str(explanation), explanation.to_json()

    def make_trainer(self, args: TrainingArguments) -> Trainer:
        model, rows = copy.deepcopy(self.model), self.rows
        return Trainer(model, args, train_dataset=rows, eval_dataset=rows, callbacks=[StopAfterTwo])

    def train(self, args: TrainingArguments) -> None:
        if isinstance(args.output_dir, str) and not args.output_dir.startswith(str(self.folder)):
            args.output_dir = str(self.folder / "out")
        if args.report_to or args.dataloader_num_workers > 2:
            return
        try:
            self.make_trainer(args).train()
        finally:
            shutil.rmtree(self.folder / "out", ignore_errors=True)
            torch.use_deterministic_algorithms(False)


class StopAfterTwo(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= 2
        return control


TEXT_WAYS = ("words", "command")
WAYS = ("construct", "construct", "assign", "assign", "subclass", "replace", "parse", "adopt", *TEXT_WAYS)


# ---- tries ----


@dataclass(frozen=True)
class Try:
    way: str
    values: dict[str, object]


def systematic_tries() -> Iterator[Try]:
    draw = random.Random(0)
    for name in (*FIELDS, *OWN_ARGUMENTS, *OLD_NAMES):
        for value in (*systematic_values(), *own_values(name)):
            yield as_try(draw.choice(WAYS), {name: value})


def random_tries(count: int, seed: int) -> Iterator[Try]:
    draw = random.Random(seed)
    names = [*FIELDS, *FIELDS, *FIELDS, *OWN_ARGUMENTS, *OLD_NAMES]
    for _ in range(count):
        chosen = draw.sample(names, draw.choice((1, 1, 1, 2, 3)))
        yield as_try(draw.choice(WAYS), {name: random_value(name, draw) for name in chosen})


def as_try(way: str, values: dict[str, object]) -> Try:
    """Only fields are replaced; only text comes by a command line."""
    allowed = {"replace": FIELDS, "adopt": {**FIELDS, **OLD_NAMES}}.get(way, values)
    if not all(name in allowed for name in values):
        way = "construct"
    is_text = all(isinstance(value, (str, int, float)) and len(repr_of(value)) < 500 for value in values.values())
    return Try("construct" if way in TEXT_WAYS and not is_text else way, values)


def repr_of(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__}>"


def judge(action: Callable[[], object], names: list[str]) -> tuple[str, object, str]:
    """Do something; return what it came to, its result, and the error's message."""
    try:
        return "success", action(), ""
    except HfCompatError as error:
        told = str(error)
        is_named = any(name in told or name.lower() in told.lower() for name in names)
        return "ours, named" if is_named else "ours, WITHOUT THE NAME", None, told
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "FOREIGN", None, f"{type(error).__name__}: {repr_of(error)}"


HEADS = ("tries", "success", "ours, named", "ours, WITHOUT THE NAME", "FOREIGN", "HUNG")
BAD = HEADS[3:]


class Report:
    def __init__(self) -> None:
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.bad: list[str] = []

    def note(self, stage: str, one: Try, end: str, told: str) -> None:
        self.counts[stage].update(("tries", end))
        if end in BAD:
            values = ", ".join(f"{name}={repr_of(value)[:120]}" for name, value in one.values.items())
            self.bad.append(f"{end} [{stage}, {one.way}] {values}\n    {told[:300]!r}")

    def table(self) -> list[list[str]]:
        rows = [[stage, *(str(count[head]) for head in HEADS)] for stage, count in sorted(self.counts.items())]
        total = sum(self.counts.values(), collections.Counter())
        return [["stage", *HEADS], *rows, ["all", *(str(total[head]) for head in HEADS)]]

    @property
    def is_well(self) -> bool:
        return not self.bad


def try_one(one: Try, setting: Setting, report: Report, trains: bool) -> None:
    today = [re.match(r"\w+", OLD_NAMES[name].means)[0] for name in one.values if name in OLD_NAMES]
    names = [*one.values, *today]
    stages: list[tuple[str, Callable[[TrainingArguments], object]]] = [
        ("dump, copy, explain", setting.use),
        ("make a Trainer", setting.make_trainer),
    ]
    with time_limit(one, report):
        end, args, told = judge(lambda: getattr(setting, one.way)(one.values), names)
        report.note(f"1 {one.way}", one, end, told)
        for number, (stage, action) in enumerate([*stages, *([("train", setting.train)] if trains else [])], 2):
            if args is None:
                return
            end, _, told = judge(lambda action=action: action(args), names)
            report.note(f"{number} {stage}", one, end, told)
            if end != "success":
                return
        with contextlib.suppress(
            AttributeError, TypeError, RuntimeError, pickle.PicklingError
        ):  # of values that cannot be pickled
            pickle.dumps(args)


@contextlib.contextmanager
def time_limit(one: Try, report: Report) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    except TimeoutError:
        report.note("1 " + one.way, one, "HUNG", "")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)


def run(count: int, seed: int, every: int = 1, train_every: int = 25, progress: bool = False) -> Report:
    """Make the tries: each n-th systematic one and `count` random ones; train with each so many-th of all."""
    chosen = [*list(systematic_tries())[::every], *random_tries(count, seed)]
    report = Report()
    with tempfile.TemporaryDirectory(prefix="arguments_") as place, quiet(), contextlib.chdir(place):
        setting = Setting(Path(place))
        for number, one in enumerate(tqdm(chosen, disable=not progress, dynamic_ncols=True, mininterval=1)):
            try_one(one, setting, report, trains=number % train_every == 0)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=5000, help="random tries")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="of the random tries")
    parser.add_argument("--every", type=int, default=1, help="each n-th of the systematic tries")
    parser.add_argument("--show", type=int, default=40, help="bad tries that are printed")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    report = run(chosen.count, chosen.seed, chosen.every, progress=True)
    for line in report.bad[: chosen.show]:
        print(line)
    table = report.table()
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    return 0 if report.is_well else 1


if __name__ == "__main__":
    sys.exit(main())
