"""Every private attribute of Lightning that this package touches: one function, base class or constant each.

Each says why there is no public way, and when it can go. `tests/house/test_lightning_internals.py` searches the package
for accesses outside this file.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hf_compat.errors import warn_once

Given = dict[str, Any]  # what Lightning saved, or the keywords of a constructor
Engine = Any  # deepspeed's `DeepSpeedEngine`; the package has no types
StepKeywords = OrderedDict[str, Any]  # of `training_step`: `batch` and `batch_idx`
Wrapped = Any  # torch's optimizer or schedule, or what accelerate wraps around it

# The release that this file was written for and is tested with.
WRITTEN_FOR = "2.6.6"

# Fields that Lightning writes into a module several times a step. None of them holds a module or a parameter, so
# `WindowModule` leaves out the search for those that `nn.Module.__setattr__` makes. Remove it when Lightning keeps the
# name of the running hook outside the module.
BOOKKEEPING_FIELDS = frozenset({"_current_fx_name"})


def warn_of_newer_lightning() -> None:
    """Warn, once a process, where the installed Lightning is a newer minor release than this file was written for."""
    installed = lightning.__version__
    if _minor_release(installed) > _minor_release(WRITTEN_FOR):
        warn_once(
            f"hf_compat uses internals of Lightning and was written for lightning {WRITTEN_FOR}; lightning {installed} "
            "is installed, which may have changed them.\n\n"
            f"Hint: where training fails or gives other numbers, pip install 'lightning~={WRITTEN_FOR}'."
        )


def _minor_release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def do_nothing(*args: object, **kwargs: object) -> None:
    """Stand in the place of a method of Lightning that is to do nothing."""


def run_validation(trainer: Trainer, batches: Iterable[object]) -> None:
    """Run the validation loop of a fit that is under way, on any batches, at any moment.

    Lightning validates at its own intervals and on the loaders it was given; HF evaluates when a flag says so, on
    whatever data set a method or callback names. Remove it when a trainer validates on request within a fit.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop._data_source.instance = batches
    loop._combined_loader = None  # the loop makes another from the data source
    _run_validation_loop(trainer)


def validates_after_this_batch(trainer: Trainer) -> bool:
    """Whether Lightning validates at the end of the training batch that is under way; a hook asks at its end.

    Lightning has no public way to ask. Remove it when checkpoints of a batch's end are resumed with their validation.
    """
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    return trainer.training and fetcher is not None and loop.epoch_loop._should_check_val_fx(fetcher)


def run_own_validation(trainer: Trainer) -> bool:
    """Run the validation loop of a fit at any moment, on its own loaders; False where it has none.

    Remove it with `run_validation`.
    """
    if not trainer.enable_validation:
        return False
    _run_validation_loop(trainer)
    return True


def _run_validation_loop(trainer: Trainer) -> None:
    connector = trainer._logger_connector
    first_iteration = connector._first_loop_iter
    trainer.validating = True
    try:
        trainer.fit_loop.epoch_loop.val_loop.run()
    finally:
        trainer.training = True
        connector._first_loop_iter = first_iteration


def metrics_of_running_loop(trainer: Trainer) -> dict[str, float]:
    """Return what the evaluation loop that is ending has logged.

    `callback_metrics` mixes it with training's. Remove it when Lightning returns the metrics of one loop.
    """
    results = trainer._results
    logged = {} if results is None else results.metrics(on_step=False)["callback"]
    return {name: float(value) for name, value in logged.items()}


def batch_under_way(module: LightningModule) -> object:
    """Return the batch of the step that a module's trainer runs, else None.

    Lightning weights what is logged by the size of it, which it finds in tensors only. Remove it when a module can say
    how large its batches are.
    """
    results = None if module._trainer is None else module._trainer._results
    return None if results is None else results.batch


