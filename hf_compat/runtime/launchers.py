"""What launchers tell a process about its place, as a table: one row for each set of variables.

`find_place` walks the table; the first row that fits counts. Three readers know the forms in which numbers come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_compat.errors import ArgumentError

Variables = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """A row: who sets which variables. Of several names for one number the first that is set counts.

    Args:
        name: Of the launchers.
        docs: Where these variables are described.
        when: Variables by which the row is known; all of them are set.
        rank: Of the process; where `starts_machines`, of the machine.
        world_size: Processes; where `starts_machines`, machines.
        local_rank: Rank on its machine.
        local_world_size: Processes on this machine.
        node_rank: Which machine this is.
        nodes: Machines.
        address: Of the first machine.
        starts_machines: It starts one process a machine, which starts others: `hf-compat run --devices N`.
        may_start_machines: It does so where it is asked for one process a machine.
    """

    name: str
    docs: str
    when: tuple[str, ...]
    rank: tuple[str, ...]
    world_size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    address: tuple[str, ...] = ("MASTER_ADDR",)
    starts_machines: bool = False
    may_start_machines: bool = False


LAUNCHERS = (
    Launcher(
        name="torchrun, `accelerate launch`, `hf-compat run`, Ray Train",
        docs="https://docs.pytorch.org/docs/stable/elastic/run.html",
        when=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        nodes=("GROUP_WORLD_SIZE",),
    ),
    Launcher(
        name="deepspeed",
        docs="https://www.deepspeed.ai/getting-started/",
        when=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_SIZE",),
        node_rank=("CROSS_RANK",),
        nodes=("CROSS_SIZE",),
    ),
    Launcher(
        name="Azure ML (PyTorch)",
        docs="https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu",
        when=("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        node_rank=("NODE_RANK",),
        nodes=("AZUREML_NODE_COUNT",),
    ),
    Launcher(
        name="Slurm (srun)",
        docs="https://slurm.schedmd.com/srun.html",
        when=("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"),  # `sbatch` alone sets no step: it starts one process
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_world_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        node_rank=("SLURM_NODEID",),
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        address=("MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        may_start_machines=True,
    ),
    Launcher(
        name="Open MPI, Azure ML (MPI)",
        docs="https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html",
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
        docs="https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux/",
        when=("PMI_RANK", "PMI_SIZE"),
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        may_start_machines=True,
    ),
    Launcher(
        name="MVAPICH2",
        docs="https://mvapich.cse.ohio-state.edu/userguide/",
        when=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank=("MV2_COMM_WORLD_RANK",),
        world_size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        may_start_machines=True,
    ),
    Launcher(
        name="Kubernetes PyTorchJob",
        docs="https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/",
        when=("RANK", "WORLD_SIZE"),  # a pod is a process, which may start others
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        may_start_machines=True,
    ),
    Launcher(
        name="Kubeflow TrainJob",
        docs="https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/",
        when=("PET_NODE_RANK", "PET_NNODES"),
        rank=("PET_NODE_RANK",),
        world_size=("PET_NNODES",),
        address=("PET_MASTER_ADDR", "MASTER_ADDR"),
        starts_machines=True,
    ),
    Launcher(
        name="SageMaker",
        docs="https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md",
        when=("SM_HOSTS", "SM_CURRENT_HOST"),
        rank=("SM_CURRENT_HOST",),
        world_size=("SM_HOSTS",),
        address=("MASTER_ADDR", "SM_HOSTS"),
        starts_machines=True,
    ),
    Launcher(
        name="Kubernetes indexed Job, JobSet",
        docs="https://kubernetes.io/docs/tasks/job/indexed-parallel-processing-static/",
        when=("JOB_COMPLETION_INDEX",),  # how many there are is not said
        rank=("JOB_COMPLETION_INDEX",),
        starts_machines=True,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a launcher has said; None where it has said nothing.

    Args:
        launcher: The row.
        rank: Of the process, or of the machine.
        world_size: Processes, or machines.
        local_rank: Rank on its machine.
        local_world_size: Processes on this machine.
        node_rank: Which machine this is.
        nodes: Machines.
        address: Of the first machine.
    """

    launcher: Launcher
    rank: int
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    nodes: int | None
    address: str | None

    @property
    def is_machine(self) -> bool:
        """Whether this process is the only one that the launcher has started on its machine, so it may start others."""
        if self.launcher.starts_machines:
            return True
        return self.launcher.may_start_machines and (self.local_world_size or 1) == 1


