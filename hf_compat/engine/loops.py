"""Lightning's training epoch without its unused work. Uses private attributes of Lightning 2.6.

For every batch Lightning's own loop enters profiler contexts, calls empty hooks, moves batches and collects metrics.
With a small model that is half of a training step. This loop looks up overridden hooks once an epoch, and again when
the callbacks change. It calls only those, in Lightning's order, with the same arguments and progress counters.

Lightning's own code runs if the trainer uses something this loop does not support, such as a profiler.

Lightning's evaluation loop without its unused work. Uses private attributes of Lightning 2.6.

Overridden hooks are looked up once an evaluation and again when the callbacks change. Lightning's
own code runs for other batches than ours, for profilers, strategy hooks and overridden transfers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import ParamSpec, TypeGuard

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.optimization.manual import ManualResult
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.combined_loader import _Sequential
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from hf_compat.engine.evaluation import EvaluationBatch
from hf_compat.engine.internals import WRITTEN_FOR, note_metrics
from hf_compat.engine.module import WindowModule
from hf_compat.engine.precision import ForwardPrecision
from hf_compat.engine.strategies import DirectStepsStrategy
from hf_compat.engine.windows import Windows

# Whether these loops support the installed Lightning. If not, its own code runs for every batch.
IS_KNOWN = lightning.__version__.split(".")[:2] == WRITTEN_FOR.split(".")[:2]
# Lightning logs every hook call here, at level DEBUG.
_CALLS = logging.getLogger("lightning.pytorch.trainer.call")

Hook = Callable[..., object]  # of any callback
Given = ParamSpec("Given")
# Hooks of the module around a batch. If one is overridden, or one of the strategy or precision plugin, Lightning's own
# loop handles the batch.
_OF_BATCH: tuple[tuple[type, tuple[str, ...]], ...] = (
    (pl.LightningModule, ("on_train_batch_start", "on_train_batch_end")),
    (DataHooks, ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")),
)
_OF_STRATEGY = ("on_train_batch_start", "batch_to_device", "post_training_step")
_OF_BACKWARD = ("on_before_backward", "on_after_backward")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Listeners:
    """The hooks to call for each training batch.

    Args:
        callbacks: The trainer's callbacks at the time of the look-up.
        module: The trained module.
        batch_start: Callbacks' `on_train_batch_start`.
        batch_end: Callbacks' `on_train_batch_end`.
        before_step: Callbacks' `on_before_optimizer_step`.
        batch_is_plain: Whether a batch has no other hooks.
        backward_is_plain: Whether a backward pass has no hooks.
        call_is_plain: Whether the strategy adds nothing to the module's step.
        step_is_plain: Whether only callbacks have hooks before the optimizer's step.
    """

    callbacks: list[pl.Callback]
    module: pl.LightningModule
    batch_start: Sequence[Hook] = ()
    batch_end: Sequence[Hook] = ()
    before_step: Sequence[Hook] = ()
    batch_is_plain: bool = False
    call_is_plain: bool = False
    backward_is_plain: bool = False
    step_is_plain: bool = False


def find_listeners(trainer: pl.Trainer) -> Listeners:
    """Look up the hooks of a fitting trainer."""
    callbacks: list[pl.Callback] = list(trainer.callbacks)  # type: ignore[attr-defined]  # set by a connector
    module = trainer.lightning_module
    if not isinstance(module, WindowModule) or not is_plain_run(trainer):
        return Listeners(callbacks=callbacks, module=module)
    heard_backward = any(hooks_of(callbacks, name) for name in _OF_BACKWARD)
    is_direct = not overrides(trainer.strategy, DirectStepsStrategy, "training_step")
    return Listeners(
        callbacks=callbacks,
        module=module,
        batch_start=hooks_of(callbacks, "on_train_batch_start"),
        batch_end=hooks_of(callbacks, "on_train_batch_end"),
        before_step=hooks_of(callbacks, "on_before_optimizer_step"),
        batch_is_plain=_batch_is_plain(trainer, module),
        call_is_plain=is_direct and type(trainer.precision_plugin) is ForwardPrecision,
        backward_is_plain=not heard_backward and _backward_is_plain(trainer, module),
        step_is_plain=_is_plain_precision(trainer.precision_plugin)
        and not overrides(module, pl.LightningModule, "on_before_optimizer_step")
        and not overrides(trainer.strategy, Strategy, "optimizer_step"),
    )


def _batch_is_plain(trainer: pl.Trainer, module: WindowModule) -> bool:
    return (
        isinstance(trainer.train_dataloader, Windows)
        and not any(overrides(module, base, name) for base, names in _OF_BATCH for name in names)
        and not any(overrides(trainer.strategy, Strategy, name) for name in _OF_STRATEGY)
        and not overrides(trainer.precision_plugin, Precision, "convert_input")
    )


def _backward_is_plain(trainer: pl.Trainer, module: WindowModule) -> bool:
    of_module, of_strategy = ("backward", *_OF_BACKWARD), ("backward", "pre_backward", "post_backward")
    return (
        _is_plain_precision(trainer.precision_plugin)
        and not any(overrides(module, pl.LightningModule, name) for name in of_module)
        and not any(overrides(trainer.strategy, Strategy, name) for name in of_strategy)
    )


def _is_plain_precision(precision: Precision) -> bool:
    return type(precision) is ForwardPrecision and precision.scaler is None


def is_plain_run(trainer: pl.Trainer) -> bool:
    """Whether these loops support a trainer: its Lightning, no profiler, no debugging, loaders for data."""
    return (
        IS_KNOWN
        and isinstance(trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]  # set by a connector
        and not _CALLS.isEnabledFor(logging.DEBUG)
        and trainer.datamodule is None  # type: ignore[attr-defined]  # as above
        and trainer.accumulate_grad_batches == 1
        and not trainer.fast_dev_run  # type: ignore[attr-defined]  # as above
    )


def overrides(owner: object, base: type, name: str) -> bool:
    """Whether a class, or the instance itself, overrides a method of a base class."""
    return name in vars(owner) or getattr(type(owner), name, None) is not getattr(base, name)


def hooks_of(callbacks: list[pl.Callback], name: str) -> list[Hook]:
    """Return one hook of every callback that overrides it."""
    return [getattr(callback, name) for callback in callbacks if overrides(callback, pl.Callback, name)]


def begin_batch(trainer: pl.Trainer, results: _ResultCollection, batch: object) -> None:
    """Set the batch that logged metrics belong to."""
    connector = trainer._logger_connector
    connector._first_loop_iter = connector._first_loop_iter is None
    results.batch, results.batch_size, results.dataloader_idx = batch, None, None


def end_batch(trainer: pl.Trainer, results: _ResultCollection) -> None:
    """Pass logged metrics to the callbacks, and release the batch."""
    if results:
        trainer._logger_connector.on_batch_end()
    else:
        results.batch = results.batch_size = None


class CarriedStop(Exception):
    """Carries a `StopIteration` of user code through Lightning's loops.

    Args:
        error: The user code's exception.
    """

    def __init__(self, error: StopIteration) -> None:
        super().__init__("a StopIteration was raised outside the data")
        self.error = error


def carrying_stops(method: Callable[Given, None]) -> Callable[Given, None]:
    """Turn a `StopIteration` from a model, loss, optimizer or callback into an error.

    Lightning's loops would take it for the end of the data, and silently skip the update or the rest of the epoch.
    Remove it when they catch only the exceptions of their data fetcher.
    """

    @functools.wraps(method)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
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

    def _broadcast_sigterm_tensor(self) -> None:
        """Skip the exchange between ranks, as Lightning handles no signal here."""

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        self._listeners = None  # a callback may have gained a hook since
        if isinstance(self.trainer.profiler, PassThroughProfiler):
            data_fetcher._start_profiler = data_fetcher._stop_profiler = do_nothing_closure

    def _current_listeners(self) -> Listeners:
        found = self._listeners
        if found is None or self.trainer.callbacks != found.callbacks:
            found = self._listeners = find_listeners(self.trainer)
            if isinstance(found.module, WindowModule):
                found.module.backward_is_plain = found.backward_is_plain
                found.module.take_step = self._step_directly if found.step_is_plain else None
        return found

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

    @carrying_stops
    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Train on one window."""
        listeners = self._current_listeners()
        is_usual = listeners.batch_is_plain and not isinstance(data_fetcher, _DataLoaderIterDataFetcher)
        if self._restarting or not is_usual:
            super().advance(data_fetcher)
            return
        if self.val_loop._restarting:
            self.val_loop.restarting = False
        batch, _, _ = next(data_fetcher)
        trainer, progress = self.trainer, self.batch_progress
        total: _ProcessedTracker = progress.total  # type: ignore[assignment]  # Lightning types the base class
        current: _ProcessedTracker = progress.current  # type: ignore[assignment]  # as above
        index = current.ready
        progress.is_last_batch = data_fetcher.done
        total.ready, current.ready = total.ready + 1, current.ready + 1
        begin_batch(self.trainer, self._results, batch)
        module = listeners.module
        self._call(listeners.batch_start, "on_train_batch_start", module, batch, index)
        total.started, current.started = total.started + 1, current.started + 1
        outputs = self._train(listeners, batch, index)
        total.processed, current.processed = total.processed + 1, current.processed + 1
        self._call(listeners.batch_end, "on_train_batch_end", module, outputs, batch, index)
        end_batch(self.trainer, self._results)
        total.completed, current.completed = total.completed + 1, current.completed + 1
        if self._results:
            trainer._logger_connector.update_train_step_metrics()

    def _call(self, hooks: Sequence[Hook], name: str, module: pl.LightningModule, *args: object) -> None:
        """Call the callbacks' hooks, under the hook's name for logged metrics."""
        if not hooks:
            return
        fields = module.__dict__  # `nn.Module` searches for a parameter of that name first
        before, fields["_current_fx_name"] = fields["_current_fx_name"], name
        for hook in hooks:
            hook(self.trainer, module, *args)
        fields["_current_fx_name"] = before

    def _train(self, listeners: Listeners, batch: object, index: int) -> dict[str, object]:
        module, strategy, manual = listeners.module, self.trainer.strategy, self.manual_optimization
        fields = module.__dict__
        step = module.training_step if listeners.call_is_plain else strategy.training_step
        optimizers = strategy._lightning_optimizers
        for optimizer in optimizers:
            optimizer._on_before_step, optimizer._on_after_step = manual._on_before_step, manual._on_after_step
        before, fields["_current_fx_name"] = fields["_current_fx_name"], "training_step"
        outputs = step(batch, index)
        fields["_current_fx_name"] = before
        for optimizer in optimizers:
            optimizer._on_before_step = optimizer._on_after_step = do_nothing_closure
        if type(outputs) is torch.Tensor:
            return {"loss": outputs.detach()}
        return ManualResult.from_training_step_output(outputs).asdict()

    def _step_directly(self) -> None:
        """Step the optimizer as `LightningOptimizer.step` ends up doing."""
        listeners, optimizer = self._listeners, self.trainer.strategy._lightning_optimizers[0]._optimizer
        assert listeners is not None  # a batch is under way
        progress = self.manual_optimization.optim_step_progress
        total, current = progress.total, progress.current
        total.ready, current.ready = total.ready + 1, current.ready + 1
        self._call(listeners.before_step, "on_before_optimizer_step", listeners.module, optimizer)
        optimizer.step()
        total.completed, current.completed = total.completed + 1, current.completed + 1

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Count the batch, and validate if Lightning's own intervals say so."""
        listeners = self._listeners
        is_usual = listeners is not None and listeners.batch_is_plain and not self._skip_next_val
        if not is_usual or self._should_check_val_fx(data_fetcher):
            super().on_advance_end(data_fetcher)
            return
        self._batches_that_stepped += 1
        if self.trainer.should_stop:
            self._save_loggers_on_train_batch_end()
        if self.trainer._signal_connector.received_sigterm and not self._is_training_done:
            raise SIGTERMException


