"""`HFCallbackAdapter` runs HF callbacks inside any `lightning.Trainer`, with any LightningModule."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import lightning.pytorch as pl

from hf_compat.callbacks.adapted_run import AdaptedRun, AdapterState, arguments_of, hf_metric_name
from hf_compat.callbacks.loggers import refuse_other_distribution
from hf_compat.errors import ArgumentError, CallbackError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.callbacks import CallbackHandler, ProgressCallback, eval_metric_name
from hf_compat.hf.state import TrainerControl, TrainerState, export_states
from hf_compat.interop.arguments import adopt_arguments
from hf_compat.training_run.run import FlagAgreement, flag_sources

# An HF callback, instance or class. It may be ours, one of transformers, or any object with its methods.
AnyCallback = Any


class HFCallbackAdapter(pl.Callback):
    """Call HF callbacks in a Lightning trainer.

    `TrainerState` is filled from Lightning's progress. The adapter obeys the flags of `TrainerControl`. It stops the
    run or the epoch, logs, runs Lightning's validation loop on its own loaders, and saves `checkpoint-<updates>.ckpt`.
    Several adapters in one trainer share state and control. The first of them calls the callbacks of all.

    With a `DefaultFlowCallback` among the callbacks, the arguments decide when to log, evaluate and save. Lightning's
    own validation interval is then off. Without one, Lightning's intervals apply and the events follow them. Logs, the
    best metric, `save_strategy="best"`, rotation and the summary work as in the Trainer.

    Args:
        callbacks: One HF callback or a list of them, as instances or classes. They may be ours, those of transformers,
            or any object with their methods.
        more: Further callbacks.
        args: Arguments that the callbacks see. By default they are made from the Lightning trainer's settings.
            `metric_for_best_model` may have the module's own name, `val_loss`.
        processing_class: Passed to callbacks as `processing_class`.

    Raises:
        ArgumentError: No callback is given.
        CallbackError: A callback is a Lightning callback.

    Not provided:
        `on_substep_end` in manual optimization, as Lightning cannot distinguish micro-batches there. Clipped gradients
        in `on_pre_optimizer_step`, as Lightning clips after its hook. `total_flos` and `num_input_tokens_seen`, which
        stay 0. `load_best_model_at_end`, for which ModelCheckpoint exists (a warning says so).

    Examples:
        >>> import lightning
        >>> from hf_compat import HFCallbackAdapter, TrainerCallback
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class StopAtTwo(TrainerCallback):
        ...     def on_step_end(self, args, state, control, **kwargs):
        ...         control.should_training_stop = state.global_step == 2
        >>> adapter = HFCallbackAdapter(StopAtTwo())
        >>> trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", barebones=True, callbacks=[adapter])
        >>> trainer.fit(BoringModel())
        >>> trainer.global_step
        2
    """

    def __init__(
        self,
        callbacks: AnyCallback | list[AnyCallback] = (),
        *more: AnyCallback,
        args: TrainingArguments | None = None,
        processing_class: object = None,
    ) -> None:
        given = [*(callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]), *more]
        if not given:
            raise ArgumentError("HFCallbackAdapter has no callback.\n\nHint: HFCallbackAdapter(MyCallback(), …).")
        for callback in given:
            refuse_other_distribution(callback)
        wrong = [c for c in given if isinstance(c, pl.Callback)]
        if wrong:
            raise CallbackError(
                f"{type(wrong[0]).__name__} is a Lightning callback, and HFCallbackAdapter calls HF callbacks.\n\n"
                "Hint: give it to lightning.Trainer itself, beside the adapter."
            )
        args = None if args is None else adopt_arguments(args)
        metric = None if args is None else args.metric_for_best_model
        if args is not None and metric is not None and hf_metric_name(metric) != eval_metric_name(metric):
            args = copy.copy(args)
            args.metric_for_best_model = hf_metric_name(metric)  # the name under which HF callbacks find it
        self._given_args = args
        self.handler = CallbackHandler([], None, processing_class, None, None)
        for callback in given:
            self.handler.add_callback(callback)
        self._shared: AdaptedRun | None = None
        self._is_first = True
        self._restored: AdapterState | None = None

    @property
    def state(self) -> TrainerState:
        """HF's state of the run."""
        return TrainerState() if self._shared is None else self._shared.state

    @property
    def control(self) -> TrainerControl:
        """HF's flags."""
        return TrainerControl() if self._shared is None else self._shared.control

    @property
    def state_key(self) -> str:
        """Key of this callback's state, made of its HF callbacks' names."""
        return f"HFCallbackAdapter[{','.join(type(c).__name__ for c in self.handler.callbacks)}]"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the run that all adapters of this trainer share, or join it.

        Raises:
            ArgumentError: Two adapters have different arguments.
        """
        adapters = _adapters(trainer)
        first = adapters[0]
        self._is_first = first is self
        if trainer.progress_bar_callback is not None:
            self.handler.pop_callback(ProgressCallback)  # one bar only
        if not self._is_first:
            self._shared = first._shared
            return
        if self._shared is None:
            given = [adapter._given_args for adapter in adapters if adapter._given_args is not None]
            if any(args.to_dict() != given[0].to_dict() for args in given[1:] if args is not given[0]):
                raise ArgumentError(
                    "Several HFCallbackAdapters of one Lightning trainer have different `args`.\n\n"
                    "Hint: pass them to one adapter only, as all share its state."
                )
            processing_class = next((a.handler.processing_class for a in adapters if a.handler.processing_class), None)
            self._shared = AdaptedRun(given[0] if given else arguments_of(trainer), bool(given), processing_class)
        run = self._shared
        run.take_callbacks([callback for adapter in adapters for callback in adapter.handler.callbacks])
        run.handler.model = pl_module
        run.handler.requestable_kwargs["trainer"] = trainer

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the run, from a checkpoint's state if one was loaded."""
        run = self._shared
        if not self._is_first or run is None:
            return
        run.begin(trainer)
        adapters = _adapters(trainer)
        for adapter in adapters:
            saved, adapter._restored = adapter._restored, None
            if saved is None:
                continue
            if adapter is self:
                run.restore(saved)
            for index, callback in enumerate(adapter.handler.callbacks):
                exported = saved["callbacks"].get(type(callback).__name__)
                if isinstance(exported, dict):
                    adapter.handler.callbacks[index] = type(callback).from_state(exported)
        callbacks = [callback for adapter in adapters for callback in adapter.handler.callbacks]
        run.take_callbacks(callbacks)
        run.flag_agreement = FlagAgreement(run.args.ddp_timeout, flag_sources(callbacks, False, HFCallbackAdapter, 1))
        run.on_train_start(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Export HF's state and the states of stateful callbacks, in plain values."""
        run = self._shared
        saved: AdapterState = {
            "state": None if run is None else asdict(run.state),
            "callbacks": export_states(self.handler.callbacks),
        }
        if run is not None:
            saved["losses"] = run.losses.state_dict()
        return dict(saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until training starts."""
        self._restored = cast(AdapterState, state_dict)


def as_lightning(callback: AnyCallback) -> pl.Callback:
    """Return a Lightning callback as it is, and an HF callback in an adapter.

    Raises:
        CallbackError: It is neither, or a class of Lightning's.
    """
    if isinstance(callback, type) and issubclass(callback, pl.Callback):
        raise CallbackError(
            f"{callback.__name__} among the callbacks is a class.\n\nHint: make an object, `{callback.__name__}(…)`."
        )
    return callback if isinstance(callback, pl.Callback) else HFCallbackAdapter(callback)


def wrap_hf_callbacks(trainer: pl.Trainer) -> None:
    """Wrap the HF callbacks in a Lightning trainer's list in adapters.

    Raises:
        CallbackError: An entry of the list is neither an HF nor a Lightning callback, or a class of Lightning's.
        Exception: An HF callback's class cannot be instantiated.
    """
    given: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    wrapped: list[pl.Callback] = []
    refusal: Exception | None = None
    for callback in given:
        try:
            wrapped.append(as_lightning(callback))
        except Exception as error:  # left out of the list, as Lightning reports an error to each callback in it
            refusal = error
    trainer.callbacks = wrapped  # type: ignore[attr-defined]
    if refusal is not None:
        raise refusal


def _adapters(trainer: pl.Trainer) -> list[HFCallbackAdapter]:
    return [c for c in trainer.callbacks if isinstance(c, HFCallbackAdapter)]  # type: ignore[attr-defined]


def _passing_on(hook: str) -> Callable[..., None]:
    """Make the adapter's method of a hook, by which the first adapter of a trainer calls the shared run."""

    def call(self: HFCallbackAdapter, *given: object) -> None:
        if self._is_first:
            getattr(self._shared, hook)(*given)

    return functools.wraps(getattr(pl.Callback, hook))(call)


for _hook in vars(AdaptedRun).keys() & vars(pl.Callback).keys() - vars(HFCallbackAdapter).keys():
    if _hook.startswith("on_"):
        setattr(HFCallbackAdapter, _hook, _passing_on(_hook))
