"""Objects of our classes as instances of those of `transformers` that they stand for."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator

# The classes that libraries ask for with `isinstance`. Arguments are adopted instead (`arguments.py`), and callbacks
# that a Trainer adds by itself have both classes (`callback_classes.py`).
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
    """Return which class of transformers a class made by `acknowledge` stands for; None for any other class."""
    return vars(kind).get("_stands_for")


def heirs(theirs: type, ours: type, known: Container[str]) -> Iterator[tuple[str, tuple[type, type]]]:
    """Yield transformers' own subclasses of a class that ours replaces, each with one that is a subclass of ours too.

    What transformers has and we have not (a tracker's callback) then is an instance of what stands for its base.

    Args:
        theirs: The class of transformers.
        ours: What stands in its place.
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