# Methods of Lightning's loop that call callbacks at the start and at the end of an evaluation.
_BEGIN = ("_on_evaluation_start", "_on_evaluation_epoch_start")
_END = ("_on_evaluation_epoch_end", "_on_evaluation_end")
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPart:
    """The part of an evaluation that one run of Lightning's loop covers. HF evaluates each data set separately.

    Args:
        is_first: Call the callbacks' hooks for the start of a validation.
        is_last: Call their hooks for its end.
        earlier: Metrics of the previous parts.
    """

    is_first: bool = True
    is_last: bool = True
    earlier: Mapping[str, object] = dataclasses.field(default_factory=dict)


WHOLE = EvaluationPart()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationListeners:
    """The hooks to call for each batch of an evaluation.

    Args:
        callbacks: The trainer's callbacks at the time of the look-up.
        module: The evaluated module.
        step: The module's step, or the strategy's if that adds something.
        step_takes_index: Whether the module's step accepts `batch_idx`.
        names: Lightning's names of the hook before a batch, the step, and the hook after it.
        before: Hooks of the callbacks, then of the module.
        after: Likewise, after the batch.
    """

    callbacks: list[pl.Callback]
    module: pl.LightningModule
    step: Hook
    step_takes_index: bool
    names: tuple[str, str, str]
    before: tuple[Sequence[Hook], Sequence[Hook]]
    after: tuple[Sequence[Hook], Sequence[Hook]]


