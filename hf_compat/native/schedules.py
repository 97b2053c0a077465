"""Optimizer and schedule of a native fit: how many updates they are made for, and those that a subclass brings."""

from __future__ import annotations

import math
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig

from hf_compat.engine.windows import Windows
from hf_compat.errors import ArgumentError, HfCompatWarning
from hf_compat.native.steps import NativeSteps

# A run without an end in sight: every schedule stays, to many digits, where its warm-up has brought it.
NO_END = 10**12
_ENDLESS_SCHEDULES = frozenset({"constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy"})


def updates_of_fit(trainer: pl.Trainer, steps: NativeSteps) -> int:
    """Return the updates of a fit that is about to begin.

    Where nothing bounds them (`Trainer(max_time=…)`), the schedule has no end to decay to, and a warning says so.

    Raises:
        ArgumentError: The warm-up is a share of a number of updates that nobody knows.
    """
    updates = trainer.estimated_stepping_batches
    if math.isinf(updates) or updates < 0:
        _check_endless_schedule(steps)
        return NO_END
    if isinstance(trainer.train_dataloader, Windows) or not math.isfinite(trainer.num_training_batches):
        return int(updates)
    assert trainer.max_epochs is not None  # set by Lightning where it is left out
    per_epoch = math.ceil(trainer.num_training_batches / steps.args.gradient_accumulation_steps)
    of_epochs = per_epoch * trainer.max_epochs if trainer.max_epochs > 0 else NO_END
    return min(of_epochs, trainer.max_steps) if trainer.max_steps > 0 else of_epochs


def _check_endless_schedule(steps: NativeSteps) -> None:
    args = steps.args
    if 0 < args.warmup_steps < 1:
        raise ArgumentError(
            f"`warmup_steps={args.warmup_steps!r}` is a share of the run, and nothing says how many updates it has.\n\n"
            "Hint: give a number of updates, or `max_steps` or `max_epochs` to lightning.Trainer."
        )
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind not in _ENDLESS_SCHEDULES:
        warnings.warn(
            f"Nothing says how many updates this fit makes, so `lr_scheduler_type={kind!r}` has no end to decay to: "
            "the learning rate stays constant after its warm-up.\n\n"
            "Hint: give `max_steps` or `max_epochs` to lightning.Trainer, or choose `lr_scheduler_type='constant'`.",
            HfCompatWarning,
            stacklevel=2,
        )


def adopt_optimizer(trainer: pl.Trainer, steps: NativeSteps) -> None:
    """Let the steps work with the optimizer that a subclass, or LightningCLI, has configured.

    Its schedule stays Lightning's, stepped at the interval that it was configured with.

    Raises:
        ArgumentError: There are several: an update of HF's has one.
    """
    made = trainer.optimizers
    if len(made) != 1:
        raise ArgumentError(
            f"`configure_optimizers` returned {len(made)} optimizers; an update of an HFModule takes one.\n\n"
            "Hint: return one with several parameter groups, or override `training_step` with "
            "`automatic_optimization = True`."
        )
    if made[0] is not steps.optimizer:
        steps.optimizer, steps.lr_scheduler = made[0], None


def step_plateau(trainer: pl.Trainer, config: LRSchedulerConfig) -> None:
    """Step a schedule of Lightning's that follows a metric, at its monitor's value.

    Raises:
        ArgumentError: Nothing of that name was logged.
    """
    value = trainer.callback_metrics.get(str(config.monitor))
    if value is None:
        if not config.strict:
            return
        raise ArgumentError(
            f"The schedule follows {config.monitor!r}, which was not logged; there are "
            f"{', '.join(sorted(trainer.callback_metrics)) or 'no metrics'}.\n\n"
            "Hint: name one of them as `monitor` in `configure_optimizers`."
        )
    assert isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    config.scheduler.step(value)
