"""Note SIGTERM, Ctrl-C and SLURM's signal while training, and act at the next update's end.

`requeue` queues a SLURM job again, and the next run in its folder resumes. Signals about child processes wait while a
child is started.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType

from hf_compat.errors import InertArgumentWarning, warn_user
from hf_compat.runtime.collectives import highest_on_host
from hf_compat.runtime.launch import slurm_job_id

logger = logging.getLogger(__name__)


Handler = Callable[[int, FrameType | None], object] | int | None


class StopSignals:
    """Note the first signal that asks to stop, so that a checkpoint can be written before it is obeyed.

    A second Ctrl-C is obeyed at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.are_watched = False  # otherwise no process of the run notes any
        self._timeout = 0.0  # in seconds
        self._handlers: dict[int, Handler] = {}  # the previous ones

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = number

    @contextlib.contextmanager
    def watched(self, stop: bool, requeue: bool = False, timeout_seconds: float = 1800.0) -> Iterator[None]:
        """Note signals within this context, and restore their handlers. Python allows it in the main thread only.

        Args:
            stop: Note SIGTERM and SIGINT.
            requeue: Note SIGUSR1, with which SLURM announces the job's end (`#SBATCH --signal=SIGUSR1@90`).
            timeout_seconds: How long a process waits for the others to agree on a signal.
        """
        self.received = None
        self._handlers = {}
        self.are_watched, self._timeout = stop or requeue, timeout_seconds  # in all processes, whatever their handlers
        if threading.current_thread() is threading.main_thread():
            ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # it is under `nohup`
            wanted: list[int] = [signal.SIGTERM, *([] if ignored else [signal.SIGINT])] if stop else []
            # Windows lacks this signal. A handler that exists is the user's or the launcher's
            if requeue and hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
                wanted.append(signal.SIGUSR1)
            for number in wanted:
                handler = signal.getsignal(number)
                if handler is not None:  # Python cannot restore a handler of C code
                    self._handlers[number] = handler
                    signal.signal(number, self.note)
        elif stop:
            warn_user(
                "`enable_jit_checkpoint=True` has no effect outside the main thread: Python handles signals there.",
                InertArgumentWarning,
            )
        try:
            yield
        finally:
            self.are_watched = False
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self.note:  # else the user has installed another
                    signal.signal(number, handler)
        # The training has ended before an update could obey, so the signal acts as without a training
        late, self.received = self.received, None
        if late is not None:
            signal.raise_signal(late)

    def agree(self) -> bool:
        """Whether a process of the run has received a signal, as all write the checkpoint together.

        A signal that arrives during the exchange is kept for the next one, because the other processes cannot know it.
        """
        [agreed] = highest_on_host([self.received or 0], self._timeout)
        if agreed:
            self.received = agreed
        return bool(agreed)

    @property
    def asks_for_requeue(self) -> bool:
        """Whether the noted signal is SLURM's."""
        return self.received is not None and self.received == getattr(signal, "SIGUSR1", None)

    def obey(self) -> None:
        """End this process as the noted signal would, by the user's handler or with its usual exit status.

        It returns if the user's handler does.
        """
        number, self.received = self.received, None
        if number is None:
            return
        handler = self._handlers.get(number)
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, None)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)


# The file beside the checkpoints that names the job which resumes from the newest of them.
REQUEUED_NAME = "requeued.json"


def requeue(folder: str) -> None:
    """Ask SLURM to queue this job again, and note in the output folder that it resumes then.

    A refusal is logged, not raised, because the checkpoint exists and the job may be queued by hand.
    """
    job = slurm_job_id()
    if job is None:
        return
    with open(os.path.join(folder, REQUEUED_NAME), "w", encoding="utf-8") as file:
        json.dump({"job": job}, file)
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        reason = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        logger.error("SLURM did not queue job %s again: %s. Run `scontrol requeue %s`.", job, reason, job)
    else:
        logger.info("SLURM has queued job %s again.", job)


def is_requeued(folder: str) -> bool:
    """Whether this job was queued again while it trained into that folder."""
    path, job = os.path.join(folder, REQUEUED_NAME), slurm_job_id()
    if job is None or not os.path.isfile(path):
        return False
    try:
        with open(path, encoding="utf-8") as file:
            return bool(json.load(file)["job"] == job)
    except (ValueError, KeyError, TypeError):
        logger.warning("%s cannot be read; training starts from the beginning.", path)
        return False


SIGCHLD: int | None = getattr(signal, "SIGCHLD", None)  # Windows has none
_DEATH_SECONDS = 5.0  # at most, between the end of its connections and of a process


@contextlib.contextmanager
def holding_child_signals() -> Iterator[Callable[[], None]]:
    """Make the handler of SIGCHLD wait within this context, in the main thread. Yield what calls it afterwards.

    torch's handler raises an error when a loader worker has died. It may run in the hooks around a fork. Python drops
    the error there, and the hook does not release `logging`'s lock, so that other threads wait for it forever.
    """
    held: list[int] = []

    def deliver() -> None:
        handler = signal.getsignal(held.pop()) if held else None
        if callable(handler):
            handler(signal.SIGCHLD, None)

    if SIGCHLD is None or threading.current_thread() is not threading.main_thread():
        yield deliver
        return
    before, is_holding = signal.getsignal(SIGCHLD), True

    def note(number: int, frame: FrameType | None) -> None:
        if is_holding:
            held[:] = [number]  # once, however often it came
        elif callable(before):  # torch's new handler calls this one
            before(number, frame)

    signal.signal(SIGCHLD, note)
    try:
        yield deliver
    finally:
        is_holding = False
        if signal.getsignal(SIGCHLD) is note:  # else torch has installed another
            signal.signal(SIGCHLD, signal.SIG_DFL if before is None else before)  # None is a handler of C code


def dead_among(processes: Iterable[BaseProcess]) -> list[BaseProcess]:
    """List the processes that have died, after waiting a few seconds for the first."""
    waiting = {process.sentinel: process for process in processes}
    ended = [waiting[sentinel] for sentinel in connection.wait(list(waiting), timeout=_DEATH_SECONDS)]  # type: ignore[index]  # of those
    for process in ended:
        process.join(_DEATH_SECONDS)  # its files are closed a moment earlier
    return ended
