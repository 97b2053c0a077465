"""Modules that replace those of `transformers`, with our names where we have them and its own otherwise.

Objects of our classes are instances of the `transformers` classes that they replace.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Container, Iterator, Mapping

from hf_compat.runtime.text import need

Lookup = Callable[[str], object]


def mirror(module: str, upstream: str, ours: Mapping[str, str]) -> tuple[Lookup, Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module that replaces one of `transformers`.

    Args:
        module: The module's own name.
        upstream: The module of transformers.
        ours: Name → module of this package that has it; the others are transformers' own, loaded when asked for.
    """

    def lookup(name: str) -> object:
        if name in ours:
            return getattr(importlib.import_module(f"hf_compat.{ours[name]}"), name)
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        need("transformers", "'hf-compat[transformers]'", f"`{module}.{name}`")
        theirs = importlib.import_module(upstream)
        if not hasattr(theirs, name):
            raise AttributeError(f"neither {module!r} nor {upstream!r} has {name!r}")
        return getattr(theirs, name)

    return lookup, lambda: sorted(ours)


# The classes that libraries ask for with `isinstance`. Arguments are adopted instead (`arguments.py`), and callbacks
# that a Trainer adds by itself have both classes (`transformers_models.py`).
_ASKED_FOR = frozenset({"Trainer", "Seq2SeqTrainer"})


class _NotOurs:
    """A name that transformers' class has and ours has not: it is not there, as if that class were no base of ours."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> object:
        raise AttributeError(f"{owner.__name__!r} has no attribute {self.name!r}")


def acknowledge(ours: object, theirs: object) -> None:
    """Make our class a subclass of transformers' own, of which it takes nothing but its name.

    A library that has imported transformers' class before `patch()` then finds our objects to be instances of it.
    """
    if not (isinstance(ours, type) and isinstance(theirs, type)) or ours.__name__ not in _ASKED_FOR:
        return
    if not issubclass(ours, theirs):
        # A subclass of transformers' class that hides what ours has not
        names = {name for kind in theirs.__mro__[:-1] for name in vars(kind)}
        hidden = {name: _NotOurs(name) for name in names if not hasattr(ours, name)}
        ours.__bases__ = (
            *ours.__bases__,
            type(theirs.__name__, (theirs,), {**hidden, "__module__": theirs.__module__, "_stands_for": theirs}),
        )


def kin_of(kind: type) -> type | None:
    """Return the class of transformers that a class made by `acknowledge` replaces, None for other classes."""
    return vars(kind).get("_stands_for")


def heirs(theirs: type, ours: type, known: Container[str]) -> Iterator[tuple[str, tuple[type, type]]]:
    """Yield transformers' own subclasses of a class that ours replaces, each with one that is a subclass of ours too.

    What transformers has and we have not (a tracker's callback) then is an instance of what stands for its base.

    Args:
        theirs: The class of transformers.
        ours: Our class that replaces it.
        known: Names that we have.
    """
    subclasses: list[type] = type.__subclasses__(theirs)
    for kind in subclasses:
        if kind.__module__.partition(".")[0] == "transformers" and not issubclass(kind, ours):
            if kind.__name__ not in known:
                yield kind.__name__, (kind, _heir(kind, ours))  # type: ignore[arg-type]  # classes have a hash
            yield from heirs(kind, ours, known)


@functools.cache
def _heir(kind: type, ours: type) -> type:
    content = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, ours), content)
