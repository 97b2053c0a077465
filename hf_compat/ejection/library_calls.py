"""How schedules of torch and streams of `datasets` were made: the calls of these libraries, kept while the script runs.

A schedule's class is listened to; a function of transformers that makes one is read from the frames under way.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

from torch.optim import lr_scheduler

# What a call was given, of whatever types.
Given = tuple[tuple[object, ...], Mapping[str, object]]
_MAKERS = ("transformers.optimization", "hf_compat.optim.lr_schedulers")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that made something.

    Args:
        of: The module of a function, by name; the object, or class, of a method.
        name: Of the function or method.
        given: What it was given; `[]` as a name stands for an item, and is given its key.
    """

    of: object
    name: str
    given: Given


Keep = Callable[[object, Given | Call], None]


@contextlib.contextmanager
def schedules_watched(keep: Keep) -> Iterator[None]:
    """Tell how each schedule of torch, or of a class that inherits from one, is made within."""
    inits = {
        kind: vars(kind)["__init__"]
        for kind in vars(lr_scheduler).values()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "__init__" in vars(kind)
    }
    for kind, init in inits.items():
        kind.__init__ = _telling(init, keep)  # type: ignore[method-assign]  # given back below
    try:
        yield
    finally:
        for kind, init in inits.items():
            kind.__init__ = init  # type: ignore[method-assign]  # as it was


def _telling(init: Callable[..., None], keep: Keep) -> Callable[..., None]:
    @functools.wraps(init)
    def init_and_tell(self: object, *positional: object, **named: object) -> None:
        frame = inspect.currentframe()
        keep(self, _call_of_maker(frame.f_back if frame else None) or (positional, named))
        init(self, *positional, **named)

    return init_and_tell


def _call_of_maker(frame: FrameType | None) -> Call | None:
    """Return the outermost call of a function of transformers that is making a schedule; None where none is."""
    found: FrameType | None = None
    while frame is not None and frame.f_globals.get("__name__") in _MAKERS:
        if frame.f_code.co_name.startswith("get_"):
            found = frame
        frame = frame.f_back
    if found is None:
        return None
    name = found.f_code.co_name
    made_by = getattr(sys.modules[found.f_globals["__name__"]], name)
    given = {
        argument: _plain(found.f_locals[argument])
        for argument, parameter in inspect.signature(made_by).parameters.items()
        if found.f_locals[argument] is not parameter.default
    }
    is_public = hasattr(sys.modules["transformers"], name)
    return Call("transformers" if is_public else "transformers.optimization", name, ((), given))


def _plain(value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else value
