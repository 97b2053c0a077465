"""The run that all `HFCallbackAdapter`s of one Lightning trainer share.

`AdaptedRun` fires HF's events at Lightning's hooks (`PAIRS` in `bridge.py`) and fills HF's state from Lightning's
progress. After an update and after an epoch it logs, evaluates and saves according to the flags, with the Trainer's
code (`hf_compat.training_run`).
"""

from __future__ import annotations

import copy
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Literal, TypedDict

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.utils.data import DataLoader

from hf_compat.callbacks.bridge import Given, fires_at_hooks
from hf_compat.checkpoint.reading import fitting
from hf_compat.data.loader import PreparedDataLoader
from hf_compat.engine.evaluation import EvaluationBatches
from hf_compat.engine.internals import (
    end_epoch_after_this_batch,
    metrics_of_running_loop,
    run_validation,
    switch_off_own_validation,
)
from hf_compat.engine.module import WindowModule
from hf_compat.engine.windows import Windows
from hf_compat.errors import warn_once
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.callbacks import Callback, CallbackHandler, DefaultFlowCallback, is_callback_of
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.hf.metrics import speed_metrics
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.collectives import gather
from hf_compat.runtime.inspection import length_of
from hf_compat.training_run.loss_log import LossLog, LossLogState
from hf_compat.training_run.run import (
    NO_AGREEMENT,
    due_actions,
    note_best_checkpoint,
    note_best_metric,
    run_summary,
    save_if_best,
)
from hf_compat.training_run.saver import (
    checkpoints_to_delete,
    checkpoints_to_delete_at_end,
    in_order_of_rotation,
    remove_or_warn,
)

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
    """An adapter's entry in Lightning's checkpoints, in plain values.

    Attributes:
        state: HF's state, or None before a run.
        callbacks: States of the callbacks, by class name.
        losses: The loss log.
    """

    state: dict[str, object] | None
    callbacks: dict[str, dict[str, object] | list[dict[str, object]]]
    losses: LossLogState


# Prefixes of validation metrics in Lightning modules. HF's prefix is `eval_`.
_VALIDATION_PREFIXES = ("validation_", "validation/", "valid_", "valid/", "val_", "val/", "eval/")


def hf_metric_name(name: str, prefix: str = "eval") -> str:
    """Convert a metric name of a Lightning module to HF's. `val_loss`, `val/loss` and `loss` become `eval_loss`."""
    for known in (f"{prefix}_", *(_VALIDATION_PREFIXES if prefix == "eval" else (f"{prefix}/",))):
        if name.startswith(known):
            return f"{prefix}_{name.removeprefix(known)}"
    return f"{prefix}_{name}"


