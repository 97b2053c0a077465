"""Batches of any loader as windows: `fit(HFModule(…), DataLoader(…))`, and any LightningDataModule."""

from __future__ import annotations

from hf_compat.data.types import Batch
from hf_compat.engine.windows import Window
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
