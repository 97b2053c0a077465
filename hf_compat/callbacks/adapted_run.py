"""The run that all `HFCallbackAdapter`s of one Lightning trainer share.

`AdaptedRun` fills HF's state from Lightning's progress and keeps what lies between two events. The run logic itself is
the Trainer's: `hf_compat.training_run`.
"""

from __future__ import annotations

import logging
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
from hf_compat.engine.internals import run_own_validation
from hf_compat.engine.module import WindowModule
from hf_compat.engine.windows import Windows
from hf_compat.errors import warn_once
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.hf.metrics import speed_metrics
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.collectives import gather
from hf_compat.runtime.inspection import has_length
from hf_compat.training_run.best_metric import note_best_checkpoint, note_best_metric
from hf_compat.training_run.flags import NO_AGREEMENT, FlagAgreement, FlagSources
from hf_compat.training_run.loss_log import LossLog, LossLogState
from hf_compat.training_run.rotation import checkpoints_to_delete, checkpoints_to_delete_at_end, in_order_of_rotation
from hf_compat.training_run.run import run_summary

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"^checkpoint-(\d+)\.ckpt$")
# What a resumed run takes over from the saved state; the rest follows from the arguments and Lightning's progress.
_RESTORED = (
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "total_flos",
    "num_input_tokens_seen",
)


class AdapterState(TypedDict, total=False):
    """What an adapter puts into Lightning's checkpoints, in plain values.

    Attributes:
        state: HF's state; None before a run.
        callbacks: States of the callbacks, by class name.
        losses: The loss log. Checkpoints of the first versions have `loss_sum` and `last_logged` in its place.
    """

    state: dict[str, object] | None
    callbacks: dict[str, dict[str, object] | list[dict[str, object]]]
    losses: LossLogState
    loss_sum: float
    last_logged: int