@fires_at_hooks
class AdaptedRun(pl.Callback):
    """HF arguments, state, control and loss log of a Lightning trainer's run, and the events at its hooks.

    Args:
        args: The arguments that callbacks see.
        has_own_arguments: Whether the user passed them. Default arguments name a metric that may not exist.
        processing_class: Passed to callbacks.

    Attributes:
        handler: Calls the HF callbacks of all adapters.
        updates_done: Updates that callbacks have been notified of.
        grad_norm: Gradient norm of the last update, if measured.
        flag_agreement: Synchronizes the flags between ranks if a callback may set one.
        flags_decide: Whether only flags trigger evaluations. Otherwise Lightning's intervals do.
        evaluation_cause: Trigger of the running evaluation: Lightning's own interval, a flag, or `eval_on_start`.
        is_best: Whether the last evaluation is the best of the run so far.
    """

    def __init__(self, args: TrainingArguments, has_own_arguments: bool, processing_class: object = None) -> None:
        self.args = args
        self.has_own_arguments = has_own_arguments
        self.handler = CallbackHandler([], None, processing_class, None, None)
        self.state, self.control = TrainerState(), TrainerControl()
        self.losses = LossLog("cpu", 0, args.logging_nan_inf_filter)
        self.updates_done = self.evaluation_batches = 0
        self.in_update = self.flags_decide = self.is_best = False
        self.grad_norm: torch.Tensor | float | None = None
        self.learning_rate: float | None = None
        self.evaluation_cause: Literal["interval", "flag", "start"] = "interval"
        self.flag_agreement = NO_AGREEMENT
        self._start_time = self._evaluation_start = 0.0
        self._first_update = self._micro_batches = 0

    def take_callbacks(self, callbacks: list[Callback]) -> None:
        """Call these HF callbacks from now on."""
        self.handler.callbacks = callbacks
        self.flags_decide = any(is_callback_of(callback, DefaultFlowCallback) for callback in callbacks)

    def begin(self, trainer: pl.Trainer) -> None:
        """Start a fit, and fill the state from Lightning's progress."""
        updates = trainer.estimated_stepping_batches
        state = self.state = TrainerState()
        state.max_steps = int(updates) if updates != float("inf") and updates > 0 else sys.maxsize
        state.num_train_epochs = max(trainer.max_epochs or -1, 0) or sys.maxsize
        state.compute_steps(self.args, state.max_steps)
        state.global_step = self._first_update = self.updates_done = trainer.global_step
        state.epoch = float(trainer.current_epoch)
        state.is_world_process_zero = trainer.is_global_zero
        state.is_local_process_zero = trainer.local_rank == 0
        state.train_batch_size = self.args.per_device_train_batch_size
        if self.args.eval_strategy != IntervalStrategy.NO and not trainer.enable_validation:
            asked = IntervalStrategy(self.args.eval_strategy).value
            warn_once(
                f"HFCallbackAdapter: `eval_strategy={asked!r}`, but the Lightning trainer does not validate. "
                "Callbacks that follow evaluations, like EarlyStoppingCallback, are never called."
            )
        if self.args.load_best_model_at_end:
            warn_once(
                "HFCallbackAdapter: `load_best_model_at_end=True` has no effect in a Lightning trainer. "
                "Use ModelCheckpoint to keep the best model."
            )
        self.losses = LossLog(trainer.strategy.root_device, trainer.global_step, self.args.logging_nan_inf_filter)
        self._start_time, self._micro_batches = time.time(), 0

    def restore(self, saved: AdapterState) -> None:
        """Restore the state of a checkpoint's run."""
        state = saved["state"]
        if state is None:
            return
        for name in _RESTORED:
            setattr(self.state, name, state[name])
        if state["global_step"] == self.state.global_step:  # Lightning counts whole epochs only
            self.state.epoch = state["epoch"]  # type: ignore[assignment]  # a number
        with fitting("The adapter's state"):
            self.losses.load_state_dict(saved["losses"])

    def fire(self, event: str, *of_hook: Given, **extra: object) -> None:
        """Fire an event. A callback may replace the control."""
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, **extra)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the training. `begin` and `restore` have made the state."""
        if self.flags_decide:
            switch_off_own_validation(trainer)
        # the fit's optimizer, schedule and loader, for the callbacks
        optimizers, schedules, handler = trainer.optimizers, trainer.lr_scheduler_configs, self.handler
        handler.optimizer = optimizers[0] if optimizers else None
        handler.lr_scheduler = schedules[0].scheduler if schedules else None
        handler.train_dataloader = trainer.train_dataloader
        self.fire("on_init_end")
        self.fire("on_train_begin")
        if self.args.eval_on_start:
            self.evaluate(trainer, "start")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start an epoch."""
        self.in_update = False
        self.fire("on_epoch_begin")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Given, batch_idx: int
    ) -> None:
        """Start an update at its first micro-batch."""
        if not self.in_update:
            self.fire("on_step_begin")
        self.in_update = True

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record learning rate and gradient norm of the update that is about to be made."""
        if not isinstance(pl_module, WindowModule):  # it has clipped already, and reports its numbers after the update
            self.learning_rate = float(optimizer.param_groups[0]["lr"])
            if self.flags_decide:
                gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
                self.grad_norm = torch.nn.utils.get_total_norm(gradients)
        self.fire("on_pre_optimizer_step")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Given, batch_idx: int
    ) -> None:
        """End a micro-batch, and the update if Lightning has made one."""
        loss = outputs if outputs is None or isinstance(outputs, torch.Tensor) else outputs.get("loss")
        loss = loss if isinstance(loss, torch.Tensor) else None
        self._micro_batches += 1
        if loss is not None:  # Lightning has divided it by `accumulate_grad_batches`
            self.losses.add(loss.detach(), self.updates_done)
        self.handler.requestable_kwargs.update(loss=loss, inputs=batch, outputs=outputs)
        if trainer.global_step > self.updates_done:
            self._end_update(trainer, pl_module, batch_idx)
        elif pl_module.automatic_optimization:
            self.fire("on_substep_end")
        self._obey(trainer)

    def _end_update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch_idx: int) -> None:
        state, batches = self.state, trainer.num_training_batches
        state.global_step = self.updates_done  # HF counts the update after this event
        self.fire("on_optimizer_step")
        self.losses.end_update()
        state.global_step = trainer.global_step
        state.epoch = trainer.current_epoch + ((batch_idx + 1) / batches if batches != float("inf") else 0.0)
        if isinstance(pl_module, WindowModule) and pl_module.measured:  # such as the norm before clipping
            self.grad_norm = pl_module.measured.get("grad_norm")
            self.learning_rate = float(pl_module.measured["learning_rate"])
        self.fire("on_step_end")
        self.updates_done, self.in_update = trainer.global_step, False
        interval = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if not self.flags_decide and interval and state.global_step % interval == 0:
            self.control.should_log = True
        self._act_on_flags(trainer, self.flag_agreement.sources.in_updates)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End an epoch, then log, evaluate and save according to the flags."""
        if self.flags_decide:
            trainer.should_stop = False  # the control has this flag, too, and a callback of this event may clear it
        self.fire("on_epoch_end")
        self._act_on_flags(trainer, self.flag_agreement.sources.in_epochs)
        self._obey(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the summary of the run, and end it. With a limit of one checkpoint, only the best stays."""
        updates = self.state.global_step - self._first_update
        samples = _samples(trainer.train_dataloader, self._micro_batches, trainer.world_size)
        train_loss, flos = self.losses.mean(self.state.global_step), self.state.total_flos
        nonfinite = self.losses.nonfinite_updates
        self._log(run_summary(self._start_time, samples, updates, flos, train_loss, nonfinite))
        best, found = self.state.best_model_checkpoint, list(self._checkpoints())
        for old in checkpoints_to_delete_at_end(found, self.args.save_total_limit, best):
            remove_or_warn(old, trainer.strategy.remove_checkpoint)
        self.fire("on_train_end")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the time of an evaluation."""
        self._evaluation_start, self.evaluation_batches = time.time(), 0

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
        """End a batch of an evaluation."""
        if trainer.sanity_checking:
            return
        self.evaluation_batches += 1
        self.handler.eval_dataloader = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        self.handler.requestable_kwargs.update(loss=None, inputs=batch, outputs=outputs)
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
        self.is_best = is_tracked and note_best_metric(self.state, self.args, evaluated)
        if self.args.save_strategy == SaveStrategy.BEST:
            self.control.should_save = self.is_best
        self.flag_agreement.agree(self.control)  # metrics may differ between ranks, and so may early stopping
        if self.evaluation_cause == "interval" and self.control.should_save:
            self._save(trainer)
        self._obey(trainer)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End a prediction."""
        self.fire("on_predict", metrics=self._metrics(trainer, "test"))

    def _metrics(self, trainer: pl.Trainer, prefix: str) -> dict[str, float]:
        logged, module = metrics_of_running_loop(trainer), trainer.lightning_module
        if isinstance(module, WindowModule) and not module.logs_to_lightning:  # of our Trainer, which logs itself
            logged |= module.evaluated_numbers()
        loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        samples = _samples(loaders, self.evaluation_batches, trainer.world_size)
        speeds = speed_metrics(prefix, self._evaluation_start, samples, self.evaluation_batches)
        return {hf_metric_name(name, prefix): value for name, value in logged.items()} | speeds

    def _log(self, logs: dict[str, float]) -> dict[str, float]:
        """Add a log and its epoch to the history."""
        logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)
        return logs

    def _act_on_flags(self, trainer: pl.Trainer, may_differ: bool) -> None:
        """Log, evaluate and save according to the flags. Ranks with different flags agree first."""
        if may_differ:
            self.flag_agreement.agree(self.control)
        for action in due_actions(self, self.flag_agreement):
            if action == "log":
                self.control.should_log = False
                update = self.state.global_step
                if update > self.losses.last_logged:  # an update was made since the last log
                    self._log(self.losses.take(update, self.grad_norm, self.learning_rate, gather))
            elif action == "evaluate":
                save_if_best(self, self.evaluate(trainer, "flag"))
            else:
                self._save(trainer)

    def evaluate(self, trainer: pl.Trainer, cause: Literal["flag", "start"]) -> bool:
        """Run Lightning's own validation loop. The result says whether the evaluation is the best of the run so far."""
        self.is_best = False
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
        return self.is_best

    def _save(self, trainer: pl.Trainer) -> None:
        """Write `checkpoint-<updates>.ckpt`, and delete old ones beyond `save_total_limit`."""
        now = self.state.global_step
        path = self._checkpoint_path(now)
        note_best_checkpoint(self.state, self._checkpoint_path, path)
        trainer.save_checkpoint(path)
        kept, found = [path, self.state.best_model_checkpoint], self._checkpoints()
        # a checkpoint with more updates belongs to an earlier run in this folder
        ordered = in_order_of_rotation(found, now, lambda old: found[old] <= now)
        for old in checkpoints_to_delete(ordered, self.args.save_total_limit, kept):
            remove_or_warn(old, trainer.strategy.remove_checkpoint)
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
    epochs = trainer.max_epochs or -1
    by_epoch = trainer.check_val_every_n_epoch is not None
    interval = trainer.val_check_interval
    steps = int(interval) if not by_epoch and isinstance(interval, (int, float)) and interval >= 1 else None
    evaluates = IntervalStrategy.EPOCH if steps is None else IntervalStrategy.STEPS
    settings: dict[str, object] = {
        "output_dir": trainer.default_root_dir,
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
            trainer.default_root_dir,
            gradient_accumulation_steps=trainer.accumulate_grad_batches,
            metric_for_best_model="loss",
            max_grad_norm=trainer.gradient_clip_val or 0.0,
            use_cpu=trainer.strategy.root_device.type == "cpu",
        )
    for name, value in settings.items():
        setattr(args, name, value)
    return args


def _samples(loaders: object, batches: int, world_size: int) -> float | None:
    """Count the samples in some batches of loaders. None if the number is unknown.

    The last batch of an epoch may be short, so whole epochs count as the length of their data sets.
    """
    if isinstance(loaders, Windows):  # as in the Trainer's summary
        return loaders.counts.num_train_samples * batches / max(loaders.counts.max_updates, 1)
    parts = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    whole = samples = 0  # of one epoch
    sizes: set[int | None] = set()
    is_known = True
    for loader in parts if isinstance(parts, (list, tuple)) else [parts]:
        inner = loader.loader if isinstance(loader, EvaluationBatches) else loader
        if not isinstance(inner, DataLoader):
            return None
        of_loader, in_set = length_of(inner) or 0, length_of(inner.dataset) or 0
        whole, samples, is_known = whole + of_loader, samples + in_set, is_known and of_loader > 0 and in_set > 0
        sizes.add(inner.samples_of_a_batch if isinstance(inner, PreparedDataLoader) else inner.batch_size)
    epochs, rest = divmod(batches, whole) if whole and is_known else (0, batches)
    size = sizes.pop() if len(sizes) == 1 else None
    is_whole = whole > 0 and is_known and not rest
    if size is None and not is_whole:
        return None
    return float(epochs * samples + rest * (size or 0) * world_size)
