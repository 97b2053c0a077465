"""Between logs an update reads nothing back from its device, and starts no collective of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from helpers.launching import OURS, result
from hf_compat.runtime.collectives import GATHER

JOB = Path(__file__).resolve().parents[1] / "helpers" / "jobs" / "sync_job.py"


def test_one_process_waits_for_nothing_between_logs(tmp_path):
    settings = ("plain", "accumulation", "unclipped")
    command = [sys.executable, str(JOB), str(tmp_path), *settings]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    check(json.loads((tmp_path / "result.json").read_text()), settings)


def test_two_processes_wait_for_nothing_of_ours_between_logs(tmp_path):
    found = result(tmp_path / "out", "plain", launcher=OURS, script=JOB)
    check(found, ("plain",))
    assert found["plain"]["a run"][GATHER] > 0


def check(found: dict, settings: tuple[str, ...]) -> None:
    for name in settings:
        assert set(found[name]["an update"].values()) == {0.0}, found
        assert found[name]["a run"]["aten._local_scalar_dense.default"] > 0  # the logs read: the counter counts
