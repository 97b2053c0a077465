"""A sample of the kills of `kill_strategies.py`, and what a launcher of ours leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# one write, as two ranks share the pipe
SLEEPING = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"


@pytest.mark.real_python
@pytest.mark.parametrize(
    ("strategy", "kills"),
    [("DDP", 3), *(pytest.param(strategy, 2, marks=pytest.mark.matrix) for strategy in ("FSDP2", "ZeRO2"))],
)
def test_killed_jobs_end_and_resume_to_the_whole_run(strategy, kills):
    command = [
        sys.executable,
        str(Path(__file__).resolve().parents[1] / "sweeps" / "distributed" / "kill_strategies.py"),
        strategy,
        str(kills),
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["kills"] == kills and report["runs that ended"] == report["equal bit for bit"] >= 1


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        # whose end a rank is told of by the system, as its parent's
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.real_python),
        (signal.SIGINT, 130),
    ],
)
def test_no_rank_outlives_its_launcher(tmp_path, number, status):
    script = tmp_path / "script.py"
    script.write_text(SLEEPING)
    command = [sys.executable, "-m", "hf_compat", "run", "--devices", "2", str(script)]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as launcher,
    ):
        ranks = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(number)
        assert launcher.wait(60) == status
    until = time.monotonic() + 10
    while any(is_alive(pid) for pid in ranks):
        assert time.monotonic() < until, "ranks train on without their launcher"
        time.sleep(0.05)