def is_training_batch(trainer: Trainer) -> bool:
    """Return whether a fit is between a batch's begin and the end of its training. Remove it when a trainer says so."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.ready > progress.processed)


def leave_out_step_metrics(trainer: Trainer) -> None:
    """Let loggers get nothing of a batch that made no update: Lightning would log the last update's values again.

    It asks only automatic optimization whether a batch accumulates. Remove it when it asks manual optimization, too.
    """
    for metric in (trainer._results or {}).values():
        if metric.meta.on_step and not metric.meta.on_epoch:
            metric.has_reset = True


def end_epoch_after_this_batch(trainer: Trainer) -> None:
    """Let a training epoch end with the batch that is ending.

    Only the module's own `on_train_batch_start` can ask for it. Remove it when a callback can.
    """
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True


def is_validating_within_fit(trainer: Trainer) -> bool:
    """Return whether the validation loop of a fit is running right now."""
    return bool(trainer.state.fn == "fit" and trainer.validating)


def forget_last_fit(callback: Callback) -> None:
    """Let a callback that averages weights begin anew with a fit, and not leave out what the last one had counted.

    Remove it when Lightning's callbacks forget in `setup`.
    """
    if isinstance(callback, WeightAveraging):
        callback._latest_update_step, callback._latest_update_epoch = 0, -1
    elif isinstance(callback, StochasticWeightAveraging):
        callback._initialized, callback._latest_update_epoch, callback._init_n_averaged = False, -1, 0
        callback.n_averaged = callback._scheduler_state = callback._swa_scheduler = None


def leave_validation_to_flags(trainer: Trainer) -> None:
    """Switch Lightning's own validation intervals off.

    With `val_check_interval` alone it validates once more whenever a fit stops. Remove it when an interval can be none.
    """
    trainer.fit_loop.epoch_loop._should_check_val_fx = do_nothing  # type: ignore[method-assign, assignment]


def stand_beside(
    trainer: Trainer, module: LightningModule, optimizer: Wrapped | None, scheduler: Wrapped | None
) -> None:
    """Give a trainer that will not run what a running one has: module, optimizer, schedule, the stage of training.

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
        shown.optimizer = inner  # not what is wrapped around it: callbacks would take the two for two
        strategy.lr_scheduler_configs = [LRSchedulerConfig(shown, interval="step")]
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    trainer.training = True


def place_at(trainer: Trainer, epoch: int, updates: int) -> None:
    """Set the progress of a trainer that will not run. Remove it with `stand_beside`."""
    start_from(trainer, epoch, updates)
    trainer.fit_loop.epoch_loop.batch_progress.current.ready = updates + 1


class _WindowFetcher(_PrefetchDataFetcher):
    """Fetches each window when it is trained; the windows say which is the last."""

    def __init__(self, is_at_end: Callable[[], bool]) -> None:
        super().__init__(prefetch_batches=0)
        self.is_at_end = is_at_end

    def __next__(self) -> tuple[object, int, int]:
        fetched: tuple[object, int, int] = super().__next__()
        self.done = self.is_at_end()
        return fetched


def fetch_when_due(trainer: Trainer, is_at_end: Callable[[], bool]) -> None:
    """Let a fit read each window when it is trained: a checkpoint then says what is left to read.

    Lightning reads one ahead where a loader has no length. Remove it when a loader can say that it knows its end.
    """
    loop = trainer.fit_loop
    if loop._data_fetcher is None or loop._data_fetcher.length is not None:  # there is a limit, which is a length
        return
    assert loop._combined_loader is not None
    loop._data_fetcher = _WindowFetcher(is_at_end)
    loop._data_fetcher.setup(loop._combined_loader)
    iter(loop._data_fetcher)


def start_within_epoch(trainer: Trainer, updates: int, done: int, batches: int) -> None:
    """Let the epoch that a fit begins with count the batches that are done: its intervals and limits go by them.

    Lightning takes them from its own checkpoints only. Remove it when `fit` can begin within an epoch.

    Args:
        trainer: The counts of whole epochs are set already.
        updates: Of the whole run.
        done: Batches of this epoch; a window is one.
        batches: Of the whole run.
    """
    loop = trainer.fit_loop.epoch_loop
    for name in ("ready", "started", "processed", "completed"):
        setattr(loop.batch_progress.total, name, batches)
        setattr(loop.batch_progress.current, name, done)
    loop._restarting = True  # of this loop alone: the epoch itself begins as usual
    loop._batches_that_stepped = updates - 1  # a restart counts the last one once more