def find_evaluation_listeners(trainer: pl.Trainer) -> EvaluationListeners | None:
    """Look up the hooks of an evaluating trainer. None if Lightning's own code has to run."""
    module, strategy = trainer.lightning_module, trainer.strategy
    callbacks: list[pl.Callback] = list(trainer.callbacks)  # type: ignore[attr-defined]  # set by a connector
    if not isinstance(module, WindowModule) or not is_plain_run(trainer):
        return None
    if (
        any(overrides(module, DataHooks, name) for name in _TRANSFERS)
        or overrides(strategy, Strategy, "batch_to_device")
        or overrides(trainer.precision_plugin, Precision, "convert_input")
    ):
        return None
    stage = "test" if trainer.testing else "validation"
    names = (f"on_{stage}_batch_start", f"{stage}_step", f"on_{stage}_batch_end")
    is_direct = type(trainer.precision_plugin) is ForwardPrecision
    is_direct = is_direct and not overrides(strategy, DirectStepsStrategy, names[1])
    own_step: Hook = getattr(module, names[1])
    # The package's own hook after a batch is left out if it has no work
    name = names[2]
    run = module.evaluation
    is_own = name not in vars(module) and getattr(type(module), name) in module.own_ends_of_batches
    return EvaluationListeners(
        callbacks=callbacks,
        module=module,
        step=own_step if is_direct else getattr(strategy, names[1]),
        step_takes_index=is_param_in_hook_signature(own_step, "batch_idx", min_args=2),
        names=names,
        before=(hooks_of(callbacks, names[0]), _of_module(module, names[0])),
        after=(
            hooks_of(callbacks, names[2]),
            [] if is_own and run is not None and not run.ends_batches else _of_module(module, name),
        ),
    )


