"""How many updates, epochs and samples a run has. Pure arithmetic over lengths and arguments."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from hf_compat.errors import ArgumentError, DataError
from hf_compat.hf.arguments import TrainingArguments

ENDLESS_EPOCHS = sys.maxsize


class RunCounts(NamedTuple):
    """The counts of one run, in the order of what upstream's `set_initial_training_values` returns.

    Args:
        num_train_epochs: Epochs that may begin; `ENDLESS_EPOCHS` where only updates count.
        updates_per_epoch: Windows of an epoch, a short last one included.
        num_examples: Samples of an epoch, as reported.
        num_train_samples: Samples of the run, as reported.
        total_train_batch_size: Samples of one update over all processes.
        micro_batches_per_epoch: Micro-batches of an epoch; for endless data those of the whole run.
        max_updates: Updates of the run.
    """

    num_train_epochs: int
    updates_per_epoch: int
    num_examples: int
    num_train_samples: float
    total_train_batch_size: int
    micro_batches_per_epoch: int
    max_updates: int

    @property
    def is_endless(self) -> bool:
        """Whether the data has no length: the run is one epoch, and only its updates end it."""
        return self.num_train_epochs == ENDLESS_EPOCHS


def make_run_counts(
    args: TrainingArguments,
    *,
    micro_batches: int | None,
    num_examples: int | None,
    total_train_batch_size: int,
) -> RunCounts:
    """Return the counts of a run.

    Args:
        args: The arguments: `max_steps`, `num_train_epochs`, `gradient_accumulation_steps` are read.
        micro_batches: Length of the training loader; None where it has none.
        num_examples: Samples of an epoch; read only where `micro_batches` is given.
        total_train_batch_size: Samples of one update over all processes.

    Raises:
        ArgumentError: Data without a length, and no `max_steps` to end by.
        DataError: Data with the length 0.

    Mirrors:
        `transformers.Trainer.set_initial_training_values`, 5.23.
    """
    window = args.gradient_accumulation_steps
    samples_per_update = total_train_batch_size
    if micro_batches is None:
        max_steps = args.max_steps
        if max_steps <= 0:
            raise ArgumentError(
                f"The training data has no length, so `max_steps={max_steps}` leaves the end of training open: "
                "max_steps has to be specified.\n\nHint: set `max_steps` to the number of updates to train."
            )
        return RunCounts(
            num_train_epochs=ENDLESS_EPOCHS,
            updates_per_epoch=max_steps,
            num_examples=samples_per_update * max_steps,
            num_train_samples=samples_per_update * max_steps,
            total_train_batch_size=samples_per_update,
            micro_batches_per_epoch=max_steps * window,
            max_updates=max_steps,
        )
    if micro_batches == 0:
        raise DataError(
            "The training data set gives no batch.\n\n"
            "Hint: check its length; with `dataloader_drop_last=True` it must hold at least one full batch."
        )
    updates_per_epoch = math.ceil(micro_batches / window)
    epochs, updates, samples = _planned(args, updates_per_epoch, samples_per_update, num_examples or 0)
    return RunCounts(
        num_train_epochs=epochs,
        updates_per_epoch=updates_per_epoch,
        num_examples=num_examples or 0,
        num_train_samples=samples,
        total_train_batch_size=samples_per_update,
        micro_batches_per_epoch=micro_batches,
        max_updates=updates,
    )


def _planned(
    args: TrainingArguments, updates_per_epoch: int, samples_per_update: int, num_examples: int
) -> tuple[int, int, float]:
    """Return the epochs that begin, the updates and the samples of a run: `max_steps` goes before the epochs."""
    if args.max_steps > 0:
        return math.ceil(args.max_steps / updates_per_epoch), args.max_steps, args.max_steps * samples_per_update
    epochs = args.num_train_epochs
    return math.ceil(epochs), math.ceil(epochs * updates_per_epoch), num_examples * epochs