def start_from(trainer: Trainer, epoch: int, updates: int) -> None:
    """Let a fit begin at an epoch and update count.

    Lightning takes them from its own checkpoints only. Remove it when `fit` can begin at an epoch.
    """
    progress = trainer.fit_loop.epoch_progress
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress.current, name, epoch)
        setattr(progress.total, name, epoch)
    steps = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
    steps.ready = steps.completed = updates
    trainer.fit_loop.epoch_loop._batches_that_stepped = updates


def note_metrics(trainer: Trainer, metrics: Mapping[str, object]) -> None:
    """Let callbacks find numbers among a trainer's metrics.

    HF's `epoch` is a share, which ModelCheckpoint would take for the number in its file's name.
    `LightningModule.log` works within a module's hooks only. Remove it when a trainer takes metrics at any time.
    """
    connector = trainer._logger_connector
    numbers = {n: torch.tensor(float(v)) for n, v in metrics.items() if isinstance(v, (int, float)) and n != "epoch"}
    connector._callback_metrics.update(numbers)
    connector._logged_metrics.update(numbers)
    connector._progress_bar_metrics.update({name: float(n) for name, n in numbers.items() if name.endswith("loss")})


def note_for_callbacks(trainer: Trainer, name: str, value: float) -> None:
    """Let callbacks find a number of an evaluation, that is the same on every process, in `callback_metrics`.

    `LightningModule.log` makes a torchmetrics object of each number, which takes longer than a small batch. Remove it
    with `note_metrics`.
    """
    trainer._logger_connector._callback_metrics[name] = torch.tensor(value)


def replace_optimizer(trainer: Trainer, optimizer: Optimizer) -> None:
    """Let a trainer that fits step another optimizer from now on, and go on counting its steps.

    The strategy wraps what it is given; the loop has put its counting on the wrappers of the batch that is under way.
    Remove it when a strategy hands that on.
    """
    strategy = trainer.strategy
    before = strategy._lightning_optimizers
    strategy.optimizers = [optimizer]
    for old, new in zip(before, strategy._lightning_optimizers, strict=False):
        new._on_before_step, new._on_after_step = old._on_before_step, old._on_after_step


def before_zero_grad(trainer: Trainer, optimizer: Optimizer) -> None:
    """Call `on_before_zero_grad`: Lightning does so in automatic optimization only.

    Remove it when manual optimization calls the hook too.
    """
    call._call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
    call._call_lightning_module_hook(trainer, "on_before_zero_grad", optimizer)


def loops_state(trainer: Trainer) -> dict[str, Any]:  # nested dicts of numbers, as Lightning saves them
    """Return the progress of all loops, as Lightning's own checkpoints hold it.

    `Trainer.save_checkpoint` writes it into a file only. Remove it when a trainer returns its checkpoint.
    """
    return trainer._checkpoint_connector._get_loops_state_dict()


def given_data(trainer: Trainer) -> object:
    """Return the data that the running command of a trainer was given: a data module, or loaders.

    A trainer shows what it recognises as a data module only. Remove it when a trainer shows what it was given.
    """
    loop = trainer._active_loop
    source = getattr(loop, "_data_source", None)
    return None if source is None else source.instance


def attach_data_module(trainer: Trainer, module: LightningModule, data: LightningDataModule) -> None:
    """Let a trainer whose command has begun work with a data module.

    Its entry points alone take one. Remove it when a hook of a module can bring one.
    """
    trainer._data_connector.attach_datamodule(module, datamodule=data)


def load_waiting_data_states(trainer: Trainer) -> None:
    """Load the state of the training data that a Lightning checkpoint brought, where that has not happened.

    Lightning loads it when it makes the loader; a module that asks for `estimated_stepping_batches` in
    `configure_optimizers` has it made before the checkpoint is read. Remove it when Lightning loads it then, too.
    """
    trainer.fit_loop._load_combined_loader_states()


def keep_loaded_data(trainer: Trainer) -> None:
    """Let a fit that is resumed go on with the data that are loaded: `reload_dataloaders_every_n_epochs` counts anew.

    Lightning compares the epoch with the one of the first load, which was before the checkpoint was read, and would
    load data that know nothing of the checkpoint. Remove it when Lightning counts from the epoch that it resumes.
    """
    trainer.fit_loop._last_train_dl_reload_epoch = trainer.current_epoch


