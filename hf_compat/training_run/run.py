"""`TrainingRun`: the state of one call of `train()`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hf_compat.upstream  # noqa: F401 - loads Lightning

# isort: split
import logging

import lightning
import lightning.pytorch as pl
import torch

from hf_compat.checkpoint.plain_values import readable_states
from hf_compat.checkpoint.run_state import DataCut, DataPosition, Moment, PlainState, ResumePoint, RunState
from hf_compat.engine.internals import is_training_batch, loops_state
from hf_compat.engine.module import WindowModule
from hf_compat.engine.window_trainer import WindowTrainer
from hf_compat.engine.windows import Loader, Windows
from hf_compat.hf.metrics import speed_metrics
from hf_compat.plan.run_counts import RunCounts
from hf_compat.training_run.flags import NO_AGREEMENT, FlagAgreement
from hf_compat.training_run.loss_log import LossLog

logger = logging.getLogger(__name__)


Trial = Any  # the trial object of a hyperparameter-search library


@dataclass(kw_only=True)
class TrainingRun:
    """The state of one call of `train()`.

    Args:
        losses: The loss since the last log and in total, and the values logged beside it.
        counts: Updates, epochs and samples.
        loader: The training loader.
        windows: The loader's micro-batches, grouped by update.
        checkpoint: The folder that the run resumes from.
        resumed: The run state of that folder, or None if it has none.
        cut: How the data is cut into updates. None without training.
        start: The point at which the run starts.
        run_id: The id in the checkpoints' manifests. A resumed run keeps the id of its checkpoint.
        trial: The hyperparameter search's trial.
        ignore_keys_for_eval: Outputs that evaluations within the run leave out.
        start_time: `time.time()` at the start of the run, in seconds.
        updates_before: Updates made before this call.
        tokens_before: Input tokens seen before this call.
        flags: Synchronizes the control's flags between ranks.

    Attributes:
        moment: The point within an epoch at which a checkpoint would be written now.
        grad_norm: Gradient norm of the last update. None before the epoch's first update.
        learning_rate: Learning rate of the last update, read before the schedule stepped.
        lightning_trainer: Lightning's trainer during its fit, else None.
        module: Lightning's module during its fit, else None.
        evaluated: Evaluation sets whose persistent workers have started.
        turn: Number of this call of `train` in its output folder. None before its first checkpoint.
    """

    losses: LossLog
    counts: RunCounts | None = None
    loader: Loader = None
    windows: Windows | None = None
    checkpoint: str | None = None
    resumed: RunState | None = None
    cut: DataCut | None = None
    start: ResumePoint = field(default_factory=ResumePoint)
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    trial: Trial = None
    ignore_keys_for_eval: list[str] | None = None
    start_time: float = field(default_factory=time.time)
    updates_before: int = 0
    tokens_before: int = 0
    flags: FlagAgreement = NO_AGREEMENT

    moment: Moment = field(default=Moment.UPDATE, init=False)
    grad_norm: torch.Tensor | float | None = field(default=None, init=False)
    learning_rate: float | None = field(default=None, init=False)
    lightning_trainer: WindowTrainer | None = field(default=None, init=False)
    module: WindowModule | None = field(default=None, init=False)
    evaluated: set[str] = field(default_factory=set, init=False)
    turn: int | None = field(default=None, init=False)

    def begin_epoch(self, is_first: bool) -> None:
        """Reset the last update's numbers. A resumed epoch restores them, as its final log may need them."""
        position = self.start.position
        resumed = self.resumed if is_first and position is not None and position.is_open else None
        self.grad_norm = None if resumed is None else resumed.grad_norm
        self.learning_rate = None if resumed is None else resumed.learning_rate

    def state(
        self,
        epoch_is_over: bool,
        world_size: int,
        samples_per_micro_batch: int,
        lightning_callbacks: Sequence[pl.Callback],
        extras: PlainState,
    ) -> RunState | None:
        """Return the state that a resumed run needs, or None if no training is running.

        Args:
            epoch_is_over: A callback is ending the epoch.
            world_size: Number of ranks.
            samples_per_micro_batch: Samples of a micro-batch over all ranks.
            lightning_callbacks: Lightning callbacks whose states are saved.
            extras: Entries that they have added to the checkpoint.
        """
        if self.lightning_trainer is None or self.windows is None:
            return None
        losses, grad_norm = self.losses.state_with(self.grad_norm)
        return RunState(
            data=self._position(self.windows, self.lightning_trainer, epoch_is_over),
            moment=self.moment,
            world_size=world_size,
            samples_per_micro_batch=samples_per_micro_batch,
            losses=dict(losses),
            grad_norm=grad_norm,
            learning_rate=None if self.learning_rate is None else float(self.learning_rate),
            loops=loops_state(self.lightning_trainer),
            callbacks=readable_states({callback.state_key: callback.state_dict() for callback in lightning_callbacks}),
            extras=extras,
            current_epoch=self.lightning_trainer.current_epoch,
            lightning_version=lightning.__version__,
            evaluated=sorted(self.evaluated),
        )

    @staticmethod
    def _position(windows: Windows, trainer: pl.Trainer, epoch_is_over: bool) -> DataPosition:
        """Return the data position after the counted updates. A resumed run repeats an unfinished update."""
        return windows.position_before_last() if is_training_batch(trainer) else windows.position(epoch_is_over)


def run_summary(
    start_time: float,
    num_samples: float | None,
    num_updates: int,
    total_flos: float,
    train_loss: float,
    nonfinite_updates: int = 0,
) -> dict[str, float]:
    """Return `train_runtime`, `train_samples_per_second`, `train_steps_per_second`, `total_flos` and `train_loss`.

    The summary has `nonfinite_steps`, with a warning, if losses were not finite.

    Args:
        start_time: `time.time()` at the start of this call of `train`, in seconds.
        num_samples: Samples trained on in this call, or None if unknown.
        num_updates: Updates made in this call.
        total_flos: Floating-point operations of the whole run.
        train_loss: Mean loss of the whole run.
        nonfinite_updates: Updates of the whole run whose loss was NaN or infinite and is left out of the mean.
    """
    speeds = speed_metrics("train", start_time, num_samples=num_samples, num_steps=num_updates)
    summary = {**speeds, "total_flos": total_flos, "train_loss": train_loss}
    if not nonfinite_updates:
        return summary
    logger.warning(
        "The loss of %d updates was not finite (NaN or infinite). `logging_nan_inf_filter` leaves it out of the logs "
        "and of `train_loss`.",
        nonfinite_updates,
    )
    return {**summary, "nonfinite_steps": nonfinite_updates}
