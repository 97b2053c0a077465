"""Private attributes of Lightning, each in one function, base class or constant.

`window_trainer.py` has those of its loops and its trainer.

Each docstring gives the reason and the condition for removal. `tests/house/test_lightning_internals.py` finds uses
outside this file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _validate_scheduler_api,
)
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from lightning.pytorch.utilities.types import LRSchedulerConfig, OptimizerLRScheduler
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hf_compat.errors import warn_once
from hf_compat.interop.deepspeed import DeepSpeedEngine

Wrapped = Any  # torch's optimizer or schedule, or what accelerate wraps around it

# The Lightning release that this file is written for and tested with.
WRITTEN_FOR = "2.6.6"


def warn_of_newer_lightning() -> None:
    """Warn, once a process, if the installed Lightning has a newer minor version than `WRITTEN_FOR`."""
    installed = lightning.__version__
    if tuple(map(int, installed.split(".")[:2])) > tuple(map(int, WRITTEN_FOR.split(".")[:2])):
        warn_once(
            f"hf_compat uses internals of Lightning {WRITTEN_FOR}. Lightning {installed} is installed and may have "
            "changed them.\n\n"
            f"Hint: if training fails or its numbers change, pip install 'lightning~={WRITTEN_FOR}'."
        )


def do_nothing(*args: object, **kwargs: object) -> None:
    """Replace a Lightning method that must not run."""


def run_validation(trainer: Trainer, batches: Iterable[object] | None = None) -> bool:
    """Run the validation loop within a fit at any moment. Return False if there is nothing to validate.

    Lightning validates at its own intervals, on the loaders that it was given. HF evaluates when a flag is set, on any
    `batches`. None takes the trainer's own loaders. Remove it when a trainer validates on request within a fit.
    """
    loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
    if batches is not None:
        loop._data_source.instance = batches
        loop._combined_loader = None  # the loop makes a new one from the data source
    elif not trainer.enable_validation:
        return False
    loop.restarting = False  # after a resume Lightning would go on with the validation before this one
    first_iteration = connector._first_loop_iter
    trainer.validating = True
    try:
        loop.run()
    finally:
        trainer.training = True
        connector._first_loop_iter = first_iteration
    return True


def given_to_fit(trainer: Trainer) -> object:
    """The loaders that the user passed to `fit`, or the data module. Remove when Lightning names it in public."""
    return trainer.fit_loop._data_source.instance


def validates_after_this_batch(trainer: Trainer) -> bool:
    """Whether Lightning validates at the end of the current training batch.

    Only hooks at the end of a batch may call this. Lightning has no public way to ask. Remove it when checkpoints of a
    batch's end are resumed with their validation.
    """
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    return trainer.training and fetcher is not None and loop.epoch_loop._should_check_val_fx(fetcher)


def metrics_of_running_loop(trainer: Trainer) -> dict[str, float]:
    """Return the metrics that the ending evaluation loop has logged.

    `callback_metrics` also holds those of training. Remove it when Lightning returns the metrics of one loop.
    """
    results = trainer._results
    logged = {} if results is None else results.metrics(on_step=False)["callback"]
    return {name: float(value) for name, value in logged.items()}


def batch_under_way(module: LightningModule) -> object:
    """Return the batch of the step that a module's trainer is running, or None.

    Lightning weights logged values by the batch size, which it finds in tensors only. Remove it when a module can name
    the size of its batches.
    """
    results = None if module._trainer is None else module._trainer._results
    return None if results is None else results.batch


def is_training_batch(trainer: Trainer) -> bool:
    """Whether a fit is between the start and the end of a training batch. Remove it when a trainer has this flag."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.ready > progress.processed)


def skip_step_metrics(trainer: Trainer, names: Collection[str] | None = None) -> None:
    """Log no metrics, or none of these, of a batch without an update. Lightning would log the last values again.

    Only for automatic optimization does Lightning check that a batch accumulates. Remove it when it also checks manual
    optimization.
    """
    for metric in (trainer._results or {}).values():
        is_named = names is None or metric.meta.name in names
        if is_named and metric.meta.on_step and not metric.meta.on_epoch:
            metric.has_reset = True


