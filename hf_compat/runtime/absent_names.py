"""Names that upstream's classes have and ours have no machinery for: an error says what to do when one is read."""

from __future__ import annotations

from typing import Never

from hf_compat.errors import AbsentName


class Absent:
    """A name of upstream's class that stands for nothing here.

    Reading it, on the class, on an object or through `super()`, raises `AbsentName`. So `hasattr` says False, and
    `getattr` gives its default. A subclass or an object may have something of that name.

    Args:
        name: The name.
        way_out: What to do instead.
    """

    def __init__(self, name: str, way_out: str) -> None:
        self.name, self.way_out = name, way_out

    def __get__(self, instance: object, owner: type) -> Never:
        raise AbsentName(
            f"{owner.__name__} has no `{self.name}` here, which a release of transformers has.\n\nHint: {self.way_out}."
        )
