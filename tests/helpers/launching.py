"""Start jobs of tests/distributed with several processes, and read what they gave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
JOB = Path(__file__).resolve().parents[1] / "helpers" / "jobs" / "job.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
OURS = ["-m", "hf_compat.cli.main", "run", "--devices", "2"]


def start(folder: Path, *words: str, launcher=OURS, script=JOB, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, *launcher, str(script), str(folder), *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, check=False)


def result(folder: Path, *words: str, **options) -> dict:
    done = start(folder, *words, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "result.json").read_text())


def series(found: dict, key: str) -> list[float]:
    return [log[key] for log in found["logs"] if key in log]
