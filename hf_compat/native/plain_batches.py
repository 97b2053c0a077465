"""Windows for an `HFModule` from any loader, and plain batches for other modules.

A module and its data module may each have arguments of their own. `share_arguments` makes them one set.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice

import lightning.pytorch as pl

from hf_compat.data.types import Batch, Loader
from hf_compat.engine.windows import Window, Windows, WindowsWithoutLength
from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import ROWS
from hf_compat.native.steps import NativeSteps
from hf_compat.plan.argument_support import default_of


class PlainBatches:
    """Gathers the batches of a loader that gives no windows, as many as one update takes.

    Args:
        steps: Whose arguments say how many, and who counts the items in them.
    """

    def __init__(self, steps: NativeSteps) -> None:
        self.steps = steps
        self._waiting: list[Batch] = []

    def start_epoch(self) -> None:
        """Drop what an epoch that was left early has not trained."""
        self._waiting = []

    def add(self, batch: Batch, is_last: bool) -> Window | None:
        """Return the window that a batch completes; None where its update takes more of them.

        Args:
            batch: What the loader gave.
            is_last: Whether it is the epoch's last one, which ends a window in any case.
        """
        self._waiting.append(batch)
        if len(self._waiting) < self.steps.args.gradient_accumulation_steps and not is_last:
            return None
        waiting, self._waiting = self._waiting, []
        batches, num_items = self.steps.get_batch_samples(iter(waiting), len(waiting), self.steps.args.device)
        return Window(batches, num_items, is_complete=True, epoch_progress=0.0)


class MicroBatches(Windows):
    """The same data and the same state, for a module that knows no windows: each batch is what the loader gave."""

    gives_windows = False

    def __init__(self, loader: Loader, **settings: object) -> None:
        super().__init__(loader, **{**settings, "steps": _OneByOne()})  # type: ignore[arg-type]  # handed on

    def __iter__(self) -> Iterator[Batch]:
        return (window.micro_batches[0] for window in super().__iter__())


class MicroBatchesWithoutLength(MicroBatches, WindowsWithoutLength):
    """The same of data without a length."""


class _OneByOne:
    """Reads one micro-batch at a time, and counts nothing."""

    def get_batch_samples(self, epoch_iterator: Iterator[Batch], *_: object) -> tuple[list[Batch], None]:
        return list(islice(epoch_iterator, 1)), None


def check_told(trainer: pl.Trainer, batches: int) -> None:
    """Refuse a number of accumulated batches that only the arguments hold: another module's updates are Lightning's.

    Raises:
        ArgumentError: The trainer has another number, or the module accumulates by itself.
    """
    if batches in (1, trainer.accumulate_grad_batches):
        return
    module = trainer.lightning_module
    way_out = f"give `accumulate_grad_batches={batches}` to lightning.Trainer"
    if not module.automatic_optimization:
        way_out = "leave the argument out, as the module's manual optimization decides"
    raise ArgumentError(
        f"`gradient_accumulation_steps={batches}` of HFDataModule's arguments has no effect on "
        f"{type(module).__name__}, which is not an HFModule: it gets plain batches, and lightning.Trainer has "
        f"`accumulate_grad_batches={trainer.accumulate_grad_batches}`.\n\nHint: {way_out}."
    )


# Where results go: a native run has Lightning's folders and loggers.
_OF_NO_EFFECT = frozenset({"output_dir", "run_name", "logging_dir", "report_to"})


def share_arguments(model: NativeSteps, data: NativeSteps) -> None:
    """Let the steps of a module and those of its data module work with the same arguments.

    Args:
        model: The steps of the module.
        data: The steps of the data module.

    Raises:
        ArgumentError: Both set an argument to different values, or the data module sets one of training.
    """
    if model.args is data.args:
        return
    values = _values_of_data(model, data) if data.has_own_arguments else {}
    if values:
        together = copy.copy(model.args)
        together.__dict__.update(values)
        model.use_arguments(together)
    data.use_arguments(model.args)


def _values_of_data(model: NativeSteps, data: NativeSteps) -> dict[str, object]:
    """Return the arguments that the data module sets and the module leaves open."""
    values: dict[str, object] = {}
    problems = []
    for field in fields(model.args):
        name, default = field.name, default_of(field)
        of_model, of_data = getattr(model.args, name), getattr(data.args, name, default)
        is_replaced = name == "learning_rate" and model.set_rate is not None
        if is_replaced or name in _OF_NO_EFFECT or of_data in (default, of_model):
            continue
        if name in ROWS and ROWS[name].data and of_model == default:
            values[name] = of_data
        else:
            problems.append(f"`{name}={of_data!r}` of HFDataModule's arguments, {name}={of_model!r} of HFModule's")
    if problems:
        raise ArgumentError(
            f"HFModule and HFDataModule were given different arguments: {'; '.join(problems)}.\n\n"
            "Hint: give both the same `TrainingArguments`, or none to HFDataModule, which takes HFModule's then."
        )
    return values
