"""What the launcher's environment says about processes, and which device this one uses. HF words only.

The only place, with `engine/build.py` and `hf/seeding.py`, that reads or writes the process environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


def variable(name: str, default: str | None = None) -> Any:
    """Return a variable of the environment by which users speak to trackers and tools (`WANDB_PROJECT` …)."""
    return os.environ.get(name, default)  # noqa: TID251 - see above


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The place of this process among those that were launched together.

    Args:
        process_index: Rank over all machines.
        local_process_index: Rank on this machine.
        world_size: Processes in all.
    """

    process_index: int = 0
    local_process_index: int = 0
    world_size: int = 1


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read the place of this process from what torchrun and its kin set.

    Args:
        environment: The variables; None reads this process's own.
    """
    variables = os.environ if environment is None else environment  # noqa: TID251 - launchers speak through it
    return Launch(
        process_index=int(variables.get("RANK", "0")),
        local_process_index=int(variables.get("LOCAL_RANK", "0")),
        world_size=int(variables.get("WORLD_SIZE", "1")),
    )


def wants_cpu(environment: Mapping[str, str] | None = None) -> bool:
    """Say whether the launcher asked for the CPU (`accelerate launch --cpu`)."""
    variables = os.environ if environment is None else environment  # noqa: TID251 - launchers speak through it
    return variables.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t")


def choose_device(use_cpu: bool, launch: Launch) -> torch.device:
    """Choose this process's single device: its own CUDA device, Apple's, or the CPU. Several are never joined here."""
    if use_cpu or wants_cpu():
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", launch.local_process_index)
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def slurm_job_id(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the id of this batch job as `scontrol` takes it; None outside of one, and in an interactive shell.

    Args:
        environment: The variables; None reads this process's own.
    """
    variables = os.environ if environment is None else environment  # noqa: TID251 - SLURM speaks through it
    if variables.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    array = variables.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{variables.get('SLURM_ARRAY_TASK_ID', '0')}"
    return variables.get("SLURM_JOB_ID")
