"""Optimizer and schedule of a native fit: how many updates they are made for, and those that a subclass brings."""

from __future__ import annotations

import functools
import math
import warnings
import weakref

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig

from hf_compat.engine.windows import Windows
from hf_compat.errors import ArgumentError, HfCompatWarning
from hf_compat.native.limits import accumulate_batches
from hf_compat.native.steps import NativeSteps

# A run without an end in sight: every schedule stays, to many digits, where its warm-up has brought it.
NO_END = 10**12
# By schedule: the metric that it follows, and whether that has to be there.
_FOLLOWED: weakref.WeakKeyDictionary[object, tuple[object, bool]] = weakref.WeakKeyDictionary()
_ENDLESS_SCHEDULES = frozenset({"constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy"})


def updates_of_fit(trainer: pl.Trainer, steps: NativeSteps) -> int:
    """Return the updates of a fit that is about to begin.

    Where nothing bounds them (`Trainer(max_time=…)`), the schedule has no end to decay to, and a warning says so.

    Raises:
        ArgumentError: The warm-up is a share of a number of updates that nobody knows.
    """
    updates = trainer.estimated_stepping_batches
    if trainer.lightning_module.automatic_optimization:
        accumulate_batches(trainer, steps.args.gradient_accumulation_steps)
        updates = trainer.estimated_stepping_batches
    if math.isinf(updates) or updates < 0:
        _check_endless_schedule(steps)
        return NO_END
    gives_windows = isinstance(trainer.train_dataloader, Windows) or not math.isfinite(trainer.num_training_batches)
    if gives_windows or trainer.lightning_module.automatic_optimization:  # Lightning has counted its own updates
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
        restore_monitor(trainer)


def keep_monitor(module: pl.LightningModule) -> None:
    """Keep which metric a schedule follows: Lightning drops it, as manual optimization steps schedules itself.

    Args:
        module: Its `configure_optimizers` may be a subclass's, or LightningCLI's; it is asked once more a fit.
    """
    configure = module.configure_optimizers
    own = module.__dict__.get("configure_optimizers")  # LightningCLI puts one into the module itself

    @functools.wraps(configure)
    def configured() -> object:
        module.__dict__.pop("configure_optimizers", None)
        if own is not None:
            module.__dict__["configure_optimizers"] = own
        chosen = configure()
        for schedule in _schedules_in(chosen):
            kept = {name: schedule.pop(name) for name in ("monitor", "strict", "reduce_on_plateau") if name in schedule}
            if kept:
                _FOLLOWED[schedule["scheduler"]] = (kept.get("monitor"), bool(kept.get("strict", True)))
        return chosen

    module.__dict__["configure_optimizers"] = configured


def _schedules_in(chosen: object) -> list[dict[str, object]]:
    """Return the entries of schedules in what `configure_optimizers` returns; a monitor beside one is put into it."""
    if isinstance(chosen, dict) and "lr_scheduler" in chosen:
        entry = chosen["lr_scheduler"]
        if not isinstance(entry, dict):
            entry = chosen["lr_scheduler"] = {"scheduler": entry}
        if "monitor" in chosen:
            entry.setdefault("monitor", chosen.pop("monitor"))
        return [entry]
    if isinstance(chosen, (tuple, list)) and len(chosen) == 2 and isinstance(chosen[1], (tuple, list)):
        return [entry for entry in chosen[1] if isinstance(entry, dict)]
    return []


def restore_monitor(trainer: pl.Trainer) -> None:
    """Give Lightning's entries of schedules the metric that they follow.

    Raises:
        ArgumentError: A schedule that follows a metric names none.
    """
    for config in trainer.lr_scheduler_configs:
        monitor, strict = _FOLLOWED.get(config.scheduler, (None, True))
        if not isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            continue
        if monitor is None:
            raise ArgumentError(
                "`configure_optimizers` returned a ReduceLROnPlateau, and no metric that it follows.\n\n"
                "Hint: return {'optimizer': …, 'lr_scheduler': {'scheduler': …, 'monitor': 'eval_loss'}}."
            )
        config.reduce_on_plateau, config.monitor, config.strict = True, str(monitor), strict


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
