"""The README's test command: set up the environment, then lint, type check and test.

python3 tests/run.py [pytest arguments]

Without arguments the whole suite runs, two files at a time. Tests with ports, signals and other processes can fail on a
crowded machine: where at most five tests failed, these run again, alone. Their first failures stay printed, and what
passes alone is named at the end.
"""

from __future__ import annotations

import importlib.util
import json
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


def _whole_suite(environment) -> int:
    """Run every test; return pytest's exit status, that of the second run where few have failed."""
    LAST_FAILED.unlink(missing_ok=True)
    status = environment.status("-m", "pytest", "-n", "2", "--dist", "loadfile")
    failed = list(json.loads(LAST_FAILED.read_text())) if status == TESTS_FAILED and LAST_FAILED.is_file() else []
    if not 0 < len(failed) <= MOST_TO_REPEAT:
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
