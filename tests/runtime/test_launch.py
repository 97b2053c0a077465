"""What launchers say about processes, as a table."""

from __future__ import annotations

import os

import pytest

from hf_compat.runtime.launch import Launch, first_node, let_children_import_from, read_launch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 0, 1, 1)),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (5, 1, 8, 4)),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (1, 1, 2, 2)),
        ({"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8",
          "SLURM_STEP_ID": "0"}, (9, 1, 16, 8)),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}, (0, 0, 1, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "bash"}, (0, 0, 1, 1)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2(x2)",
          "SLURM_STEP_ID": "0"}, (3, 1, 4, 2)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (2, 0, 4, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 1, 2, 2)),
    ],
)  # fmt: skip
def test_launchers(variables, expected):
    launch = read_launch(variables)
    found = (launch.process_index, launch.local_process_index, launch.world_size, launch.local_world_size)
    assert found == expected


def test_machines():
    launch = Launch(process_index=9, local_process_index=1, world_size=16, local_world_size=8)
    assert (launch.node_rank, launch.nodes) == (1, 2)
    assert [first_node(nodes) for nodes in ("gpu[03-05,9],cpu1", "a,b", "node7", "")] == ["gpu03", "a", "node7", ""]


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
