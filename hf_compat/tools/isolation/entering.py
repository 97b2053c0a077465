"""Runs a command in isolation and ends as it does: `enter(PLAN, COMMAND…)`. The standard library only.

This process stays outside of the isolation: it passes signals on, ends what the command has left running, and leaves
of the isolation what the plan says, also where whoever has started it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from types import FrameType

from hf_compat.tools.isolation import copies, overlay
from hf_compat.tools.isolation.plan import VARIABLE, Plan

_END_WITH_PARENT, _ADOPT = 1, 36  # prctl
_SECONDS_TO_END = 3
_SECONDS_TO_DIE = 30  # after SIGKILL; on a machine with too much to do it takes a while
_NOT_ISOLATED = 125
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def enter(plan_file: str, *command: str) -> int:
    """Run a command, without one try whether it could be run; returns its status, negative for a signal.

    Args:
        plan_file: Of a `Plan`. What is read-only is written beside it, or why there is no isolation.
        command: What is run.
    """
    plan = Plan.read(plan_file)
    starter = os.getppid()
    _prctl(_ADOPT, 1)
    child = os.fork()
    if child == 0:
        _become(plan, command)
    _prctl(_END_WITH_PARENT, signal.SIGTERM)
    for number in _PASSED_ON:
        signal.signal(number, lambda told, _: _pass_on(child, told))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells the command, too
    signal.signal(signal.SIGALRM, lambda *_: _send(child, signal.SIGKILL))
    if os.getppid() != starter:  # killed in this instant
        _pass_on(child, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _end_what_is_left()
    if command:
        try:
            plan.settle()
        except OSError as error:  # the disk is full, say: how the command has ended counts
            sys.stderr.write(f"not all that was written could be sorted into {plan.in_folder('files')}: {error}\n")
    if not plan.is_kept and os.getppid() != starter:
        plan.remove()
    return status


def _become(plan: Plan, command: tuple[str, ...]) -> None:
    """Enter the isolation and become the command; does not return."""
    try:
        read_only: list[str] = []
        if plan.how == "overlay":
            read_only = overlay.enter(plan)
        else:
            copies.restrict(plan)
        _prctl(_END_WITH_PARENT, signal.SIGTERM)
        os.chdir(plan.inside(plan.working_folder))
        with open(plan.in_folder("entered.json"), "w", encoding="utf-8") as file:
            json.dump({"read_only": read_only}, file)
        if not command:
            if os.access(".", os.W_OK):
                tempfile.TemporaryFile(dir=".").close()  # some systems mount an overlay, and let nobody write
            os._exit(0)
        os.environ[VARIABLE] = plan.folder  # noqa: TID251 - the command's, which this process becomes
        os.execvp(command[0], command)
    except OSError as error:
        with open(plan.in_folder("refused"), "w", encoding="utf-8") as file:
            file.write(str(error))
        if command:
            sys.stderr.write(f"not isolated: {error}\n")
    finally:
        os._exit(_NOT_ISOLATED)


def _pass_on(child: int, number: int) -> None:
    _send(child, number)
    if number in (signal.SIGTERM, signal.SIGHUP):
        signal.alarm(_SECONDS_TO_END)


def _end_what_is_left() -> None:
    """End processes that the command has left: their parent is this one now."""
    until = time.monotonic() + _SECONDS_TO_DIE
    while time.monotonic() < until:
        for child in _children():
            _send(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        if not list(_children()):
            return
        time.sleep(0.02)


def _children() -> Iterator[int]:
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    yield int(name)


def _send(process: int, number: int, _: FrameType | None = None) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(words: list[str]) -> None:
    """Run a command in isolation, and end as it ended."""
    status = enter(*words)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
