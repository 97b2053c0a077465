"""`HFBridge`: the one Lightning callback that turns hooks into HF events, and flags into actions.

Both vocabularies. Lightning things are prefixed `pl_`, HF things `hf_` where both are in scope.

    Lightning hook                 HF event
    on_train_start                 on_train_begin (then the evaluation of eval_on_start)
    on_train_epoch_start           on_epoch_begin
    on_train_batch_start           on_step_begin
    (told by the module)           on_substep_end
    on_before_optimizer_step       on_pre_optimizer_step
    (told by the module)           on_optimizer_step
    on_train_batch_end             on_step_end, then log → evaluate → save as the flags say
    on_validation_batch_end        on_prediction_step
    on_train_epoch_end             on_epoch_end, then log → evaluate → save as the flags say
"""

from __future__ import annotations

import logging
import math
from typing import Any

import lightning.pytorch as pl
import torch

from hf_compat.callbacks.event_order import PAIRS, CallbackOrder, HFEvents
from hf_compat.callbacks.session import Session
from hf_compat.engine.windows import Window, Windows
from hf_compat.runtime import slurm
from hf_compat.runtime.inspection import call_by_signature

logger = logging.getLogger(__name__)


class HFBridge(pl.Callback):
    """Fire the HF events of a run and obey the flags that its callbacks set.

    Args:
        hf_session: The run: a Trainer.
        windows: The windows of the fit, which end an epoch when asked; None where nothing is trained.
        first_epoch: Epoch that the fit begins with.
        start_time: `time.time()` at the start of training, in seconds.
        ignore_keys_for_eval: Outputs that evaluations within the fit leave out.
        trial: The hyperparameter search's trial.
        is_finished: Nothing is left to train: the run begins and ends (it was resumed at its end).
    """

    def __init__(
        self,
        hf_session: Session,
        windows: Windows | None = None,
        first_epoch: int = 0,
        start_time: float = 0.0,
        ignore_keys_for_eval: list[str] | None = None,
        trial: Any = None,
        is_finished: bool = False,
    ) -> None:
        self.hf_session = hf_session
        self.windows = windows
        self.epoch = first_epoch - 1
        self.start_time = start_time
        self.ignore_keys_for_eval = ignore_keys_for_eval
        self.trial = trial
        self.is_finished = is_finished
        self._grad_norm: Any = None
        self._learning_rate: float | None = None
        self._stepped = False
        self._last_saved = -1
        self._taken_up = False
        self._requested_kwargs: set[str] = set()
        # whether the filter has hidden a loss within this update: False, True, or a tensor on the loss's device
        self._hides: Any = False
        self._order: CallbackOrder | None = None
        self._last_segment = 0

    # Events are fired through here, so that a callback may replace the control.
    def _fire(self, event: str, **extra: Any) -> None:
        session = self.hf_session
        fire = getattr(session.callback_handler, event)
        session.control = fire(session.args, session.state, session.control, **extra)

    def lightning_callback_list(
        self, lightning_callbacks: list[pl.Callback], order: CallbackOrder
    ) -> list[pl.Callback]:
        """Return the callbacks of a Lightning trainer: the user's, HF's events between them, this bridge last."""
        self._order = order if lightning_callbacks else None
        self._last_segment = len(lightning_callbacks)
        return order.arrange(lightning_callbacks, self, lambda segment: HFEvents(self, segment))

    def fire_for_hook(self, hook: str, segment: int, batch: Any = None, outputs: Any = None) -> None:
        """Tell the event that goes with a hook to one run of the HF callbacks; the first one prepares it.

        Args:
            hook: Lightning's hook.
            segment: Which segment of the HF callbacks: 0 stands before the first Lightning callback.
            batch: The batch, where the hook has one.
            outputs: What the step returned, where the hook has it.
        """
        session, event = self.hf_session, PAIRS[hook]
        handler = session.callback_handler
        if segment == 0:
            self._prepare(hook, batch, outputs)
        if hook == "on_train_batch_end" and not self._stepped:
            return
        if self._order is None:
            self._fire(event)
            return
        handler.active_ids = self._order.segments(handler.callbacks)[segment]
        try:
            if segment == 0:
                self._fire(event)
            else:  # the flags are reset once, by the handler's own method
                session.control = handler.call_event(event, session.args, session.state, session.control)
        finally:
            handler.active_ids = None

    def _prepare(self, hook: str, batch: Any, outputs: Any) -> None:
        """Do what comes before an event's first callback."""
        session = self.hf_session
        if hook == "on_train_start":
            self.find_requested_kwargs()
        elif hook == "on_train_epoch_start":
            self.epoch += 1
            self._grad_norm = self._learning_rate = None
            self.find_requested_kwargs()
        elif hook == "on_train_batch_start":
            self._stepped = False
        elif hook == "on_train_batch_end" and self._stepped:
            assert isinstance(batch, Window)  # the data module yields nothing else
            session.state.global_step += 1
            session.state.epoch = self.epoch + batch.epoch_progress
        elif hook == "on_train_epoch_end":
            self._close_epoch()
        elif hook == "on_validation_batch_end" and self._requested_kwargs:
            session.callback_handler.requestable_kwargs.update(loss=outputs, inputs=getattr(batch, "inputs", batch))

    def find_requested_kwargs(self) -> None:
        """Find out whether a callback asks for losses, inputs or outputs; keeping them costs memory."""
        self._requested_kwargs = self.hf_session.callback_handler.requested_kwargs() - {"trainer"}
        self.hf_session._watch_outputs("outputs" in self._requested_kwargs)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the run take up optimizer and schedule, which Lightning has just had made."""
        if not self._taken_up:
            self._taken_up = True
            self.hf_session._take_up_optimizer()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the run."""
        self.fire_for_hook("on_train_start", self._last_segment)
        if self.hf_session.args.eval_on_start:
            self.hf_session._evaluate(self.trial, self.ignore_keys_for_eval, skip_scheduler=True)
        if self.is_finished:
            trainer.should_stop = True

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin an epoch."""
        self.fire_for_hook("on_train_epoch_start", self._last_segment)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin an update."""
        self.fire_for_hook("on_train_batch_start", self._last_segment)

    def micro_batch_done(self, loss: torch.Tensor, inputs: Any) -> None:
        """Take a micro-batch's loss, operations and tokens into account."""
        session = self.hf_session
        session._tr_loss += self._countable(loss)
        if self._requested_kwargs:
            session.callback_handler.requestable_kwargs.update(loss=loss, inputs=inputs)
        session.current_flos += float(session.floating_point_ops(inputs))
        session._track_num_input_tokens(inputs)

    def _countable(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, or in its place the mean so far where it is not finite and the filter is on."""
        session = self.hf_session
        if not session.args.logging_nan_inf_filter:
            return loss
        steps = 1 + session.state.global_step - session._globalstep_last_logged
        if loss.device.type == "cpu":
            if math.isfinite(loss.item()):
                return loss
            self._hides = True
            return session._tr_loss / steps
        # on a device the choice is made there: asking for the value would wait for it at every step
        finite = torch.isfinite(loss)
        self._hides = ~finite if self._hides is False else self._hides | ~finite
        return torch.where(finite, loss, session._tr_loss / steps)

    def substep_ended(self) -> None:
        """Tell that a micro-batch other than the last has ended."""
        self._fire("on_substep_end")

    def should_break(self) -> bool:
        """Say whether a flag asks to leave the window."""
        control = self.hf_session.control
        return control.should_epoch_stop or control.should_training_stop

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Tell that gradients are clipped and the optimizer is about to step."""
        self.fire_for_hook("on_before_optimizer_step", self._last_segment)

    def optimizer_stepped(self, grad_norm: Any) -> None:
        """Tell that the optimizer has stepped."""
        self._grad_norm = grad_norm
        self._stepped = True
        self._fire("on_optimizer_step")

    def learning_rate_read(self, learning_rate: float) -> None:
        """Keep the learning rate of the update that was just made."""
        self._learning_rate = learning_rate

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End an update: count it, then log, evaluate and save as the flags say."""
        session = self.hf_session
        session._check_background()
        if trainer.should_stop:  # a Lightning callback asks to stop
            session.control.should_training_stop = True
        self.fire_for_hook("on_train_batch_end", self._last_segment, batch)
        if self._stepped:
            self._count_hidden()
            self._act_on_flags(trainer)
            self._obey_signals()
        if self.should_break():
            trainer.should_stop = session.control.should_training_stop
            if self.windows is not None:
                self.windows.close_epoch()

    def _count_hidden(self) -> None:
        """Count the update where the filter has hidden a loss that was not finite."""
        if self._hides is not False:
            self.hf_session._nonfinite_steps += self._hides
            self._hides = False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End an epoch: then log, evaluate and save as the flags say."""
        session = self.hf_session
        self.fire_for_hook("on_train_epoch_end", self._last_segment)
        if trainer.should_stop:  # a Lightning callback asks to stop, at the end of this epoch
            session.control.should_training_stop = True
        self._act_on_flags(trainer)
        trainer.should_stop = session.control.should_training_stop

    def _close_epoch(self) -> None:
        session, trainer = self.hf_session, self.hf_session.lightning_trainer
        if self.windows is not None:
            self.windows.finish_epoch()
        if self.windows is not None and not self.windows.saw_data:
            logger.warning(
                "The training data gave no sample in epoch %d; training stops at update %d of %d.",
                self.epoch,
                session.state.global_step,
                session.state.max_steps,
            )
            session.control.should_training_stop = True
        if trainer is not None:
            trainer.should_stop = False  # the control says it too; an HF callback of this event may take it back

    def _obey_signals(self) -> None:
        """Write a checkpoint where a signal has asked to stop, then stop."""
        session = self.hf_session
        session.stop_signals.agree()
        if session.stop_signals.received is None:
            return
        if self._last_saved != session.state.global_step:
            session._save_checkpoint(session.model, self.trial)
            self._fire("on_save")
        session._background.wait()
        if session.stop_signals.asks_for_requeue and session.state.is_world_process_zero:
            slurm.requeue(str(session.args.output_dir))
        session.stop_signals.obey()

    def _act_on_flags(self, trainer: pl.Trainer) -> None:
        session = self.hf_session
        if session.control.should_save:
            self._last_saved = session.state.global_step
        # by name: older overrides lack the learning rate, the start time or the gradient norm
        call_by_signature(
            session._maybe_log_save_evaluate,
            optional={
                "tr_loss": session._tr_loss,
                "grad_norm": self._grad_norm,
                "model": session.model,
                "trial": self.trial,
                "epoch": self.epoch,
                "ignore_keys_for_eval": self.ignore_keys_for_eval,
                "start_time": self.start_time,
                "learning_rate": self._learning_rate,
            },
        )
        if trainer.should_stop:  # a Lightning callback asks to stop after the evaluation
            session.control.should_training_stop = True

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Tell that a batch was predicted."""
        self.fire_for_hook("on_validation_batch_end", self._last_segment, batch, outputs)

    on_test_batch_end = on_validation_batch_end

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close progress bars, so that the error stands on a line of its own."""
        for callback in self.hf_session.callback_handler.callbacks:
            close = getattr(callback, "close", None)
            if callable(close) and hasattr(callback, "training_bar"):
                close()
