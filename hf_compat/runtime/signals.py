"""SIGTERM, Ctrl-C and SLURM's signal while training: noted, and obeyed at the next update's end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from hf_compat.runtime.collectives import CPUAgreement


class StopSignals:
    """Note the first signal that asks to stop, so that a checkpoint can be written before it is obeyed.

    A second Ctrl-C is obeyed at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._agreement: CPUAgreement | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = number

    @contextlib.contextmanager
    def watched(self, stop: bool, requeue: bool = False) -> Iterator[None]:
        """Note signals within this context; Python has them in its main thread only.

        Args:
            stop: Note SIGTERM and SIGINT.
            requeue: Note SIGUSR1, by which SLURM announces the job's end (`#SBATCH --signal=SIGUSR1@90`).
        """
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        watched = [signal.SIGTERM, signal.SIGINT] if stop else []
        # Windows lacks this signal; a handler that is there already is the user's or the launcher's own
        if requeue and hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            watched.append(signal.SIGUSR1)
        self._agreement = CPUAgreement() if watched else None
        before = {number: signal.signal(number, self.note) for number in watched}
        try:
            yield
        finally:
            self._agreement = None
            for number, handler in before.items():
                signal.signal(number, handler)

    def agree(self) -> None:
        """Note a signal that another process of the run has received: all write the checkpoint together."""
        if self._agreement is not None:
            self.received = self._agreement.highest(self.received or 0) or None

    @property
    def asks_for_requeue(self) -> bool:
        """Whether the noted signal is SLURM's."""
        return self.received is not None and self.received == getattr(signal, "SIGUSR1", None)

    def obey(self) -> None:
        """End this process as the noted signal would have: with its usual exit status."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)
