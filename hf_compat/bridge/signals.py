"""SIGTERM and Ctrl-C while training: noted when they come, obeyed at the next update's end. Process signals only."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class StopSignals:
    """Note the first signal that asks to stop, so that a checkpoint can be written before it is obeyed.

    A second Ctrl-C is obeyed at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = number

    @contextlib.contextmanager
    def watched(self, enabled: bool) -> Iterator[None]:
        """Note signals within this context, where enabled; Python has them in its main thread only."""
        self.received = None
        if not enabled or threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {
            number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def obey(self) -> None:
        """End the process's work as the noted signal asks: with its usual exit status."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)
