"""`HFCallbackAdapter` runs HF callbacks inside any `lightning.Trainer`, with any LightningModule.

`AdaptedRun`, which all adapters of a trainer share, fires HF's events at Lightning's hooks (`PAIRS` in `bridge.py`) and
fills HF's state from Lightning's progress. After an update and after an epoch it logs, evaluates and saves according to
the flags, with the Trainer's code (`hf_compat.training_run`).
"""

from __future__ import annotations

import copy
import os
import re
import sys
import time
from dataclasses import asdict
from typing import Any, Literal, TypedDict, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT

from hf_compat.callbacks.bridge import Given, RunObserver, fires_at_hooks
from hf_compat.callbacks.loggers import refuse_other_distribution
from hf_compat.checkpoint.reading import naming_misfit
from hf_compat.checkpoint.run_state import PlainState
from hf_compat.data.types import Batch
from hf_compat.engine.internals import (
    end_epoch_after_this_batch,
    metrics_of_running_loop,
    run_validation,
    switch_off_own_validation,
)
from hf_compat.engine.module import WindowModule
from hf_compat.engine.windows import BatchGroup, UpdateObserver, Window, Windows
from hf_compat.errors import ArgumentError, CallbackError, warn_once
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.callbacks import (
    CallbackHandler,
    DefaultFlowCallback,
    ProgressCallback,
    TrainerCallback,
    eval_metric_name,
    is_callback_of,
)
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.hf.metrics import speed_metrics
from hf_compat.hf.state import TrainerControl, TrainerState, export_states
from hf_compat.interop.arguments import adopt_arguments
from hf_compat.interop.patching import tell_of_newer_names
from hf_compat.optim.prepared import PreparedOptimizer
from hf_compat.runtime.collectives import gather, highest_each
from hf_compat.runtime.nested import find_batch_size
from hf_compat.runtime.text import brief
from hf_compat.training_run.best import note_best_checkpoint, update_best_metric
from hf_compat.training_run.flags import FlagAgreement, FlagSources, due_actions, flag_sources, request_save_if_best
from hf_compat.training_run.loss_log import LossLog
from hf_compat.training_run.rotation import in_order_of_rotation, remove_surplus
from hf_compat.training_run.run import TrainingRun, run_summary

# An HF callback, instance or class. It may be ours, one of transformers, or any object with its methods.
AnyCallback = Any

_CHECKPOINT = re.compile(r"^checkpoint-(\d+)\.ckpt$")
# State fields that a resumed run restores. The others follow from the arguments and Lightning's progress.
_RESTORED = (
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "total_flos",
    "num_input_tokens_seen",
)


class AdapterState(TypedDict, total=False):
    """An adapter's entry in Lightning's checkpoints, in plain values."""

    state: dict[str, object] | None  # None before a run
    callbacks: dict[str, dict[str, object] | list[dict[str, object]]]  # by class name
    losses: PlainState


# Prefixes of validation metrics in Lightning modules. HF's prefix is `eval_`.
_VALIDATION_PREFIXES = ("validation_", "validation/", "valid_", "valid/", "val_", "val/", "eval/")


