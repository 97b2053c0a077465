"""How the objects of a script were made: the arguments of each constructor call, kept while the script runs.

An instance does not know what it was made from. The project makes it again, so somebody has to have listened.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from torch import nn

from hf_compat.tools.ejection.library_calls import Call, Given, classes_watched, stream_methods
from hf_compat.tools.ejection.secrets import Environment

# Classes that make streams; they are listened to as soon as somebody has imported them.
_STREAM_CLASSES = {"datasets.iterable_dataset": "IterableDataset", "datasets.arrow_dataset": "Dataset"}

_STANDARD = Path(sysconfig.get_paths()["stdlib"])


class Recorder:
    """Keeps, for each instance of the script's own classes and for each module of torch, what it was made from.

    Args:
        folder: Where the script stands: classes of files in there, and in the working folder, are its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folders = (folder, Path.cwd())
        # the instance is kept, so that its identity stays its own
        self._made: dict[int, tuple[object, Given | Call]] = {}
        self._held: dict[int, dict[str, tuple[object, int | None]]] = {}
        self._changed: dict[int, dict[str, object]] = {}
        self._given_back = contextlib.ExitStack()
        self.environment = Environment(self.is_of_script)

    def origin_of(self, instance: object) -> Given | Call | None:
        """Return what an instance's class was given, or the call that made it; None where nobody has listened."""
        found = self._made.get(id(instance))
        return None if found is None else found[1]

    def arguments_of(self, instance: object) -> Given | None:
        """Return what an instance's class was given; None where nobody has listened."""
        origin = self.origin_of(instance)
        return None if isinstance(origin, Call) else origin

    def settle(self) -> None:
        """Find out what the script has set on its objects since they were made: what is tried later sets more."""
        for place, held in self._held.items():
            value = self._made[place][0]
            now = _held_by(value)
            if held.keys() - now.keys():
                continue  # an attribute is gone: the constructor alone tells what it is made of
            changed = {name for name, one in now.items() if name not in held or not _same_part(one, held[name])}
            self._changed[place] = {name: vars(value)[name] for name in sorted(changed)}

    def changes_of(self, instance: object) -> dict[str, object]:
        """Return the attributes that the script has set since its constructor ended, or all where it has none."""
        if id(instance) in self._made:
            return self._changed.get(id(instance), {})
        return dict(vars(instance))

    def is_of_script(self, module: str) -> bool:
        """Return whether a module is the script, or a file beside it or in the working folder."""
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
        """Listen to what is made within."""
        build_class, init_module = builtins.__build_class__, nn.Module.__init__
        builtins.__build_class__ = self._watching(build_class)
        nn.Module.__init__ = self._watched_module_init(init_module)  # type: ignore[method-assign]  # given back below
        try:
            with self._given_back, classes_watched(self._keep), self.environment.listening():
                for home, name in _STREAM_CLASSES.items():
                    self._watch_streams(getattr(sys.modules.get(home), name, None))
                yield
        finally:
            builtins.__build_class__ = build_class
            nn.Module.__init__ = init_module  # type: ignore[method-assign]  # as it was

    def _keep(self, instance: object, origin: Given | Call) -> None:
        # a subclass's constructor calls that of its base: the first call is the instance's own
        self._made.setdefault(id(instance), (instance, origin))

    def _keep_last(self, instance: object, origin: Given | Call) -> None:
        self._made[id(instance)] = (instance, origin)

    def _watch_streams(self, kind: object) -> None:
        if not isinstance(kind, type) or _STREAM_CLASSES.get(kind.__module__) != kind.__name__:
            return
        for name, method in stream_methods(kind, self._keep, self._keep_last).items():
            self._given_back.callback(setattr, kind, name, vars(kind)[name])
            setattr(kind, name, method)

    def _watching(self, build_class: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(build_class)
        def build(body: Callable[..., object], *words: object, **named: object) -> object:
            made = build_class(body, *words, **named)
            if isinstance(made, type) and "__init__" in vars(made) and self.is_of_script(made.__module__):
                self._listen_to(made)
            self._watch_streams(made)
            return made

        return build

    def _listen_to(self, made: type) -> None:
        init = vars(made)["__init__"]
        keep, held, is_module = self._keep, self._held, issubclass(made, nn.Module)

        @functools.wraps(init)
        def init_and_tell(self: object, *positional: object, **named: object) -> None:
            keep(self, (positional, named))
            init(self, *positional, **named)
            if not is_module and hasattr(self, "__dict__"):  # of a module the weights are compared
                held[id(self)] = _held_by(self)

        with contextlib.suppress(AttributeError, TypeError):  # a class may forbid changes; it is not listened to
            made.__init__ = init_and_tell  # type: ignore[misc]  # of an instance's class, not of an instance

    def _watched_module_init(self, init: Callable[..., None]) -> Callable[..., None]:
        keep = self._keep

        @functools.wraps(init)
        def init_and_tell(self: nn.Module, *positional: object, **named: object) -> None:
            kind = type(self).__module__
            if kind.startswith("torch."):
                given = _given_to(self, inspect.currentframe())
                if given is not None:
                    keep(self, given)
            init(self, *positional, **named)

        return init_and_tell


def _held_by(value: object) -> dict[str, tuple[object, int | None]]:
    """Return what an object holds, each with its length: a container that grows is another one."""
    return {
        name: (part, len(part) if isinstance(part, (list, dict, set)) else None) for name, part in vars(value).items()
    }


def _same_part(one: tuple[object, int | None], other: tuple[object, int | None]) -> bool:
    return one[0] is other[0] and one[1] == other[1]


def _given_to(module: nn.Module, frame: FrameType | None) -> Given | None:
    """Return what the outermost `__init__` of a module was called with, read from the frames under way."""
    found: FrameType | None = None
    while frame is not None:
        frame = frame.f_back
        if frame is None or frame.f_code.co_name != "__init__":
            break
        names = frame.f_code.co_varnames
        if not names or frame.f_locals.get(names[0]) is not module:
            break
        found = frame
    if found is None:
        return None
    arguments = inspect.getargvalues(found)
    values = arguments.locals
    named = {name: values[name] for name in arguments.args[1:] if name in values}
    if arguments.varargs is not None:
        return (*named.values(), *values[arguments.varargs]), dict(values.get(arguments.keywords or "", {}))
    return (), named | dict(values.get(arguments.keywords or "", {}))
