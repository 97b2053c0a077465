"""Plain batches: any loader's for an HFModule, as windows; an HFDataModule's for any other module, without windows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import lightning.pytorch as pl

from hf_compat.data.types import Batch
from hf_compat.engine.windows import Loader, Window, Windows, WindowsWithoutLength
from hf_compat.errors import ArgumentError
from hf_compat.native.steps import NativeSteps


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
        super().__init__(loader, **{**settings, "read_window": _one_batch})  # type: ignore[arg-type]  # handed on

    def __iter__(self) -> Iterator[Batch]:
        return (window.micro_batches[0] for window in super().__iter__())


class MicroBatchesWithoutLength(MicroBatches, WindowsWithoutLength):
    """The same of data without a length."""


def _one_batch(micro_batches: Iterator[Batch], *_: object) -> tuple[list[Batch], None]:
    return list(islice(micro_batches, 1)), None


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
