"""The README's test command: set up the environment, then lint, type check and test.

python3 tests/run.py [pytest arguments]
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _environment():
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".setup" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    environment = _environment()
    environment.run("-m", "ruff", "check", ".")
    environment.run("-m", "ruff", "format", "--check", ".")
    environment.run("-m", "mypy")
    arguments = sys.argv[1:] or ["-n", "2", "--dist", "loadfile"]
    environment.run("-m", "pytest", *arguments)


if __name__ == "__main__":
    main()
