"""How schedules and samplers of torch and streams of `datasets` were made: the calls are kept while a script runs.

The class of a schedule or sampler is listened to. The functions of transformers that make schedules are read from the
frames under way.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, FunctionType

from torch.optim import lr_scheduler
from torch.utils.data import sampler

# What a call was given, of whatever types.
Given = tuple[tuple[object, ...], Mapping[str, object]]
_MAKERS = ("transformers.optimization", "hf_compat.optim.lr_schedulers")
# Functions of `datasets` that make streams, and what is kept of what they are given.
_STREAM_MAKERS = {
    "load_dataset": ("path", "name", "data_dir", "data_files", "split", "revision", "streaming"),
    "interleave_datasets": ("datasets", "probabilities", "seed", "stopping_strategy"),
    "concatenate_datasets": ("dsets", "axis"),
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call that made something.

    Args:
        of: The module of a function, by name; the object, or class, of a method.
        name: Of the function or method.
        given: What it was given.
    """

    of: object
    name: str
    given: Given


Keep = Callable[[object, Given | Call], None]


@contextlib.contextmanager
def classes_watched(keep: Keep) -> Iterator[None]:
    """Tell how each schedule and sampler of torch, or of a class that inherits from one, is made within."""
    inits = {
        kind: vars(kind)["__init__"]
        for module, base in ((lr_scheduler, lr_scheduler.LRScheduler), (sampler, sampler.Sampler))
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, base)
        and kind is not sampler.Sampler
        and "__init__" in vars(kind)
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


def stream_methods(kind: type, keep: Keep, keep_last: Keep) -> dict[str, object]:
    """Return methods in the place of those of `datasets` that make a stream: they tell what they were called with.

    Args:
        kind: `datasets.IterableDataset`, or `datasets.Dataset`.
        keep: Told of what a constructor is given; its first telling counts.
        keep_last: Told of the call of a method; its last telling counts, as methods call one another.
    """
    if kind.__name__ == "Dataset":
        return {"to_iterable_dataset": _telling_method(kind, "to_iterable_dataset", keep_last)}
    names = [name for name, part in vars(kind).items() if name[0] != "_" and _is_method(part)]
    made: dict[str, object] = {name: _telling_method(kind, name, keep_last) for name in names}
    init = vars(kind)["__init__"]

    def init_and_tell(self: object, *positional: object, **named: object) -> None:
        init(self, *positional, **named)
        call = _call_of_stream_maker(inspect.currentframe())
        if call is not None:
            keep(self, call)

    return {**made, "__init__": init_and_tell}


def _is_method(part: object) -> bool:
    return isinstance(part.__func__ if isinstance(part, staticmethod) else part, FunctionType)


def _telling_method(kind: type, name: str, keep: Keep) -> object:
    part = vars(kind)[name]
    is_static = isinstance(part, staticmethod)
    method = part.__func__ if is_static else part

    @functools.wraps(method)
    def call_and_tell(*positional: object, **named: object) -> object:
        made = method(*positional, **named)
        owner, given = (kind, positional) if is_static else (positional[0], positional[1:])
        if type(made).__name__ == "IterableDataset" and made is not owner:
            keep(made, Call(owner, name, (given, named)))
        return made

    return staticmethod(call_and_tell) if is_static else call_and_tell


def _call_of_stream_maker(frame: FrameType | None) -> Call | None:
    """Return the call of a function of `datasets` that is making a stream; None where none is."""
    frame = None if frame is None else frame.f_back
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("datasets."):
        code = frame.f_code
        if code.co_name in _STREAM_MAKERS and code.co_name == code.co_qualname:
            known = inspect.signature(frame.f_globals[code.co_name]).parameters
            names = [name for name in _STREAM_MAKERS[code.co_name] if frame.f_locals[name] is not known[name].default]
            given = {name: _found_again(frame.f_locals[name], name) for name in names}
            return Call("datasets", code.co_name, ((), given))
        frame = frame.f_back
    return None


def _found_again(value: object, name: str) -> object:
    """Return a path, of a file or of several, as it is found from another folder, too."""
    if isinstance(value, str):
        is_path = name in ("path", "data_dir", "data_files") and os.path.exists(value)
        return os.path.abspath(value) if is_path else value
    if name == "data_files" and isinstance(value, (list, tuple)):
        return [_found_again(one, name) for one in value]
    if name == "data_files" and isinstance(value, Mapping):
        return {key: _found_again(one, name) for key, one in value.items()}
    return value
