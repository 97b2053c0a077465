"""What launchers say about processes: the environment that each sets, and what we read of it."""

from __future__ import annotations

import contextlib
import os
import signal
from types import SimpleNamespace

import pytest

from hf_compat.errors import ArgumentError
from hf_compat.runtime import launch as launching
from hf_compat.runtime.launch import (
    LAUNCHERS,
    find_place,
    first_host,
    let_children_import_from,
    main_address,
    read_launch,
    slurm_job_id,
)

SRUN = {"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train"}
TORCHRUN = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "5", "TORCHELASTIC_RESTART_COUNT": "0",
            "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}  # fmt: skip


# launcher, its environment → (rank, local rank, processes, processes of the machine), (machine, machines)
@pytest.mark.parametrize(
    ("variables", "expected", "machine"),
    [
        ({}, (0, 0, 1, 1), (0, 1)),
        # torchrun; two machines with unequally many processes; `accelerate launch` adds ACCELERATE_…; Ray Train
        ({**TORCHRUN, "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (5, 1, 8, 4),
         (1, 2)),
        ({**TORCHRUN, "RANK": "3", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}, (3, 0, 4, 1),
         (1, 2)),
        ({"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"}, (1, 0, 2, 1),
         (1, 2)),
        # deepspeed
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"},
         (3, 1, 4, 2), (1, 2)),
        # Azure ML; by hand on one machine
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "NODE_RANK": "1", "AZUREML_NODE_COUNT": "2"},
         (3, 1, 4, 2), (1, 2)),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (1, 1, 2, 2), (0, 1)),
        # srun: --ntasks-per-node or not, unequally, a step of a larger allocation; sbatch and shells start one
        ({**SRUN, "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8"},
         (9, 1, 16, 8), (1, 2)),
        ({**SRUN, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)",
          "SLURM_NNODES": "2", "SLURM_NODEID": "1"}, (3, 1, 4, 2), (1, 2)),
        ({**SRUN, "SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "3,1",
          "SLURM_NNODES": "2", "SLURM_NODEID": "1"}, (3, 0, 4, 1), (1, 2)),
        ({**SRUN, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)",
          "SLURM_NNODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
          "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}, (1, 1, 2, 2), (0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}, (0, 0, 1, 1), (0, 1)),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "bash"}, (0, 0, 1, 1), (0, 1)),
        # mpirun
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "0"}, (2, 0, 4, 2), (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 1, 2, 2), (0, 1)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}, (3, 1, 4, 2), (1, 2)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_SIZE": "2",
          "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 1, 2, 2), (0, 1)),
        # a pod of a PyTorchJob is a process; those of other jobs train alone, until `hf-compat run` joins them
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}, (1, 0, 4, 1), (1, 4)),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}, (0, 0, 1, 1), (0, 1)),
        ({"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}, (0, 0, 1, 1), (0, 1)),
        ({"JOB_COMPLETION_INDEX": "3"}, (0, 0, 1, 1), (0, 1)),
    ],
)  # fmt: skip
def test_every_launcher_places_a_process(variables, expected, machine):
    launch = read_launch(variables)
    found = (launch.process_index, launch.local_process_index, launch.world_size, launch.local_world_size)
    assert (found, (launch.node_rank, launch.nodes)) == (expected, machine)


@pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.name)
def test_each_row_reads_its_own_variables(row):
    said = {"rank": "3", "world_size": "4", "local_rank": "1", "local_world_size": "2", "node_rank": "1", "nodes": "2"}
    if set(row.rank) & row.readers.keys():  # hosts by their names
        said |= {"rank": "d", "world_size": '["a", "b", "c", "d"]'}
    if row.rank == ("RANK",) and "LOCAL_RANK" not in row.when:  # with it an earlier row would fit
        said |= {"local_rank": "", "local_world_size": ""}
    said |= {"port": "29123"} if row.port else {}
    variables = dict.fromkeys(row.when, "0")
    for column, text in {**said, "address": "node0:29500"}.items():
        variables |= dict.fromkeys(getattr(row, column)[:1] if text else (), text)
    place = find_place(variables)
    assert place.launcher is row
    for column, text in {**said, "rank": "3", "world_size": "4"}.items():
        assert getattr(place, column) == (int(text) if getattr(row, column) and text else None)
    assert place.address == "node0"


# What starts one process a machine → (machine, machines, address of the first); `hf-compat run` starts others there
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({**SRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)",
          "SLURM_STEP_NODELIST": "gpu[03-04]"}, (1, 2, "gpu03")),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
          "AZ_BATCH_MASTER_NODE": "10.0.0.4:6105"}, (1, 2, "10.0.0.4")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0"}, (1, 2, "job-master-0")),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "1:2", "PET_MASTER_ADDR": "node-0-0.job"}, (1, 2, "node-0-0.job")),
        ({"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}, (1, 2, "algo-1")),
        ({"JOB_COMPLETION_INDEX": "3", "MASTER_ADDR": "job-workers-0-0.job"}, (3, None, "job-workers-0-0.job")),
    ],
)  # fmt: skip
def test_launchers_of_one_process_a_machine_are_known(variables, expected):
    place = find_place(variables)
    assert place.is_machine and (place.rank, place.world_size, place.address) == expected


def test_torchruns_own_processes_start_no_others():
    by_torchrun = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    two_tasks = {**SRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}
    assert not find_place(by_torchrun).is_machine and not find_place(two_tasks).is_machine


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE"),
        ({"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8"}, "MPI_LOCALNRANKS"),
        ({"RANK": "five", "WORLD_SIZE": "8"}, "RANK"),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS"),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-2"}, "SM_CURRENT_HOST"),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE"),
    ],
)
def test_the_variable_that_says_too_little_is_named(variables, missing):
    with pytest.raises(ArgumentError, match=f"`{missing}"):
        read_launch(variables)


