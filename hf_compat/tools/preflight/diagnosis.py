"""After an error of a run: what the checks of a preflight say of the batch that it was raised for.

The findings become notes of the exception, below its own text. A run without an error never comes here.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_compat.engine.evaluation import is_metric_source
from hf_compat.engine.windows import BatchGroup
from hf_compat.errors import HfCompatError, LossError
from hf_compat.runtime.inspection import accepted_parameters
from hf_compat.tools.preflight.data_checks import check_numbers, columns_without_numbers
from hf_compat.tools.preflight.report import way_out_of
from hf_compat.tools.preflight.session import Session
from hf_compat.trainer import Trainer
from hf_compat.trainer_methods.evaluator import Evaluator

_EARLY_UPDATES = 1  # later a batch is rarely to blame
_NO_TENSOR = "Of {} no tensor can be made. Hint: convert or remove what holds no numbers."


@dataclass(kw_only=True)
class Crash:
    """An error that leaves a method of a Trainer."""

    trainer: Trainer
    error: Exception
    batch: object = None  # that was trained or evaluated on. None if no batch was there yet
    in_evaluation: bool = False

    def says(self, *patterns: str) -> bool:
        """Whether the error's text has one of these patterns."""
        return any(re.search(pattern, str(self.error)) for pattern in patterns)

    @property
    def values(self) -> dict[str, object]:
        """The batch's values by name."""
        return {str(key): value for key, value in self.batch.items()} if isinstance(self.batch, Mapping) else {}

    @property
    def float_labels(self) -> list[str]:
        """The labels that are fractions, among the batch's."""
        names = [*self.trainer.label_names, "labels", "label"]
        found = ((name, self.values.get(name)) for name in dict.fromkeys(names))
        return [name for name, value in found if isinstance(value, torch.Tensor) and value.is_floating_point()]


class Rule(NamedTuple):
    """A cause, by its evidence, and what helps."""

    applies: Callable[[Crash], object]
    says: Callable[[Crash], str]


def _takes_two(crash: Crash) -> bool:
    """Whether the metric function takes predictions and labels as two arguments."""
    compute = crash.trainer.compute_metrics
    if not isinstance(crash.error, TypeError) or not callable(compute) or is_metric_source(compute):
        return False
    return len(accepted_parameters(compute).required - {"compute_result"}) > 1


def _lists(crash: Crash) -> list[str]:
    return [name for name, value in crash.values.items() if isinstance(value, (list, str))]


def _is_table(dataset: object) -> bool:
    return type(dataset).__module__.partition(".")[0] in ("pandas", "polars", "pyarrow")


def _tables(crash: Crash) -> list[str]:
    sets = {"train_dataset": crash.trainer.train_dataset, "eval_dataset": crash.trainer.eval_dataset}
    return [name for name, dataset in sets.items() if _is_table(dataset)]


RULES: Sequence[Rule] = (
    Rule(
        _takes_two,
        lambda crash: (
            f"`compute_metrics` is called with one `EvalPrediction`, and takes "
            f"{inspect.signature(crash.trainer.compute_metrics)}. "
            "Hint: take one parameter `p`, and read `p.predictions` and `p.label_ids`."
        ),
    ),
    Rule(
        _tables,
        lambda crash: (
            f"`{_tables(crash)[0]}` is a table, which gives columns and no samples. "
            "Hint: convert it: `datasets.Dataset.from_pandas(table)`, or `table.to_dict('records')`."
        ),
    ),
    Rule(
        _lists,
        lambda crash: (
            f"The batch has lists or texts in {', '.join(map(repr, _lists(crash)))}, and a model takes tensors. "
            "Hint: let `data_collator` make tensors of them, or leave them out."
        ),
    ),
    Rule(
        lambda crash: (
            crash.float_labels and crash.says("(?i)long|float|dtype|scalar type|not implemented for|target size")
        ),
        lambda crash: (
            f"{crash.float_labels[0]!r} holds fractions (torch.float32), and a loss of classes takes whole numbers. "
            "Hint: convert the labels (`.long()`), or use a loss for numbers (`problem_type='regression'`)."
        ),
    ),
)


def tell(trainer: Trainer, error: Exception, updates: int | None) -> None:
    """Add what a preflight would have said to an error of the first updates or of an evaluation.

    `updates` were made in this run. None if the Trainer was never set up.
    """
    notes = getattr(error, "__notes__", ())
    is_explained = isinstance(error, HfCompatError) and not isinstance(error, LossError)
    if is_explained or any(note.startswith("hf_compat: ") for note in notes):
        return
    found: list[str] = []
    # the user's error is the one to be seen, whatever a check of the user's objects raises
    with contextlib.suppress(Exception):
        found += _notes(trainer, error, updates)
    for note in dict.fromkeys(found):
        error.add_note(f"hf_compat: {note}")


def _crash(trainer: Trainer, error: Exception) -> Crash:
    """Find the batch in the frames that the error came through."""
    crash, trace = Crash(trainer=trainer, error=error), error.__traceback__
    while trace is not None:
        values, code = trace.tb_frame.f_locals, trace.tb_frame.f_code
        crash.in_evaluation |= code is Evaluator.run.__code__
        group = values.get("window", values.get("batch"))
        if isinstance(group, BatchGroup) and group.micro_batches:
            index = values.get("index")
            place = index - 1 if isinstance(index, int) and 0 < index <= len(group.micro_batches) else 0
            crash.batch = group.micro_batches[place]
        trace = trace.tb_next
    return crash


def _notes(trainer: Trainer, error: Exception, updates: int | None) -> Iterator[str]:
    if updates is None:
        yield (
            f"The constructor of {type(trainer).__name__} has not called that of the Trainer. "
            "Hint: call `super().__init__(…)` in its `__init__`."
        )
        return
    crash = _crash(trainer, error)
    if updates > _EARLY_UPDATES and not crash.in_evaluation:
        return
    if isinstance(error, LossError):  # which says the rest itself
        odd = columns_without_numbers(trainer)
        if any(repr(name) in odd for name in trainer.label_names):
            yield _NO_TENSOR.format(odd)
        return
    by_rules = [rule.says(crash) for rule in RULES if rule.applies(crash)]
    yield from by_rules
    # a sample that has killed a worker would kill this process
    if crash.batch is None and not crash.says("DataLoader worker"):
        odd = columns_without_numbers(trainer)
        if odd:
            yield _NO_TENSOR.format(odd)
    if crash.batch is not None:
        session = Session(trainer=trainer, folder="", output_dir=str(trainer.args.output_dir))
        session.batches = [crash.batch]
        check_numbers(session)
        yield from (f"{one.problem} Hint: {one.way_out}." for one in session.findings)
    known = way_out_of(error)
    if known is not None and not by_rules:
        yield f"Hint: {known}."