def find_place(variables: Variables) -> Place | None:
    """Return what the first fitting row of the table says; None where no launcher has started this process.

    Args:
        variables: The environment.

    Raises:
        ArgumentError: A variable that should hold a number holds none.
    """
    for row in LAUNCHERS:
        # an interactive shell of Slurm's is a step, too
        of_shell = row.rank[0] == "SLURM_PROCID" and variables.get("SLURM_JOB_NAME") in ("bash", "interactive")
        if all(name in variables for name in row.when) and not of_shell:
            node_rank = _first(variables, row.node_rank, _number)
            rank = _first(variables, row.rank, _index)
            assert rank is not None  # `when` has its variable
            return Place(
                launcher=row,
                rank=rank,
                world_size=_first(variables, row.world_size, _count),
                local_rank=_first(variables, row.local_rank, _number),
                local_world_size=_first(variables, row.local_world_size, _of_machine(node_rank or 0)),
                node_rank=node_rank,
                nodes=_first(variables, row.nodes, _number),
                address=next((found for name in row.address if (found := first_host(variables.get(name, "")))), None),
            )
    return None


def _first(variables: Variables, names: tuple[str, ...], read: Callable[[Variables, str], int | None]) -> int | None:
    return next((read(variables, name) for name in names if variables.get(name)), None)


def _number(variables: Variables, name: str) -> int:
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


def _hosts(variables: Variables, name: str) -> list[str]:
    try:
        hosts = json.loads(variables[name])
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or not hosts:
        raise ArgumentError(f"The environment has `{name}={variables[name]!r}`, which is no list of hosts in JSON.")
    return [str(host) for host in hosts]


def _index(variables: Variables, name: str) -> int:
    """Read a rank: a number, or SageMaker's name of a host among its hosts."""
    if name != "SM_CURRENT_HOST":
        return _number(variables, name)
    hosts = _hosts(variables, "SM_HOSTS")
    if variables[name] not in hosts:
        raise ArgumentError(f"The environment has `{name}={variables[name]!r}`, which is not among `SM_HOSTS`.")
    return hosts.index(variables[name])


def _count(variables: Variables, name: str) -> int:
    """Read how many there are: a number, the most of an elastic range (`1:2`), or the length of a list of hosts."""
    if name == "SM_HOSTS":
        return len(_hosts(variables, name))
    if name == "PET_NNODES":
        return _number({name: variables[name].rpartition(":")[2]}, name)
    return _number(variables, name)


def _of_machine(node_rank: int) -> Callable[[Variables, str], int | None]:
    """Read the processes of a machine, from a number or Slurm's list: in `2(x3),1` the fourth machine has 1."""

    def read(variables: Variables, name: str) -> int | None:
        if not name.startswith("SLURM"):
            return _number(variables, name)
        each = [
            int(count)
            for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", variables[name])
            for _ in range(int(times or 1))
        ]
        if not each:
            return _number(variables, name)  # says what is wrong with it
        return each[node_rank] if node_rank < len(each) else each[0]

    return read


def first_host(text: str) -> str:
    """Return the first host of a list: Slurm's (`gpu[03-05,9],cpu1` is `gpu03`), SageMaker's in JSON, `host:port`."""
    if text.startswith("["):
        hosts = re.match(r'\["([^"]+)"', text)
        return hosts[1] if hosts is not None else text
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", text)
    host = "" if match is None else match[1] + (match[2] or "")
    return host.partition(":")[0] if host.count(":") == 1 else host  # more than one: an address of IPv6