def end_epoch_after_this_batch(trainer: Trainer) -> None:
    """End the training epoch after the current batch.

    Lightning lets only the module's own `on_train_batch_start` do this. Remove it when a callback can.
    """
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True


def is_validating_within_fit(trainer: Trainer) -> bool:
    """Whether the validation loop of a fit is running."""
    return bool(trainer.state.fn == "fit" and trainer.validating)


def reset_weight_averaging(callback: Callback) -> None:
    """Reset the counters of a weight-averaging callback, so that it starts fresh with the next fit.

    Remove it when Lightning's callbacks reset them in `setup`.
    """
    if isinstance(callback, WeightAveraging):
        callback._latest_update_step, callback._latest_update_epoch = 0, -1
    elif isinstance(callback, StochasticWeightAveraging):
        callback._initialized, callback._latest_update_epoch, callback._init_n_averaged = False, -1, 0
        callback.n_averaged = callback._scheduler_state = callback._swa_scheduler = None


def switch_off_own_validation(trainer: Trainer) -> None:
    """Switch off Lightning's own validation intervals.

    With `val_check_interval` alone Lightning validates once more when a fit stops. Remove it when the interval can be
    switched off.
    """
    trainer.fit_loop.epoch_loop._should_check_val_fx = do_nothing  # type: ignore[method-assign, assignment]


def mirror_running_fit(
    trainer: Trainer, module: LightningModule, optimizer: Wrapped | None, scheduler: Wrapped | None
) -> None:
    """Give an idle trainer the module, optimizer, schedule and training state of a running one.

    Lightning sets these in `fit` only. Remove it when a trainer can be built in the middle of a fit.
    """
    warn_of_newer_lightning()
    strategy = trainer.strategy
    strategy.connect(module)
    strategy._lightning_module = module
    module._trainer = trainer
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    strategy.optimizers = [] if inner is None else [inner]
    own = getattr(scheduler, "scheduler", scheduler)
    if own is not None and getattr(own, "optimizer", None) is not None:
        shown = copy.copy(own)
        shown.optimizer = inner  # without its wrapper, as callbacks would take the two for different optimizers
        strategy.lr_scheduler_configs = [LRSchedulerConfig(shown, interval="step")]
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    trainer.training = True


def set_progress(trainer: Trainer, epoch: int, updates: int) -> None:
    """Set the progress of an idle trainer. Remove it with `mirror_running_fit`."""
    start_from(trainer, epoch, updates)
    trainer.fit_loop.epoch_loop.batch_progress.current.ready = updates + 1


class _WindowFetcher(_PrefetchDataFetcher):
    """Fetches each window just before it is trained on. The windows report which one is the last."""

    def __init__(self, is_at_end: Callable[[], bool]) -> None:
        super().__init__(prefetch_batches=0)
        self.is_at_end = is_at_end

    def __next__(self) -> tuple[object, int, int]:
        fetched: tuple[object, int, int] = super().__next__()
        self.done = self.is_at_end()
        return fetched


def fetch_without_prefetch(trainer: Trainer, is_at_end: Callable[[], bool]) -> None:
    """Make a fit read each window just before training on it, so that a checkpoint knows the unread data.

    Lightning reads one batch ahead if a loader has no length. Remove it when a loader can report its end.
    """
    loop = trainer.fit_loop
    if loop._data_fetcher is None or loop._data_fetcher.length is not None:  # with a length it reads none ahead
        return
    assert loop._combined_loader is not None
    loop._data_fetcher = _WindowFetcher(is_at_end)
    loop._data_fetcher.setup(loop._combined_loader)
    iter(loop._data_fetcher)