def hf_metric_name(name: str, prefix: str = "eval") -> str:
    """Convert a metric name of a Lightning module to HF's. `val_loss`, `val/loss` and `loss` become `eval_loss`."""
    for known in (f"{prefix}_", *(_VALIDATION_PREFIXES if prefix == "eval" else (f"{prefix}/",))):
        if name.startswith(known):
            return f"{prefix}_{name.removeprefix(known)}"
    return f"{prefix}_{name}"


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
        `on_substep_end` where a step makes its own updates, as nothing distinguishes micro-batches there. Clipped
        gradients in `on_pre_optimizer_step`, as Lightning clips after its hook. `total_flos` and
        `num_input_tokens_seen`, which stay 0. `load_best_model_at_end`, for which ModelCheckpoint exists (a warning
        says so).

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
            tell_of_newer_names(callback if isinstance(callback, type) else type(callback), TrainerCallback)
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
        self._joined: AdaptedRun | None = None
        self._restored: AdapterState | None = None

    @property
    def state(self) -> TrainerState:
        """HF's state of the run."""
        return TrainerState() if self._joined is None else self._joined.state

    @property
    def control(self) -> TrainerControl:
        """HF's flags."""
        return TrainerControl() if self._joined is None else self._joined.control

    @property
    def state_key(self) -> str:
        """Key of this callback's state, made of its HF callbacks' names."""
        return f"HFCallbackAdapter[{','.join(type(c).__name__ for c in self.handler.callbacks)}]"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the run that all adapters of this trainer share, and add it to its callbacks. Or join it.

        Raises:
            ArgumentError: Two adapters have different arguments.
        """
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        adapters = [callback for callback in callbacks if isinstance(callback, HFCallbackAdapter)]
        if trainer.progress_bar_callback is not None:
            self.handler.pop_callback(ProgressCallback)  # one bar only
        if adapters[0] is not self:
            self._joined = adapters[0]._joined
            return
        if self._joined is None:
            given = [adapter._given_args for adapter in adapters if adapter._given_args is not None]
            if any(args.to_dict() != given[0].to_dict() for args in given[1:] if args is not given[0]):
                raise ArgumentError(
                    "Several HFCallbackAdapters of one Lightning trainer have different `args`.\n\n"
                    "Hint: pass them to one adapter only, as all share its state."
                )
            processing_class = next((a.handler.processing_class for a in adapters if a.handler.processing_class), None)
            self._joined = AdaptedRun(given[0] if given else arguments_of(trainer), bool(given), processing_class)
        self._joined.take_callbacks(adapters)
        self._joined.callback_handler.model = pl_module
        self._joined.callback_handler.requestable_kwargs["trainer"] = trainer
        others = [callback for callback in callbacks if not isinstance(callback, AdaptedRun)]
        place = others.index(self) + 1
        trainer.callbacks = [*others[:place], self._joined, *others[place:]]  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Export HF's state and the states of stateful callbacks, in plain values."""
        joined = self._joined
        saved: AdapterState = {
            "state": None if joined is None else asdict(joined.state),
            "callbacks": export_states(self.handler.callbacks),
        }
        if joined is not None:
            saved["losses"] = joined.run.losses.state_dict()
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


class EventTiming:
    """Lets a callback's `optimizer.step()` have an effect at events that have the gradients of a whole update."""

    sync_gradients = True
    scaler: torch.amp.GradScaler | None = None
    distributed_type = "NO"


