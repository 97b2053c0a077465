"""Objects of transformers' own classes can be pickled while ours stand under their names. HF words only.

pickle writes the name of an object's class, and refuses where another class has that name: a Trainer of transformers'
that was made before `hf_compat.patch()` could not save its arguments.
"""

from __future__ import annotations

import copyreg
import importlib
from collections.abc import Callable, Iterable

Reduced = tuple[object, ...]  # what `__reduce_ex__` returns
_originals: dict[str, type] = {}


def let_originals_be_pickled(classes: Iterable[type]) -> None:
    """Give pickle a way to write objects of replaced classes; a class that has one of its own keeps it."""
    for cls in classes:
        if cls not in copyreg.dispatch_table:
            copyreg.dispatch_table[cls] = _reduced  # type: ignore[assignment]  # tuples of three lengths
            _originals[_name_of(cls)] = cls


def leave_originals_to_pickle() -> None:
    """Take back what `let_originals_be_pickled` has set: the names are transformers' own again."""
    for cls in _originals.values():
        copyreg.dispatch_table.pop(cls, None)
    _originals.clear()


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _reduced(value: object) -> Reduced:
    """Return what pickle writes, with the class by its name in place of the class."""
    found = value.__reduce_ex__(2)
    if isinstance(found, str):
        return found  # type: ignore[return-value]  # pickle takes a global's name, too
    function, arguments, *rest = found
    cls = type(value)
    if function is cls:
        return (called, (_name_of(cls), *arguments), *rest)
    if arguments and arguments[0] is cls:  # `copyreg.__newobj__`, and `getattr` for members of an enum
        return (with_class, (function, _name_of(cls), *arguments[1:]), *rest)
    return (function, arguments, *rest)


def called(name: str, *arguments: object) -> object:
    """Call transformers' own class."""
    return _original(name)(*arguments)


def with_class(function: Callable[..., object], name: str, *arguments: object) -> object:
    """Call a function with transformers' own class."""
    return function(_original(name), *arguments)


def _original(name: str) -> type:
    """Return transformers' own class of a name, whether ours stands there or not."""
    found: object = _originals.get(name)
    if found is None:
        module, _, path = name.partition(":")
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    if not isinstance(found, type):
        raise TypeError(f"{name} is no class")
    return found
