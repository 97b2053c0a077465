"""Kill one of two ranks at random instants, again and again, and resume: the end is that of the uninterrupted run.

python tests/sweeps/distributed/kill_rank.py [KILLS] [SEED]
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = Path(__file__).resolve().parents[2] / "helpers" / "jobs" / "job.py"
LONG = ("num_train_epochs=40", "save_steps=1", "logging_steps=5", "save_total_limit=3")


def launch(folder: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "hf_compat.cli.main", "run", "--devices", "2", str(JOB), str(folder), *words]
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def has_checkpoint(folder: Path) -> bool:
    return any((path / "manifest.json").is_file() for path in folder.glob("checkpoint-*"))


def kill_and_resume(folder: Path, kills: int, seed: int) -> dict:
    """Return how many runs were killed, how many ended, and whether each of these equals the uninterrupted one."""
    random.seed(seed)
    whole = folder / "whole"
    assert launch(whole, *LONG).wait() == 0, (folder / "whole.log").read_text()[-2000:]
    expected = json.loads((whole / "result.json").read_text())
    counts = {"kills": 0, "ended": 0, "equal": 0, "slowest": 0.0}
    run = 0
    while counts["kills"] < kills:
        run += 1
        cut = folder / f"cut-{run}"
        while True:
            for pid in cut.glob("pids/*"):
                pid.unlink()
            resume = ("resume=True",) if has_checkpoint(cut) else ()
            process = launch(cut, *LONG, *resume)
            if not kill_one(process, cut, counts, kills):
                break
        assert process.returncode == 0, (folder / f"cut-{run}.log").read_text()[-3000:]
        result = json.loads((cut / "result.json").read_text())
        counts["ended"] += 1
        counts["equal"] += result == expected
    return counts


def kill_one(process: subprocess.Popen, folder: Path, counts: dict, kills: int) -> bool:
    """Kill a rank some time after both are up; returns whether the run was killed (it may end first)."""
    while process.poll() is None and len(list(folder.glob("pids/*"))) < 2:
        time.sleep(0.01)
    wait = random.uniform(0.5, 4.0)
    deadline = time.monotonic() + (wait if counts["kills"] < kills else 1e9)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    if process.poll() is not None:
        return False
    victim = int((folder / "pids" / str(random.randint(0, 1))).read_text())
    began = time.monotonic()
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended by itself
        process.wait()
        return False
    status = process.wait(timeout=60)
    counts["slowest"] = max(counts["slowest"], time.monotonic() - began)
    assert status != 0, "the launcher hides that a rank was killed"
    counts["kills"] += 1
    return True


def main() -> None:
    kills, seed = (int(word) for word in [*sys.argv[1:], "20", "1"][:2])
    with tempfile.TemporaryDirectory() as folder:
        counts = kill_and_resume(Path(folder), kills, seed)
    print(
        f"{counts['kills']} kills of one rank; the job ended within {counts['slowest']:.1f} s each time; "
        f"{counts['equal']} of {counts['ended']} runs that were resumed to their end equal the uninterrupted one"
    )
    assert counts["equal"] == counts["ended"] > 0


if __name__ == "__main__":
    main()
