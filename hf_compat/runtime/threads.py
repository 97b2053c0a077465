"""Threads that write files, and waits for them that Ctrl-C does not end early.

Python 3.11 and 3.12 take a running thread for ended once Ctrl-C has interrupted its `join`: the next `join` returns at
once, and so does the end of a `ThreadPoolExecutor`. A `Future` can be waited for again. A `ThreadPoolExecutor` also
takes no more work once the main thread has ended, and a save in another thread still needs it.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


_BESIDE: dict[Future[None], int] = {}  # tasks that have not ended, each with its process: a forked one has no threads


@functools.cache
def _wait_at_exit() -> None:
    """From now on, wait for such tasks when the process ends. Ctrl-C makes Python wait for no thread there."""

    def wait() -> None:
        with contextlib.suppress(KeyboardInterrupt):  # logged already
            end([task for task, process in tuple(_BESIDE.items()) if process == os.getpid()])

    atexit.register(wait)


def start(task: Future[None], function: Callable[[], None], name: str) -> None:
    """Call a function for a task in a thread of its own. The process ends after it."""
    _wait_at_exit()
    _BESIDE[task] = os.getpid()
    task.add_done_callback(_BESIDE.pop)
    threading.Thread(target=work_on, args=(task, function), name=name, daemon=False).start()


def work_on(task: Future[T], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function for a task, which then has its result or its error. A cancelled task calls nothing."""
    if not task.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        task.set_exception(error)
        del task  # the error holds this frame, which would keep it alive
    else:
        task.set_result(result)


def end(tasks: Iterable[Future[T]]) -> None:
    """Cancel the tasks that have not begun, and wait for the others. Ctrl-C is raised after that."""
    interruption: BaseException | None = None
    left = list(tasks)
    while left:
        try:
            while left:
                if not left[-1].cancel():
                    left[-1].exception()  # waits, and raises nothing of the task's
                left.pop()
        except BaseException as error:  # the user's own signal handler may raise anything
            interruption = error
            text = "Files are being written, and this process ends after that. `kill -9 %d` ends it at once."
            logger.warning(text, os.getpid())
    if interruption is not None:
        raise interruption


class Helpers(Generic[T]):
    """Up to `count` threads that help one block. When it is left, even by Ctrl-C, none of them works any more."""

    def __init__(self, count: int, name: str = "hf_compat-helper") -> None:
        self._count, self._name = count, name
        self._tasks: list[Future[T]] = []
        self._lock = threading.Lock()  # of the two below
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._working = 0
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Let a thread call a function."""
        task: Future[T] = Future()
        self._tasks.append(task)
        with self._lock:
            self._waiting.append(lambda: work_on(task, function, *args, **kwargs))
            is_more = self._working < self._count
            self._working += is_more
        if is_more:
            thread = threading.Thread(target=self._work, name=self._name)
            self._threads.append(thread)
            thread.start()
        return task

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._working -= 1
                    return
                work = self._waiting.popleft()
            work()

    def __enter__(self) -> Helpers[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end(self._tasks)
        for thread in self._threads:
            if thread.is_alive():  # Ctrl-C may have come before it began
                thread.join()


class BackgroundWriter:
    """Runs one write at a time beside the training. The next call raises its error. The process exits after it."""

    def __init__(self) -> None:
        self.under_way: Future[None] | None = None  # the last write, until its error is asked for

    def submit(self, *parts: Callable[[], object]) -> None:
        """Start a write of several parts. First wait for the write before, and raise its error."""
        self.wait()
        self.under_way = Future()

        def write() -> None:
            for part in parts:
                part()

        start(self.under_way, write, "hf_compat-checkpoint")

    def fail(self, error: BaseException) -> None:
        """Keep an error for the next call, as if a write had failed by it."""
        self.under_way = Future()
        self.under_way.set_exception(error)

    def wait(self, only_if_ended: bool = False) -> None:
        """Wait for the running write, and raise its error. With `only_if_ended` one that still runs is left alone."""
        if only_if_ended and self.under_way is not None and not self.under_way.done():
            return
        error = self.settle()
        if error is not None:
            raise error

    def settle(self) -> BaseException | None:
        """Wait for the running write, and return its error. For a caller with another error to raise.

        Ctrl-C is raised when the write has ended. If it has interrupted `submit` before the write began, the write
        never begins.
        """
        write = self.under_way
        if write is None:
            return None
        end([write])
        self.under_way = None
        return None if write.cancelled() else write.exception()
