"""Shorten the tracebacks of errors that leave the package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from hf_compat.errors import HfCompatError
from hf_compat.runtime.launch import environment

_OURS = {"hf_compat", "lightning", "lightning_fabric", "pytorch_lightning"}
_BETWEEN = {"contextlib", "functools"}  # their frames between two of ours explain nothing
_PASSES_ON = "torch"  # nor do its, as those of `Sequential`, unless it raised the error

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_brief_traceback(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Omit inner frames from the traceback of any error that leaves the method, which the object may explain before.

    The frame that raised the error stays. Of an error of ours, which says it all, no frame of ours stays. With
    `HF_COMPAT_TRACEBACKS=full` all frames do.
    """

    @functools.wraps(method)
    def without_inner_frames(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        __tracebackhide__ = True  # IPython and pytest would show seven lines of it
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
                        says_it_all = isinstance(one, HfCompatError)
                        one.__traceback__ = _shortened(one, keeps_first=one is error and not says_it_all)
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
        package = part.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        is_made = part.tb_frame.f_code.co_filename == "<string>"  # the `__init__` of a dataclass, with all parameters
        hiding = package in _OURS or (hiding and (package in _BETWEEN or is_made))
        explains_nothing = hiding or package == _PASSES_ON
        if part is parts[-1]:  # where the error was raised
            explains_nothing = isinstance(error, HfCompatError) and package == "hf_compat"
        if not explains_nothing or (keeps_first and part is parts[0]):
            shown.append(part)
    short: TracebackType | None = None
    for part in reversed(shown):
        short = TracebackType(short, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return short
