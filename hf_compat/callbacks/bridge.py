"""HF's events at Lightning's hooks. `HFBridge` is the Lightning callback that fires them and obeys the flags.

`EVENTS` in `hf/callbacks.py` has a row for each event. `WindowModule` fires those within an update that have no hook.
After an update and after an epoch, the bridge logs, evaluates and saves according to the flags.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch.utils.data import IterableDataset
from torch.utils.hooks import RemovableHandle

from hf_compat.callbacks.trackers import TensorBoardCallback
from hf_compat.checkpoint.run_state import SavedAt
from hf_compat.data.types import Batch
from hf_compat.engine.module import WindowModule
from hf_compat.engine.windows import GradNorm, UpdateObserver, Window
from hf_compat.errors import DataError
from hf_compat.hf.callbacks import EVENTS, Callback, CallbackHandler
from hf_compat.runtime.inspection import calling_like_upstream
from hf_compat.runtime.nested import nested_detach
from hf_compat.runtime.signals import requeue
from hf_compat.training_run.flags import Controlled
from hf_compat.training_run.interface import TrainerApi
from hf_compat.training_run.run import TrainingRun
from hf_compat.training_run.saver import Saver

logger = logging.getLogger(__name__)

# Parameters of upstream's `_maybe_log_save_evaluate`, which it passes by position except for the last.
LOG_SAVE_EVALUATE_PARAMETERS = (
    "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time", "learning_rate",
)  # fmt: skip

# Lightning hook → the HF event that it fires.
PAIRS = {hook: event.name for event in EVENTS.values() for hook in event.hooks}

Given = Any  # a hook's batch, outputs or index

Kind = TypeVar("Kind", bound=type[pl.Callback])


def fires_at_hooks(kind: Kind) -> Kind:
    """Add the hooks in `PAIRS` that a class lacks. Each calls the class's `at_hook` with its event first."""
    at_hook = kind.at_hook  # type: ignore[attr-defined]  # each of the decorated classes has it
    for hook in PAIRS.keys() - vars(kind).keys():
        setattr(kind, hook, functools.partialmethod(at_hook, PAIRS[hook]))
    return kind


class RunObserver(UpdateObserver):
    """What every run does within its updates: sum the losses, and end an update early if a flag asks for it."""

    host: Controlled
    run: TrainingRun
    requested: set[str]  # losses, inputs or outputs, of which a callback asks for one

    def micro_batch_done(self, loss: torch.Tensor, inputs: Batch) -> None:
        """Add a micro-batch's loss."""
        host, losses = self.host, self.run.losses
        losses.filter_nonfinite = host.args.logging_nan_inf_filter  # a callback may change it
        losses.add(loss, host.state.global_step)
        if self.requested:
            host.callback_handler.requestable_kwargs.update(loss=loss, inputs=inputs)

    def agree_to_stop(self) -> bool:
        """Whether a flag asks to leave the window."""
        control = self.host.control
        if self.run.flag_agreement.sources.in_windows:
            self.run.flag_agreement.agree(control)
        return control.should_epoch_stop or control.should_training_stop


@fires_at_hooks
class HFEvents(pl.Callback):
    """One segment of the HF callbacks. Lightning callbacks divide them into segments, and the first has the index 0."""

    def __init__(self, bridge: HFBridge, segment: int) -> None:
        self.bridge = bridge
        self.segment = segment

    def at_hook(self, event: str, *of_hook: Given) -> None:
        """Fire a hook's event for this segment. The first segment also prepares it."""
        if self.segment == 0:
            self.bridge.prepare(event, *of_hook)
        if event != "on_step_end" or of_hook[3].is_trained:  # trainer, module, outputs, window, index
            self.bridge.fire(event, self.segment)


def segment_of(order: list[pl.Callback | Callback], callback: Callback) -> int:
    """Count the Lightning callbacks before an HF callback. One that was added to the handler directly comes last."""
    segment = 0
    for entry in order:
        if entry is callback:
            break
        segment += isinstance(entry, pl.Callback)
    return segment


