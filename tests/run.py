"""The README's test command: set up the environment, then lint, type check and test.

python3 tests/run.py [--quick] [--changed [REV]] [--record] [pytest arguments]

Without arguments the suite runs on four workers, without the further rows of long tables, which `-m matrix` runs. That
is for two cores: many tests wait for processes or timeouts. Their files are in memory where the machine lends enough:
some cut the power a hundred times, and each flushes. The type checker runs beside it. Tests
with ports, signals and other processes can fail on a crowded machine: where five or fewer failed, these run again,
alone and on the disk. Their first failures stay printed, and what passes alone is named at the end.

--quick takes the fastest tests of each file, all of them where a file takes a few seconds. --changed takes the tests
of what was changed since a commit (HEAD, if none is named) and of what imports it. --record writes
tests/durations.json anew, by which the files are divided over the workers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
MOST_TO_REPEAT = 5
TESTS_FAILED = 1  # pytest's exit status
MEMORY = Path("/dev/shm")  # Linux's folder in memory
BYTES_OF_THE_SUITE = 4 << 30  # its files are a tenth of it
ON_WORKERS = ("-m", "not matrix", "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder")


def _environment():
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".setup" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _suite(environment, words: list[str]) -> int:
    """Run the tests on four workers; return pytest's exit status, that of the second run where few have failed."""
    LAST_FAILED.unlink(missing_ok=True)
    has_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > BYTES_OF_THE_SUITE
    with tempfile.TemporaryDirectory(prefix="hf_compat-", dir=MEMORY if has_memory else None) as folder:
        Path(folder).chmod(0o1777)  # as /tmp: some tests act as another user
        status = environment.status("-m", "pytest", *ON_WORKERS, *words, TMPDIR=folder)
    failed = list(json.loads(LAST_FAILED.read_text())) if status == TESTS_FAILED and LAST_FAILED.is_file() else []
    if not 0 < len(failed) <= MOST_TO_REPEAT:
        return status
    print(f"\n{len(failed)} failed beside other tests; now alone:", flush=True)
    status = environment.status("-m", "pytest", "-n", "0", *failed)
    if status == 0:
        print("FAILED BESIDE OTHERS, PASSED ALONE:", *failed, sep="\n  ", flush=True)
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description="Lint, type check and test.", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="the fastest tests of each file")
    parser.add_argument("--changed", nargs="?", const="HEAD", metavar="REV", help="tests of what was changed since REV")
    parser.add_argument("--record", action="store_true", help="write tests/durations.json anew")
    chosen, selected = parser.parse_known_args()
    words = [word for word, is_set in (("--quick", chosen.quick), ("--record", chosen.record)) if is_set]
    words += ["--changed", chosen.changed] if chosen.changed else []
    environment = _environment()
    environment.run("-m", "ruff", "check", ".")
    environment.run("-m", "ruff", "format", "--check", ".")
    with tempfile.TemporaryFile("w+") as said:
        checking = environment.start("-m", "mypy", stdout=said, stderr=subprocess.STDOUT)
        if selected:
            status = environment.status("-m", "pytest", *words, *selected)
        else:
            status = _suite(environment, words)
        checked = checking.wait()
        said.seek(0)
        print("\nmypy:", said.read(), flush=True)
    sys.exit(status or checked)


if __name__ == "__main__":
    main()
