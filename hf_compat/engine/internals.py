"""Every private attribute of Lightning that this package touches, one function each. Lightning words only.

Written against lightning 2.6.6. Each function says why there is no public way; it goes when there is one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.types import LRSchedulerConfig


def run_validation(trainer: Trainer, batches: Any) -> None:
    """Run the validation loop of a fit that is under way, on any batches, at any moment.

    Lightning validates at its own intervals and on the loaders it was given; HF evaluates when a flag says so, on
    whatever data set a method or callback names.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    connector = trainer._logger_connector
    first_iteration = connector._first_loop_iter
    loop._data_source.instance = batches
    loop._combined_loader = None  # made anew from the data source
    trainer.validating = True
    try:
        loop.run()
    finally:
        trainer.training = True
        connector._first_loop_iter = first_iteration


def run_own_validation(trainer: Trainer) -> bool:
    """Run the validation loop of a fit at any moment, on its own loaders; False where it has none."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if not trainer.enable_validation:
        return False
    connector = trainer._logger_connector
    first_iteration = connector._first_loop_iter
    trainer.validating = True
    try:
        loop.run()
    finally:
        trainer.training = True
        connector._first_loop_iter = first_iteration
    return True


def metrics_of_running_loop(trainer: Trainer) -> dict[str, float]:
    """Return what the evaluation loop that is ending has logged; `callback_metrics` mixes it with training's."""
    results = trainer._results
    logged = {} if results is None else results.metrics(on_step=False)["callback"]
    return {name: float(value) for name, value in logged.items()}


def end_epoch_after_this_batch(trainer: Trainer) -> None:
    """Let a training epoch end with the batch that is ending; only the module's own hook could ask for it."""
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True


def is_validating_within_fit(trainer: Trainer) -> bool:
    """Say whether the validation loop of a fit is running right now."""
    return bool(trainer.state.fn == "fit" and trainer.validating)


def leave_validation_to_flags(trainer: Trainer) -> None:
    """Switch Lightning's own validation intervals off: it would validate once more whenever a fit stops."""
    trainer.fit_loop.epoch_loop._should_check_val_fx = lambda data_fetcher: False  # type: ignore[method-assign]


def accept_modules_in_eval_mode(trainer: Trainer) -> None:
    """Leave out the warning on modules in eval mode: every training step sets the mode itself."""
    trainer.fit_loop._warn_if_modules_in_eval_mode = lambda: None  # type: ignore[method-assign]


def stand_beside(trainer: Trainer, module: Any, optimizer: Any, scheduler: Any) -> None:
    """Give a trainer that will not run what a running one has: module, optimizer, schedule, the stage of training."""
    strategy = trainer.strategy
    strategy.connect(module)
    strategy._lightning_module = module
    module._trainer = trainer
    strategy.optimizers = [] if optimizer is None else [getattr(optimizer, "optimizer", optimizer)]
    own = getattr(scheduler, "scheduler", scheduler)
    if own is not None and getattr(own, "optimizer", None) is not None:
        strategy.lr_scheduler_configs = [LRSchedulerConfig(own, interval="step")]
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    trainer.training = True


def place_at(trainer: Trainer, epoch: int, updates: int) -> None:
    """Set the progress of a trainer that will not run."""
    start_from(trainer, epoch, updates)
    trainer.fit_loop.epoch_loop.batch_progress.current.ready = updates + 1


def start_from(trainer: Trainer, epoch: int, updates: int) -> None:
    """Let a fit begin at an epoch and update count: Lightning only takes them from its own checkpoints."""
    progress = trainer.fit_loop.epoch_progress
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress.current, name, epoch)
        setattr(progress.total, name, epoch)
    steps = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
    steps.ready = steps.completed = updates
    trainer.fit_loop.epoch_loop._batches_that_stepped = updates


def keep_step_signature(trainer: Trainer) -> None:
    """Leave out the inspection of `training_step`'s signature at every step: it takes the batch and its index."""

    def build(kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
        kwargs["batch"], kwargs["batch_idx"] = batch, batch_idx
        return kwargs

    trainer.fit_loop.epoch_loop._build_kwargs = build  # type: ignore[method-assign]


def note_metrics(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Let callbacks find numbers among a trainer's metrics.

    `LightningModule.log` works within a module's hooks only.
    """
    connector = trainer._logger_connector
    numbers = {n: torch.tensor(float(v)) for n, v in metrics.items() if isinstance(v, (int, float))}
    connector._callback_metrics.update(numbers)
    connector._logged_metrics.update(numbers)


def before_zero_grad(trainer: Trainer, optimizer: Any) -> None:
    """Call `on_before_zero_grad`: Lightning does so in automatic optimization only."""
    call._call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
    call._call_lightning_module_hook(trainer, "on_before_zero_grad", optimizer)


def loops_state(trainer: Trainer) -> dict[str, Any]:
    """Return the progress of all loops, as Lightning's own checkpoints hold it."""
    return trainer._checkpoint_connector._get_loops_state_dict()


def load_waiting_data_states(trainer: Trainer) -> None:
    """Load the state of the training data that a Lightning checkpoint brought, where that has not happened.

    Lightning loads it when it makes the loader; a module that asks for `estimated_stepping_batches` in
    `configure_optimizers` has it made before the checkpoint is read.
    """
    trainer.fit_loop._load_combined_loader_states()


def place_of(trainer: Trainer) -> tuple[int, int, int, int]:
    """Return rank, rank on this machine, processes, and processes on this machine."""
    return trainer.global_rank, trainer.local_rank, trainer.world_size, trainer.num_devices
