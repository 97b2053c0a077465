"""`HFCallbackAdapter` runs HF callbacks inside any `lightning.Trainer`, with any LightningModule.

Each hook of the adapter fires the events of its moment. After an update and after an epoch, the adapter logs, evaluates
and saves according to the flags.
"""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT

from hf_compat.callbacks.adapted_run import AdaptedRun, AdapterState, arguments_of, loss_of
from hf_compat.callbacks.loggers import is_of_other_distribution
from hf_compat.data.types import Batch
from hf_compat.engine.internals import end_epoch_after_this_batch, metrics_of_running_loop, switch_off_own_validation
from hf_compat.engine.module import WindowModule
from hf_compat.errors import ArgumentError, CallbackError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.builtin_callbacks import DefaultFlowCallback, ProgressCallback
from hf_compat.hf.callbacks import CallbackHandler
from hf_compat.hf.state import TrainerControl, TrainerState, export_states
from hf_compat.interop.arguments import adopt_arguments
from hf_compat.training_run.run import FlagAgreement, flag_sources, log_evaluate_save

# An HF callback, instance or class. It may be ours, one of transformers, or any object with its methods.
AnyCallback = Any

# Prefixes of validation metrics in Lightning modules. HF's prefix is `eval_`.
_VALIDATION_PREFIXES = ("validation_", "validation/", "valid_", "valid/", "val_", "val/", "eval/")


def hf_metric_name(name: str, prefix: str = "eval") -> str:
    """Convert a metric name of a Lightning module to HF's. `val_loss`, `val/loss` and `loss` become `eval_loss`."""
    if name.startswith(f"{prefix}_"):
        return name
    known = _VALIDATION_PREFIXES if prefix == "eval" else (f"{prefix}/",)
    for candidate in known:
        if name.startswith(candidate):
            return f"{prefix}_{name.removeprefix(candidate)}"
    return f"{prefix}_{name}"