class HFBridge(HFEvents, RunObserver):
    """Fire the HF events of a run and obey the flags that its callbacks set.

    Args:
        host: The owner of the events.
        run: The running training. For an evaluation outside of a fit, the last one.
        saver: The writer of the run's checkpoints.

    Attributes:
        arranged: The Trainer's Lightning callbacks, with HF's events between them, and this bridge last.
    """

    host: TrainerApi

    def __init__(self, host: TrainerApi, run: TrainingRun, saver: Saver) -> None:
        own = host._callbacks
        super().__init__(self, len(own.lightning))  # the last segment
        self.host, self.run, self.saver = host, run, saver
        self.arranged: list[pl.Callback] = []
        self.epoch = run.start.epoch - 1
        # With several ranks, one rank's error is raised on all at the next save or at the end
        self._writer = saver.background if host.args.world_size == 1 else None
        self._last_saved = -1
        self.requested = set()
        self._outputs_hook: RemovableHandle | None = None
        self._order = own.order if own.lightning else None
        for segment, callback in enumerate(own.lightning):
            self.arranged += (HFEvents(self, segment), callback)
        self.arranged.append(self)

    def fire(self, event: str, segment: int | None = None, /, **values: object) -> None:
        """Fire an event for all HF callbacks, or for one segment of them. A callback may replace the control.

        The values are those that the event's row offers.
        """
        host, handler = self.host, self.host.callback_handler
        call, outer = getattr(handler, event), handler.active_ids
        if segment is not None and self._order is not None:
            handler.active_ids = {id(one) for one in handler.callbacks if segment_of(self._order, one) == segment}
            if segment:  # the handler's own method clears flags, which must happen only once
                call = functools.partial(handler.call_event, event)
        try:
            host.control = call(host.args, host.state, host.control, **values)
        finally:
            handler.active_ids = outer

    def prepare(self, event: str, trainer: pl.Trainer, pl_module: pl.LightningModule, *given: Given) -> None:
        """Do what comes before a hook's event, before the first callback of either kind hears of it.

        Raises:
            DataError: A stream gave no samples, so nothing was trained.
        """
        host, run = self.host, self.run
        if event == "on_epoch_begin":
            self.epoch += 1
            is_first = self.epoch == run.start.epoch
            run.grad_norm = run.learning_rate = None
            position, resumed = run.start.position, run.resumed
            if is_first and resumed is not None and position is not None and position.is_open:
                # the final log of a resumed epoch may need those of the last update
                run.grad_norm, run.learning_rate = resumed.grad_norm, resumed.learning_rate
            if is_first and run.start.epoch_is_over:
                # A restored control has the flags of the update that saved it. They were obeyed, and no
                # `on_step_begin` of this epoch clears them.
                control = host.control
                control.should_log = control.should_evaluate = control.should_save = False
            self.keep_requested_kwargs()
        elif event == "on_step_begin":
            run.moment = SavedAt.UPDATE
            window = given[0]
            host.accelerator.sync_gradients = window.is_complete and len(window.micro_batches) == 1
        elif event == "on_epoch_end":
            # the control has this flag, too, and an HF callback of this event may clear it
            trainer.should_stop = False
            if run.windows is None or run.windows.saw_data:
                return
            dataset, updates = getattr(run.loader, "dataset", None), host.state.global_step
            if updates == 0 and isinstance(dataset, IterableDataset):
                raise DataError(
                    f"`train_dataset` ({type(dataset).__name__}) gave no samples, so nothing was "
                    "trained.\n\nHint: `next(iter(train_dataset))` has to give one; a generator that was read before "
                    "gives no more."
                )
            text = "The training data had no samples in epoch %d. Training stops at update %d of %d."
            logger.warning(text, self.epoch, updates, host.state.max_steps)
            host.control.should_training_stop = True
        elif event == "on_prediction_step" and self.requested:
            outputs, batch = given[:2]
            inputs = getattr(batch, "inputs", batch)
            host.callback_handler.requestable_kwargs.update(loss=outputs, inputs=inputs)

    def keep_requested_kwargs(self, keeps: bool = True) -> None:
        """Keep only the losses, inputs or outputs that callbacks ask for, because this costs memory. False keeps none.

        A hook on the model keeps the outputs.
        """
        handler = self.host.callback_handler
        self.requested = handler.requested_kwargs() - {"trainer"} if keeps else set()
        wanted = "outputs" in self.requested
        if wanted and self._outputs_hook is None:
            self._outputs_hook = self.host.model_wrapped.register_forward_hook(
                lambda module, args, outputs: handler.requestable_kwargs.update(outputs=nested_detach(outputs))
            )
        elif not wanted and self._outputs_hook is not None:
            self._outputs_hook.remove()
            self._outputs_hook = None
        if not wanted:
            handler.requestable_kwargs.update(outputs=None)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        host, run = self.host, self.run
        self.keep_requested_kwargs()
        super().on_train_start(trainer, pl_module)
        host._refuse_late_overrides()  # a callback may have replaced a method
        if host.args.eval_on_start:
            host._evaluate(run.trial, run.ignore_keys_for_eval, skip_scheduler=True)
        if run.start.is_finished or run.stops_at_start:
            trainer.should_stop = True
        elif host.state.global_step >= max(host.state.max_steps, 1):  # resumed at its epoch's last update
            host.control.should_training_stop = True

    def micro_batch_done(self, loss: torch.Tensor, inputs: Batch) -> None:
        """Add a micro-batch's loss, floating-point operations and tokens."""
        super().micro_batch_done(loss, inputs)
        host = self.host
        host.current_flos += float(host.floating_point_ops(inputs))
        host._track_num_input_tokens(inputs)

    def update_made(self, window: Window, learning_rate: float, grad_norm: GradNorm) -> None:
        """Count an update, before Lightning's callbacks hear of its end."""
        state = self.host.state
        state.global_step += 1
        state.epoch = self.epoch + window.epoch_progress
        self.run.grad_norm, self.run.learning_rate = grad_norm, learning_rate

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Given, batch: Window, batch_idx: int
    ) -> None:
        """End an update, then log, evaluate and save according to the flags."""
        control = self.host.control
        if self._writer is not None:
            if self._writer.under_way is not None:
                self._writer.wait(only_if_ended=True)
            if self.saver.has_lost_folder:
                self.saver.check_folder()
        if trainer.should_stop:  # set by a Lightning callback
            control.should_training_stop = True
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if batch.is_trained:
            self.run.losses.end_update()
            self._act_on_flags(trainer, self.run.flag_agreement.sources.in_updates)
            if self.host.stop_signals.are_watched and self.host.stop_signals.agree():
                self._obey_signals()
        if not self.agree_to_stop():
            return
        control, windows = self.host.control, self.run.windows  # a callback may have replaced the control
        trainer.should_stop = control.should_training_stop
        if windows is not None:  # start no further window
            if batch.is_complete and not batch.is_trained and not control.should_epoch_stop:
                windows.rewind(batch)  # a resumed run makes this update
            windows.leave_epoch(is_over=control.should_epoch_stop)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End an epoch, then log, evaluate and save according to the flags."""
        host, run = self.host, self.run
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.should_stop:  # set by a Lightning callback for the end of this epoch
            host.control.should_training_stop = True
        run.moment = SavedAt.EPOCH_END
        if isinstance(pl_module, WindowModule):
            pl_module.end_epoch()
        self._act_on_flags(trainer, run.flag_agreement.sources.in_epochs)
        trainer.should_stop = host.control.should_training_stop

    def _obey_signals(self) -> None:
        """Write a checkpoint and stop, as a signal has asked to."""
        host = self.host
        signals = host.stop_signals
        if self._last_saved != host.state.global_step:
            host._save_checkpoint(host.model, self.run.trial)
            self.fire("on_save")
            self.saver.end_of_event()
        if self._writer is not None:
            self._writer.wait()
        self.saver.mirror.settle_now()
        if signals.asks_for_requeue and host.state.is_world_process_zero:
            requeue(str(host.args.output_dir))
        signals.obey()
        host.control.should_training_stop = True  # after a user-defined handler has returned

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Obey a signal that arrived after the last update."""
        if self.host.stop_signals.are_watched and self.host.stop_signals.agree():
            self._obey_signals()

    def _act_on_flags(self, trainer: pl.Trainer, may_differ: bool) -> None:
        """Log, evaluate and save according to the flags. Ranks with different flags agree first."""
        host, run = self.host, self.run
        if may_differ:
            run.flag_agreement.agree(host.control)
        if host.control.should_save:
            self._last_saved = host.state.global_step
        act = calling_like_upstream(host._maybe_log_save_evaluate, LOG_SAVE_EVALUATE_PARAMETERS, last_by_keyword=1)
        act(
            run.losses.since_last_log,
            run.grad_norm,
            host.model,
            run.trial,
            self.epoch,
            run.ignore_keys_for_eval,
            run.start_time,
            learning_rate=run.learning_rate,
        )
        if trainer.should_stop:  # set by a Lightning callback after the evaluation
            host.control.should_training_stop = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close progress bars, so that the error message starts on its own line."""
        close_bars(self.host.callback_handler)


def close_bars(handler: CallbackHandler) -> None:
    """Close the progress bars and the trackers' files after an error."""
    for callback in handler.callbacks:
        close = getattr(callback, "close", None)
        if callable(close) and (hasattr(callback, "training_bar") or isinstance(callback, TensorBoardCallback)):
            close()
