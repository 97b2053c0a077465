"""The log lines at the start of a run, and their handler."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import torch
from tqdm import tqdm

from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.run_counts import RunCounts

_PACKAGE = "hf_compat"


def show_logs(level: int | None) -> None:
    """Set the package's log level, and log to stderr if the program has not set up logging.

    Args:
        level: The level from the arguments. None keeps the program's level, or sets `INFO`, which shows the lines at
            the start of a run.
    """
    logger = logging.getLogger(_PACKAGE)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = _AboveBars(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    if level is not None:
        logger.setLevel(level)
    elif logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


class _AboveBars(logging.StreamHandler[TextIO]):
    """Writes lines above the progress bars and redraws the bars below them."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self.stream):
            super().emit(record)


def opening_lines(
    plan: LightningPlan, schedule: RunCounts, parameters: int, updates_done: int, in_detail: bool
) -> list[str]:
    """Return the line that opens a run, or the lines below those of transformers' Trainer.

    Args:
        plan: The settings of the Lightning trainer.
        schedule: Counts of the run.
        parameters: Number of trainable parameters.
        updates_done: Updates of the checkpoint that the run resumes from.
        in_detail: Whether the lines of transformers' Trainer were logged before. Then only add what they lack.
    """
    if in_detail:
        clip = "no clipping" if plan.gradient_clip_norm is None else f"clipping at {plan.gradient_clip_norm:g}"
        return [
            f"  Training on Lightning: device {plan.device}, precision {plan.precision}, {clip}",
            *_process_lines(plan),
        ]
    resumed = f", from update {updates_done:,} on" if updates_done else ""
    processes = f" in {plan.world_size} processes ({plan.strategy})" if plan.world_size > 1 else ""
    return [
        f"Training on Lightning: {parameters:,} parameters, {schedule.max_updates:,} updates of "
        f"{schedule.total_train_batch_size} samples{resumed}, on {plan.device}{processes}, {plan.precision}",
    ]


def _process_lines(plan: LightningPlan) -> list[str]:
    if plan.world_size == 1:
        return []
    machines = plan.world_size // plan.devices_per_node
    return [f"  {plan.world_size} processes on {machines} machine(s): {plan.strategy}"]


def unused_devices(plan: LightningPlan, schedule: RunCounts) -> str | None:
    """Return a warning if one process trains on one of several GPUs. transformers would use larger updates."""
    count = torch.cuda.device_count() if plan.world_size == 1 and plan.device.startswith("cuda") else 1
    if count == 1:
        return None
    samples = schedule.total_train_batch_size
    return (
        f"Training uses one of {count} GPUs, with {samples} samples an update. transformers would use all in one "
        f"process (DataParallel), with {samples * count}. "
        "`hf-compat run script.py …` or torchrun starts a process on each."
    )