def start_from(trainer: Trainer, epoch: int, updates: int, done: int = 0, batches: int | None = None) -> None:
    """Start a fit at an epoch and update count, or within an epoch. Intervals and limits depend on them.

    Lightning sets them from its own checkpoints only. Remove it when `fit` can start at a position.

    Args:
        trainer: It has not begun the fit.
        epoch: Whole epochs done.
        updates: Updates of the whole run.
        done: Batches done of the next epoch. A window is one batch.
        batches: Batches of the whole run. By default each was an update.
    """
    loop, progress = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress
    loop._batches_that_stepped = updates
    stages = ("ready", "started", "processed", "completed")
    for counts in (progress.current, progress.total):
        counts.load_state_dict(dict.fromkeys(stages, epoch))
    if done:
        loop.batch_progress.total.load_state_dict(dict.fromkeys(stages, updates if batches is None else batches))
        loop.batch_progress.current.load_state_dict(dict.fromkeys(stages, done))
    automatic = loop.automatic_optimization.optim_progress.optimizer.step.total
    for steps in (loop.manual_optimization.optim_step_progress.total, automatic):  # the module's own kind counts
        steps.ready = steps.completed = updates
    if done:
        loop._restarting = True  # for this loop only, as the epoch itself starts as usual
        loop._batches_that_stepped = updates - 1  # a restart counts the last one again


def count_on(loops: dict[str, Any], module: LightningModule) -> None:
    """Let a module count the stored steps of loops on, also those that the other kind of optimization has made.

    Lightning counts automatic and manual steps apart, and `global_step` is that of the module's own kind. Remove it
    when there is one count.
    """
    fit = loops.get("fit_loop", {})
    automatic = fit.get("epoch_loop.automatic_optimization.optim_progress", {}).get("optimizer", {}).get("step")
    manual = fit.get("epoch_loop.manual_optimization.optim_step_progress")
    if automatic and manual:
        own, other = (automatic, manual) if module.automatic_optimization else (manual, automatic)
        if own["total"]["completed"] < other["total"]["completed"]:
            own.update(copy.deepcopy(other))


def note_metrics(trainer: Trainer, metrics: Mapping[str, object]) -> None:
    """Add numbers to a trainer's metrics, for its callbacks.

    HF's `epoch` is a fraction, which ModelCheckpoint would use as the epoch number in a file name.
    `LightningModule.log` works within a module's hooks only. Remove it when a trainer accepts metrics at any time.
    """
    connector = trainer._logger_connector
    numbers = {n: torch.tensor(float(v)) for n, v in metrics.items() if isinstance(v, (int, float)) and n != "epoch"}
    connector._callback_metrics.update(numbers)
    connector._logged_metrics.update(numbers)
    connector._progress_bar_metrics.update({name: float(n) for name, n in numbers.items() if name.endswith("loss")})


def note_for_callbacks(trainer: Trainer, name: str, value: float) -> None:
    """Add a number of an evaluation, equal on every rank, to `callback_metrics`.

    `LightningModule.log` makes a torchmetrics object of each number, which takes longer than a small batch. Remove it
    with `note_metrics`.
    """
    trainer._logger_connector._callback_metrics[name] = torch.tensor(value)


def replace_schedule_steps(trainer: Trainer, step: Callable[..., None] | None) -> Callable[[str, bool], None]:
    """Replace Lightning's steps of a fit's schedules, and return them. None restores them.

    They take an interval, and whether the schedules that follow a metric are meant. Lightning steps all schedules in
    automatic optimization, and none in manual. Remove it when a module can choose those that Lightning steps.
    """
    loop = trainer.fit_loop.epoch_loop
    loop.__dict__.pop("_update_learning_rates", None)
    own: Callable[[str, bool], None] = loop._update_learning_rates
    if step is not None:
        loop._update_learning_rates = step  # type: ignore[method-assign]
    return own


def skips_backward(trainer: Trainer) -> bool:
    """Whether StochasticWeightAveraging runs its last epoch, which only collects the statistics of batch norms.

    Lightning heeds it in automatic optimization. Remove it when manual optimization is told of it.
    """
    return bool(trainer.fit_loop._skip_backward)


