"""Modules that stand for those of `transformers`: our names where we have them, its own otherwise."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from hf_compat.runtime.text import need

Lookup = Callable[[str], object]


def mirror(module: str, upstream: str, ours: Mapping[str, str]) -> tuple[Lookup, Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module that stands for one of `transformers`.

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
