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
from hf_compat.runtime.launchers import Place, find_place
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
        said_node_rank: Which machine this is, where the launcher has said it.
        said_nodes: Machines, where it has said them: they need not have equally many processes.
        unsaid: The variable that would say the rank on this machine, and is not set: no GPU can be chosen by it.
    """

    process_index: int = 0
    local_process_index: int = 0
    world_size: int = 1
    local_world_size: int = 1
    said_node_rank: int | None = None
    said_nodes: int | None = None
    unsaid: str = ""

    @property
    def node_rank(self) -> int:
        """Which machine this is."""
        return self.process_index // self.local_world_size if self.said_node_rank is None else self.said_node_rank

    @property
    def nodes(self) -> int:
        """Machines."""
        return max(self.world_size // self.local_world_size, 1) if self.said_nodes is None else self.said_nodes


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
    """Read which process this is from what a launcher has set; the table is in `runtime/launchers.py`.

    Args:
        environment: The variables; None reads this process's own.

    Raises:
        ArgumentError: A variable that should hold a number holds none, or too little is said.
    """
    assumed = _ASSUMED.get()
    if assumed is not None and environment is None:
        return assumed[0]
    place = launched_place(environment)
    if place is None or place.launcher.starts_machines or place.world_size is None:
        return Launch()
    row, world, nodes = place.launcher, place.world_size, place.nodes
    here = place.local_world_size
    if here is None and nodes:
        here = world // nodes
    elif here is None and place.local_rank is None:
        here = 1  # a pod of its own, by all that is said
    elif here is None:
        if place.local_rank != place.rank:
            raise ArgumentError(
                f"`{row.rank[0]}={place.rank}` is rank {place.local_rank} of its machine (`{row.local_rank[0]}`), so "
                f"there are several machines, and `{(*row.local_world_size, 'LOCAL_WORLD_SIZE')[0]}` is not set.\n\n"
                "Hint: set it to the processes of a machine, on every one; torchrun does."
            )
        here = world
    return Launch(
        process_index=place.rank,
        local_process_index=place.local_rank or 0,
        world_size=world,
        local_world_size=min(max(here, 1), world),
        said_node_rank=place.node_rank if world > 1 else None,
        said_nodes=nodes if world > 1 else None,
        unsaid=(*row.local_rank, "LOCAL_RANK")[0] if place.local_rank is None and world > 1 else "",
    )


def launched_place(environment: Mapping[str, str] | None = None) -> Place | None:
    """Return what the launcher of this process, or of the only process of this machine, has said.

    Args:
        environment: The variables; None reads this process's own.
    """
    return find_place(os.environ if environment is None else environment)  # noqa: TID251 - launchers speak through it


def is_launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher has started this process as one that trains, alone or among others.

    Args:
        environment: The variables; None reads this process's own.
    """
    place = launched_place(environment)
    return place is not None and not place.launcher.starts_machines


def main_address() -> tuple[str, int]:
    """Return address and port of the rendezvous: `MASTER_ADDR` and `MASTER_PORT`, or a Slurm job's first machine.

    Raises:
        ArgumentError: There are several machines, and nothing says the address of the first.
    """
    variables = os.environ  # noqa: TID251 - launchers speak through it
    place = launched_place()
    address = variables.get("MASTER_ADDR") or (None if place is None else place.address)
    if not address and (nodes := read_launch().nodes) > 1:
        raise ArgumentError(
            f"The processes are on {nodes} machines, and `MASTER_ADDR` is not set.\n\n"
            "Hint: set it to the host name of the first machine, on all of them."
        )
    job = re.sub(r"\D", "", variables.get("SLURM_JOB_ID", ""))[-4:]
    port = variables.get("MASTER_PORT")
    if port and not port.isdigit():
        raise ArgumentError(f"The environment has `MASTER_PORT={port!r}`, which is no port.\n\nHint: 29500, say.")
    return address or "127.0.0.1", int(port) if port else 15000 + int(job) if job else 29500


def has_rendezvous() -> bool:
    """Return whether the launcher has set torch's variables of the rendezvous."""
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ  # noqa: TID251 - see above


def wants_cpu(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the launcher asked for the CPU (`accelerate launch --cpu`)."""
    variables = os.environ if environment is None else environment  # noqa: TID251 - launchers speak through it
    return parse_switch(variables, "ACCELERATE_USE_CPU")


def choose_device(use_cpu: bool, launch: Launch) -> torch.device:
    """Choose this process's single device: its own CUDA device, Apple's, or the CPU.

    A process that sees fewer GPUs than its number among the machine's takes the remainder, as under Accelerate: a
    launcher may show each process one GPU. Where each pod has one, nothing need say a rank on the machine.

    Raises:
        ArgumentError: There is an accelerator that Lightning does not know, or nothing says which of several GPUs.
    """
    assumed = _ASSUMED.get()
    if assumed is not None:
        return torch.device("cpu") if use_cpu else torch.device(assumed[1])
    if use_cpu or wants_cpu():
        return torch.device("cpu")
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if launch.unsaid and gpus > 1:
            raise ArgumentError(
                f"This is rank {launch.process_index} of {launch.world_size} and sees {gpus} GPUs; "
                f"`{launch.unsaid}`, which would say which of them is its own, is not set.\n\n"
                f"Hint: set `{launch.unsaid}` to the process's number on its machine; or let "
                "`hf-compat run --devices N` or torchrun start the processes of a machine."
            )
        return torch.device("cuda", launch.local_process_index % max(gpus, 1))
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
