"""Record how the objects of a script are made, while it runs, so that the project can make them again.

It watches the constructors of the script's classes, and of torch's modules, schedules and samplers. It also watches the
calls that make streams of `datasets`.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import sampler

from hf_compat.tools.ejection.secrets import Environment
from hf_compat.tools.until_train import replaced

# The positional and named arguments of a call.
Given = tuple[tuple[object, ...], Mapping[str, object]]
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
# Modules whose functions make schedules.
_MAKERS = ("transformers.optimization", "hf_compat.optim.lr_schedulers")
# Classes that make streams. They are watched as soon as they are imported.
_STREAM_CLASSES = {"datasets.iterable_dataset": "IterableDataset", "datasets.arrow_dataset": "Dataset"}
# Functions of `datasets` that make streams, and the arguments of theirs that are kept.
_STREAM_MAKERS = {
    "load_dataset": ("path", "name", "data_dir", "data_files", "split", "revision", "streaming"),
    "interleave_datasets": ("datasets", "probabilities", "seed", "stopping_strategy"),
    "concatenate_datasets": ("dsets", "axis"),
}


class Call(NamedTuple):
    """A call that made an object."""

    of: object  # the name of a function's module, or the owner of a method
    name: str  # of the function or method
    given: Given


Origin = Callable[[object, FrameType | None], Given | Call | None]


class Recorder:
    """Keeps the arguments from which each watched instance was made.

    Classes of files in the script's folder and in the working folder are the script's own.
    """

    def __init__(self, folder: Path) -> None:
        self._folders = (folder, Path.cwd())
        # The instances are kept, because another object could otherwise get their identity
        self._made: dict[int, tuple[object, Given | Call]] = {}
        self._held: dict[int, dict[str, tuple[object, int | None]]] = {}
        self._changed: dict[int, dict[str, object]] = {}
        self._given_back = contextlib.ExitStack()
        self.environment = Environment(self.is_of_script)

    def origin_of(self, instance: object) -> Given | Call | None:
        """The arguments of an instance's class, or the call that made it. None if it was not recorded.

        A copy of a module (`copy.deepcopy`) is made as a recorded one with tensors of the same shapes.
        """
        found = self._made.get(id(instance))
        if found is None and isinstance(instance, nn.Module):
            shapes = _shapes(instance)
            alike = (one for one in self._made.values() if type(one[0]) is type(instance))
            found = next((one for one in alike if _shapes(one[0]) == shapes), None)  # type: ignore[arg-type]  # a module, too
        return None if found is None else found[1]

    def arguments_of(self, instance: object) -> Given | None:
        """The arguments of an instance's class. None if they were not recorded."""
        origin = self.origin_of(instance)
        return None if isinstance(origin, Call) else origin

    def settle(self) -> None:
        """Find the attributes that the script has set on its objects since they were made.

        It comes before the parts of the run are tried, because those set more.
        """
        for place, held in self._held.items():
            value = self._made[place][0]
            now = _held_by(value)
            if held.keys() - now.keys():
                continue  # an attribute is gone, so only the constructor is certain
            # The same object and length: a container that grows counts as changed
            unknown = (held, None)
            before = {name: held.get(name, unknown) for name in now}
            changed = [
                name for name, (part, size) in now.items() if before[name][0] is not part or before[name][1] != size
            ]
            self._changed[place] = {name: vars(value)[name] for name in sorted(changed)}

    def changes_of(self, instance: object) -> dict[str, object]:
        """The attributes that the script has set since its constructor ended, or all if it was not recorded."""
        if id(instance) in self._made:
            return self._changed.get(id(instance), {})
        return dict(vars(instance))

    def is_of_script(self, module: str) -> bool:
        """Whether a module is the script, or a file beside it or in the working folder."""
        file = getattr(sys.modules.get(module), "__file__", None)
        if module == "__main__" or file is None:
            return module == "__main__"
        path = Path(file)
        is_library = (
            "site-packages" in path.parts or _STANDARD in path.parents or module.partition(".")[0] == "hf_compat"
        )
        return not is_library and any(folder in path.parents for folder in self._folders)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record the objects that are made within."""
        build_class: Callable[..., object] = builtins.__build_class__

        @functools.wraps(build_class)
        def build(body: Callable[..., object], *words: object, **named: object) -> object:
            made = build_class(body, *words, **named)
            if isinstance(made, type) and "__init__" in vars(made) and self.is_of_script(made.__module__):
                with contextlib.suppress(AttributeError, TypeError):  # a class that forbids changes is not watched
                    # Of a module the weights are compared, not the attributes
                    self._watch_init(made, holds=not issubclass(made, nn.Module))
            self._watch_streams(made)
            return made

        with self._given_back, self.environment.listening():
            self._put(builtins, "__build_class__", build)
            self._watch_init(nn.Module, _module_arguments)
            for module, base in ((lr_scheduler, lr_scheduler.LRScheduler), (sampler, sampler.Sampler)):
                kinds = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, base)]
                for kind in dict.fromkeys(kinds):
                    if kind is not sampler.Sampler and "__init__" in vars(kind):
                        self._watch_init(kind, _schedule_call)
            for home, name in _STREAM_CLASSES.items():
                self._watch_streams(getattr(sys.modules.get(home), name, None))
            yield

    def _put(self, owner: object, name: str, value: object) -> None:
        """Set an attribute until the end of the recording."""
        self._given_back.enter_context(replaced(owner, name, value))

    def _keep(self, instance: object, origin: Given | Call) -> None:
        # A subclass's constructor calls that of its base, so the first call is the instance's own
        self._made.setdefault(id(instance), (instance, origin))

    def _watch_init(self, kind: type, origin_of: Origin = lambda *_: None, *, holds: bool = False) -> None:
        """Watch a constructor until the end of the recording, and keep an instance's attributes with `holds`.

        `origin_of` finds the origin of an instance in the running frames. By default it is the arguments.
        """
        init, keep, held = vars(kind)["__init__"], self._keep, self._held

        @functools.wraps(init)
        def init_and_keep(self: object, *positional: object, **named: object) -> None:
            frame = inspect.currentframe()
            origin = origin_of(self, None if frame is None else frame.f_back)
            if origin is not None or kind is not nn.Module:
                keep(self, origin or (positional, named))
            init(self, *positional, **named)
            if holds and hasattr(self, "__dict__"):
                held[id(self)] = _held_by(self)

        self._put(kind, "__init__", init_and_keep)

    def _watch_streams(self, kind: object) -> None:
        """Watch the methods of a class of `datasets` that make a stream."""
        if not isinstance(kind, type) or _STREAM_CLASSES.get(kind.__module__) != kind.__name__:
            return
        if kind.__name__ == "Dataset":
            self._put(kind, "to_iterable_dataset", self._watched_method(kind, "to_iterable_dataset"))
            return
        for name, part in list(vars(kind).items()):
            function = part.__func__ if isinstance(part, staticmethod) else part
            if name[0] != "_" and isinstance(function, FunctionType):
                self._put(kind, name, self._watched_method(kind, name))
        init, keep = vars(kind)["__init__"], self._keep

        def init_and_keep(self: object, *positional: object, **named: object) -> None:
            init(self, *positional, **named)
            call = _stream_call(inspect.currentframe())
            if call is not None:
                keep(self, call)

        self._put(kind, "__init__", init_and_keep)

    def _watched_method(self, kind: type, name: str) -> object:
        part = vars(kind)[name]
        is_static = isinstance(part, staticmethod)
        method = part.__func__ if is_static else part

        @functools.wraps(method)
        def call_and_keep(*positional: object, **named: object) -> object:
            made = method(*positional, **named)
            owner, given = (kind, positional) if is_static else (positional[0], positional[1:])
            if type(made).__name__ == "IterableDataset" and made is not owner:
                # Methods call one another, so the last call counts
                self._made[id(made)] = (made, Call(owner, name, (given, named)))
            return made

        return staticmethod(call_and_keep) if is_static else call_and_keep


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _held_by(value: object) -> dict[str, tuple[object, int | None]]:
    return {
        name: (part, len(part) if isinstance(part, (list, dict, set)) else None) for name, part in vars(value).items()
    }


def _module_arguments(module: object, frame: FrameType | None) -> Given | None:
    """Read the arguments of the outermost `__init__` of a module of torch from the running frames."""
    if not type(module).__module__.startswith("torch."):
        return None
    found: FrameType | None = None
    while frame is not None and frame.f_code.co_name == "__init__":
        names = frame.f_code.co_varnames
        if not names or frame.f_locals.get(names[0]) is not module:
            break
        found, frame = frame, frame.f_back
    if found is None:
        return None
    arguments = inspect.getargvalues(found)
    values = arguments.locals
    named = {name: values[name] for name in arguments.args[1:] if name in values}
    rest = dict(values.get(arguments.keywords or "", {}))
    if arguments.varargs is not None:
        return (*named.values(), *values[arguments.varargs]), rest
    return (), named | rest


def _schedule_call(_: object, frame: FrameType | None) -> Call | None:
    """The outermost running call of a function of transformers that makes a schedule."""
    found: FrameType | None = None
    while frame is not None and frame.f_globals.get("__name__") in _MAKERS:
        if frame.f_code.co_name.startswith("get_"):
            found = frame
        frame = frame.f_back
    if found is None:
        return None
    name, values = found.f_code.co_name, found.f_locals
    known = inspect.signature(getattr(sys.modules[found.f_globals["__name__"]], name)).parameters
    chosen = {key: values[key] for key, parameter in known.items() if values[key] is not parameter.default}
    given = {key: value.value if isinstance(value, enum.Enum) else value for key, value in chosen.items()}
    is_public = hasattr(sys.modules["transformers"], name)
    return Call("transformers" if is_public else "transformers.optimization", name, ((), given))


def _stream_call(frame: FrameType | None) -> Call | None:
    """The running call of a function of `datasets` that makes a stream."""
    frame = None if frame is None else frame.f_back
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("datasets."):
        code = frame.f_code
        if code.co_name in _STREAM_MAKERS and code.co_name == code.co_qualname:
            known = inspect.signature(frame.f_globals[code.co_name]).parameters
            names = [name for name in _STREAM_MAKERS[code.co_name] if frame.f_locals[name] is not known[name].default]
            given = {name: _absolute(frame.f_locals[name], name) for name in names}
            return Call("datasets", code.co_name, ((), given))
        frame = frame.f_back
    return None


def _absolute(value: object, name: str) -> object:
    """Make the paths in an argument absolute, so that they hold from another folder."""
    if isinstance(value, str):
        is_path = name in ("path", "data_dir", "data_files") and os.path.exists(value)
        return os.path.abspath(value) if is_path else value
    if name == "data_files" and isinstance(value, (list, tuple)):
        return [_absolute(one, name) for one in value]
    if name == "data_files" and isinstance(value, Mapping):
        return {key: _absolute(one, name) for key, one in value.items()}
    return value
