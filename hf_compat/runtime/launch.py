"""Which process this is among those of a launcher.

`LAUNCHERS` has a row for each set of variables that launchers set, and `find_place` takes the first row that fits.
The core reads and writes the variables of the process through `environment` only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeAlias

from hf_compat.errors import ArgumentError
from hf_compat.runtime.text import brief

Variables = Mapping[str, str]
# Through it launchers, trackers and tools are heard, and the processes that this one starts
environment: MutableMapping[str, str] = os.environ  # noqa: TID251 - the one place


# A function that reads a variable's text, given all variables and the number of this machine.
Reader: TypeAlias = Callable[[str, Variables, int], int]


class _Misfit(ValueError):
    """What is wrong with a variable, in words."""


def _most_machines(text: str, variables: Variables, node_rank: int) -> int:
    """Read the number of machines, or the most of an elastic range, such as `1:2`."""
    return int(text.rpartition(":")[2])


def _tasks_of_machine(text: str, variables: Variables, node_rank: int) -> int:
    """Read the tasks of this machine from those of each: in `2(x3),1` the fourth has 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    each = [count for count, times in found for _ in range(int(times or 1))] or [text]
    return int(each[node_rank if node_rank < len(each) else 0])


def _hosts(variables: Variables, *needed: str) -> list[str]:
    """Read SageMaker's list of hosts, which has those needed."""
    with contextlib.suppress(ValueError):
        hosts = json.loads(variables["SM_HOSTS"])
        if isinstance(hosts, list) and all(one in hosts for one in needed):
            return hosts
    raise _Misfit(f"does not fit a JSON list of hosts in `SM_HOSTS={brief(variables['SM_HOSTS'])}`")


def _number_of_hosts(text: str, variables: Variables, node_rank: int) -> int:
    return len(_hosts(variables))


