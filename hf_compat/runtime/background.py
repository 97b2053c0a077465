"""Checkpoints written while training goes on: one thread writes what was copied (`frozen_copies.py`)."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Run one write at a time beside training. The next call raises its error; the process exits after it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Start a write, after waiting for the one before; raise the error of that one."""
        self.wait()
        # no daemon: the interpreter does not exit before the checkpoint is whole
        self._thread = threading.Thread(target=self._run, args=(write,), name="hf_compat-checkpoint", daemon=False)
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise the error of a write that has ended."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the write under way, and raise its error."""
        error = self.settle()
        if error is not None:
            raise error

    def settle(self) -> BaseException | None:
        """Wait for the write under way, and return its error: for whoever has another one to raise."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error
