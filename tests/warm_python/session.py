"""The stand-in for the interpreter, for one test session and its workers (a plugin of pytest)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

REAL = sys.executable
CLIENT = Path(__file__).resolve().parent / "client.py"
_FOLDER = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", {}).get("warm_python")
    config.stash[_FOLDER] = given or _new_folder()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Workers of xdist share one warm process."""
    node.workerinput["warm_python"] = node.config.stash[_FOLDER]


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


def _new_folder() -> str:
    given = os.environ.pop("WARM_PYTHON", "")  # of mutants: a warm process listens at its address
    folder = Path(given or tempfile.mkdtemp(prefix="hf_compat-warm-"))
    facts = {"process": os.getpid(), "environment": dict(os.environ), "folder": os.getcwd()}
    (folder / "session.json").write_text(json.dumps(facts))
    stand_in = folder / "python"
    words = [REAL, "-IS", str(CLIENT), str(folder), REAL, str(stand_in)]
    stand_in.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    stand_in.chmod(0o755)
    return str(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let `sys.executable` start forks of the warm process; elsewhere than on Linux it stays what it is."""
    if sys.platform.startswith("linux") and item.get_closest_marker("real_python") is None:
        sys.executable = str(Path(item.config.stash[_FOLDER]) / "python")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    sys.executable = REAL