def _place_among_hosts(text: str, variables: Variables, node_rank: int) -> int:
    return _hosts(variables, text).index(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """A row: who sets which variables, by default torch's. Of several names for one number the first one set counts.

    `tests/house/pages.py` writes the same table into docs/scale.md. Where `starts_machines`, the row's processes are
    machines.
    """

    name: str  # of the launchers
    link: str  # to their description
    when: tuple[str, ...]  # variables by which the row is known; all of them are set
    rank: tuple[str, ...] = ("RANK",)
    world_size: tuple[str, ...] = ("WORLD_SIZE",)
    local_rank: tuple[str, ...] = ("LOCAL_RANK",)  # on its machine
    local_world_size: tuple[str, ...] = ()  # processes on this machine
    node_rank: tuple[str, ...] = ()  # which machine this is
    nodes: tuple[str, ...] = ()  # machines
    address: tuple[str, ...] = ("MASTER_ADDR",)  # of the first machine. Of `host:port` the host is read
    port: tuple[str, ...] = ()  # there, unless `MASTER_PORT` is set
    starts_machines: bool = False  # its process on each machine starts the others there: `hf-compat run --devices N`
    may_start_machines: bool = False  # the same, if the job has one process a machine
    readers: Mapping[str, Reader] = field(default_factory=dict)  # of variables that hold something else than a number


LAUNCHERS = (
    Launcher(
        name="torchrun, `accelerate launch`, `hf-compat run`, Ray Train",
        link="https://docs.pytorch.org/docs/stable/elastic/run.html",
        when=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        nodes=("GROUP_WORLD_SIZE",),
    ),
    Launcher(
        name="deepspeed",
        link="https://www.deepspeed.ai/getting-started/",
        when=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        local_world_size=("LOCAL_SIZE",),
        node_rank=("CROSS_RANK",),
        nodes=("CROSS_SIZE",),
    ),
    Launcher(
        name="Azure ML (PyTorch)",
        link="https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu",
        when=("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        node_rank=("NODE_RANK",),
        nodes=("AZUREML_NODE_COUNT",),
    ),
    Launcher(
        name="Slurm (srun)",
        link="https://slurm.schedmd.com/srun.html",
        when=("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"),  # `sbatch` alone sets no step: it starts one process
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_world_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        node_rank=("SLURM_NODEID",),
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        address=("MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        may_start_machines=True,
        readers=dict.fromkeys(
            ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"), _tasks_of_machine
        ),
    ),
    Launcher(
        name="Open MPI, Azure ML (MPI)",
        link="https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html",
        when=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        nodes=("AZUREML_NODE_COUNT",),
        address=("MASTER_ADDR", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
        may_start_machines=True,
    ),
    Launcher(
        name="Intel MPI, MPICH, Cray PALS",
        link="https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux/",
        when=("PMI_RANK", "PMI_SIZE"),
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        may_start_machines=True,
    ),
    Launcher(
        name="MVAPICH2",
        link="https://mvapich.cse.ohio-state.edu/userguide/",
        when=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank=("MV2_COMM_WORLD_RANK",),
        world_size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        may_start_machines=True,
    ),
    Launcher(
        name="Kubernetes PyTorchJob",
        link="https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/",
        when=("RANK", "WORLD_SIZE"),  # a pod is a process, which may start others
        local_world_size=("LOCAL_WORLD_SIZE",),
        may_start_machines=True,
    ),
    Launcher(
        name="Kubeflow TrainJob",
        link="https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/",
        when=("PET_NODE_RANK", "PET_NNODES"),
        rank=("PET_NODE_RANK",),
        world_size=("PET_NNODES",),
        local_rank=(),
        address=("PET_MASTER_ADDR", "MASTER_ADDR"),
        port=("PET_MASTER_PORT",),
        starts_machines=True,
        readers={"PET_NNODES": _most_machines},
    ),
    Launcher(
        name="SageMaker",
        link="https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md",
        when=("SM_HOSTS", "SM_CURRENT_HOST"),
        rank=("SM_CURRENT_HOST",),
        world_size=("SM_HOSTS",),
        local_rank=(),
        address=("MASTER_ADDR", "SM_HOSTS"),
        starts_machines=True,
        readers={"SM_CURRENT_HOST": _place_among_hosts, "SM_HOSTS": _number_of_hosts},
    ),
    Launcher(
        name="Kubernetes indexed Job, JobSet",
        link="https://kubernetes.io/docs/tasks/job/indexed-parallel-processing-static/",
        when=("JOB_COMPLETION_INDEX",),  # how many there are is not said
        rank=("JOB_COMPLETION_INDEX",),
        world_size=(),
        local_rank=(),
        starts_machines=True,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a launcher has said; None where it has said nothing."""

    launcher: Launcher
    rank: int
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    nodes: int | None
    address: str | None
    port: int | None

    @property
    def is_machine(self) -> bool:
        """Whether this process is the only one that the launcher has started on its machine, so it may start others."""
        if self.launcher.starts_machines:
            return True
        return self.launcher.may_start_machines and (self.local_world_size or 1) == 1


def find_place(variables: Variables = environment) -> Place | None:
    """Return what the first fitting row of the table says; None where no launcher has started this process.

    Raises:
        ArgumentError: A variable that should hold a number holds none.
    """
    for row in LAUNCHERS:
        # an interactive shell of Slurm's is a step, too
        of_shell = row.rank[0] == "SLURM_PROCID" and variables.get("SLURM_JOB_NAME") in ("bash", "interactive")
        if all(name in variables for name in row.when) and not of_shell:
            node_rank, rank = _read(row, variables, row.node_rank), _read(row, variables, row.rank)
            if rank is None:  # `when` has its variable, which is empty
                continue
            return Place(
                launcher=row,
                rank=rank,
                world_size=_read(row, variables, row.world_size),
                local_rank=_read(row, variables, row.local_rank),
                local_world_size=_read(row, variables, row.local_world_size, node_rank or 0),
                node_rank=node_rank,
                nodes=_read(row, variables, row.nodes),
                address=next((found for name in row.address if (found := first_host(variables.get(name, "")))), None),
                port=_read(row, variables, row.port),
            )
    return None


def _read(row: Launcher, variables: Variables, names: tuple[str, ...], node_rank: int = 0) -> int | None:
    """Read the first of these variables that is set."""
    name = next((name for name in names if variables.get(name)), None)
    if name is None:
        return None
    try:
        read = row.readers.get(name)
        return int(variables[name]) if read is None else read(variables[name], variables, node_rank)
    except ValueError as error:
        wrong = str(error) if isinstance(error, _Misfit) else "is not a whole number"
        raise ArgumentError(
            f"The environment has `{name}={brief(variables[name])}`, which {wrong}.\n\n"
            "Hint: launchers set it; unset it to train in one process."
        ) from error


def first_host(text: str) -> str:
    """Return the first host of a list: Slurm's (`gpu[03-05,9],cpu1` is `gpu03`), SageMaker's in JSON, `host:port`."""
    if text.startswith("["):
        hosts = re.match(r'\["([^"]+)"', text)
        return hosts[1] if hosts is not None else text
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", text)
    host = "" if match is None else match[1] + (match[2] or "")
    return host.partition(":")[0] if host.count(":") == 1 else host  # more than one: an address of IPv6


def let_children_import_from(folder: str) -> None:
    """Put a folder first among those where the Pythons that this process starts look for modules."""
    said = environment.get("PYTHONPATH", "")
    before = said.split(os.pathsep) if said else []  # an empty part is the working directory
    if folder not in before:
        environment["PYTHONPATH"] = os.pathsep.join([folder, *before])


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Which process this is among those that were launched together."""

    process_index: int = 0  # rank over all machines
    local_process_index: int = 0  # rank on this machine
    world_size: int = 1  # processes in all
    local_world_size: int = 1  # processes on this machine
    node_rank: int = 0  # which machine this is
    nodes: int = 1  # machines, which need not have equally many processes
    unsaid: str = ""  # the variable that would say the rank on this machine, and is not set, so it cannot choose a GPU


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


def assumed_device() -> str | None:
    """The type of the device that arguments are made for within `assuming`; None outside of it."""
    assumed = _ASSUMED.get()
    return None if assumed is None else assumed[1]


def read_launch(variables: Variables = environment) -> Launch:
    """Read which process this is from what a launcher has set; the table is in `runtime/launch.py`.

    Raises:
        ArgumentError: A variable that should hold a number holds none, or too little is said.
    """
    assumed = _ASSUMED.get()
    if assumed is not None and variables is environment:
        return assumed[0]
    place = find_place(variables)
    if place is None or place.launcher.starts_machines or not place.world_size:
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
    here = min(max(here, 1), world)
    is_alone = world == 1
    return Launch(
        process_index=place.rank,
        local_process_index=place.local_rank or 0,
        world_size=world,
        local_world_size=here,
        node_rank=place.rank // here if place.node_rank is None or is_alone else place.node_rank,
        nodes=world // here if nodes is None or is_alone else nodes,
        unsaid=(*row.local_rank, "LOCAL_RANK")[0] if place.local_rank is None and not is_alone else "",
    )


def is_launched(variables: Variables = environment) -> bool:
    """Whether a launcher has started this process as one that trains, alone or among others."""
    place = find_place(variables)
    return place is not None and not place.launcher.starts_machines


def main_address() -> tuple[str, int]:
    """Return address and port of the rendezvous: `MASTER_ADDR` and `MASTER_PORT`, or what the launcher's row names.

    Raises:
        ArgumentError: There are several machines, and nothing says the address of the first.
    """
    place = find_place()
    address = environment.get("MASTER_ADDR") or (None if place is None else place.address)
    if not address and (nodes := read_launch().nodes) > 1:
        raise ArgumentError(
            f"The processes are on {nodes} machines, and `MASTER_ADDR` is not set.\n\n"
            "Hint: set it to the host name of the first machine, on all of them."
        )
    job = re.sub(r"\D", "", environment.get("SLURM_JOB_ID", ""))[-4:]
    port = environment.get("MASTER_PORT")
    if port and not port.isdigit():
        raise ArgumentError(f"The environment has `MASTER_PORT={brief(port)}`, which is no port.\n\nHint: 29500, say.")
    given = int(port) if port else None if place is None else place.port
    if given is None:
        given = 15000 + int(job) if job else 29500
    return address or "127.0.0.1", given


def has_rendezvous() -> bool:
    """Return whether the launcher has set torch's variables of the rendezvous."""
    return "MASTER_ADDR" in environment and "MASTER_PORT" in environment


def slurm_job_id() -> str | None:
    """Return the id of this batch job as `scontrol` takes it; None outside of one, and in an interactive shell."""
    if environment.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{environment.get('SLURM_ARRAY_TASK_ID', '0')}"
    return environment.get("SLURM_JOB_ID")


_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def end_with_launcher(launcher: int) -> None:
    """Get SIGTERM when the process that started this one is gone; Linux only.

    A launcher that is killed cannot end its processes: they would train on, beside the next start in the same folder.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:  # it was gone before
        raise SystemExit(128 + signal.SIGTERM)