@fires_at_hooks
class AdaptedRun(pl.Callback, RunObserver):
    """HF arguments, state and control of a Lightning trainer's run, and the events at its hooks.

    It is among the trainer's callbacks while the trainer runs. An HFModule tells it of events within an update.
    """

    def __init__(self, args: TrainingArguments, has_own_arguments: bool, processing_class: object = None) -> None:
        self.args = args
        self.has_own_arguments = has_own_arguments  # default ones name a metric that may not exist
        self.adapters: list[HFCallbackAdapter] = []
        self.host = self
        self.requested = {"loss", "inputs", "outputs"}
        self.callback_handler = CallbackHandler([], None, processing_class, None, None)
        self.state, self.control = TrainerState(), TrainerControl()
        self.run = TrainingRun(losses=LossLog("cpu", 0, args.logging_nan_inf_filter))
        self.in_update = self._is_told = False  # whether the module has told of the batch's losses and events
        self.timing = EventTiming()
        self.flags_decide = False  # whether only flags trigger evaluations, and not Lightning's intervals
        self.evaluation_cause: Literal["interval", "flag", "start"] = "interval"  # of the running evaluation
        self._evaluation_start = 0.0
        self._samples = self._evaluated_samples = self._evaluated_batches = 0

    def take_callbacks(self, adapters: list[HFCallbackAdapter]) -> None:
        """Call the HF callbacks of these adapters from now on."""
        self.adapters = adapters
        callbacks = self.callback_handler.callbacks = [one for adapter in adapters for one in adapter.handler.callbacks]
        self.flags_decide = any(is_callback_of(callback, DefaultFlowCallback) for callback in callbacks)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the trainer's callbacks, and the module."""
        if isinstance(pl_module, WindowModule) and pl_module.observer is self:
            pl_module.observer = UpdateObserver()
        trainer.callbacks = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]

    def _begin(self, trainer: pl.Trainer) -> None:
        """Start a fit, and fill the state from Lightning's progress."""
        updates = trainer.estimated_stepping_batches
        state = self.state = TrainerState()
        state.max_steps = int(updates) if updates != float("inf") and updates > 0 else sys.maxsize
        state.num_train_epochs = max(trainer.max_epochs or -1, 0) or sys.maxsize
        state.compute_steps(self.args, state.max_steps)
        state.global_step = trainer.global_step  # counts the updates that callbacks have been notified of
        state.epoch = float(trainer.current_epoch)
        state.is_world_process_zero = trainer.is_global_zero
        state.is_local_process_zero = trainer.local_rank == 0
        state.train_batch_size = self.args.per_device_train_batch_size
        if self.args.eval_strategy != IntervalStrategy.NO and not trainer.enable_validation:
            asked = IntervalStrategy(self.args.eval_strategy).value
            warn_once(
                f"HFCallbackAdapter: `eval_strategy={brief(asked)}`, but the Lightning trainer does not validate. "
                "Callbacks that follow evaluations, like EarlyStoppingCallback, are never called."
            )
        if self.args.load_best_model_at_end:
            warn_once(
                "HFCallbackAdapter: `load_best_model_at_end=True` has no effect in a Lightning trainer. "
                "Use ModelCheckpoint to keep the best model."
            )
        losses = LossLog(trainer.strategy.root_device, trainer.global_step, self.args.logging_nan_inf_filter)
        self.run, self._samples = TrainingRun(losses=losses, updates_before=trainer.global_step), 0

    def restore(self, saved: AdapterState) -> None:
        """Restore the state of a checkpoint's run."""
        state = saved["state"]
        if state is None:
            return
        for name in _RESTORED:
            setattr(self.state, name, state[name])
        if state["global_step"] == self.state.global_step:  # Lightning counts whole epochs only
            self.state.epoch = state["epoch"]  # type: ignore[assignment]  # a number
        with naming_misfit("The adapter's state"):
            self.run.losses.load_state_dict(saved["losses"])

    def fire(self, event: str, /, *of_hook: Given, **extra: object) -> None:
        """Fire an event. A callback may replace the control."""
        self.timing.sync_gradients = event not in ("on_step_begin", "on_substep_end")
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, **extra)

    at_hook = fire

    def micro_batch_done(self, loss: torch.Tensor, inputs: Batch) -> None:
        """Add a micro-batch's loss. Lightning trains with one number of any shape."""
        super().micro_batch_done(loss.mean() if loss.dim() else loss, inputs)
        self._is_told = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the training, from a checkpoint's state if one was loaded."""
        self._begin(trainer)
        for adapter in self.adapters:
            saved, adapter._restored = adapter._restored, None
            if saved is None:
                continue
            if adapter is self.adapters[0]:
                self.restore(saved)
            callbacks = adapter.handler.callbacks
            for name, exported in saved["callbacks"].items():
                found = [callback for callback in callbacks if type(callback).__name__ == name]
                for callback, state in zip(found, exported if isinstance(exported, list) else [exported], strict=False):
                    callbacks[callbacks.index(callback)] = type(callback).from_state(state)
        self.take_callbacks(self.adapters)
        if self.flags_decide:
            switch_off_own_validation(trainer)
        micro_batches = 1
        if isinstance(pl_module, WindowModule) and pl_module.logs_to_lightning:
            pl_module.observer = self
            micro_batches = pl_module.steps.args.gradient_accumulation_steps
        own = flag_sources(self.callback_handler.callbacks, False, HFCallbackAdapter, micro_batches)
        self.run.flag_agreement = FlagAgreement(self.args.ddp_timeout, FlagSources(*map(bool, highest_each(own))))
        # the fit's optimizer, schedule and loader, for the callbacks
        optimizers = [one for one in trainer.optimizers if one.param_groups]
        schedules, handler = trainer.lr_scheduler_configs, self.callback_handler
        # wrapped as by Accelerate, as callbacks test it
        handler.optimizer = PreparedOptimizer(optimizers[0], self.timing) if optimizers else None
        handler.lr_scheduler = schedules[0].scheduler if schedules else None
        handler.train_dataloader = trainer.train_dataloader
        self.fire("on_init_end")
        self.fire("on_train_begin")
        if self.args.eval_on_start:
            self.evaluate(trainer, "start")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.in_update = self._is_told = False  # an error may have ended the last fit within an update
        self.fire("on_epoch_begin")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Given, batch_idx: int
    ) -> None:
        if not self.in_update:
            self.fire("on_step_begin")
        self.in_update = True

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record learning rate and gradient norm of the update that is about to be made."""
        if not isinstance(pl_module, WindowModule):  # it has clipped already, and reports its numbers after the update
            group = next(iter(optimizer.param_groups), {})  # Lightning's stand-in for no optimizer has none
            self.run.learning_rate = float(group["lr"]) if "lr" in group else None
            if self.flags_decide:
                gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
                self.run.grad_norm = torch.nn.utils.get_total_norm(gradients)
        self.fire("on_pre_optimizer_step")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Given, batch_idx: int
    ) -> None:
        """End a micro-batch, and the update if Lightning has made one."""
        loss = outputs if outputs is None or isinstance(outputs, torch.Tensor) else outputs.get("loss")
        loss = loss if isinstance(loss, torch.Tensor) else None
        self._samples += _samples_of(batch)
        was_told = self._is_told
        if loss is not None and not was_told:  # Lightning has divided it by `accumulate_grad_batches`
            self.micro_batch_done(loss.detach(), batch)
        self._is_told = False
        self.callback_handler.requestable_kwargs.update(loss=loss, inputs=batch, outputs=outputs)
        state, run = self.state, self.run
        if trainer.global_step > state.global_step:
            if not was_told:
                self.fire("on_optimizer_step")  # HF counts the update after this event
            run.losses.end_update()
            state.global_step = trainer.global_step
            state.epoch = trainer.current_epoch + _epoch_progress(trainer, batch, batch_idx)
            if isinstance(pl_module, WindowModule) and pl_module.measured:  # such as the norm before clipping
                run.grad_norm = pl_module.measured.get("grad_norm")
                run.learning_rate = float(pl_module.measured["learning_rate"])
            self.fire("on_step_end")
            self.in_update = False
            interval = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
            if not self.flags_decide and interval and state.global_step % interval == 0:
                self.control.should_log = True
            self._act_on_flags(trainer, run.flag_agreement.sources.in_updates)
        elif pl_module.automatic_optimization:
            self.fire("on_substep_end")
        self._obey(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End an epoch, then log, evaluate and save according to the flags."""
        if self.flags_decide:
            trainer.should_stop = False  # the control has this flag, too, and a callback of this event may clear it
        self.fire("on_epoch_end")
        self._act_on_flags(trainer, self.run.flag_agreement.sources.in_epochs)
        self._obey(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the summary of the run, and end it. With a limit of one checkpoint, only the best stays."""
        state, run = self.state, self.run
        samples = self._samples * trainer.world_size or None
        updates, train_loss = state.global_step - run.updates_before, run.losses.mean(state.global_step)
        [nonfinite] = highest_each([run.losses.nonfinite_updates])
        self._log(run_summary(run.start_time, samples, updates, state.total_flos, train_loss, nonfinite))
        best = state.best_model_checkpoint
        if self.args.save_total_limit == 1 and best is not None:
            remove_surplus(list(self._checkpoints()), 1, [best], trainer.strategy.remove_checkpoint)
        self.fire("on_train_end")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluation_start, self._evaluated_samples, self._evaluated_batches = time.time(), 0, 0

    on_test_start = on_validation_start

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Given,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking:
            return
        self._evaluated_batches += 1
        self._evaluated_samples += _samples_of(batch)
        self.callback_handler.eval_dataloader = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        self.callback_handler.requestable_kwargs.update(loss=None, inputs=batch, outputs=outputs)
        self.fire("on_prediction_step")

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log an evaluation, and compare it with the best one of the run.

        Raises:
            MissingMetric: The metric that the user's arguments name is not among the metrics.
        """
        if trainer.sanity_checking:
            return
        evaluated = self._log(self._metrics(trainer, "eval"))
        self.fire("on_evaluate", metrics=evaluated)
        if trainer.state.fn != "fit" or self.evaluation_cause == "start":
            return
        is_tracked = self.has_own_arguments or "eval_loss" in evaluated
        request_save_if_best(self, is_tracked and update_best_metric(self.state, self.args, evaluated))
        self.run.flag_agreement.agree(self.control)  # metrics may differ between ranks, and so may early stopping
        if self.evaluation_cause == "interval" and self.control.should_save:
            self._save(trainer)
        self._obey(trainer)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.fire("on_predict", metrics=self._metrics(trainer, "test"))

    def _metrics(self, trainer: pl.Trainer, prefix: str) -> dict[str, float]:
        logged, module = metrics_of_running_loop(trainer), trainer.lightning_module
        if isinstance(module, WindowModule) and not module.logs_to_lightning:  # of our Trainer, which logs itself
            logged |= module.evaluated_numbers()
        samples = self._evaluated_samples * trainer.world_size or None
        speeds = speed_metrics(prefix, self._evaluation_start, samples, self._evaluated_batches)
        return {hf_metric_name(name, prefix): value for name, value in logged.items()} | speeds

    def _log(self, logs: dict[str, float]) -> dict[str, float]:
        """Add a log and its epoch to the history."""
        logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)
        return logs

    def _act_on_flags(self, trainer: pl.Trainer, may_differ: bool) -> None:
        """Log, evaluate and save according to the flags. Ranks with different flags agree first."""
        run, updates = self.run, self.state.global_step
        if may_differ:
            run.flag_agreement.agree(self.control)
        for action in due_actions(self, run.flag_agreement):
            if action == "log":
                self.control.should_log = False
                if updates > run.losses.last_logged:  # an update was made since the last log
                    self._log(run.losses.take(updates, run.grad_norm, run.learning_rate, gather))
            elif action == "evaluate":
                self.evaluate(trainer, "flag")
            else:
                self._save(trainer)

    def evaluate(self, trainer: pl.Trainer, cause: Literal["flag", "start"]) -> None:
        """Run Lightning's own validation loop."""
        self.evaluation_cause = cause
        try:
            if not run_validation(trainer):
                warn_once(
                    "HFCallbackAdapter: a callback requests an evaluation, but the Lightning trainer has no validation "
                    "data."
                )
        finally:
            self.evaluation_cause = "interval"
        self.control.should_evaluate = False

    def _save(self, trainer: pl.Trainer) -> None:
        """Write `checkpoint-<updates>.ckpt`, and delete old ones beyond `save_total_limit`."""
        now = self.state.global_step
        path = self._checkpoint_path(now)
        note_best_checkpoint(self.state, self._checkpoint_path, path)
        trainer.save_checkpoint(path)
        kept, found = [path, self.state.best_model_checkpoint], self._checkpoints()
        # a checkpoint with more updates belongs to an earlier run in this folder
        ordered = in_order_of_rotation(found, now, lambda old: found[old] <= now)
        remove_surplus(ordered, self.args.save_total_limit, kept, trainer.strategy.remove_checkpoint)
        self.fire("on_save")

    def _checkpoint_path(self, updates: int) -> str:
        return os.path.join(str(self.args.output_dir), f"checkpoint-{updates}.ckpt")

    def _checkpoints(self) -> dict[str, int]:
        """The checkpoints in the output folder, with their updates, oldest first."""
        folder = str(self.args.output_dir)
        names = os.listdir(folder) if os.path.isdir(folder) else []
        found = sorted(int(match[1]) for match in map(_CHECKPOINT.match, names) if match)
        return {self._checkpoint_path(updates): updates for updates in found}

    def _obey(self, trainer: pl.Trainer) -> None:
        """Stop the run or the epoch if a flag asks for it."""
        if self.control.should_training_stop:
            trainer.should_stop = True
        if self.control.should_epoch_stop:
            end_epoch_after_this_batch(trainer)