def is_in_resumed_epoch(trainer: Trainer) -> bool:
    """Whether a fit is in the epoch in which its checkpoint was saved. Metrics of its first part are lost.

    Remove it when checkpoints hold the metrics of an epoch.
    """
    return bool(trainer.fit_loop.restarting)


def replace_optimizer(trainer: Trainer, optimizer: Optimizer) -> None:
    """Replace the optimizer of a running fit, and keep counting its steps.

    The strategy wraps the new optimizer, but the loop's counters are attached to the old wrappers. Remove it when a
    strategy moves them.
    """
    strategy = trainer.strategy
    before = strategy._lightning_optimizers
    strategy.optimizers = [optimizer]
    for old, new in zip(before, strategy._lightning_optimizers, strict=False):
        new._on_before_step, new._on_after_step = old._on_before_step, old._on_after_step


def call_before_zero_grad(trainer: Trainer, optimizer: Optimizer) -> None:
    """Call `on_before_zero_grad`. Lightning calls it in automatic optimization only.

    Remove it when manual optimization calls the hook too.
    """
    call._call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
    call._call_lightning_module_hook(trainer, "on_before_zero_grad", optimizer)


def load_waiting_data_states(trainer: Trainer) -> None:
    """Load the state of the training data from a Lightning checkpoint, if Lightning has not.

    Lightning loads it when it makes the loader. If `configure_optimizers` asks for `estimated_stepping_batches`, the
    loader is made before the checkpoint is read. Remove it when Lightning loads the state in that case, too.
    """
    trainer.fit_loop._load_combined_loader_states()


def keep_loaded_data(trainer: Trainer) -> None:
    """Keep the loaded data in a resumed fit with `reload_dataloaders_every_n_epochs`.

    Lightning compares the epoch with that of the first load, which came before the checkpoint was read. It would load
    data without the checkpoint's state. Remove it when Lightning counts from the resumed epoch.
    """
    trainer.fit_loop._last_train_dl_reload_epoch = trainer.current_epoch


def compile_model_only(module: LightningModule, model: nn.Module) -> None:
    """Compile the model of a module that went through `torch.compile`, but not the module's steps.

    Lightning also compiles the steps, and tracing an update's backward passes, clipping and optimizer gains nothing.
    Remove it when a module can choose what is compiled.
    """
    compiler = module._compiler_ctx
    if compiler is None:
        return
    to_uncompiled(module)
    model._compiled_call_impl = compiler["dynamo_ctx"](model._call_impl)  # the attribute that `nn.Module.compile` sets


def overrides(module: LightningModule, name: str, base: type[LightningModule]) -> bool:
    """Whether a subclass of `base`, or the author in the module itself, overrides a method.

    `torch.compile` and DDP put forms of it into the module, too. Remove it when the module keeps those of its class.
    """
    of_class, own = getattr(type(module), name), vars(module).get(name)
    is_form = module._compiler_ctx is not None or getattr(own, "__func__", None) is of_class
    return of_class is not getattr(base, name) or (own is not None and not is_form)