def test_several_machines_need_the_address_of_the_first(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match="on 2 machines, and `MASTER_ADDR` is not set"):
        main_address()
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert main_address() == ("node0", 29500)


@pytest.mark.parametrize(
    ("variables", "port"),
    [
        ({}, 29500),
        ({"SLURM_JOB_ID": "71"}, 15071),
        ({"SLURM_JOB_ID": "1234567"}, 19567),  # the last four digits, as jobs of one machine have them apart
        ({"SLURM_JOB_ID": "job-12-3"}, 15123),
        ({"SLURM_JOB_ID": "71", "MASTER_PORT": "29"}, 29),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_MASTER_PORT": "29123"}, 29123),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_MASTER_PORT": "29123", "MASTER_PORT": "29"}, 29),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "2"}, 29500),
    ],
)
def test_jobs_of_one_machine_meet_at_ports_of_their_own(monkeypatch, variables, port):
    for name in ("MASTER_PORT", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "node0", **variables}.items():
        monkeypatch.setenv(name, value)
    assert main_address() == ("node0", port)


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"SLURM_JOB_ID": "71", "SLURM_JOB_NAME": "train"}, "71"),
        ({"SLURM_JOB_ID": "71"}, "71"),
        ({"SLURM_JOB_ID": "71", "SLURM_JOB_NAME": "bash"}, None),
        ({"SLURM_JOB_ID": "71", "SLURM_JOB_NAME": "interactive"}, None),
        ({"SLURM_JOB_ID": "73", "SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "2"}, "71_2"),
        ({"SLURM_JOB_ID": "73", "SLURM_ARRAY_JOB_ID": "71"}, "71_0"),
        ({}, None),
    ],
)
def test_a_batch_job_is_named_as_scontrol_takes_it_and_a_shell_is_none(monkeypatch, variables, job):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert slurm_job_id() == job


def test_machines():
    launch = read_launch({"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"})
    assert (launch.node_rank, launch.nodes) == (1, 2)
    lists = {"gpu[03-05,9],cpu1": "gpu03", "a,b": "a", "node7": "node7", "": "", "10.0.0.4:6105": "10.0.0.4",
             "fe80::1": "fe80::1", '["algo-1", "algo-2"]': "algo-1"}  # fmt: skip
    assert {text: first_host(text) for text in lists} == lists


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, "new"), ("", "new"), ("a", "new:a"), ("a:", "new:a:"), (":a", "new::a"), ("a::b", "new:a::b")],
)
def test_an_empty_part_of_the_path_stays_the_working_directory(monkeypatch, before, after):
    if before is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", before)
    let_children_import_from("new")
    let_children_import_from("new")
    assert os.environ["PYTHONPATH"] == after


def test_a_rank_that_is_empty_is_not_set():
    assert find_place({"RANK": "", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("system", "parent", "asks", "ends"),
    [("linux", 7, True, False), ("linux2", 7, True, False), ("linux", 1, True, True), ("darwin", 1, False, False)],
)
def test_a_process_ends_with_its_launcher(monkeypatch, system, parent, asks, ends):
    asked = []
    monkeypatch.setattr(launching.sys, "platform", system)
    monkeypatch.setattr(launching.os, "getppid", lambda: parent)
    library = lambda name, use_errno: SimpleNamespace(prctl=lambda *words: asked.append(words))  # noqa: E731
    monkeypatch.setattr(launching.ctypes, "CDLL", library)
    with pytest.raises(SystemExit) if ends else contextlib.nullcontext() as raised:
        launching.end_with_launcher(7)
    assert asked == ([(1, signal.SIGTERM, 0, 0, 0)] if asks else [])
    assert not ends or raised.value.code == 143


@pytest.mark.parametrize(
    ("text", "machine", "tasks"),
    [
        ("2(x3),1", 0, 2),
        ("2(x3),1", 2, 2),
        ("2(x3),1", 3, 1),
        ("2(x3),1", 4, 2),
        ("4", 0, 4),
        ("4", 1, 4),
        ("3,1", 1, 1),
    ],
)
def test_each_machine_has_tasks_of_its_own(text, machine, tasks):
    assert launching._tasks_of_machine(text, {}, machine) == tasks


@pytest.mark.parametrize(
    ("variables", "is_launched"),
    [
        ({}, False),
        ({"JOB_COMPLETION_INDEX": "3"}, False),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, True),
    ],
)
def test_machines_of_other_jobs_are_launched_as_no_process(variables, is_launched):
    assert launching.is_launched(variables) is is_launched


@pytest.mark.parametrize("names", [(), ("MASTER_ADDR",), ("MASTER_PORT",), ("MASTER_ADDR", "MASTER_PORT")])
def test_a_rendezvous_has_address_and_port(monkeypatch, names):
    monkeypatch.setattr(launching, "environment", dict.fromkeys(names, "1"))
    assert launching.has_rendezvous() is (len(names) == 2)


def test_a_launch_is_assumed_within_the_context_alone():
    assumed, said = launching.Launch(world_size=8), {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    with launching.assuming(assumed, "cuda"):
        assert read_launch() is assumed and launching.assumed_device() == "cuda"
        assert read_launch(said).world_size == 2
    assert read_launch() is not assumed and launching.assumed_device() is None


@pytest.mark.parametrize("hosts", ["[", "[]", '["a"', '{"a": 1}', "3"])
def test_a_list_of_hosts_that_is_none_is_named(hosts):
    variables = {"SM_HOSTS": hosts, "SM_CURRENT_HOST": "a"}
    with pytest.raises(ArgumentError, match="SM_"):
        read_launch(variables)
