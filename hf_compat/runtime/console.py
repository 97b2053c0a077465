"""Show progress bars and notices of long waits, and log under transformers' names."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from tqdm import TqdmWarning

from hf_compat.runtime.text import brief

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)  # in a notebook without ipywidgets a bar of text is as good
    from tqdm.auto import tqdm

# A bar of tqdm, as text in a terminal and as a widget in a notebook.
progress_bar = functools.partial(tqdm, dynamic_ncols=True)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


PATIENCE_SECONDS = 20.0

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def saying_what_is_awaited(text: str, address: str = "", until: Callable[[], bool] = bool) -> Iterator[None]:
    """Warn once if this context lasts longer than `PATIENCE_SECONDS`.

    Args:
        text: The message.
        address: The host that is waited for. The warning adds that its name cannot be resolved, if so.
        until: Whether the wait is over although the context lasts.
    """

    def say() -> None:
        if until():
            return
        unknown = ""
        if address:
            try:
                socket.getaddrinfo(address, None)
            except OSError as error:
                unknown = f"; the host name {brief(address)} has no address here ({error.strerror or error})"
        logger.warning("%s%s.", text, unknown)

    timer = threading.Timer(PATIENCE_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def has_children() -> bool:
    """Whether this process has child processes. True except on Linux."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    return not lists or any(file.read_text().strip() for file in lists)


_in_place_of_transformers: list[bool] = []  # at most one


def log_as_transformers(wanted: bool) -> None:
    """Log under transformers' names from now on, or under ours again."""
    _in_place_of_transformers[:] = [True] if wanted else []


def follow_level(level: int | None) -> None:
    """Set transformers' verbosity in a patched process, as its Trainer does. None does not change it."""
    if _in_place_of_transformers and level is not None:
        logging.getLogger("transformers").setLevel(level)


class _AboveBars(logging.StreamHandler[TextIO]):
    """Writes lines to stderr, above the progress bars, and redraws the bars below them.

    A notebook shows stderr in red, so there only warnings go to it.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._stderr = self.stream

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout if record.levelno < logging.WARNING and in_notebook() else self._stderr
        with tqdm.external_write_mode(self.stream):
            super().emit(record)


def show_logs(level: int | None) -> None:
    """Set the package's log level, and log to stderr if the program has not set up logging.

    Without a level, the program's own stays, or `INFO` shows the lines at the start of a run.
    """
    package = logging.getLogger("hf_compat")
    if not package.handlers and not logging.getLogger().handlers:
        handler = _AboveBars()
        handler.setFormatter(logging.Formatter("%(message)s"))
        package.addHandler(handler)
    if level is not None:
        package.setLevel(level)
    elif package.level == logging.NOTSET:
        package.setLevel(logging.INFO)


def log_line(line: str, otherwise: logging.Logger | None = None) -> None:
    """Log a line of transformers' Trainer at level info, on its logger. Without a patch it goes to another, if any.

    `transformers.utils.logging.set_verbosity_info()` shows these lines. By default they are hidden.
    """
    shown = logging.getLogger("transformers.trainer") if _in_place_of_transformers else otherwise
    if shown is not None:
        shown.info(line)


def log_ignored_columns(
    columns: Iterable[str], description: str | None, model: str | None, ours: logging.Logger
) -> None:
    """Log the columns of a data set that the model does not take."""
    where = "" if description is None else f"in the {description} set "
    text = (
        f"The following columns {where}don't have a corresponding argument in `{model}.forward` and have been ignored"
    )
    log_line(f"{text}: {', '.join(sorted(columns))}.", ours)


class SharedLogger:
    """Logs messages that transformers logs too. A patched process uses transformers' logger, to which scripts listen.

    Args:
        ours: The name of our logger.
        theirs: The name of transformers' logger.
    """

    def __init__(self, ours: str, theirs: str) -> None:
        self._ours = logging.getLogger(ours)
        self._theirs = logging.getLogger(theirs)
        self._told: set[str] = set()

    def warning_once(self, text: str) -> None:
        """Log a warning about a step, once in this process."""
        if text not in self._told:
            self._told.add(text)
            self.warning(text, stacklevel=2)

    def __getattr__(self, name: str) -> Any:
        """Other methods are those of the logger in use."""
        return getattr(self._theirs if _in_place_of_transformers else self._ours, name)
