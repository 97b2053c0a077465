"""`WindowTrainer`: the `lightning.Trainer` for a `WindowModule`, and its loops.

It uses private attributes of Lightning 2.6. Lightning's own trainer installs signal handlers, exits on Ctrl-C and
announces devices. Scripts written for HF's Trainer expect none of this.

For every batch Lightning's own loops enter profiler contexts, call empty hooks, move batches and collect metrics. With
a small model that is half of a training step. The loops here look up overridden hooks once an epoch or evaluation, and
again when the callbacks change. They call only those, in Lightning's order, with the same arguments and progress
counters. Lightning's own code runs with a release that is not known, with profilers, and where it logs its calls. It
also runs if the module, the strategy or the precision plugin overrides a transfer or a hook around a batch, and in
evaluations for other batches than ours.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import signal
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, Literal, ParamSpec

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.manual import ManualResult
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _Sequential
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from hf_compat.engine.evaluation import WHOLE, EvaluationBatch, EvaluationBatches, EvaluationPart
from hf_compat.engine.internals import WRITTEN_FOR, do_nothing, note_metrics
from hf_compat.engine.module import WindowModule
from hf_compat.engine.quiet import quietly
from hf_compat.engine.strategies import (
    DirectStepsStrategy,
    ForwardPrecision,
    HFDDPStrategy,
    HFDeepSpeedStrategy,
    HFFSDP2Strategy,
    HFMeshStrategy,
    HFSingleDeviceStrategy,
    LaunchedEnvironment,
)
from hf_compat.optim.fused_step import FusedStep
from hf_compat.plan.translate import LightningPlan
from hf_compat.runtime.inspection import is_replaced
from hf_compat.runtime.installed import names_no_entry_point
from hf_compat.runtime.launch import Launch

logger = logging.getLogger(__name__)

# Whether these loops support the installed Lightning. If not, its own code runs for every batch.
IS_KNOWN = lightning.__version__.split(".")[:2] == WRITTEN_FOR.split(".")[:2]
# Lightning logs every hook call here, at level DEBUG.
_CALLS = logging.getLogger("lightning.pytorch.trainer.call")

Hook = Callable[..., object]
P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True, slots=True)
class Listeners:
    """The hooks to call for each batch, looked up with the trainer's callbacks of that time."""

    module: WindowModule
    names: tuple[str, str, str]  # of the hook before a batch, the step, and the hook after it. Logged metrics get them
    before: Sequence[Hook]  # a batch
    step: Hook  # the module's, or the strategy's if that adds something
    takes_index: bool  # whether the module's step accepts `batch_idx`
    after: Sequence[Hook]  # a batch
    before_optimizer: Sequence[Hook]  # steps
    backward_is_plain: bool  # a backward pass has no hooks
    optimizer_is_plain: bool  # an optimizer's step needs nothing but these hooks


def find_listeners(trainer: pl.Trainer, stage: Literal["train", "validation", "test"]) -> Listeners | None:
    """Look up the hooks of a running trainer. None if Lightning's own code has to run its batches.

    It has to with a profiler, in debugging, and with own transfers of batches.
    """
    module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    assert isinstance(module, WindowModule)  # a `WindowTrainer` runs no other
    own = pl.LightningModule
    begin, end = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
    step = "training_step" if stage == "train" else f"{stage}_step"
    if (
        not IS_KNOWN
        or not isinstance(trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]  # set by a connector
        or _CALLS.isEnabledFor(logging.DEBUG)
        or is_replaced(module, "on_before_batch_transfer", DataHooks)
        or is_replaced(module, "transfer_batch_to_device", DataHooks)
        or is_replaced(module, "on_after_batch_transfer", DataHooks)
        or is_replaced(strategy, "batch_to_device", Strategy)
        or is_replaced(precision, "convert_input", Precision)
    ):
        return None
    if stage == "train" and (
        is_replaced(module, begin, own)
        or is_replaced(module, end, own)
        or is_replaced(strategy, begin, Strategy)
        or is_replaced(strategy, "post_training_step", Strategy)
    ):
        return None
    own_step: Hook = getattr(module, step)
    is_ours = type(precision) is ForwardPrecision  # a subclass may have changes
    # whether neither a scaler nor DeepSpeed's engine takes part in an update
    is_unscaled = is_ours and precision.scaler is None and precision.engine is None  # type: ignore[attr-defined]  # it is
    return Listeners(
        module=module,
        names=(begin, step, end),
        before=hooks_of(trainer, begin),
        step=own_step if is_ours and not is_replaced(strategy, step, DirectStepsStrategy) else getattr(strategy, step),
        takes_index=is_param_in_hook_signature(own_step, "batch_idx", min_args=2),
        after=hooks_of(trainer, end),
        before_optimizer=hooks_of(trainer, "on_before_optimizer_step"),
        backward_is_plain=is_unscaled
        and not (hooks_of(trainer, "on_before_backward") or hooks_of(trainer, "on_after_backward"))
        and not is_replaced(module, "backward", own)
        and not is_replaced(strategy, "backward", Strategy)
        and not is_replaced(strategy, "pre_backward", Strategy)
        and not is_replaced(strategy, "post_backward", Strategy),
        optimizer_is_plain=is_unscaled and not is_replaced(strategy, "optimizer_step", Strategy),
    )