class HFCallbackAdapter(pl.Callback):
    """Call HF callbacks in a Lightning trainer.

    `TrainerState` is filled from Lightning's progress. The adapter obeys the flags of `TrainerControl`. It stops the
    run or the epoch, logs, runs Lightning's validation loop on its own loaders, and saves `checkpoint-<updates>.ckpt`.
    Several adapters in one trainer share state and control.

    With a `DefaultFlowCallback` among the callbacks, the arguments decide when to log, evaluate and save. Lightning's
    own validation interval is then off. Without one, Lightning's intervals apply and the events follow them. Logs, the
    best metric, `save_strategy="best"`, rotation and the summary work as in the Trainer.

    Args:
        callbacks: One HF callback or a list of them, as instances or classes. They may be ours, those of transformers,
            or any object with their methods.
        more: Further callbacks.
        args: Arguments that the callbacks see. By default they are made from the Lightning trainer's settings.
        processing_class: Passed to callbacks as `processing_class`.

    Raises:
        ArgumentError: No callback is given.
        CallbackError: A callback is a Lightning callback.

    Not provided:
        `on_substep_end` in manual optimization, as Lightning cannot distinguish micro-batches there. Clipped gradients
        in `on_pre_optimizer_step`, as Lightning clips after its hook. `total_flos` and `num_input_tokens_seen`, which
        stay 0. `load_best_model_at_end`, for which ModelCheckpoint exists (a warning says so).

    Examples:
        `lightning.Trainer(callbacks=[HFCallbackAdapter(EarlyStoppingCallback(2))])`
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
        wrong = [c for c in given if isinstance(c, pl.Callback) or is_of_other_distribution(c)]
        if wrong:
            raise CallbackError(
                f"{type(wrong[0]).__name__} is a Lightning callback, and HFCallbackAdapter calls HF callbacks.\n\n"
                "Hint: give it to lightning.Trainer itself, beside the adapter."
            )
        self._given_args = None if args is None else adopt_arguments(args)
        self._processing_class = processing_class
        self.handler = CallbackHandler([], None, processing_class, None, None)
        for callback in given:
            self.handler.add_callback(callback)
        self._shared_run: AdaptedRun | None = None
        self._is_first = self._is_last = True
        self._restored: AdapterState | None = None

    @property
    def state(self) -> TrainerState:
        """HF's state of the run."""
        return TrainerState() if self._shared_run is None else self._shared_run.state

    @property
    def control(self) -> TrainerControl:
        """HF's flags."""
        return TrainerControl() if self._shared_run is None else self._shared_run.control

    @property
    def state_key(self) -> str:
        """Key of this callback's state, made of its HF callbacks' names."""
        return f"HFCallbackAdapter[{','.join(type(c).__name__ for c in self.handler.callbacks)}]"

    @property
    def _adapted_run(self) -> AdaptedRun:
        assert self._shared_run is not None  # `setup` has set it
        return self._shared_run

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Join the other adapters of this trainer. The first one makes the shared run.

        Raises:
            ArgumentError: Two adapters have different arguments.
        """
        adapters = _adapters(trainer)
        self._is_first, self._is_last = adapters[0] is self, adapters[-1] is self
        if self._is_first:
            if self._shared_run is None:
                given_args = [adapter._given_args for adapter in adapters if adapter._given_args is not None]
                given = given_args[0] if given_args else None
                if any(args is not given and args.to_dict() != given_args[0].to_dict() for args in given_args):
                    raise ArgumentError(
                        "Several HFCallbackAdapters of one Lightning trainer have different `args`.\n\n"
                        "Hint: pass them to one adapter only, as all share its state."
                    )
                self._shared_run = AdaptedRun(given or arguments_of(trainer), given is not None)
            names = {type(callback).__name__ for adapter in adapters for callback in adapter.handler.callbacks}
            self._adapted_run.flags_decide = DefaultFlowCallback.__name__ in names
        self._shared_run = adapters[0]._adapted_run
        self.handler.model = pl_module
        self.handler.requestable_kwargs["trainer"] = trainer
        if trainer.progress_bar_callback is not None:
            self.handler.pop_callback(ProgressCallback)  # one bar only

    def _fire(self, event: str, **extra: object) -> None:
        """Fire an event for this adapter's callbacks. The first adapter's handler also clears the flags."""
        run = self._adapted_run
        fire = getattr(self.handler, event) if self._is_first else functools.partial(self.handler.call_event, event)
        run.control = fire(run.args, run.state, run.control, **extra)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the run."""
        run = self._adapted_run
        if self._is_first:
            run.begin(trainer)
            callbacks = [callback for adapter in _adapters(trainer) for callback in adapter.handler.callbacks]
            run.flags = FlagAgreement(run.args.ddp_timeout, flag_sources(callbacks, False, HFCallbackAdapter, 1))
            if run.flags_decide:
                switch_off_own_validation(trainer)
        # the fit's optimizer, schedule and loader, for the callbacks
        optimizers, schedules = trainer.optimizers, trainer.lr_scheduler_configs
        self.handler.optimizer = optimizers[0] if optimizers else None
        self.handler.lr_scheduler = schedules[0].scheduler if schedules else None
        self.handler.train_dataloader = trainer.train_dataloader
        self._restore()
        run.control = self.handler.call_event("on_init_end", run.args, run.state, run.control)
        self._fire("on_train_begin")
        if self._is_last and run.args.eval_on_start:
            run.evaluate(trainer, "start")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start an epoch."""
        self._adapted_run.in_update = False
        self._fire("on_epoch_begin")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Start an update at its first micro-batch."""
        if not self._adapted_run.in_update:
            self._fire("on_step_begin")
        if self._is_last:
            self._adapted_run.in_update = True

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record learning rate and gradient norm for the log."""
        if self._is_first:
            self._adapted_run.note_update(pl_module, optimizer)
        self._fire("on_pre_optimizer_step")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        """End a micro-batch, and the update if Lightning has made one."""
        run = self._adapted_run
        if self._is_first:
            run.add_loss(outputs)
        self.handler.requestable_kwargs.update(loss=loss_of(outputs), inputs=batch, outputs=outputs)
        if trainer.global_step > run.updates_done:
            self._end_update(trainer, batch_idx)
        elif pl_module.automatic_optimization:
            self._fire("on_substep_end")
        if self._is_last:
            self._obey(trainer)

    def _end_update(self, trainer: pl.Trainer, batch_idx: int) -> None:
        run = self._adapted_run
        run.state.global_step = run.updates_done  # HF counts the update after this event
        self._fire("on_optimizer_step")
        run.count_update(trainer, batch_idx)
        run.take_measured(trainer.lightning_module)
        self._fire("on_step_end")
        if self._is_last:
            run.updates_done = trainer.global_step
            run.in_update = False
            run.ask_for_log(trainer)
            self._act_on_flags(trainer, run.flags.sources.in_updates)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End an epoch, then log, evaluate and save according to the flags."""
        if self._is_first and self._adapted_run.flags_decide:
            trainer.should_stop = False  # the control has this flag, too, and a callback of this event may clear it
        self._fire("on_epoch_end")
        if self._is_last:
            self._act_on_flags(trainer, self._adapted_run.flags.sources.in_epochs)
            self._obey(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start an evaluation."""
        self._adapted_run.begin_evaluation()

    on_test_start = on_validation_start

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """End a batch of an evaluation."""
        if trainer.sanity_checking:
            return
        if self._is_first:
            self._adapted_run.evaluation_batches += 1
        self.handler.eval_dataloader = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        self.handler.requestable_kwargs.update(loss=None, inputs=batch, outputs=outputs)
        self._fire("on_prediction_step")

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log an evaluation, and compare it with the best one of the run."""
        if trainer.sanity_checking:
            return
        run = self._adapted_run
        if self._is_first:
            run.evaluated = run.log(self._metrics(trainer, "eval"))
        self._fire("on_log", logs=run.evaluated)
        self._fire("on_evaluate", metrics=run.evaluated)
        if self._is_last and trainer.state.fn == "fit" and run.evaluation_cause != "start":
            run.note_evaluation(run.evaluated)
            run.flags.agree(run.control)  # metrics may differ between ranks, and so may early stopping
            if run.evaluation_cause == "interval" and run.control.should_save:
                self._save(trainer)
            self._obey(trainer)

    def _metrics(self, trainer: pl.Trainer, prefix: str) -> dict[str, float]:
        logged, module = metrics_of_running_loop(trainer), trainer.lightning_module
        if isinstance(module, WindowModule) and not module.logs_to_lightning:  # of our Trainer, which logs itself
            logged |= module.evaluated_numbers()
        metrics = {hf_metric_name(name, prefix): value for name, value in logged.items()}
        loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        return metrics | self._adapted_run.evaluation_speeds(prefix, loaders, trainer.world_size)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End a prediction."""
        self._fire("on_predict", metrics=self._metrics(trainer, "test"))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the summary of the run, and end it."""
        run = self._adapted_run
        if self._is_first:
            run.summary = run.summarize(trainer)
        self._fire("on_log", logs=run.summary)
        if self._is_first:
            run.rotate_at_end(trainer)
        self._fire("on_train_end")

    def _act_on_flags(self, trainer: pl.Trainer, may_differ: bool) -> None:
        """Log, evaluate and save according to the flags. Ranks with different flags agree first."""
        run = self._adapted_run
        if may_differ:
            run.flags.agree(run.control)
        log_evaluate_save(
            run,
            log=lambda: self._log_training(trainer),
            evaluate=lambda: self._adapted_run.evaluate(trainer, "flag"),
            save=lambda: self._save(trainer),
            agreement=run.flags,
        )

    def _log_training(self, trainer: pl.Trainer) -> None:
        run = self._adapted_run
        run.control.should_log = False
        logs = run.take_logs()
        if logs:
            for adapter in _adapters(trainer):
                adapter._fire("on_log", logs=logs)

    def _save(self, trainer: pl.Trainer) -> None:
        self._adapted_run.save(trainer)
        for adapter in _adapters(trainer):
            adapter._fire("on_save")

    def _obey(self, trainer: pl.Trainer) -> None:
        """Stop the run or the epoch if a flag asks for it."""
        control = self._adapted_run.control
        if control.should_training_stop:
            trainer.should_stop = True
        if control.should_epoch_stop:
            end_epoch_after_this_batch(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Export HF's state and the states of stateful callbacks, in plain values."""
        run = self._shared_run
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

    def _restore(self) -> None:
        saved, self._restored = self._restored, None
        if saved is None:
            return
        if self._is_first:
            self._adapted_run.restore(saved)
        for index, callback in enumerate(self.handler.callbacks):
            exported = saved["callbacks"].get(type(callback).__name__)
            if isinstance(exported, dict):
                self.handler.callbacks[index] = type(callback).from_state(exported)


def _adapters(trainer: pl.Trainer) -> list[HFCallbackAdapter]:
    return [c for c in trainer.callbacks if isinstance(c, HFCallbackAdapter)]  # type: ignore[attr-defined]