class HooksOfPlainBatches(LightningModule):
    """Passes plain batches to the transfer hooks: each micro-batch of a window, or the inputs of an evaluation batch.

    Lightning calls the hooks of a module or of its data in `_call_batch_hook`. Remove it when a batch can choose the
    hooks' argument.
    """

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute. Lightning's name of the running hook is set without `nn.Module`'s search for parameters.

        It is written around every hook. Remove it when Lightning keeps the name outside the module.
        """
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)  # type: ignore[arg-type]  # of any type

    def _call_batch_hook(self, hook_name: str, batch: object, *args: object) -> object:
        call = super()._call_batch_hook
        change_batches = getattr(batch, "change_batches", None)  # of a window, or of a batch of an evaluation
        if change_batches is None:
            return call(hook_name, batch, *args)
        selector = self.trainer._data_connector._datahook_selector
        owner = type(self if selector is None else selector.get_instance(hook_name))
        if getattr(owner, hook_name) is not getattr(DataHooks, hook_name):  # without an override the steps move inputs
            change_batches(lambda part: call(hook_name, part, *args))
        return batch


def call_hooks_before_step(precision: Precision, model: LightningModule, optimizer: Optimizer) -> None:
    """Call `on_before_optimizer_step`, then the trainer's clipping, which this package leaves off.

    A plugin's `optimizer_step` passes the optimizer a closure that calls the hooks. Here the gradients exist before the
    step, and a gradient scaler accepts no closure. Remove it when a custom plugin can call the hooks.
    """
    precision._after_closure(model, optimizer)


class InnerModelDDPStrategy(DDPStrategy):
    """DDP around the module's `model`, not around the LightningModule. HF calls the wrapper `model_wrapped`.

    Lightning always wraps the LightningModule. Remove it when a strategy accepts the module to wrap.
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        inner: Any = model.model
        return DistributedDataParallel(inner, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class InnerModelDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeed's engine around the module's `model`, not around the LightningModule.

    Lightning always wraps the LightningModule. Remove it when a strategy accepts the module to wrap.
    """

    def set_up_engine(self, groups: object = None) -> DeepSpeedEngine:
        """Make the optimizer, the schedule and the engine around the module's model. Return the engine.

        `groups` are those of processes that share sequences, as DeepSpeed's `mpu`.
        """
        import deepspeed

        optimizer, scheduler = self._init_optimizers()
        assert self.lightning_module is not None
        inner: Any = self.lightning_module.model
        engine, wrapped, _, _ = deepspeed.initialize(
            config=self.config,
            model=inner,
            model_parameters=[parameter for parameter in inner.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            dist_init_required=False,
            mpu=groups,
        )
        self.model, self.optimizers = engine, [wrapped]
        self.lr_scheduler_configs = [] if scheduler is None else [scheduler]
        return engine


# Refuses `module.load_from_checkpoint(…)`, which would load nothing into that module. It has no public name.
restricted_classmethod = _restricted_classmethod


def attached_trainer(module: LightningModule) -> Trainer | None:
    """Return a module's Lightning trainer. Without one, or in Fabric, None."""
    return module._trainer if module._fabric is None else None


def given_hyperparameters() -> object:
    """Return LightningCLI's arguments for a module, or None. Lightning shows them to `save_hyperparameters` only."""
    return _given_hyperparameters.get()


def automatic_schedules(chosen: OptimizerLRScheduler) -> tuple[list[Optimizer], list[LRSchedulerConfig] | None]:
    """Read the result of a `configure_optimizers` as in automatic optimization. None if it has several optimizers."""
    optimizers, schedules, monitor = _configure_optimizers(chosen)  # type: ignore[arg-type]  # it checks the type
    return optimizers, _configure_schedulers_automatic_opt(schedules, monitor) if len(optimizers) == 1 else None


def check_schedules(configs: list[LRSchedulerConfig], module: LightningModule) -> None:
    """Refuse schedules that Lightning cannot step, as it does in automatic optimization only."""
    _validate_scheduler_api(configs, module)


def load_state(
    cls: type[LightningModule | LightningDataModule],
    checkpoint: dict[str, Any],
    strict: bool | None,
    keywords: dict[str, Any],
) -> object:
    """Make a module or data module from a loaded checkpoint. The public method reads a file."""
    return _load_state(cls, checkpoint, strict, **keywords)


def dump_checkpoint(trainer: Trainer) -> dict[str, object]:
    """Return what `Trainer.save_checkpoint` writes. Remove it when a trainer gives it to callers."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def sample_indices_wrapper(indices: list[list[int]]) -> _IndexBatchSamplerWrapper:
    """Make the wrapper in which `BasePredictionWriter` finds the sample indices of each batch.

    Lightning adds this private wrapper only to the batch sampler of torch's loaders. Remove it when a loader can
    publish its indices.
    """
    wrapper = _IndexBatchSamplerWrapper(SimpleNamespace())  # never iterated
    wrapper.seen_batch_indices = indices
    return wrapper
