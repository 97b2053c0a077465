"""Show progress bars, shortened tracebacks and notices of long waits, and log under transformers' names."""

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
from types import TracebackType
from typing import Any, ParamSpec, TextIO, TypeVar

from tqdm import TqdmWarning

from hf_compat.errors import HfCompatError
from hf_compat.runtime.launch import environment
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


_OURS = {"hf_compat", "lightning", "lightning_fabric", "pytorch_lightning"}
# Packages whose frames between two of ours, or between ours and the user's, explain nothing.
_BETWEEN = {"contextlib", "functools", "torch"}
_CALLS_OF_FORWARD = "torch.nn.modules.module"  # nor do two frames for each module, between the user's

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_brief_traceback(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Omit inner frames from the traceback of any error that leaves the method, which the object may explain before.

    The frame that raised the error stays, unless it is one of ours and the error says it all. With
    `HF_COMPAT_TRACEBACKS=full` all frames stay.
    """

    @functools.wraps(method)
    def without_inner_frames(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)  # HF_COMPAT_TRACEBACKS=full shows the frames that are left out below
        except BaseException as error:
            explain = getattr(args[0], "_explain_error", None) if args and method.__name__ != "__init__" else None
            if explain is not None and isinstance(error, Exception):
                explain(error)
            if environment.get("HF_COMPAT_TRACEBACKS") != "full":
                waiting: list[BaseException | None] = [error]
                seen: set[int] = set()
                while waiting:  # the error, and those that it followed from
                    one = waiting.pop()
                    if one is not None and id(one) not in seen:
                        seen.add(id(one))
                        one.__traceback__ = _shortened(one, keeps_first=one is error)
                        waiting += [one.__cause__, one.__context__]
            raise

    return without_inner_frames


def _shortened(error: BaseException, keeps_first: bool) -> TracebackType | None:
    trace, parts = error.__traceback__, []
    while trace is not None:
        parts.append(trace)
        trace = trace.tb_next
    shown: list[TracebackType] = []
    hiding = False
    for part in parts:
        module = part.tb_frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        hiding = package in _OURS or (hiding and package in _BETWEEN)
        explains_nothing = hiding or module == _CALLS_OF_FORWARD
        if part is parts[-1]:  # where the error was raised
            explains_nothing = isinstance(error, HfCompatError) and package == "hf_compat"
        if not explains_nothing or (keeps_first and part is parts[0]):
            shown.append(part)
    short: TracebackType | None = None
    for part in reversed(shown):
        short = TracebackType(short, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return short


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