class AdaptedRun:
    """Arguments, state, control and loss log of a Lightning trainer's run, in HF's words.

    Args:
        args: The arguments that callbacks see.
        has_own_arguments: Whether the user gave them; made ones name a metric that nobody has asked for.

    Attributes:
        updates_done: Updates that callbacks were told of.
        in_update: Whether an update has begun and is not yet over.
        grad_norm: Norm of the last update's gradients, where it was measured.
        learning_rate: Learning rate of the last update.
        flags: Makes the flags the same on all processes, where a callback may set one.
        flags_decide: Whether the flags alone say when to evaluate; else Lightning's intervals do.
        evaluation_cause: What the evaluation that is running was asked for by: Lightning's own interval, a flag, or
            `eval_on_start`.
        is_best: Whether the last evaluation of the run is the best so far.
        evaluated: The last evaluation as it was logged.
        summary: The summary of the run as it was logged.
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
        self._evaluation_batches = 0

    def begin(self, trainer: pl.Trainer) -> None:
        """Begin a fit: fill the state from Lightning's progress."""
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
                f"HFCallbackAdapter: `eval_strategy={asked!r}`, and the Lightning trainer "
                "validates nothing: callbacks that follow evaluations, as EarlyStoppingCallback, hear of none."
            )
        device = trainer.strategy.root_device
        self.losses = LossLog(device, trainer.global_step, self.args.logging_nan_inf_filter)
        self._start_time, self._micro_batches = time.time(), 0
        if self.args.load_best_model_at_end:
            warn_once(
                "HFCallbackAdapter: `load_best_model_at_end=True` has no effect in a Lightning trainer; "
                "ModelCheckpoint keeps the best model."
            )

    def agree_on_flags(self, sources: FlagSources) -> None:
        """Let all processes act on the same flags from now on, as the callbacks that may set one make it necessary."""
        self.flags = FlagAgreement(self.args.ddp_timeout, sources)

    def ask_for_log(self, trainer: pl.Trainer) -> None:
        """Ask for a log at Lightning's own interval, where no callback decides about flags."""
        interval = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if not self.flags_decide and interval and self.state.global_step % interval == 0:
            self.control.should_log = True

    def restore(self, saved: AdapterState) -> None:
        """Go on where a checkpoint's run stood."""
        state = saved["state"]
        if state is None:
            return
        for name in _RESTORED:
            setattr(self.state, name, state[name])
        if state["global_step"] == self.state.global_step:  # Lightning counts whole epochs
            self.state.epoch = state["epoch"]  # type: ignore[assignment]  # a number
        if "losses" in saved:
            self.losses.load_state_dict(saved["losses"])
        else:
            self.losses.since_last_log.fill_(saved["loss_sum"])
            self.losses.last_logged = saved["last_logged"]

    def add_loss(self, outputs: STEP_OUTPUT) -> None:
        """Add a micro-batch's loss, which Lightning has divided by the accumulation."""
        self._micro_batches += 1
        loss = loss_of(outputs)
        if loss is not None:
            self.losses.add(loss.detach(), self.updates_done)

    def count_update(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Count an update, and say how far the epoch is."""
        batches = trainer.num_training_batches
        self.losses.end_update()
        self.state.global_step = trainer.global_step
        self.state.epoch = trainer.current_epoch + ((batch_idx + 1) / batches if batches != float("inf") else 0.0)

    def note_update(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Keep the numbers of the update that is about to be made."""
        if isinstance(module, WindowModule):
            return  # it has clipped already, and says after the update what it measured
        self.learning_rate = float(optimizer.param_groups[0]["lr"])
        if self.flags_decide:
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            self.grad_norm = torch.nn.utils.get_total_norm(gradients)

    def take_measured(self, module: nn.Module) -> None:
        """Keep what a module of ours has measured in the update that was made: the norm before it has clipped."""
        measured = getattr(module.observer, "measured", dict) if isinstance(module, WindowModule) else dict
        numbers: dict[str, torch.Tensor | float] = measured()
        if numbers:
            self.grad_norm, self.learning_rate = numbers.get("grad_norm"), float(numbers["learning_rate"])

    def take_logs(self) -> dict[str, float]:
        """Return the entries of a log, which goes into the history; none where no update was made since the last."""
        if self.state.global_step <= self.losses.last_logged:
            return {}
        return self.log(self.losses.take(self.state.global_step, self.grad_norm, self.learning_rate, gather))

    def log(self, logs: dict[str, float]) -> dict[str, float]:
        """Put a log into the history, and return it with its epoch."""
        logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        return logs

    def evaluate(self, trainer: pl.Trainer, cause: Literal["flag", "start"]) -> bool:
        """Run Lightning's own validation loop, and return whether the evaluation is the best of the run so far."""
        self.is_best = False
        self.evaluation_cause = cause
        try:
            if not run_own_validation(trainer):
                warn_once(
                    "HFCallbackAdapter: a callback asks to evaluate, but the Lightning trainer has no validation data."
                )
        finally:
            self.evaluation_cause = "interval"
        self.control.should_evaluate = False
        return self.is_best

    def begin_evaluation(self) -> None:
        """Begin to measure an evaluation."""
        self._evaluation_start, self._evaluation_batches = time.time(), 0

    def count_evaluation_batch(self) -> None:
        """Count a batch of the evaluation that is running."""
        self._evaluation_batches += 1

    def evaluation_speeds(self, prefix: str, loaders: object, world_size: int) -> dict[str, float]:
        """Return the speeds of the evaluation that is ending."""
        samples = _samples(loaders, self._evaluation_batches, world_size)
        return speed_metrics(prefix, self._evaluation_start, samples, self._evaluation_batches)

    def note_evaluation(self, metrics: dict[str, float]) -> None:
        """Compare an evaluation with the best one, and ask for a checkpoint where the strategy is to save the best.

        Raises:
            MissingMetric: The tracked metric, which the user's arguments name, is not among the metrics.
        """
        if not self.has_own_arguments and "eval_loss" not in metrics:
            self.is_best = False
        else:
            self.is_best = note_best_metric(self.state, self.args, metrics)
        if self.args.save_strategy == SaveStrategy.BEST:
            self.control.should_save = self.is_best

    def checkpoint_path(self, updates: int) -> str:
        """Return the path of the checkpoint that is written after so many updates."""
        return os.path.join(str(self.args.output_dir), f"checkpoint-{updates}.ckpt")

    def save(self, trainer: pl.Trainer) -> None:
        """Write `checkpoint-<updates>.ckpt`, and keep as many as the arguments allow."""
        path = self.checkpoint_path(self.state.global_step)
        note_best_checkpoint(self.state, self.checkpoint_path, path)
        trainer.save_checkpoint(path)
        kept, now = [path, self.state.best_model_checkpoint], self.state.global_step
        found = {self.checkpoint_path(update): update for update in self._updates_of_checkpoints()}
        # what lies beyond the update did not lead to it: an earlier run left it in the folder
        ordered = in_order_of_rotation(found, now, lambda old: found[old] <= now)
        for old in checkpoints_to_delete(ordered, self.args.save_total_limit, kept):
            _remove(trainer, old)

    def rotate_at_end(self, trainer: pl.Trainer) -> None:
        """With a limit of one checkpoint, keep the best alone."""
        best = self.state.best_model_checkpoint
        found = [self.checkpoint_path(update) for update in self._updates_of_checkpoints()]
        for old in checkpoints_to_delete_at_end(found, self.args.save_total_limit, best):
            _remove(trainer, old)

    def _updates_of_checkpoints(self) -> list[int]:
        folder = str(self.args.output_dir)
        if not os.path.isdir(folder):
            return []
        return sorted(int(match[1]) for match in map(_CHECKPOINT.match, os.listdir(folder)) if match)

    def summarize(self, trainer: pl.Trainer) -> dict[str, float]:
        """Log the summary of the run, and return it."""
        updates = self.state.global_step - self._first_update
        samples = _samples(trainer.train_dataloader, self._micro_batches, trainer.world_size)
        train_loss = self.losses.mean(self.state.global_step)
        nonfinite = self.losses.nonfinite_over_processes()
        return self.log(run_summary(self._start_time, samples, updates, self.state.total_flos, train_loss, nonfinite))


def _remove(trainer: pl.Trainer, checkpoint: str) -> None:
    """Remove a checkpoint; one that cannot be removed is no reason to end a training that saves."""
    try:
        trainer.strategy.remove_checkpoint(checkpoint)
    except OSError as error:
        logger.warning("The old checkpoint %s could not be removed: %s. Training goes on.", checkpoint, error)


def loss_of(outputs: STEP_OUTPUT) -> torch.Tensor | None:
    """Return the loss among what a training step gave."""
    loss = outputs if outputs is None or isinstance(outputs, torch.Tensor) else outputs.get("loss")
    return loss if isinstance(loss, torch.Tensor) else None


# Epochs of a run that updates or a time limit end: as many as arguments take.
_NO_END = 10**6


def arguments_of(trainer: pl.Trainer) -> TrainingArguments:
    """Make HF arguments that say what a Lightning trainer does."""
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
    """Return how many samples some batches of loaders hold; None where that is not known.

    The last batch of an epoch may be a short one: whole epochs count as the data sets' length.
    """
    if isinstance(loaders, Windows):  # as the Trainer's summary has it
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
    """A loader's batches, samples and samples of a batch, each None where it does not say."""

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