# Number of epochs for a run limited by updates or time, the greatest that the arguments accept.
_NO_END = 10**6


def arguments_of(trainer: pl.Trainer) -> TrainingArguments:
    """Make HF arguments that describe a Lightning trainer's settings. The rest is that of an HFModule's arguments."""
    epochs = trainer.max_epochs or 0
    by_epoch = trainer.check_val_every_n_epoch is not None
    interval = getattr(trainer, "val_check_interval", None)  # Lightning sets none where it is a time
    steps = int(interval) if not by_epoch and isinstance(interval, (int, float)) and interval >= 1 else None
    evaluates = IntervalStrategy.EPOCH if steps is None else IntervalStrategy.STEPS
    settings: dict[str, object] = {
        "max_steps": trainer.max_steps,
        "num_train_epochs": epochs if epochs > 0 else _NO_END,
        "logging_steps": max(trainer.log_every_n_steps, 1),  # type: ignore[attr-defined]  # set by a connector
        "eval_strategy": evaluates if trainer.enable_validation else IntervalStrategy.NO,
        "eval_steps": steps,
        "save_strategy": "no",
    }
    of_module = getattr(trainer.lightning_module, "args", None)
    if isinstance(of_module, TrainingArguments):
        args = copy.copy(of_module)
        settings["metric_for_best_model"] = of_module.metric_for_best_model or "loss"
    else:
        args = TrainingArguments(
            gradient_accumulation_steps=trainer.accumulate_grad_batches,
            metric_for_best_model="loss",
            max_grad_norm=trainer.gradient_clip_val or 0.0,
            use_cpu=trainer.strategy.root_device.type == "cpu",
        )
    for name, value in settings.items():
        setattr(args, name, value)
    vars(args)["output_dir"] = trainer.default_root_dir  # unchecked: Lightning also writes to other storage
    return args


def _epoch_progress(trainer: pl.Trainer, batch: Given, batch_idx: int) -> float:
    """The completed fraction of the epoch. A window knows it, unless Lightning is to end the epoch before its data."""
    batches, data = trainer.num_training_batches, trainer.train_dataloader
    if isinstance(batch, Window) and isinstance(data, Windows) and data.counts.updates_per_epoch == batches:
        return batch.epoch_progress
    return (batch_idx + 1) / batches if batches != float("inf") else 0.0


def _samples_of(batch: Given) -> int:
    """Count the samples of a batch or a window. 0 if its data has no shape that says it."""
    parts = batch if isinstance(batch, BatchGroup) else (batch,)
    return sum(find_batch_size(part) or 0 for part in parts)
