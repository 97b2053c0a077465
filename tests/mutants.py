"""Plant random mistakes in the core, one at a time, and print which test notices each."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    python = ROOT / ".venv" / "bin" / "python"
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        spec = importlib.util.spec_from_file_location("environment", ROOT / ".setup" / "environment.py")
        environment = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(environment)
        environment.prepare()
        os.execv(python, [str(python), *sys.argv])
    from mutation.command import main

    sys.exit(main())
