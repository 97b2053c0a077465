"""Make the virtual environment that the README's commands run in: once, and again when what it holds changes.

Needs nothing but Python 3.11 and pip. Safe to repeat: a finished environment is recognised by its stamp.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / ".setup" / "constraints.txt"
VENV = ROOT / ".venv"
STAMP = VENV / "hf_compat.stamp"


def _python() -> Path:
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _fingerprint() -> str:
    content = b"".join(path.read_bytes() for path in (ROOT / "pyproject.toml", CONSTRAINTS))
    return hashlib.sha256(content + str(ROOT).encode() + sys.version.encode()).hexdigest()


def prepare() -> str:
    """Make the environment where it is missing or out of date, and return its Python."""
    if sys.version_info < (3, 11):
        sys.exit(f"hf_compat needs Python 3.11 or newer, this is {sys.version.split()[0]}.")
    if STAMP.is_file() and STAMP.read_text() == _fingerprint():
        return str(_python())
    print(f"setting up {VENV} (once; some minutes) …", flush=True)
    venv.create(VENV, with_pip=True, clear=not STAMP.is_file())
    install = [str(_python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(CONSTRAINTS)]
    install += ["--no-compile"]
    # torch first and by its exact version: with it in place, no other package asks for a newer build
    subprocess.run([*install, "torch==2.13.0"], check=True, env=clean_variables())
    subprocess.run([*install, "-e", f"{ROOT}[test]"], check=True, env=clean_variables())
    # pip would compile one module after another. Some are templates, which cannot be compiled
    subprocess.run([str(_python()), "-m", "compileall", "-q", "-j", "0", str(VENV / "lib")], stdout=subprocess.DEVNULL)
    STAMP.write_text(_fingerprint())
    return str(_python())


def clean_variables() -> dict[str, str]:
    """Return this process's variables without those that would point Python elsewhere."""
    drop = ("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def start(*command: str, variables: Mapping[str, str] = {}, **options: object) -> subprocess.Popen[bytes]:
    """Start Python in the environment, with more variables; options as of `subprocess.Popen`."""
    return subprocess.Popen([prepare(), *command], cwd=ROOT, env={**clean_variables(), **variables}, **options)


def status(*command: str, **variables: str) -> int:
    """Run Python in the environment, with more variables; return its exit status."""
    return start(*command, variables=variables).wait()


def run(*command: str) -> None:
    """Run Python in the environment; its exit status becomes ours where it is not 0."""
    if ended := status(*command):
        sys.exit(ended)
