"""Tracebacks of what people call: their own frames, without the ones between of this package and of Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from hf_compat.runtime.launch import variable

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
