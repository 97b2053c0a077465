"""Run a function in a process of its own, and send it signals."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest


def forked(body: Callable[[], None]) -> int:
    """Run a function in a process of its own, without the start-up time; returns the process id."""
    pid = os.fork()
    if pid:
        return pid
    faulthandler.dump_traceback_later(20)  # where it stands, for one that does not go on
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    try:
        body()
        os._exit(0)
    except KeyboardInterrupt:
        os._exit(77)
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 99)
    except BaseException:
        traceback.print_exc()
        os._exit(98)


def ended(pid: int, within: float) -> int:
    """Wait for a process, and return what `subprocess` calls its return code."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail(f"the process did not end within {within} s")


def wait_for(mark: Path) -> None:
    until = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < until, f"{mark.name} never came"
        time.sleep(0.01)