def _of_module(module: pl.LightningModule, name: str) -> list[Hook]:
    return [getattr(module, name)] if overrides(module, pl.LightningModule, name) else []


class _OneLoaderFetcher(_PrefetchDataFetcher):
    """Reads the batches of one loader with a length, without Lightning's iteration over several loaders.

    Args:
        fetcher: Lightning's own fetcher, already started.
    """

    def __init__(self, fetcher: _PrefetchDataFetcher) -> None:
        super().__init__(fetcher.prefetch_batches)
        vars(self).update(vars(fetcher))
        loaders: _Sequential = fetcher.iterator._iterator  # type: ignore[union-attr]  # a `CombinedLoader`
        self._batches, self._index = loaders.iterators[0], loaders._idx

    def __next__(self) -> tuple[object, int, int]:
        if self.done:
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            self.done = True
            raise
        index, self._index = self._index, self._index + 1
        self.fetched += 1
        self.done = self.fetched >= self.length  # type: ignore[operator]  # `_has_one_known_loader` has checked it
        return batch, index, 0

    def teardown(self) -> None:
        """Also release the loader, which ends its workers."""
        super().teardown()
        self._batches = iter(())


class LeanEvaluationLoop(_EvaluationLoop):
    """Evaluates a `WindowModule`, whose steps move each `EvaluationBatch` to the device themselves."""

    _listeners: EvaluationListeners | None = None
    _earlier: Mapping[str, object] = {}

    @classmethod
    def replacing(cls, loop: _EvaluationLoop) -> LeanEvaluationLoop:
        """Make a loop with the settings of one of Lightning's that has not run yet."""
        return cls(loop.trainer, loop._trainer_fn, loop._stage, loop.verbose, loop.inference_mode)

    @contextlib.contextmanager
    def as_part(self, part: EvaluationPart) -> Iterator[None]:
        """Present the parts of an evaluation to callbacks as one, from the start of the first to the end of the last.

        Lightning's loops run over all loaders at once. HF's methods, which users override, run over one. Remove it when
        a loop can pause between two loaders.
        """
        left_out = (*(() if part.is_first else _BEGIN), *(() if part.is_last else _END))
        fields = vars(self)
        before = {name: fields.pop(name) for name in (*_BEGIN, *_END) if name in fields}  # of an outer evaluation
        # Callbacks read the metrics at the end. Noting them in each part would take quadratic time.
        before["_earlier"], self._earlier = self._earlier, part.earlier if part.is_last else {}
        for name in left_out:
            fields[name] = functools.partial(self._without_callbacks, getattr(self, name))
        try:
            yield
        finally:
            for name in left_out:
                del fields[name]
            fields.update(before)

    def _without_callbacks(self, method: Callable[[], None]) -> None:
        trainer = self.trainer
        callbacks, trainer.callbacks = trainer.callbacks, []  # type: ignore[attr-defined]  # set by a connector
        try:
            method()
        finally:
            trainer.callbacks = callbacks  # type: ignore[attr-defined]

    def on_run_start(self) -> None:
        self._listeners = None
        if self._earlier:
            note_metrics(self.trainer, self._earlier)
        fetcher = self._data_fetcher
        if fetcher is not None and is_plain_run(self.trainer):
            fetcher._start_profiler = fetcher._stop_profiler = do_nothing_closure
            if self._has_one_known_loader(fetcher):
                self._data_fetcher = _OneLoaderFetcher(fetcher)
        super().on_run_start()

    def _has_one_known_loader(self, fetcher: _DataFetcher) -> TypeGuard[_PrefetchDataFetcher]:
        is_plain = type(fetcher) is _PrefetchDataFetcher and not fetcher.batches and fetcher.length is not None
        loaders = getattr(fetcher.iterator, "_iterator", None)
        return is_plain and type(loaders) is _Sequential and len(loaders.iterables) == len(loaders.iterators) == 1

    def _current_listeners(self) -> EvaluationListeners | None:
        found = self._listeners
        if found is None or self.trainer.callbacks != found.callbacks:  # type: ignore[attr-defined]  # as above
            is_usual = self.num_dataloaders == 1 and not self.trainer.sanity_checking
            found = self._listeners = find_evaluation_listeners(self.trainer) if is_usual else None
        return found

    @carrying_stops
    def _evaluation_step(
        self, batch: object, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[object] | None
    ) -> None:
        """Evaluate one batch."""
        listeners = self._current_listeners() if type(batch) is EvaluationBatch else None
        if listeners is None:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        trainer, progress, names = self.trainer, self.batch_progress, listeners.names
        total: _ProcessedTracker = progress.total  # type: ignore[assignment]  # Lightning types the base class
        current: _ProcessedTracker = progress.current  # type: ignore[assignment]  # as above
        total.ready, current.ready = total.ready + 1, current.ready + 1
        begin_batch(trainer, self._results, batch)
        self._call(listeners, listeners.before, names[0], batch, batch_idx)
        total.started, current.started = total.started + 1, current.started + 1
        output = self._predict(listeners, batch, batch_idx)
        total.processed, current.processed = total.processed + 1, current.processed + 1
        self._call(listeners, listeners.after, names[2], output, batch, batch_idx)
        end_batch(trainer, self._results)
        total.completed, current.completed = total.completed + 1, current.completed + 1
        self._has_run = True
        seen = self._seen_batches_per_dataloader
        if self._results:
            trainer._logger_connector.update_eval_step_metrics(seen[dataloader_idx])
        seen[dataloader_idx] += 1
        if trainer._signal_connector.received_sigterm and not progress.is_last_batch:
            raise SIGTERMException

    def _call(
        self,
        listeners: EvaluationListeners,
        hooks: tuple[Sequence[Hook], Sequence[Hook]],
        name: str,
        *args: object,
    ) -> None:
        """Call the hooks of the callbacks, then of the module, under the hook's name for logged metrics."""
        of_callbacks, of_module = hooks
        if not of_callbacks and not of_module:
            return
        fields = listeners.module.__dict__  # `nn.Module` searches for a parameter of that name first
        before, fields["_current_fx_name"] = fields["_current_fx_name"], name
        for hook in of_callbacks:
            hook(self.trainer, listeners.module, *args)
        for hook in of_module:
            hook(*args)
        fields["_current_fx_name"] = before

    def _predict(self, listeners: EvaluationListeners, batch: object, batch_idx: int) -> object:
        fields = listeners.module.__dict__
        before, fields["_current_fx_name"] = fields["_current_fx_name"], listeners.names[1]
        output = listeners.step(batch, batch_idx) if listeners.step_takes_index else listeners.step(batch)
        fields["_current_fx_name"] = before
        return output
