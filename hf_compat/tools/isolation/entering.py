"""Run a command in isolation and end as it does: `enter(PLAN, COMMAND…)`.

This process stays outside of the isolation. It passes signals on, and ends processes that the command has left. It
sorts or removes the files as the plan says, even if its parent is killed.
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
_SECONDS_TO_DIE = 30  # after SIGKILL, because a busy machine takes a while
_NOT_ISOLATED = 125
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def enter(plan_file: str, *command: str) -> int:
    """Run a command, and give its status, negative for a signal. Without a command, only try the isolation.

    Args:
        plan_file: The file of a `Plan`. The read-only folders, or the reason for a refusal, are written beside it.
        command: The command.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts the command, too
    signal.signal(signal.SIGALRM, lambda *_: _send(child, signal.SIGKILL))
    if os.getppid() != starter:  # the parent was killed meanwhile
        _pass_on(child, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _end_children()
    if command:
        try:
            plan.settle((overlay.settle, copies.settle))
        except OSError as error:  # such as a full disk, while the status of the command counts
            sys.stderr.write(f"not all that was written could be sorted into {plan.in_folder('files')}: {error}\n")
    if not plan.is_kept and os.getppid() != starter:
        plan.remove()
    return status


def _become(plan: Plan, command: tuple[str, ...]) -> None:
    """Enter the isolation and become the command. It does not return."""
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
                tempfile.TemporaryFile(dir=".").close()  # some systems mount an overlay that cannot be written to
            os._exit(0)
        os.environ[VARIABLE] = plan.folder  # noqa: TID251 - the environment of the command
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


def _end_children() -> None:
    """End processes that the command has left. Their parent is this process now."""
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
    """Run a command in isolation, and end with its status or signal."""
    status = enter(*words)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
