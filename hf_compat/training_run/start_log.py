"""The log lines at the start of a run, and the package's logger."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import torch
from tqdm import tqdm

from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.translate import LightningPlan, RunCounts
from hf_compat.runtime.console import log_line

logger = logging.getLogger(__name__)


class _AboveBars(logging.StreamHandler[TextIO]):
    """Writes lines above the progress bars and redraws the bars below them."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self.stream):
            super().emit(record)


def show_logs(level: int | None) -> None:
    """Set the package's log level, and log to stderr if the program has not set up logging.

    Without a level, the program's own stays, or `INFO` shows the lines at the start of a run.
    """
    package = logging.getLogger("hf_compat")
    if not package.handlers and not logging.getLogger().handlers:
        handler = _AboveBars(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        package.addHandler(handler)
    if level is not None:
        package.setLevel(level)
    elif package.level == logging.NOTSET:
        package.setLevel(logging.INFO)


def log_start(
    plan: LightningPlan,
    counts: RunCounts,
    args: TrainingArguments,
    parameters: int,
    updates_done: int,
    is_resumed: bool,
) -> None:
    """Log the lines with which transformers' Trainer starts a training, and the settings of Lightning's trainer.

    The arguments' log level decides whether transformers' lines are shown, too.
    """
    in_detail = args.log_level in ("info", "debug")
    accumulation = args.gradient_accumulation_steps
    lines = [
        "***** Running training *****",
        f"  Num examples = {counts.num_examples:,}",
        f"  Num Epochs = {counts.num_train_epochs:,}",
        f"  Num update steps per epoch = {counts.updates_per_epoch:,}",
        f"  Instantaneous batch size per device = {args.per_device_train_batch_size:,}",
        f"  Total train batch size (w. parallel, distributed & accumulation) = {counts.total_train_batch_size:,}",
        f"  Gradient Accumulation steps = {accumulation}",
        f"  Total optimization steps = {counts.max_updates:,}",
        f"  Number of trainable parameters = {parameters:,}",
    ]
    if is_resumed:
        epochs, updates = divmod(updates_done, counts.updates_per_epoch)
        lines.append(f"  Resuming training from checkpoint with epoch {epochs} and global step {updates_done}")
        if not args.ignore_data_skip:
            lines.append(
                f"  Fast-forwarding the dataloader past {epochs} epochs and {updates * accumulation} batches to resume "
                "from the exact training state."
            )
    for line in lines:
        log_line(line, logger if in_detail else None)
    for line in opening_lines(plan, counts, parameters, updates_done, in_detail):
        logger.info(line)
    unused = unused_devices(plan, counts)
    if unused is not None:
        logger.warning("%s", unused)


def opening_lines(
    plan: LightningPlan, schedule: RunCounts, parameters: int, updates_done: int, in_detail: bool
) -> list[str]:
    """Compose the line that opens a run, or the lines that are added to those of transformers' Trainer."""
    if in_detail:
        clip = "no clipping" if plan.gradient_clip_norm is None else f"clipping at {plan.gradient_clip_norm:g}"
        lines = [f"  Training on Lightning: device {plan.device}, precision {plan.precision}, {clip}"]
        if plan.world_size > 1:
            machines = plan.world_size // plan.devices_per_node
            lines.append(f"  {plan.world_size} processes on {machines} machine(s): {plan.strategy}")
        return lines
    resumed = f", from update {updates_done:,} on" if updates_done else ""
    processes = f" in {plan.world_size} processes ({plan.strategy})" if plan.world_size > 1 else ""
    return [
        f"Training on Lightning: {parameters:,} parameters, {schedule.max_updates:,} updates of "
        f"{schedule.total_train_batch_size} samples{resumed}, on {plan.device}{processes}, {plan.precision}",
    ]


def unused_devices(plan: LightningPlan, schedule: RunCounts) -> str | None:
    """Warn if one process trains on one of several GPUs. transformers would use larger updates."""
    count = torch.cuda.device_count() if plan.world_size == 1 and plan.device.startswith("cuda") else 1
    if count == 1:
        return None
    samples = schedule.total_train_batch_size
    return (
        f"Training uses one of {count} GPUs, with {samples} samples an update. transformers would use all in one "
        f"process (DataParallel), with {samples * count}. "
        "`hf-compat run script.py …` or torchrun starts a process on each."
    )