def compile_model_only(module: LightningModule, model: nn.Module) -> None:
    """Compile the model of a module that went through `torch.compile`, and leave its steps as they are.

    Lightning has the steps compiled, too: an update's backward passes, clipping and optimizer are nothing to trace.
    Remove it when a module can say what of it is compiled.
    """
    compiler = module._compiler_ctx
    if compiler is None:
        return
    to_uncompiled(module)
    model._compiled_call_impl = compiler["dynamo_ctx"](model._call_impl)  # what `nn.Module.compile` sets


def place_of(trainer: Trainer) -> tuple[int, int, int, int]:
    """Return rank, rank on this machine, processes, and processes on this machine."""
    return trainer.global_rank, trainer.local_rank, trainer.world_size, trainer.num_devices


@runtime_checkable
class HoldsBatches(Protocol):
    """A window, or an evaluation's batch."""

    def change_batches(self, change: Callable[[object], object]) -> None:
        """Put something in the place of each batch."""


class HooksOfPlainBatches(LightningModule):
    """Gives the hooks that transfer batches plain ones: each micro-batch of a window, what an evaluation's batch holds.

    `_call_batch_hook` is where Lightning calls a module's hooks, or those of its data. Remove it when a batch can say
    what a hook is to be given.
    """

    def _call_batch_hook(self, hook_name: str, batch: object, *args: object) -> object:
        call = super()._call_batch_hook
        if not isinstance(batch, HoldsBatches):
            return call(hook_name, batch, *args)
        selector = self.trainer._data_connector._datahook_selector
        owner = type(self if selector is None else selector.get_instance(hook_name))
        if getattr(owner, hook_name) is not getattr(DataHooks, hook_name):  # else the steps move what they train
            batch.change_batches(lambda part: call(hook_name, part, *args))
        return batch


def call_hooks_before_step(precision: Precision, model: LightningModule, optimizer: Optimizer) -> None:
    """Call `on_before_optimizer_step`, then the clipping that the trainer was asked for (none by this package).

    A plugin's `optimizer_step` hands the optimizer a closure that calls the hooks; here the gradients are there before
    the step, and a gradient scaler takes no closure. Remove it when the hooks can be called by a plugin of one's own.
    """
    precision._after_closure(model, optimizer)


class InnerModelDDPStrategy(DDPStrategy):
    """DDP around the module's `model`, not around the LightningModule: what HF calls `model_wrapped`.

    Lightning offers no choice of what is wrapped. Remove it when a strategy can be given the module to wrap.
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        inner: Any = model.model
        return DistributedDataParallel(inner, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class InnerModelDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeed's engine around the module's `model`, not around the LightningModule.

    Lightning offers no choice of what is wrapped. Remove it when a strategy can be given the module to wrap.
    """

    def set_up_engine(self) -> Engine:
        """Make optimizer and schedule, and the engine around the module's model; returns the engine."""
        optimizer, scheduler = self._init_optimizers()
        assert self.lightning_module is not None
        inner: Any = self.lightning_module.model
        engine, wrapped = self._setup_model_and_optimizer(inner, optimizer, None)
        self.model, self.optimizers = engine, [wrapped]
        self.lr_scheduler_configs = [] if scheduler is None else [scheduler]
        return engine


# Refuses `module.load_from_checkpoint(…)`, which would load nothing into that module; it has no public name.
restricted_classmethod = _restricted_classmethod


def given_hyperparameters() -> object:
    """Return what LightningCLI makes a module with, or None; Lightning tells its own `save_hyperparameters` alone."""
    return _given_hyperparameters.get()


def load_state(cls: type[LightningModule], checkpoint: Given, keywords: Given) -> object:
    """Make a module of a checkpoint that was read already; the public way reads a file."""
    return _load_state(cls, checkpoint, **keywords)


def known_batches(indices: list[list[int]]) -> _IndexBatchSamplerWrapper:
    """Return what tells `BasePredictionWriter` which samples a batch holds, for loaders that are not torch's own.

    Lightning looks for this private wrapper, which it puts around the batch sampler of torch's loaders only. Remove it
    when a loader can say so by a public name.
    """
    wrapper = _IndexBatchSamplerWrapper(SimpleNamespace())  # nothing is drawn from it
    wrapper.seen_batch_indices = indices
    return wrapper
