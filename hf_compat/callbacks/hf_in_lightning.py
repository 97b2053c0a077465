"""`HFCallbackAdapter`: HF callbacks inside anybody's `lightning.Trainer`, with any LightningModule. Both vocabularies.

Lightning hook                      HF event
on_train_start                      on_train_begin (on_init_end before the first)
on_train_epoch_start                on_epoch_begin
on_train_batch_start                on_step_begin, at the first batch of an update
on_before_optimizer_step            on_pre_optimizer_step: Lightning clips after it, HF before
on_train_batch_end                  on_substep_end within an update; at its end on_optimizer_step, on_step_end,
then log → evaluate → save as the flags say
on_validation_batch_end, on_test_…  on_prediction_step
on_validation_end                   on_log, on_evaluate
on_test_end                         on_predict
on_train_epoch_end                  on_epoch_end, then log → evaluate → save as the flags say
on_train_end                        on_log (the summary), on_train_end
"""

from __future__ import annotations

import glob
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from hf_compat.engine.internals import (
    end_epoch_after_this_batch,
    leave_validation_to_flags,
    metrics_of_running_loop,
    run_own_validation,
    warn_of_newer_lightning,
)
from hf_compat.errors import ArgumentError, warn_once
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.builtin_callbacks import DefaultFlowCallback, eval_metric_name
from hf_compat.hf.callbacks import CallbackHandler, TrainerCallback
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.hf.metrics import speed_metrics
from hf_compat.hf.state import TrainerControl, TrainerState, export_states, is_exportable
from hf_compat.interop.arguments import adopt_arguments

# Prefixes under which Lightning modules log validation metrics; HF's is `eval_`.
_VALIDATION_PREFIXES = ("validation_", "validation/", "valid_", "valid/", "val_", "val/", "eval/")


def hf_metric_name(name: str, prefix: str = "eval") -> str:
    """Give a metric that a Lightning module logs its HF name: `val_loss`, `val/loss` and `loss` are `eval_loss`."""
    if name.startswith(f"{prefix}_"):
        return name
    known = _VALIDATION_PREFIXES if prefix == "eval" else (f"{prefix}/",)
    for candidate in known:
        if name.startswith(candidate):
            return f"{prefix}_{name.removeprefix(candidate)}"
    return f"{prefix}_{name}"


class _Session:
    """State, control and arguments that all adapters of one Lightning trainer share."""

    def __init__(self, args: TrainingArguments) -> None:
        self.args = args
        self.state, self.control = TrainerState(), TrainerControl()
        self.loss_sum: torch.Tensor | float = 0.0
        self.total_loss = 0.0
        self.last_logged = 0
        self.first_update = 0
        self.updates_seen = 0
        self.in_window = False
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None
        self.start_time = 0.0
        self.samples = 0
        self.flags_decide = False


