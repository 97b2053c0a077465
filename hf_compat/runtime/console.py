"""Show progress bars, shortened tracebacks and notices of long waits, and log under transformers' names.

Bars are lines in a terminal. In a notebook they are HTML, which needs no widgets and stays in the saved page.
"""

from __future__ import annotations

import contextlib
import functools
import html
import io
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

from tqdm import tqdm

from hf_compat.runtime.launch import variable

_T = TypeVar("_T")

# The text beside an HTML bar: its values are those of `tqdm.format_meter`.
_TEXT = "{desc}{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class _Display(Protocol):
    """What a notebook shows and can show anew: IPython's `DisplayHandle`."""

    def update(self, obj: object) -> None:
        """Show another object in the place of this one."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookOutput:
    """HTML that a cell shows, and shows anew in its place whenever it changes."""

    def __init__(self) -> None:
        self._handle: _Display | None = None

    def show(self, text: str) -> None:
        """Show a text of HTML in place of the one before."""
        from IPython.display import HTML, display

        shown = HTML(text)  # type: ignore[no-untyped-call]  # IPython's
        if self._handle is None:
            self._handle = display(shown, display_id=True)  # type: ignore[no-untyped-call]  # IPython's
        else:
            self._handle.update(shown)


class HtmlBar(tqdm):
    """A bar of tqdm that is an element of HTML.

    Args:
        iterable: Whose items are counted; None where `update` counts.
        show: Called with the HTML whenever it changes, at most four times a second; default: an output of its own.
        options: Those of `tqdm`.
    """

    def __init__(
        self, iterable: Iterable[object] | None = None, *, show: Callable[[str], None] | None = None, **options: object
    ) -> None:
        self.show = show or NotebookOutput().show
        super().__init__(iterable, **{"mininterval": 0.25, "bar_format": _TEXT, **options, "file": io.StringIO()})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Show the bar as it stands; tqdm calls it. An empty `msg` removes the bar."""
        values = self.format_dict
        size = f"value='{values['n']}' max='{values['total']}'" if values["total"] else ""
        bar = f"<progress {size} style='width: 300px; vertical-align: middle'></progress>"
        self.show("" if msg == "" else f"<div>{bar} {html.escape(self.format_meter(**values))}</div>")


def progress_bar(
    iterable: Iterable[_T] | None = None,
    total: int | None = None,
    initial: int = 0,
    leave: bool = True,
    desc: str | None = None,
) -> tqdm[_T]:
    """Return a bar of tqdm for where this process shows its output; the arguments are those of `tqdm`."""
    kind = HtmlBar if in_notebook() else partial(tqdm, dynamic_ncols=True)
    return kind(iterable, total=total, initial=initial, leave=leave, desc=desc)


_OURS = {"hf_compat", "lightning", "lightning_fabric", "pytorch_lightning"}
# What stands between two frames of ours, or of ours and the user's, and says nothing by itself.
_BETWEEN = {"contextlib", "functools", "torch"}

_P = ParamSpec("_P")
_R = TypeVar("_R")


def brief(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Leave inner frames out of the traceback of any error that leaves the method.

    The place where the error was raised stays, whoever's it is. `HF_COMPAT_TRACEBACKS=full` leaves all in.
    """

    @functools.wraps(method)
    def without_inner_frames(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)  # HF_COMPAT_TRACEBACKS=full shows the frames that are left out below
        except BaseException as error:
            if variable("HF_COMPAT_TRACEBACKS") != "full":
                for one in _chain(error):
                    one.__traceback__ = _shortened(one.__traceback__, keeps_first=one is error)
            raise

    return without_inner_frames


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it followed from."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]


def _shortened(trace: TracebackType | None, keeps_first: bool) -> TracebackType | None:
    parts = list(_parts(trace))
    if not parts:
        return None
    *outer, short = parts  # where the error was raised
    shown: list[TracebackType] = []
    hiding = False
    for part in outer:
        package = part.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        hiding = package in _OURS or (hiding and package in _BETWEEN)
        if not hiding or (keeps_first and part is trace):
            shown.append(part)
    for part in reversed(shown):
        short = TracebackType(short, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return short


def _parts(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


PATIENCE_SECONDS = 20.0

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def saying_what_is_awaited(text: str, address: str = "", until: Callable[[], bool] = bool) -> Iterator[None]:
    """Warn once, where this context lasts longer than `PATIENCE_SECONDS`.

    Args:
        text: What is waited for.
        address: The host that is asked; said too where it has none.
        until: Whether it has come meanwhile, though the context lasts.
    """

    def say() -> None:
        if not until():
            logger.warning("%s%s.", text, _unknown_host(address) if address else "")

    timer = threading.Timer(PATIENCE_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def has_children() -> bool:
    """Return whether this process has started others; Linux only, True elsewhere."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    return not lists or any(file.read_text().strip() for file in lists)


def _unknown_host(address: str) -> str:
    """Return words that say that a host has no address now; empty where it has one."""
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        return f"; the host name {address!r} has no address here ({error.strerror or error})"
    return ""


_in_place_of_transformers: list[bool] = []  # at most one


def log_as_transformers(wanted: bool) -> None:
    """Log under transformers' names from now on, or under ours again."""
    _in_place_of_transformers[:] = [True] if wanted else []


class SharedLogger:
    """Logs what transformers logs too: on its logger in a patched process, where scripts listen; else on ours.

    Args:
        ours: The name of our logger.
        theirs: The name of transformers' logger.
    """

    def __init__(self, ours: str, theirs: str) -> None:
        self._ours = logging.getLogger(ours)
        self._theirs = logging.getLogger(theirs)
        self._told: set[str] = set()

    def warning(self, text: str) -> None:
        """Log a warning."""
        self._logger.warning(text, stacklevel=2)

    def warning_once(self, text: str) -> None:
        """Log a warning that a step gives rise to: the first time in this process."""
        if text not in self._told:
            self._told.add(text)
            self._logger.warning(text, stacklevel=2)

    def info(self, text: str) -> None:
        """Log a line of information."""
        self._logger.info(text, stacklevel=2)

    @property
    def _logger(self) -> logging.Logger:
        return self._theirs if _in_place_of_transformers else self._ours
