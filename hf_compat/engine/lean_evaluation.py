"""Lightning's evaluation loop without its unused work. Uses private attributes of Lightning 2.6.

As in `lean_loop.py`, overridden hooks are looked up once an evaluation and again when the callbacks change. Lightning's
own code runs for other batches than ours, for profilers, strategy hooks and overridden transfers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeGuard

import lightning.pytorch as pl
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.combined_loader import _Sequential
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from hf_compat.engine.evaluation import EvaluationBatch
from hf_compat.engine.internals import note_metrics
from hf_compat.engine.lean_loop import (
    Hook,
    begin_batch,
    carrying_stops,
    end_batch,
    hooks_of,
    is_plain_run,
    overrides,
)
from hf_compat.engine.module import WindowModule
from hf_compat.engine.precision import ForwardPrecision
from hf_compat.engine.strategies import DirectStepsStrategy

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