class HFCallbackAdapter(pl.Callback):
    """Let HF callbacks ride in a Lightning trainer that knows nothing of HF.

    `TrainerState` is filled from Lightning's progress; the flags of `TrainerControl` are obeyed: stop, stop the epoch,
    log, evaluate (Lightning's own validation loop on its own loaders) and save (`checkpoint-<updates>.ckpt`). Several
    adapters in one trainer share state and control.

    With a `DefaultFlowCallback` among the callbacks, the arguments say when to log, evaluate and save, and Lightning's
    own validation interval is off; without one, Lightning's intervals count and the events follow them.

    Args:
        callbacks: HF callbacks (instances or classes): ours, `transformers`' own, or of the same shape; one or a list.
        more: Further ones.
        args: Arguments that the callbacks see; made from the Lightning trainer where none are given.
        processing_class: What callbacks get as `processing_class`.

    Not given, and why:
        `on_substep_end` in manual optimization (Lightning does not tell micro-batches apart there); clipped gradients
        in `on_pre_optimizer_step` (Lightning clips after its hook); `total_flos`; `num_input_tokens_seen`;
        `load_best_model_at_end` (Lightning's ModelCheckpoint keeps the best; a warning says so).

    Example:
        `lightning.Trainer(callbacks=[HFCallbackAdapter(EarlyStoppingCallback(2))])`
    """

    def __init__(
        self,
        callbacks: TrainerCallback | list[TrainerCallback] | Any = (),
        *more: Any,
        args: TrainingArguments | None = None,
        processing_class: Any = None,
    ) -> None:
        given = [*(callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]), *more]
        if not given:
            raise ArgumentError("HFCallbackAdapter has no callback.\n\nHint: HFCallbackAdapter(MyCallback(), …).")
        self._given_args = None if args is None else adopt_arguments(args)
        self._processing_class = processing_class
        self.handler = CallbackHandler(given, None, processing_class, None, None)
        self._session: _Session | None = None
        self._is_first = self._is_last = True
        self._restored: dict[str, Any] | None = None

    @property
    def state(self) -> TrainerState:
        """HF's state of the run."""
        return TrainerState() if self._session is None else self._session.state

    @property
    def control(self) -> TrainerControl:
        """HF's flags."""
        return TrainerControl() if self._session is None else self._session.control

    @property
    def state_key(self) -> str:
        """Key of this callback's state: its HF callbacks' names."""
        return f"HFCallbackAdapter[{','.join(type(c).__name__ for c in self.handler.callbacks)}]"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Join the other adapters of this trainer."""
        warn_of_newer_lightning()
        adapters: list[HFCallbackAdapter] = [
            c for c in getattr(trainer, "callbacks", []) if isinstance(c, HFCallbackAdapter)
        ]
        first = adapters[0]
        self._is_first, self._is_last = first is self, adapters[-1] is self
        if self._is_first:
            if self._session is None:
                told = [a._given_args for a in adapters if a._given_args is not None]
                if any(args is not told[0] and args.to_dict() != told[0].to_dict() for args in told):
                    raise ArgumentError(
                        "Several HFCallbackAdapters of one Lightning trainer have different `args`.\n\n"
                        "Hint: give them to one; all share its state."
                    )
                given = told[0] if told else None
                self._session = _Session(given or _arguments_of(trainer))
            callbacks = [callback for adapter in adapters for callback in adapter.handler.callbacks]
            # transformers' own has the same name
            self._session.flags_decide = any(type(c).__name__ == DefaultFlowCallback.__name__ for c in callbacks)
        self._session = first._session
        self.handler.model = pl_module
        self.handler.requestable_kwargs["trainer"] = trainer

    def _fire(self, event: str, **extra: Any) -> None:
        """Tell an event to this adapter's callbacks; the first adapter's handler also resets the flags."""
        session = self._running
        tell = getattr(self.handler, event) if self._is_first else None
        if tell is not None:
            session.control = tell(session.args, session.state, session.control, **extra)
        else:
            session.control = self.handler.call_event(event, session.args, session.state, session.control, **extra)

    @property
    def _running(self) -> _Session:
        assert self._session is not None  # setup came first
        return self._session

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        session = self._running
        if self._is_first:
            self._begin(trainer)
        optimizers, schedules = trainer.optimizers, trainer.lr_scheduler_configs
        self.handler.optimizer = optimizers[0] if optimizers else None
        self.handler.lr_scheduler = schedules[0].scheduler if schedules else None
        self.handler.train_dataloader = trainer.train_dataloader
        if self._restored is not None:
            self._restore(self._restored)
        session.control = self.handler.call_event("on_init_end", session.args, session.state, session.control)
        self._fire("on_train_begin")

    def _begin(self, trainer: pl.Trainer) -> None:
        session = self._running
        state = session.state = TrainerState()
        updates = trainer.estimated_stepping_batches
        state.max_steps = int(updates) if updates != float("inf") and updates > 0 else sys.maxsize
        state.num_train_epochs = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else sys.maxsize  # type: ignore[assignment]
        state.compute_steps(session.args, state.max_steps)
        state.global_step = session.first_update = session.last_logged = session.updates_seen = trainer.global_step
        state.epoch = float(trainer.current_epoch)
        state.is_world_process_zero = trainer.is_global_zero
        state.is_local_process_zero = trainer.local_rank == 0
        state.train_batch_size = session.args.per_device_train_batch_size
        session.start_time, session.samples, session.total_loss = time.time(), 0, 0.0
        session.loss_sum = 0.0
        if session.flags_decide:
            leave_validation_to_flags(trainer)
        if session.args.load_best_model_at_end:
            warn_once(
                "HFCallbackAdapter: `load_best_model_at_end=True` has no effect in a Lightning trainer; "
                "ModelCheckpoint keeps the best model."
            )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._running.in_window = False
        self._fire("on_epoch_begin")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._running.in_window:
            self._fire("on_step_begin")
        if self._is_last:
            self._running.in_window = True

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        session = self._running
        if self._is_first:
            session.learning_rate = float(optimizer.param_groups[0]["lr"])
            if session.flags_decide:
                session.grad_norm = _norm_of_gradients(pl_module)
        self._fire("on_pre_optimizer_step")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        session = self._running
        if self._is_first:
            self._add_loss(outputs)
        stepped = trainer.global_step > session.updates_seen
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.handler.requestable_kwargs.update(loss=loss, inputs=batch, outputs=outputs)
        if not stepped:
            if pl_module.automatic_optimization:
                self._fire("on_substep_end")
            self._obey(trainer)
            return
        session.state.global_step = session.updates_seen  # HF counts the update after this event
        self._fire("on_optimizer_step")
        batches = trainer.num_training_batches
        within = (batch_idx + 1) / batches if batches != float("inf") else 0.0
        session.state.global_step, session.state.epoch = trainer.global_step, trainer.current_epoch + within
        self._fire("on_step_end")
        if self._is_last:
            session.updates_seen = trainer.global_step
            session.in_window = False
            self._act_on_flags(trainer)
            self._obey(trainer)

    def _add_loss(self, outputs: Any) -> None:
        session = self._running
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):  # Lightning has divided it by the accumulation
            session.loss_sum = session.loss_sum + loss.detach().float()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_first and self._running.flags_decide:
            trainer.should_stop = False  # the control says it too; a callback of this event may take it back
        self._fire("on_epoch_end")
        if self._is_last:
            self._act_on_flags(trainer)
            self._obey(trainer)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
            self.handler.eval_dataloader = loaders
            self.handler.requestable_kwargs.update(loss=None, inputs=batch, outputs=outputs)
            self._fire("on_prediction_step")

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        session = self._running
        found = metrics_of_running_loop(trainer)
        metrics = {hf_metric_name(name): value for name, value in found.items()}
        if self._is_first:
            session.state.log_history.append(
                {**metrics, "epoch": session.state.epoch, "step": session.state.global_step}
            )
        self._fire("on_log", logs={**metrics, "epoch": session.state.epoch})
        self._fire("on_evaluate", metrics={**metrics, "epoch": session.state.epoch})
        if self._is_last:
            self._note_best(metrics)
            if trainer.state.fn == "fit":
                self._obey(trainer)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = metrics_of_running_loop(trainer)
        self._fire("on_predict", metrics={hf_metric_name(name, "test"): value for name, value in found.items()})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        session = self._running
        updates = session.state.global_step - session.first_update
        if self._is_first:
            session.total_loss += float(session.loss_sum)
            session.loss_sum = 0.0
            summary = speed_metrics("train", session.start_time, num_steps=updates)
            session.state.log_history.append(
                {
                    **summary,
                    "train_loss": session.total_loss / max(updates, 1),
                    "epoch": session.state.epoch,
                    "step": session.state.global_step,
                }
            )
        logs = {name: value for name, value in session.state.log_history[-1].items() if name != "step"}
        self._fire("on_log", logs=logs)
        self._fire("on_train_end")

    def _act_on_flags(self, trainer: pl.Trainer) -> None:
        """Log, evaluate and save, in this order, as the flags say."""
        session, control = self._running, self._running.control
        if control.should_log:
            self._log_training(trainer)
        if control.should_evaluate and not run_own_validation(trainer):
            warn_once(
                "HFCallbackAdapter: a callback asks to evaluate, but the Lightning trainer has no validation data."
            )
        session.control.should_evaluate = False
        if session.control.should_save:
            self._save(trainer)
            for adapter in _adapters(trainer):
                adapter._fire("on_save")

    def _log_training(self, trainer: pl.Trainer) -> None:
        session = self._running
        state = session.state
        updates = state.global_step - session.last_logged
        session.control.should_log = False
        if updates <= 0:
            return
        total = float(session.loss_sum)
        logs: dict[str, Any] = {"loss": total / updates}
        if session.grad_norm is not None:
            logs["grad_norm"] = session.grad_norm
        if session.learning_rate is not None:
            logs["learning_rate"] = session.learning_rate
        logs["epoch"] = state.epoch
        session.total_loss += total
        session.loss_sum, session.last_logged = 0.0, state.global_step
        state.log_history.append({**logs, "step": state.global_step})
        for adapter in _adapters(trainer):
            adapter._fire("on_log", logs=logs)

    def _save(self, trainer: pl.Trainer) -> None:
        """Write `checkpoint-<updates>.ckpt`, and keep as many as the arguments allow."""
        session = self._running
        folder = str(session.args.output_dir)
        path = os.path.join(folder, f"checkpoint-{session.state.global_step}.ckpt")
        trainer.save_checkpoint(path)
        if session.state.best_global_step == session.state.global_step:
            session.state.best_model_checkpoint = path
        limit = session.args.save_total_limit
        if limit and limit > 0 and trainer.is_global_zero:
            kept = {path, session.state.best_model_checkpoint}
            written = sorted(glob.glob(os.path.join(glob.escape(folder), "checkpoint-*.ckpt")), key=_step_of)
            for old in [p for p in written if p not in kept][: max(len(written) - max(limit, len(kept)), 0)]:
                os.unlink(old)

    def _note_best(self, metrics: dict[str, float]) -> None:
        session = self._running
        args, state = session.args, session.state
        if args.metric_for_best_model is None:
            return
        value = metrics.get(eval_metric_name(args.metric_for_best_model))
        if value is None:
            return
        better = state.best_metric is None or (
            value > state.best_metric if args.greater_is_better else value < state.best_metric
        )
        if better:
            state.best_metric, state.best_global_step = value, state.global_step

    def _obey(self, trainer: pl.Trainer) -> None:
        control = self._running.control
        if control.should_training_stop:
            trainer.should_stop = True
        if control.should_epoch_stop:
            end_epoch_after_this_batch(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return HF's state and the states of callbacks that have one, in plain values."""
        session = self._session
        stateful = [callback for callback in self.handler.callbacks if is_exportable(callback)]
        return {
            "state": None if session is None else asdict(session.state),
            "callbacks": export_states(stateful),
            "loss_sum": 0.0 if session is None else float(session.loss_sum),
            "last_logged": 0 if session is None else session.last_logged,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until training starts."""
        self._restored = state_dict

    def _restore(self, saved: dict[str, Any]) -> None:
        self._restored = None
        session, known = self._running, saved["state"]
        if self._is_first and known is not None:
            for name in ("log_history", "best_metric", "best_global_step", "best_model_checkpoint"):
                setattr(session.state, name, known[name])
            session.loss_sum, session.last_logged = saved["loss_sum"], saved["last_logged"]
        for index, callback in enumerate(self.handler.callbacks):
            exported = saved["callbacks"].get(type(callback).__name__)
            if isinstance(exported, dict):
                self.handler.callbacks[index] = type(callback).from_state(exported)


def _adapters(trainer: pl.Trainer) -> list[HFCallbackAdapter]:
    return [c for c in trainer.callbacks if isinstance(c, HFCallbackAdapter)]  # type: ignore[attr-defined]


def _arguments_of(trainer: pl.Trainer) -> TrainingArguments:
    """Make HF arguments that say what a Lightning trainer does."""
    epochs = trainer.max_epochs or -1
    by_epoch = trainer.check_val_every_n_epoch is not None
    interval = trainer.val_check_interval
    steps = int(interval) if not by_epoch and isinstance(interval, (int, float)) and interval >= 1 else None
    return TrainingArguments(
        output_dir=trainer.default_root_dir,
        max_steps=trainer.max_steps,
        num_train_epochs=epochs if epochs > 0 else sys.maxsize,
        gradient_accumulation_steps=trainer.accumulate_grad_batches,
        logging_steps=max(trainer.log_every_n_steps, 1),  # type: ignore[attr-defined]  # set by a connector
        eval_strategy=IntervalStrategy.EPOCH if steps is None else IntervalStrategy.STEPS,
        eval_steps=steps,
        save_strategy="no",
        metric_for_best_model="loss",
        max_grad_norm=trainer.gradient_clip_val or 0.0,
        use_cpu=trainer.strategy.root_device.type == "cpu",
    )


def _norm_of_gradients(module: nn.Module) -> float:
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def _step_of(path: str) -> int:
    digits = os.path.basename(path).removeprefix("checkpoint-").removesuffix(".ckpt")
    return int(digits) if digits.isdigit() else -1
