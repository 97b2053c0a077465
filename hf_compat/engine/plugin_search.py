"""Lightning's search for callbacks that installed packages bring, made once. Private names of Lightning 2.6.

Each `lightning.Trainer` reads the list of plugins of every installed package: some milliseconds, more than a small
evaluation takes, and a Trainer of ours makes one a call.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib import metadata

from lightning.fabric.utilities import registry

Places = tuple[tuple[str, int], ...]

_NAME = "entry_points"  # the function that Lightning calls with a group
_found: dict[str, tuple[Places, metadata.EntryPoints]] = {}


@contextlib.contextmanager
def searching_plugins_once() -> Iterator[None]:
    """Let trainers that are made within the context search a group of plugins again only after an installation."""
    own = getattr(registry, _NAME, None)
    if own is not metadata.entry_points:  # another release of Lightning, a test's stand-in, or we ourselves
        yield
        return
    setattr(registry, _NAME, plugins_of)
    try:
        yield
    finally:
        setattr(registry, _NAME, own)


def plugins_of(group: str) -> metadata.EntryPoints:
    """Return the plugins of a group, as `importlib.metadata.entry_points` does."""
    places, known = _places(), _found.get(group)
    if known is None or known[0] != places:
        known = _found[group] = (places, metadata.entry_points(group=group))
    return known[1]


def _places() -> Places:
    """Return the folders in which packages are found; those of installations with the time of their last change."""
    return tuple((path, _changed(path) if path.endswith("-packages") else 0) for path in sys.path)


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # a path that does not exist
        return 0
