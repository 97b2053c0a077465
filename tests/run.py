"""The README's test command: set up the environment, then lint, type check and test.

python3 tests/run.py [pytest arguments]

Without arguments the suite runs, two files at a time, without the further rows of long tables, which `-m matrix` runs.
Files that fork run in processes of their own, which no other test has filled with threads: a fork inherits their locks,
and may wait for one for ever. Tests with ports, signals and other processes can fail on a crowded machine: where five
or fewer failed, these run again, alone. Their first failures stay printed, and what passes alone is named at the end.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
MOST_TO_REPEAT = 5
TESTS_FAILED = 1  # pytest's exit status


def _environment():
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".setup" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _forking_files() -> list[str]:
    """List the files whose tests fork the process that runs them."""
    forks = re.compile(r"^(import|from) forking\b|\bos\.fork\(", re.MULTILINE)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if forks.search(path.read_text())]


def _failed_of(environment, *selection: str) -> tuple[int, list[str]]:
    """Run tests two files at a time; return pytest's exit status, and what has failed."""
    LAST_FAILED.unlink(missing_ok=True)
    status = environment.status("-m", "pytest", "-m", "not matrix", "-n", "2", "--dist", "loadfile", *selection)
    return status, list(json.loads(LAST_FAILED.read_text())) if status == TESTS_FAILED and LAST_FAILED.is_file() else []


def _whole_suite(environment) -> int:
    """Run every test; return pytest's exit status, that of the second run where few have failed."""
    forking = _forking_files()
    runs = [_failed_of(environment, *forking), _failed_of(environment, *(f"--ignore={path}" for path in forking))]
    status = max(status for status, _ in runs)
    failed = [test for _, tests in runs for test in tests]
    if status != TESTS_FAILED or not 0 < len(failed) <= MOST_TO_REPEAT:
        return status
    print(f"\n{len(failed)} failed beside other tests; now alone:", flush=True)
    status = environment.status("-m", "pytest", "-n", "0", *failed)
    if status == 0:
        print("FAILED BESIDE OTHERS, PASSED ALONE:", *failed, sep="\n  ", flush=True)
    return status


def main() -> None:
    environment = _environment()
    environment.run("-m", "ruff", "check", ".")
    environment.run("-m", "ruff", "format", "--check", ".")
    environment.run("-m", "mypy")
    if sys.argv[1:]:
        environment.run("-m", "pytest", *sys.argv[1:])
    else:
        sys.exit(_whole_suite(environment))


if __name__ == "__main__":
    main()
