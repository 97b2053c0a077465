"""Two processes on a pretended GPU each: DDP under both trainers gives the same on both ranks."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.parity.compare import first_difference, same
from sweeps.device.two_gpus import CONFIGURATIONS

JOB = Path(__file__).resolve().parents[1] / "sweeps" / "device" / "two_gpus.py"


def of_two_processes(api: str, name: str, folder: Path) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in "01":
        with (folder / f"{api}-{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(
                [sys.executable, str(JOB), api, name, str(folder)], stdout=log, stderr=log,
                env={**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank},
            ))  # fmt: skip
    try:
        assert [process.wait(timeout=200) for process in processes] == [0, 0], (folder / f"{api}-0.log").read_text()
    finally:
        for process in processes:
            process.kill()
    return [pickle.loads((folder / f"{api}-{name}-{rank}.pickle").read_bytes()) for rank in "01"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_gpus_give_what_they_give_under_transformers(tmp_path, name):
    theirs, ours = (of_two_processes(api, name, tmp_path) for api in ("transformers", "hf_compat"))
    assert same(theirs, ours), first_difference(theirs, ours)
    assert [(one["device"], one["current"], one["backend"]) for one in ours] == [
        ("cuda:0", 0, "gloo"),
        ("cuda:1", 1, "gloo"),
    ]
    assert same(ours[0]["weights"], ours[1]["weights"])
