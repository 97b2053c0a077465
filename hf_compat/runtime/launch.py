"""What the launcher's environment says about processes, and which device this one uses.

Only this file and `runtime/seeding.py` read or write the process environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import overload

import torch

from hf_compat.errors import ArgumentError
from hf_compat.runtime.text import parse_switch


@overload
def variable(name: str) -> str | None: ...
@overload
def variable(name: str, default: str) -> str: ...
def variable(name: str, default: str | None = None) -> str | None:
    """Return a variable of the environment that trackers and tools are set by (`WANDB_PROJECT` …)."""
    return os.environ.get(name, default)  # noqa: TID251 - see above


_OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def launcher_variables() -> Mapping[str, str]:
    """Return the variables that `accelerate launch` sets for strategies and precision."""
    return {k: v for k, v in os.environ.items() if k.startswith(_OF_LAUNCHERS)}  # noqa: TID251 - see above


def set_for_children(name: str, value: str) -> None:
    """Set a variable of the environment, for this process and the Pythons that it starts."""
    os.environ[name] = value  # noqa: TID251 - see above


def environment_with(values: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for one that it starts, with further variables where it has them not."""
    return {**values, **os.environ}  # noqa: TID251 - see above


def let_children_import_from(folder: str) -> None:
    """Put a folder first among those where the Pythons that this process starts look for modules."""
    said = os.environ.get("PYTHONPATH", "")  # noqa: TID251 - see above
    before = said.split(os.pathsep) if said else []  # an empty part is the working directory
    if folder not in before:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *before])  # noqa: TID251 - see above


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Which process this is among those that were launched together.

    Args:
        process_index: Rank over all machines.
        local_process_index: Rank on this machine.
        world_size: Processes in all.
        local_world_size: Processes on this machine.
    """

    process_index: int = 0
    local_process_index: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def node_rank(self) -> int:
        """Which machine this is."""
        return self.process_index // self.local_world_size

    @property
    def nodes(self) -> int:
        """Machines."""
        return max(self.world_size // self.local_world_size, 1)


# By launcher: rank, rank on this machine, processes, processes on this machine.
_VARIABLES = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun, accelerate, deepspeed
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),  # srun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),  # Intel MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
)


# What `explain` is asked about: processes and a device that are not there.
_ASSUMED: ContextVar[tuple[Launch, str] | None] = ContextVar("assumed launch", default=None)


@contextlib.contextmanager
def assuming(launch: Launch, device: str) -> Iterator[None]:
    """Let arguments that are made within this context belong to an assumed launch and device."""
    token = _ASSUMED.set((launch, device))
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read which process this is from what torchrun, SLURM or MPI have set.

    Args:
        environment: The variables; None reads this process's own.

    Raises:
        ArgumentError: A variable that should hold a number holds none.
    """
    assumed = _ASSUMED.get()
    if assumed is not None and environment is None:
        return assumed[0]
    variables = os.environ if environment is None else environment  # noqa: TID251 - launchers speak through it
    for rank, local_rank, size, local_size in _VARIABLES:
        # `sbatch` alone sets SLURM_NTASKS too; only `srun` starts a process for each task
        if (
            rank not in variables
            or size not in variables
            or (
                rank.startswith("SLURM")
                and (variables.get("SLURM_JOB_NAME") in ("bash", "interactive") or "SLURM_STEP_ID" not in variables)
            )
        ):
            continue
        world = _count(variables, size)
        here = int(re.match(r"\d*", variables.get(local_size, ""))[0] or world)  # type: ignore[index]  # it matches anything
        return Launch(
            process_index=_count(variables, rank),
            local_process_index=_count(variables, local_rank if local_rank in variables else rank),
            world_size=world,
            local_world_size=min(here, world),
        )
    return Launch()


def is_launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher has started this process, alone or among others.

    Args:
        environment: The variables; None reads this process's own.
    """
    variables = os.environ if environment is None else environment  # noqa: TID251 - launchers speak through it
    return any(
        rank in variables and size in variables and (not rank.startswith("SLURM") or "SLURM_STEP_ID" in variables)
        for rank, _, size, _ in _VARIABLES
    )


def _count(variables: Mapping[str, str], name: str) -> int:
    """Return a variable's number.

    Raises:
        ArgumentError: It holds none.
    """
    try:
        return int(variables[name])
    except ValueError as error:
        raise ArgumentError(
            f"The environment has `{name}={variables[name]!r}`, which is no whole number.\n\n"
            "Hint: launchers set it; unset it to train in one process."
        ) from error


def main_address() -> tuple[str, int]:
    """Return address and port of the rendezvous: `MASTER_ADDR` and `MASTER_PORT`, or a SLURM job's first machine."""
    variables = os.environ  # noqa: TID251 - launchers speak through it
    address = variables.get("MASTER_ADDR")
    if address is None:
        nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
        address = first_node(nodes) or "127.0.0.1"
    job = re.sub(r"\D", "", variables.get("SLURM_JOB_ID", ""))[-4:]
    if variables.get("MASTER_PORT"):
        return address, _count(variables, "MASTER_PORT")
    return address, 15000 + int(job) if job else 29500


def has_rendezvous() -> bool:
    """Return whether the launcher has set torch's variables of the rendezvous."""
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ  # noqa: TID251 - see above


def first_node(nodes: str) -> str:
    """Return the first machine of a SLURM list: `gpu[03-05,9],cpu1` is `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return "" if match is None else match[1] + (match[2] or "")


def wants_cpu(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the launcher asked for the CPU (`accelerate launch --cpu`)."""
    variables = os.environ if environment is None else environment  # noqa: TID251 - launchers speak through it
    return parse_switch(variables, "ACCELERATE_USE_CPU")


def choose_device(use_cpu: bool, launch: Launch) -> torch.device:
    """Choose this process's single device: its own CUDA device, Apple's, or the CPU.

    A process that sees fewer GPUs than its number among the machine's takes the remainder, as under Accelerate: a
    launcher may show each process one GPU, or leave out `LOCAL_RANK` where each pod has one.

    Raises:
        ArgumentError: There is an accelerator that Lightning does not know.
    """
    assumed = _ASSUMED.get()
    if assumed is not None:
        return torch.device("cpu") if use_cpu else torch.device(assumed[1])
    if use_cpu or wants_cpu():
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", launch.local_process_index % max(torch.cuda.device_count(), 1))
    if torch.backends.mps.is_available():
        return torch.device("mps")
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None:
        raise ArgumentError(
            f"torch finds an accelerator of type {other.type!r}, which Lightning does not train on; transformers does."
            "\n\nHint: set `use_cpu=True` to train on the CPU."
        )
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


_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def end_with_launcher(launcher: int) -> None:
    """Get SIGTERM when the process that started this one is gone; Linux only.

    A launcher that is killed cannot end its processes: they would train on, beside the next start in the same folder.

    Args:
        launcher: Its process id.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:  # it was gone before
        raise SystemExit(128 + signal.SIGTERM)
