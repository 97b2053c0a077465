"""The run that all `HFCallbackAdapter`s of one Lightning trainer share.

`AdaptedRun` fills HF's state from Lightning's progress and keeps values between two events. The run logic is shared
with the Trainer (`hf_compat.training_run`).
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sized
from typing import Literal, NamedTuple, TypedDict, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.utils.data import DataLoader

from hf_compat.data.loader import PreparedDataLoader
from hf_compat.engine.evaluation import EvaluationBatches
from hf_compat.engine.internals import run_validation
from hf_compat.engine.module import WindowModule
from hf_compat.engine.windows import Windows
from hf_compat.errors import warn_once
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.hf.metrics import speed_metrics
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.collectives import gather
from hf_compat.runtime.inspection import has_length
from hf_compat.training_run.loss_log import LossLog, LossLogState
from hf_compat.training_run.run import (
    NO_AGREEMENT,
    note_best_checkpoint,
    note_best_metric,
    run_summary,
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
        losses: The loss log. Checkpoints of the first versions hold `loss_sum` and `last_logged` instead.
    """

    state: dict[str, object] | None
    callbacks: dict[str, dict[str, object] | list[dict[str, object]]]
    losses: LossLogState
    loss_sum: float
    last_logged: int


class AdaptedRun:
    """HF arguments, state, control and loss log of a Lightning trainer's run.

    Args:
        args: The arguments that callbacks see.
        has_own_arguments: Whether the user passed them. Default arguments name a metric that may not exist.

    Attributes:
        updates_done: Updates that callbacks have been notified of.
        in_update: Whether an update is running.
        grad_norm: Gradient norm of the last update, if measured.
        learning_rate: Learning rate of the last update.
        flags: Synchronizes the flags between ranks if a callback may set one.
        flags_decide: Whether only flags trigger evaluations. Otherwise Lightning's intervals do.
        evaluation_cause: Trigger of the running evaluation: Lightning's own interval, a flag, or `eval_on_start`.
        is_best: Whether the last evaluation is the best of the run so far.
        evaluation_batches: Batches of the running evaluation so far.
        evaluated: The logged metrics of the last evaluation.
        summary: The logged summary of the run.
    """

    def __init__(self, args: TrainingArguments, has_own_arguments: bool) -> None:
        self.args = args
        self.has_own_arguments = has_own_arguments
        self.state, self.control = TrainerState(), TrainerControl()
        self.losses = LossLog("cpu", 0, args.logging_nan_inf_filter)
        self.updates_done = 0
        self.in_update = False
        self.grad_norm: torch.Tensor | float | None = None
        self.learning_rate: float | None = None
        self.flags_decide = False
        self.evaluation_cause: Literal["interval", "flag", "start"] = "interval"
        self.is_best = False
        self.flags = NO_AGREEMENT
        self.evaluated: dict[str, float] = {}
        self.summary: dict[str, float] = {}
        self._start_time = 0.0
        self._first_update = 0
        self._micro_batches = 0
        self._evaluation_start = 0.0
        self.evaluation_batches = 0

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
        device = trainer.strategy.root_device
        self.losses = LossLog(device, trainer.global_step, self.args.logging_nan_inf_filter)
        self._start_time, self._micro_batches = time.time(), 0
        if self.args.load_best_model_at_end:
            warn_once(
                "HFCallbackAdapter: `load_best_model_at_end=True` has no effect in a Lightning trainer. "
                "Use ModelCheckpoint to keep the best model."
            )

    def ask_for_log(self, trainer: pl.Trainer) -> None:
        """Request a log at Lightning's own interval, unless a callback decides about flags."""
        interval = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if not self.flags_decide and interval and self.state.global_step % interval == 0:
            self.control.should_log = True

    def restore(self, saved: AdapterState) -> None:
        """Restore the state of a checkpoint's run."""
        state = saved["state"]
        if state is None:
            return
        for name in _RESTORED:
            setattr(self.state, name, state[name])
        if state["global_step"] == self.state.global_step:  # Lightning counts whole epochs only
            self.state.epoch = state["epoch"]  # type: ignore[assignment]  # a number
        if "losses" in saved:
            self.losses.load_state_dict(saved["losses"])
        else:
            self.losses.since_last_log.fill_(saved["loss_sum"])
            self.losses.last_logged = saved["last_logged"]

    def add_loss(self, outputs: STEP_OUTPUT) -> None:
        """Add a micro-batch's loss, which Lightning has divided by `accumulate_grad_batches`."""
        self._micro_batches += 1
        loss = loss_of(outputs)
        if loss is not None:
            self.losses.add(loss.detach(), self.updates_done)

    def count_update(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Count an update and set the epoch's progress."""
        batches = trainer.num_training_batches
        self.losses.end_update()
        self.state.global_step = trainer.global_step
        self.state.epoch = trainer.current_epoch + ((batch_idx + 1) / batches if batches != float("inf") else 0.0)

    def note_update(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Record learning rate and gradient norm of the update that is about to be made."""
        if isinstance(module, WindowModule):
            return  # it has clipped already and reports its numbers after the update
        self.learning_rate = float(optimizer.param_groups[0]["lr"])
        if self.flags_decide:
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            self.grad_norm = torch.nn.utils.get_total_norm(gradients)

    def take_measured(self, module: nn.Module) -> None:
        """Record the numbers that a `WindowModule` measured in the last update, such as the norm before clipping."""
        if isinstance(module, WindowModule) and module.measured:
            self.grad_norm = module.measured.get("grad_norm")
            self.learning_rate = float(module.measured["learning_rate"])

    def take_logs(self) -> dict[str, float]:
        """Add a log to the history. It is empty if no update was made since the last one."""
        if self.state.global_step <= self.losses.last_logged:
            return {}
        return self.log(self.losses.take(self.state.global_step, self.grad_norm, self.learning_rate, gather))

    def log(self, logs: dict[str, float]) -> dict[str, float]:
        """Add a log and its epoch to the history."""
        logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        return logs

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

    def begin_evaluation(self) -> None:
        """Start the time of an evaluation."""
        self._evaluation_start, self.evaluation_batches = time.time(), 0

    def evaluation_speeds(self, prefix: str, loaders: object, world_size: int) -> dict[str, float]:
        """Measure the speed of the ending evaluation."""
        samples = _samples(loaders, self.evaluation_batches, world_size)
        return speed_metrics(prefix, self._evaluation_start, samples, self.evaluation_batches)

    def note_evaluation(self, metrics: dict[str, float]) -> None:
        """Compare an evaluation with the best one, and request a checkpoint if `save_strategy="best"` asks for it.

        Raises:
            MissingMetric: The metric that the user's arguments name is not among the metrics.
        """
        if not self.has_own_arguments and "eval_loss" not in metrics:
            self.is_best = False
        else:
            self.is_best = note_best_metric(self.state, self.args, metrics)
        if self.args.save_strategy == SaveStrategy.BEST:
            self.control.should_save = self.is_best

    def checkpoint_path(self, updates: int) -> str:
        """The path of the checkpoint after a number of updates."""
        return os.path.join(str(self.args.output_dir), f"checkpoint-{updates}.ckpt")

    def save(self, trainer: pl.Trainer) -> None:
        """Write `checkpoint-<updates>.ckpt`, and delete old ones beyond `save_total_limit`."""
        path = self.checkpoint_path(self.state.global_step)
        note_best_checkpoint(self.state, self.checkpoint_path, path)
        trainer.save_checkpoint(path)
        kept, now = [path, self.state.best_model_checkpoint], self.state.global_step
        found = {self.checkpoint_path(update): update for update in self._updates_of_checkpoints()}
        # a checkpoint with more updates belongs to an earlier run in this folder
        ordered = in_order_of_rotation(found, now, lambda old: found[old] <= now)
        for old in checkpoints_to_delete(ordered, self.args.save_total_limit, kept):
            remove_or_warn(old, trainer.strategy.remove_checkpoint)

    def rotate_at_end(self, trainer: pl.Trainer) -> None:
        """With a limit of one checkpoint, keep only the best."""
        best = self.state.best_model_checkpoint
        found = [self.checkpoint_path(update) for update in self._updates_of_checkpoints()]
        for old in checkpoints_to_delete_at_end(found, self.args.save_total_limit, best):
            remove_or_warn(old, trainer.strategy.remove_checkpoint)

    def _updates_of_checkpoints(self) -> list[int]:
        folder = str(self.args.output_dir)
        if not os.path.isdir(folder):
            return []
        return sorted(int(match[1]) for match in map(_CHECKPOINT.match, os.listdir(folder)) if match)

    def summarize(self, trainer: pl.Trainer) -> dict[str, float]:
        """Log the summary of the run."""
        updates = self.state.global_step - self._first_update
        samples = _samples(trainer.train_dataloader, self._micro_batches, trainer.world_size)
        train_loss = self.losses.mean(self.state.global_step)
        nonfinite = self.losses.nonfinite_over_processes()
        return self.log(run_summary(self._start_time, samples, updates, self.state.total_flos, train_loss, nonfinite))


def loss_of(outputs: STEP_OUTPUT) -> torch.Tensor | None:
    """The loss in a training step's output, or None."""
    loss = outputs if outputs is None or isinstance(outputs, torch.Tensor) else outputs.get("loss")
    return loss if isinstance(loss, torch.Tensor) else None


# Number of epochs for a run limited by updates or time, the greatest that the arguments accept.
_NO_END = 10**6


def arguments_of(trainer: pl.Trainer) -> TrainingArguments:
    """Make HF arguments that describe a Lightning trainer's settings."""
    epochs = trainer.max_epochs or -1
    by_epoch = trainer.check_val_every_n_epoch is not None
    interval = trainer.val_check_interval
    steps = int(interval) if not by_epoch and isinstance(interval, (int, float)) and interval >= 1 else None
    evaluates = IntervalStrategy.EPOCH if steps is None else IntervalStrategy.STEPS
    return TrainingArguments(
        output_dir=trainer.default_root_dir,
        max_steps=trainer.max_steps,
        num_train_epochs=epochs if epochs > 0 else _NO_END,
        gradient_accumulation_steps=trainer.accumulate_grad_batches,
        logging_steps=max(trainer.log_every_n_steps, 1),  # type: ignore[attr-defined]  # set by a connector
        eval_strategy=evaluates if trainer.enable_validation else IntervalStrategy.NO,
        eval_steps=steps,
        save_strategy="no",
        metric_for_best_model="loss",
        max_grad_norm=trainer.gradient_clip_val or 0.0,
        use_cpu=trainer.strategy.root_device.type == "cpu",
    )


def _samples(loaders: object, batches: int, world_size: int) -> float | None:
    """Count the samples in some batches of loaders. None if the number is unknown.

    The last batch of an epoch may be short, so whole epochs count as the length of their data sets.
    """
    if isinstance(loaders, Windows):  # as in the Trainer's summary
        return loaders.counts.num_train_samples * batches / max(loaders.counts.max_updates, 1)
    parts = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    found = [_Part.of(loader) for loader in (parts if isinstance(parts, (list, tuple)) else [parts])]
    whole = sum(part.batches or 0 for part in found)
    if whole and batches % whole == 0 and all(part.batches and part.samples for part in found):
        return float(batches // whole * sum(part.samples or 0 for part in found))
    sizes = {part.batch_size for part in found}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None:
        return None
    epochs, rest = divmod(batches, whole) if whole and found[0].samples else (0, batches)
    return float(epochs * (found[0].samples or 0) + rest * size * world_size)


class _Part(NamedTuple):
    """A loader's number of batches, number of samples, and batch size. None where unknown."""

    batches: int | None
    samples: int | None
    batch_size: int | None

    @classmethod
    def of(cls, loader: object) -> _Part:
        inner = loader.loader if isinstance(loader, EvaluationBatches) else loader
        if not isinstance(inner, DataLoader):
            return cls(None, None, None)
        samples = len(cast(Sized, inner.dataset)) if has_length(inner.dataset) else None
        size = inner.samples_of_a_batch if isinstance(inner, PreparedDataLoader) else inner.batch_size
        return cls(len(inner) if has_length(inner) else None, samples, size)
