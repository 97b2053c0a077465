"""Child processes: signals about them while they are started, and whether one of them has died. Processes only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType

SIGCHLD: int | None = getattr(signal, "SIGCHLD", None)  # Windows has none
_DEATH_SECONDS = 5.0  # how long the end of a process takes at most, once its connections are closed


class HeldChildSignals:
    """Within this context the handler of SIGCHLD waits: torch's raises an error where a loader worker has died.

    A handler runs between any two instructions, also in the hooks around a fork. There Python drops its error, and what
    such a hook was about to release stays taken: `logging`'s lock, for which every other thread then waits for ever.

    Python has signals in its main thread only; in another one nothing is done.
    """

    def __init__(self) -> None:
        self._is_holding = self._has_come = False
        self._before = signal.SIG_DFL if SIGCHLD is None else signal.getsignal(SIGCHLD)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding:
            self._has_come = True
        elif callable(self._before):  # torch has put its own handler before this one, which calls it
            self._before(number, frame)

    def __enter__(self) -> HeldChildSignals:
        if SIGCHLD is not None and threading.current_thread() is threading.main_thread():
            self._is_holding = True
            self._before = signal.signal(SIGCHLD, self._note) or signal.SIG_DFL  # None: not of Python's
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_holding and SIGCHLD is not None:
            self._is_holding = False
            if signal.getsignal(SIGCHLD) == self._note:  # else torch has put its own there meanwhile
                signal.signal(SIGCHLD, self._before)

    def deliver(self) -> None:
        """Call the handler where a signal has come meanwhile."""
        has_come, self._has_come = self._has_come, False
        if SIGCHLD is None or not has_come:
            return
        handler = signal.getsignal(SIGCHLD)
        if callable(handler):
            handler(SIGCHLD, None)


def dead_among(processes: Iterable[BaseProcess]) -> list[BaseProcess]:
    """Return the processes that have died; where all seem to live, the end of one is waited for, a few seconds."""
    waiting = {process.sentinel: process for process in processes}
    ended = [waiting[sentinel] for sentinel in connection.wait(list(waiting), timeout=_DEATH_SECONDS)]  # type: ignore[index]  # of those
    for process in ended:
        process.join(_DEATH_SECONDS)  # its files are closed a moment before it has ended
    return ended