def hooks_of(trainer: pl.Trainer, name: str) -> list[Hook]:
    """Bind one hook of every callback that overrides it to the trainer and its module. The module's own comes last."""
    module, found = trainer.lightning_module, list[Hook]()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        if is_replaced(callback, name, pl.Callback):
            found.append(functools.partial(getattr(callback, name), trainer, module))
    if is_replaced(module, name, pl.LightningModule):
        found.append(getattr(module, name))
    return found


class CarriedStop(Exception):
    """Carries a `StopIteration` of user code through Lightning's loops."""

    def __init__(self, error: StopIteration) -> None:
        super().__init__("a StopIteration was raised outside the data")
        self.error = error


def carrying_stops(method: Callable[P, None]) -> Callable[P, None]:
    """Turn a `StopIteration` from a model, loss, optimizer or callback into an error.

    Lightning's loops would take it for the end of the data, and silently skip the update or the rest of the epoch.
    Remove it when they catch only the exceptions of their data fetcher.
    """

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except StopIteration as error:
            if any("loops.fetchers" in frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)):
                raise  # the end of the data
            raise CarriedStop(error) from error

    return run


class LeanEpochLoop(_TrainingEpochLoop):
    """The epochs of a `WindowModule`, which optimizes manually. One batch is one window and one update."""

    _listeners: Listeners | None = None
    _seen: list[pl.Callback] | None = None  # the callbacks that the listeners were looked up with
    _step: FusedStep | None = None

    def _broadcast_sigterm_tensor(self) -> None:
        """Skip the exchange between ranks, as Lightning handles no signal here."""

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        """Start no validation. HF's flags do."""
        return False

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        self._seen = None  # a callback may have gained a hook since
        if isinstance(self.trainer.profiler, PassThroughProfiler):
            data_fetcher._start_profiler = data_fetcher._stop_profiler = do_nothing_closure

    @property
    def done(self) -> bool:
        """Whether the epoch is over."""
        if self._restarting or self.trainer.should_stop or not IS_KNOWN:
            return super().done
        updates = self.manual_optimization.optim_step_progress.total.completed
        progress = self.batch_progress
        return (
            (self.max_steps != -1 and updates >= self.max_steps)
            or progress.is_last_batch
            or progress.current.ready == self.trainer.fit_loop.max_batches
        )

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Train on one window."""
        trainer, progress, results = self.trainer, self.batch_progress, self._results
        if trainer.callbacks != self._seen:
            self._look_up()
        listeners = self._listeners
        if listeners is None:
            carrying_stops(super().advance)(data_fetcher)
            return
        if self.val_loop._restarting:
            self.val_loop.restarting = False
        window, _, _ = next(data_fetcher)
        total: _ProcessedTracker = progress.total  # type: ignore[assignment]  # Lightning types the base class
        current: _ProcessedTracker = progress.current  # type: ignore[assignment]  # as above
        connector, index = trainer._logger_connector, current.ready
        fields = listeners.module.__dict__  # `nn.Module` searches for a parameter of that name first
        optimizers, manual = trainer.strategy._lightning_optimizers, self.manual_optimization
        progress.is_last_batch = data_fetcher.done
        total.ready, current.ready = total.ready + 1, current.ready + 1
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = window, None, None
        try:
            fields["_current_fx_name"] = "on_train_batch_start"
            for hook in listeners.before:
                hook(window, index)
            total.started, current.started = total.started + 1, current.started + 1
            fields["_current_fx_name"] = "training_step"
            for optimizer in optimizers:
                optimizer._on_before_step, optimizer._on_after_step = manual._on_before_step, manual._on_after_step
            loss = listeners.step(window, index)
            for optimizer in optimizers:
                optimizer._on_before_step = optimizer._on_after_step = do_nothing_closure
            outputs: dict[str, object] = (
                {"loss": loss.detach()}
                if type(loss) is torch.Tensor
                else ManualResult.from_training_step_output(loss).asdict()  # type: ignore[arg-type]  # it checks
            )
            total.processed, current.processed = total.processed + 1, current.processed + 1
            fields["_current_fx_name"] = "on_train_batch_end"
            for hook in listeners.after:
                hook(outputs, window, index)
        except StopIteration as error:
            raise CarriedStop(error) from error
        fields["_current_fx_name"] = None
        total.completed, current.completed = total.completed + 1, current.completed + 1
        if results:
            connector.on_batch_end()
            connector.update_train_step_metrics()
        else:
            results.batch = results.batch_size = None

    def _look_up(self) -> None:
        """Look up the hooks of the current callbacks."""
        self._seen, module = list(self.trainer.callbacks), self.trainer.lightning_module
        self._listeners = found = find_listeners(self.trainer, "train")
        if isinstance(module, WindowModule):  # updates without Lightning's own code around them, which calls hooks
            is_direct = found is not None and found.backward_is_plain
            module.steps.accelerator.run_backward = None if is_direct else module.mechanics.backward
            module.take_step = self._step_directly if found is not None and found.optimizer_is_plain else None

    def _step_directly(self) -> None:
        """Step the optimizer as `LightningOptimizer.step` ends up doing."""
        listeners, optimizer = self._listeners, self.trainer.strategy._lightning_optimizers[0]._optimizer
        assert listeners is not None  # a batch is under way
        progress, fields = self.manual_optimization.optim_step_progress, listeners.module.__dict__
        total, current = progress.total, progress.current
        total.ready, current.ready = total.ready + 1, current.ready + 1
        outer, fields["_current_fx_name"] = fields["_current_fx_name"], "on_before_optimizer_step"
        for hook in listeners.before_optimizer:
            hook(optimizer)
        fields["_current_fx_name"] = outer
        if self._step is None or self._step.optimizer is not optimizer:
            self._step = FusedStep(optimizer)
        self._step()
        total.completed, current.completed = total.completed + 1, current.completed + 1

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Count the batch."""
        if self._listeners is None:
            super().on_advance_end(data_fetcher)
            return
        self._batches_that_stepped += 1
        if self.trainer.should_stop:
            self._save_loggers_on_train_batch_end()
        if self.trainer._signal_connector.received_sigterm and not self._is_training_done:
            raise SIGTERMException


