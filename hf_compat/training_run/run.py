"""`TrainingRun` holds what lasts for one call of `train()`."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_compat.checkpoint.run_state import ResumePoint, RunState, SavedAt
from hf_compat.data.types import Loader
from hf_compat.engine.module import WindowModule
from hf_compat.engine.window_trainer import WindowTrainer
from hf_compat.engine.windows import Windows
from hf_compat.hf.metrics import speed_metrics
from hf_compat.hf.search import Trial
from hf_compat.plan.translate import RunCounts
from hf_compat.training_run.flags import NO_AGREEMENT, FlagAgreement
from hf_compat.training_run.loss_log import LossLog

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingRun:
    """The state of one call of `train()`."""

    losses: LossLog
    counts: RunCounts | None = None
    loader: Loader = None
    windows: Windows | None = None  # the loader's micro-batches, grouped by update
    checkpoint: str | None = None  # the folder that the run resumes from
    resumed: RunState | None = None  # the state in that folder, if it has one
    start: ResumePoint = field(default_factory=ResumePoint)
    run_id: str = field(default_factory=functools.partial(secrets.token_hex, 4))  # in manifests. A resumed run keeps it
    trial: Trial = None
    ignore_keys_for_eval: list[str] | None = None
    start_time: float = field(default_factory=time.time)
    updates_before: int = 0  # made before this call
    tokens_before: int = 0
    flag_agreement: FlagAgreement = NO_AGREEMENT

    moment: SavedAt = field(default=SavedAt.UPDATE, init=False)  # where in an epoch a checkpoint would be written now
    grad_norm: torch.Tensor | float | None = field(default=None, init=False)  # None before the epoch's first update
    learning_rate: float | None = field(default=None, init=False)  # of the last update, before the schedule stepped
    lightning_trainer: WindowTrainer | None = field(default=None, init=False)  # during the fit
    module: WindowModule | None = field(default=None, init=False)  # during the fit
    frozen: list[nn.Parameter] = field(default_factory=list, init=False)  # at the start, if own code may unfreeze them
    stops_at_start: bool = field(default=False, init=False)  # a callback's time limit was over before the fit
    evaluated: set[str] = field(default_factory=set, init=False)  # sets whose persistent workers have started
    turn: int | None = field(default=None, init=False)  # number of this call of `train` in its output folder


def run_summary(
    start_time: float,
    num_samples: float | None,
    num_updates: int,
    total_flos: float,
    train_loss: float,
    nonfinite_updates: int = 0,
) -> dict[str, float]:
    """Return `train_runtime`, `train_samples_per_second`, `train_steps_per_second`, `total_flos` and `train_loss`.

    The times begin at `start_time` (`time.time()`, seconds), as do samples and updates. Operations and mean loss are
    of the whole run. The summary has `nonfinite_steps`, with a warning, if losses were not finite: `nonfinite_updates`
    is the number of the rank that had most updates with such losses.
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
