"""List the lines of the package that ask about devices, and that no test of this folder reaches.

    .venv/bin/python tests/sweeps/device/reached.py

Traces the tests here with the processes that they start, the tests of devices beside them, and some configurations of
`device_matrix.py`. The exit status is 1 if a line without a reason is not reached, or a reason is out of date.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[2] / "device"  # the tests
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import peft  # noqa: F401 - while no device is there: what it imports looks for one
import pytest

from helpers.traced import FOLDER, PACKAGE, Line, asking, of_started_processes, tracing
from sweeps.device import device_matrix

# By file and text of a line: why nothing here can reach it.
NOT_REACHED: dict[tuple[str, str], str] = {}
CONFIGURATIONS = ["fp16_overflow_resumed", "resume_within_an_epoch", "cpu_beside_a_device", "full_determinism",
                  "bf16_full_eval"]  # fmt: skip
BESIDE = ["trainer_methods/test_device_maps.py", "trainer_methods/test_memory_tracker.py",
          "preflight/test_unchanged.py"]  # fmt: skip
# Its own subject, and no line of the package.
LEFT_OUT = ("test_pretended.py",)


def run_all() -> set[Line]:
    """Run configurations and tests, and return all lines that they and their processes reached."""
    with tempfile.TemporaryDirectory() as started, tracing(asking()) as reached:
        os.environ[FOLDER] = started
        for name in CONFIGURATIONS:
            with tempfile.TemporaryDirectory() as folder:
                device_matrix.run_one("hf_compat", name, Path(folder), "cuda")
        own = [str(path) for path in sorted(HERE.glob("test_*.py")) if path.name not in LEFT_OUT]
        quiet = ["-n", "0", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        pytest.main([*own, *(str(HERE.parent / name) for name in BESIDE), *quiet])
        os.environ.pop(FOLDER, None)
        return reached | of_started_processes(Path(started))


def main() -> int:
    wanted = asking()
    reached = run_all()
    missed, reasons, total = [], dict(NOT_REACHED), 0
    for file in sorted(wanted):
        texts = Path(file).read_text().splitlines()
        for number in sorted(wanted[file]):
            name, text = str(Path(file).relative_to(PACKAGE)), texts[number - 1].strip()
            total += 1
            if (file, number) in reached:
                continue
            reason = reasons.pop((name, text), "")
            print(f"{name}:{number}: {text}" + (f"\n    {reason}" if reason else ""))
            missed += [] if reason else [text]
    for (name, text), _ in reasons.items():
        print(f"{name}: a reason for a line that is reached, or not there: {text}")
    explained = len(NOT_REACHED) - len(reasons)
    print(
        f"{total - len(missed) - explained} of {total} lines that ask about devices are reached, {explained} explained"
    )
    return 1 if missed or reasons else 0


if __name__ == "__main__":
    sys.exit(main())
