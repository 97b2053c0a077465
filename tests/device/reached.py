"""List the lines of the package that ask about devices, and that no test of this folder reaches.

    .venv/bin/python tests/device/reached.py

Traces the tests here, the tests of devices beside it, and some configurations of `device_matrix.py`.
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "parity"), str(HERE.parent)]

import device_matrix
import peft  # noqa: F401 - while no device is there: what it imports looks for one
import pytest

PACKAGE = HERE.parents[1] / "hf_compat"
ASKS = re.compile(r"device\.type|is_cuda|torch\.cuda|copies_beside\(|get_device_module")
CONFIGURATIONS = [
    "fp16_overflow_saved",
    "resume_within_an_epoch",
    "cpu_beside_a_device",
    "full_determinism",
    "bf16_full_eval",
]
BESIDE = [
    "trainer_methods/test_device_maps.py",
    "trainer_methods/test_memory_tracker.py",
    "preflight/test_unchanged.py",
]


def asking() -> dict[str, set[int]]:
    """Return the lines that ask, by file; what is said in comments and texts is none."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        lines = path.read_text().splitlines()
        numbers = {n for n, line in enumerate(lines, 1) if ASKS.search(line.partition("#")[0]) and not _is_text(line)}
        if numbers:
            found[str(path)] = numbers
    return found


def _is_text(line: str) -> bool:
    return line.strip().startswith(('"', "'", 'f"')) or line.strip().startswith(("import", "from"))


def main() -> int:
    wanted = asking()
    reached: set[tuple[str, int]] = set()

    def trace(frame, event, _):
        file = frame.f_code.co_filename
        if file not in wanted:
            return None
        reached.add((file, frame.f_lineno))
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    for name in CONFIGURATIONS:
        with tempfile.TemporaryDirectory() as folder:
            device_matrix.run_one("hf_compat", name, Path(folder), "cuda")
    own = [
        str(path) for path in HERE.glob("test_*.py") if path.name not in ("test_pretended.py", "test_device_runs.py")
    ]
    pytest.main(
        [
            *own,
            *(str(HERE.parent / name) for name in BESIDE),
            "-n",
            "0",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]
    )
    sys.settrace(None)
    missed = [(file, line) for file in sorted(wanted) for line in sorted(wanted[file]) if (file, line) not in reached]
    for file, line in missed:
        print(
            f"{Path(file).relative_to(PACKAGE.parent)}:{line}: {Path(file).read_text().splitlines()[line - 1].strip()}"
        )
    total = sum(map(len, wanted.values()))
    print(f"{total - len(missed)} of {total} lines that ask about devices are reached")
    return 0


if __name__ == "__main__":
    sys.exit(main())