class _OneLoaderFetcher(_PrefetchDataFetcher):
    """Reads the batches of one loader with a length, in place of Lightning's own fetcher, which has started."""

    def __init__(self, fetcher: _PrefetchDataFetcher) -> None:
        super().__init__(fetcher.prefetch_batches)
        vars(self).update(vars(fetcher))
        loaders: _Sequential = fetcher.iterator._iterator  # type: ignore[union-attr]  # a `CombinedLoader`
        self._batches, self._index = loaders.iterators[0], loaders._idx
        loader = loaders.iterables[0]
        # As in HF, a loader ends where its data does. A stream may hold more samples than its `__len__` says.
        self._reads_all = type(loader) is EvaluationBatches and self.length == loader.length

    def __next__(self) -> tuple[object, int, int]:
        if self.done and not self._reads_all:
            raise StopIteration
        batch = next(self._batches)
        index, self._index = self._index, self._index + 1
        self.fetched += 1
        self.done = self.fetched >= self.length  # type: ignore[operator]  # `on_run_start` has checked it
        return batch, index, 0

    def teardown(self) -> None:
        """Also release the loader, which ends its workers."""
        super().teardown()
        self._batches = iter(())


class LeanEvaluationLoop(_EvaluationLoop):
    """Evaluates a `WindowModule`, whose steps move each `EvaluationBatch` to the device themselves."""

    _listeners: Listeners | None = None
    _seen: list[pl.Callback] | None = None  # as in training
    _part: EvaluationPart = WHOLE  # of the running evaluation
    _is_plain = False  # module and strategy have no hook of their own for its begin or end

    def setup_data(self) -> None:
        """Take `EvaluationBatches` as they are.

        Lightning asks the device for the number of batches on all ranks, and prepares to make loaders anew.
        """
        trainer, batches = self.trainer, self._data_source.instance
        limit = trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches
        is_whole = isinstance(limit, float) and limit == 1.0  # 1 is a single batch
        if type(batches) is not EvaluationBatches or not is_whole or not IS_KNOWN or trainer.world_size > 1:
            super().setup_data()
            return
        self._combined_loader = CombinedLoader(batches, "sequential")
        self._max_batches = [float("inf") if batches.length is None else batches.length]
        self._seen_batches_per_dataloader = defaultdict(int)

    def _verify_dataloader_idx_requirement(self) -> None:
        """Look at no signature. The hooks are those of a `WindowModule`, and there is one loader."""

    @contextlib.contextmanager
    def _hearing(self, is_heard: bool) -> Iterator[None]:
        """Call no hook of a callback within the context, unless it is to be heard.

        Lightning's loops run over all loaders at once. HF's methods, which users override, run over one. Remove it when
        a loop can pause between two loaders.
        """
        trainer, callbacks = vars(self.trainer), self.trainer.callbacks  # type: ignore[attr-defined]  # as above
        if not is_heard:
            trainer["callbacks"] = []
        try:
            yield
        finally:
            if not is_heard:
                trainer["callbacks"] = callbacks

    def on_run_start(self) -> None:
        """Start an evaluation, or a part of one."""
        self._part = part = getattr(self._data_source.instance, "part", WHOLE)
        # Callbacks read the metrics at the end. Noting them in each part would take quadratic time.
        if part.is_last and part.earlier:
            note_metrics(self.trainer, part.earlier)
        with self._hearing(part.is_first):
            super().on_run_start()
        if part.is_first or self.trainer.callbacks != self._seen:  # type: ignore[attr-defined]  # as above
            self._look_up()
        fetcher = self._data_fetcher
        if fetcher is not None and self._listeners is not None:
            fetcher._start_profiler = fetcher._stop_profiler = do_nothing_closure
            loaders = getattr(fetcher.iterator, "_iterator", None)
            is_one = type(loaders) is _Sequential and len(loaders.iterables) == len(loaders.iterators) == 1
            if is_one and type(fetcher) is _PrefetchDataFetcher and not fetcher.batches and fetcher.length is not None:
                self._data_fetcher = _OneLoaderFetcher(fetcher)

    def _look_up(self) -> None:
        """Look up the hooks of the current callbacks."""
        trainer = self.trainer
        stage: Literal["test", "validation"] = "test" if trainer.testing else "validation"
        self._seen = list(trainer.callbacks)  # type: ignore[attr-defined]  # as above
        self._listeners = find_listeners(trainer, stage)
        module, begin, end = trainer.lightning_module, f"on_{stage}_start", f"on_{stage}_end"
        of_module = any(is_replaced(module, n, pl.LightningModule) for n in (begin, f"on_{stage}_epoch_start", end))
        self._is_plain = not (of_module or any(is_replaced(trainer.strategy, n, Strategy) for n in (begin, end)))

    @property
    def _is_unheard(self) -> bool:
        """Whether no hook has anything to do at the start and end of this part. An empty one costs 20 calls."""
        part = self._part
        return self._is_plain and self._listeners is not None and not (part.is_first or part.is_last)

    def _on_evaluation_start(self, *args: object, **kwargs: object) -> None:
        if not self._is_unheard:
            super()._on_evaluation_start(*args, **kwargs)

    def _on_evaluation_epoch_start(self, *args: object, **kwargs: object) -> None:
        if not self._is_unheard:
            super()._on_evaluation_epoch_start(*args, **kwargs)

    def _on_evaluation_end(self, *args: object, **kwargs: object) -> None:
        if self._is_unheard:
            self.trainer._logger_connector.reset_results()
        else:
            super()._on_evaluation_end(*args, **kwargs)

    def on_run_end(self) -> list[Mapping[str, float]]:  # type: ignore[override]  # Lightning's own type is private
        """End an evaluation, or a part of one."""
        with self._hearing(self._part.is_last):
            return super().on_run_end()  # type: ignore[return-value]  # as above

    def _evaluation_step(
        self, batch: object, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[object] | None
    ) -> None:
        """Evaluate one batch."""
        trainer, progress, results = self.trainer, self.batch_progress, self._results
        if trainer.callbacks != self._seen:  # type: ignore[attr-defined]  # as above
            self._look_up()
        listeners = self._listeners
        if listeners is None or type(batch) is not EvaluationBatch:
            carrying_stops(super()._evaluation_step)(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        total: _ProcessedTracker = progress.total  # type: ignore[assignment]  # Lightning types the base class
        current: _ProcessedTracker = progress.current  # type: ignore[assignment]  # as above
        connector, fields = trainer._logger_connector, listeners.module.__dict__
        outer = fields["_current_fx_name"]  # the hook of the training batch, within a fit
        name_before, name_of_step, name_after = listeners.names
        total.ready, current.ready = total.ready + 1, current.ready + 1
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        try:
            fields["_current_fx_name"] = name_before
            for hook in listeners.before:
                hook(batch, batch_idx)
            total.started, current.started = total.started + 1, current.started + 1
            fields["_current_fx_name"] = name_of_step
            output = listeners.step(batch, batch_idx) if listeners.takes_index else listeners.step(batch)
            total.processed, current.processed = total.processed + 1, current.processed + 1
            fields["_current_fx_name"] = name_after
            for hook in listeners.after:
                hook(output, batch, batch_idx)
        except StopIteration as error:
            raise CarriedStop(error) from error
        fields["_current_fx_name"] = outer
        total.completed, current.completed = total.completed + 1, current.completed + 1
        self._has_run = True
        seen = self._seen_batches_per_dataloader
        if results:
            connector.on_batch_end()
            connector.update_eval_step_metrics(seen[dataloader_idx])
        else:
            results.batch = results.batch_size = None
        seen[dataloader_idx] += 1
        if trainer._signal_connector.received_sigterm and not progress.is_last_batch:
            raise SIGTERMException


# The strategies of several processes.
_LAUNCHED: dict[str, Callable[..., Strategy]] = {
    "ddp": HFDDPStrategy, "fsdp2": HFFSDP2Strategy, "tensor_parallel": HFMeshStrategy, "deepspeed": HFDeepSpeedStrategy,
}  # fmt: skip
# Callbacks that Lightning would add by default, with the switch for each.
_SWITCHED_ON: dict[type[pl.Callback], str] = {
    ProgressBar: "enable_progress_bar",
    ModelSummary: "enable_model_summary",
    Checkpoint: "enable_checkpointing",
}


@contextlib.contextmanager
def reading_entry_points_once() -> Iterator[None]:
    """Let Lightning search the installed packages for callbacks once, and again when one was installed.

    Each of its trainers reads the metadata of every installed package. Remove it when Lightning keeps what it found.
    """
    names = vars(registry)
    if names["entry_points"] is not importlib.metadata.entry_points:  # another package's, or another thread's
        yield
        return
    names["entry_points"] = _entry_points
    try:
        yield
    finally:
        names["entry_points"] = importlib.metadata.entry_points


def _entry_points(group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    changed = []
    for folder in sys.path:
        try:
            changed.append((folder, os.stat(folder or ".").st_mtime_ns))
        except OSError:  # Python skips it, too
            changed.append((folder, 0))
    return _entry_points_in(tuple(changed), group)


@functools.lru_cache(maxsize=4)
def _entry_points_in(path: tuple[tuple[str, int], ...], group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    if names_no_entry_point([folder for folder, _ in path], group):
        return ()
    return tuple(importlib.metadata.entry_points(group=group))


class _NoProfiler(PassThroughProfiler):
    """Skip profiling without any cost. Lightning enters about fifteen of these contexts a step."""

    profile = contextlib.nullcontext  # type: ignore[assignment]


def _is_in(stage: RunningStage, theirs: property) -> property:
    """Whether a trainer is in a stage, which may be set. Lightning's own property compares texts."""
    return property(lambda trainer: trainer.state.stage is stage, theirs.fset)


class WindowTrainer(pl.Trainer):
    """The trainer for a plan. Progress bars, summaries and checkpoints among its callbacks are switched on."""

    testing = _is_in(RunningStage.TESTING, pl.Trainer.testing)  # type: ignore[arg-type]
    validating = _is_in(RunningStage.VALIDATING, pl.Trainer.validating)  # type: ignore[arg-type]
    sanity_checking = _is_in(RunningStage.SANITY_CHECKING, pl.Trainer.sanity_checking)  # type: ignore[arg-type]

    def __init__(
        self,
        plan: LightningPlan,
        callbacks: list[pl.Callback],
        loggers: Sequence[Logger] = (),
        launch: Launch | None = None,
        **options: Any,  # of `lightning.Trainer`, which the plan does not set
    ) -> None:
        device = torch.device(plan.device)
        scaler = torch.amp.GradScaler(device.type) if plan.precision == "16-mixed" else None
        precision = ForwardPrecision(plan.precision, scaler, device.type)
        if plan.strategy == "one_device" or launch is None:
            strategy: Strategy = HFSingleDeviceStrategy(device=device, precision_plugin=precision)
        else:
            strategy = _LAUNCHED[plan.strategy](
                cluster_environment=LaunchedEnvironment(launch), precision_plugin=precision, **plan.strategy_options
            )
        settings: dict[str, Any] = {
            **plan.trainer_settings(),
            "callbacks": callbacks,
            "logger": list(loggers) or False,
            "strategy": strategy,
            "profiler": _NoProfiler(),
            # the seed sets it already, and Lightning would choose another cuBLAS workspace than upstream
            "deterministic": None,
        }
        for kind, switch in _SWITCHED_ON.items():
            settings[switch] = False
            for callback in callbacks:
                settings[switch] |= isinstance(callback, kind)
        with quietly(), reading_entry_points_once():
            # the user may choose the CPU on purpose
            warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
            super().__init__(**{**settings, **options})
        if not IS_KNOWN:
            installed = lightning.__version__
            logger.info("hf_compat does not support the loops of Lightning %s, so steps are slower.", installed)
        self._sigint_handler: Any = None  # Python's handler of Ctrl-C, as returned by `signal.getsignal`
        # Lightning's SIGTERM handler exits with status 0, and every update exchanges whether it was called.
        # Remove it when a trainer has a setting for it.
        self._signal_connector.register_signal_handlers = do_nothing  # type: ignore[method-assign]
        # Don't search for checkpoints beside an OnExceptionCheckpoint or in a SLURM job. Remove it when `fit` accepts a
        # value for "none".
        self._checkpoint_connector._parse_ckpt_path = do_nothing  # type: ignore[method-assign]
        # Lightning gives a GPU's cached memory back at the begin and end of each command, so the batches after it wait
        # for new memory. Remove it when a trainer has a setting for it.
        self._checkpoint_connector.resume_end = do_nothing  # type: ignore[method-assign]  # besides, it loads nothing
        if isinstance(self.accelerator, CUDAAccelerator):
            self.accelerator.setup = self.accelerator.teardown = do_nothing  # type: ignore[method-assign]
        # Every training step sets the model's mode. Remove it when a module can declare this.
        self.fit_loop._warn_if_modules_in_eval_mode = do_nothing  # type: ignore[method-assign]
        theirs = self.fit_loop.epoch_loop
        self.fit_loop.epoch_loop = LeanEpochLoop(self, theirs.min_steps, theirs.max_steps)
        self.fit_loop.epoch_loop.val_loop = self._lean(theirs.val_loop)
        self.validate_loop, self.test_loop = self._lean(self.validate_loop), self._lean(self.test_loop)
        manual, fit = self.fit_loop.epoch_loop.manual_optimization, self.fit_loop
        manual.advance = carrying_stops(manual.advance)  # type: ignore[method-assign]
        fit.on_advance_start = carrying_stops(fit.on_advance_start)  # type: ignore[method-assign]
        fit.on_advance_end = carrying_stops(fit.on_advance_end)  # type: ignore[method-assign]

    def _lean(self, own: _EvaluationLoop) -> LeanEvaluationLoop:
        return LeanEvaluationLoop(self, own._trainer_fn, own._stage, own.verbose, own.inference_mode)

    def run_command(self, command: Callable[..., object], module: pl.LightningModule, **data: object) -> None:
        """Run a command of this trainer (`fit`, `validate`, `test`) with loaders, and raise its errors unchanged.

        After Ctrl-C Lightning ignores the signal and exits with status 1. Scripts and notebooks written for HF catch
        KeyboardInterrupt and continue. Remove it when a trainer raises it.
        """
        self._sigint_handler = signal.getsignal(signal.SIGINT)
        if command != self.fit:  # no gradients are cleared, as a script may have computed them itself
            self._run_stage = (self.test_loop if command == self.test else self.validate_loop).run  # type: ignore[method-assign]
        try:
            with quietly():
                command(module, **data)
        except CarriedStop as carried:
            raise carried.error from None
        except (SystemExit, ValueError) as ended:
            if not isinstance(ended.__context__, KeyboardInterrupt):
                raise
            if threading.current_thread() is threading.main_thread() and self._sigint_handler is not None:
                signal.signal(signal.SIGINT, self._sigint_handler)
            raise ended.__context__ from None
        finally:
            vars(self).pop("_run_stage", None)
            # After an error the results still hold the batch, whose memory belongs to loader workers. Remove it when
            # Lightning releases it at teardown.
            training = self.fit_loop.epoch_loop
            for loop in (training, training.val_loop, self.validate_loop, self.test_loop):
                loop._results.batch = None

    def validation_of(self, part: EvaluationPart) -> Callable[..., object]:
        """Return the command that validates a part of an evaluation.

        Lightning's own looks at the hooks, moves the model and tears down each time. After the first part of several,
        everything is set up: Lightning callbacks get a new trainer for each part, and several processes its command.
        """
        state = self.state
        is_set_up = (
            state.finished and state.fn is TrainerFn.VALIDATING and type(self.strategy) is HFSingleDeviceStrategy
        )
        return self._validate_next if is_set_up and not part.is_first else self.validate

    def _validate_next(self, module: pl.LightningModule, dataloaders: EvaluationBatches, verbose: bool) -> None:
        loop, connector = self.validate_loop, self._logger_connector

        def run() -> None:
            loop.verbose, loop._data_source.instance, loop._combined_loader = verbose, dataloaders, None
            self.state.status, self.state.stage = TrainerStatus.RUNNING, RunningStage.VALIDATING
            connector.reset_metrics()
            loop.run()
            loop.teardown()
            self.state.status, self.state.stage = TrainerStatus.FINISHED, None

        call._call_and_handle_interrupt(self, run)

    @property
    def _active_loop(self) -> _FitLoop | _EvaluationLoop | _PredictionLoop | None:
        """Return the running loop. Lightning's own property compares texts, several times a hook."""
        stage, fn = self.state.stage, self.state.fn
        if stage is RunningStage.TRAINING:
            return self.fit_loop
        if stage is None or stage is RunningStage.PREDICTING:
            return None if stage is None else self.predict_loop
        if fn is TrainerFn.VALIDATING:
            return self.validate_loop
        return self.fit_loop.epoch_loop.val_loop if fn is TrainerFn.FITTING else self.test_loop

    def _run(self, *args: Any, **kwargs: Any) -> Any:  # as Lightning's own method
        try:
            return super()._run(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            self._sigint_handler = signal.getsignal(signal.SIGINT)  # a callback may have installed another one
            # Lightning's own handling sets a signal handler, which only the main thread may do
            if threading.current_thread() is not threading.main_thread():
                call._interrupt(self, interrupt)
                self._teardown()
            raise


# Validation data for a fit whose evaluations use their own. Without any, Lightning would never validate.
NO_BATCHES = EvaluationBatches(iter(()))
