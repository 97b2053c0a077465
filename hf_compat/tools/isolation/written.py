"""What a command has written: files of its own, and what programs keep for themselves. The standard library only."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator

from hf_compat.tools.isolation.plan import is_below

_CACHES = ("CACHE", "TMPDIR", "TMP", "TEMP", "CACHE_DIR", "HF_HOME", "TORCH_HOME")
_NAMED = 3


def machine_folders() -> Iterator[str]:
    """Yield where programs keep what is nobody's work: temporary files, caches, devices."""
    yield from (tempfile.gettempdir(), os.path.expanduser("~/.cache"), os.path.expanduser("~/.triton"), "/dev", "/proc")
    for name, value in os.environ.items():  # noqa: TID251 - it says where caches are, and cannot ask runtime/
        if name.endswith(_CACHES) and os.path.isabs(value):
            yield value


def files_below(folder: str) -> Iterator[str]:
    """Yield the regular files in a tree of written files, each by its whole path outside of the isolation."""
    for parent, _, names in os.walk(folder):
        for path in (os.path.join(parent, name) for name in names):
            if os.path.isfile(path) and not os.path.islink(path):
                yield path.removeprefix(folder)


def is_of_the_command(path: str, own: Iterable[str]) -> bool:
    """Return whether a file is the command's own, and none that programs keep for themselves.

    Args:
        path: Outside of the isolation.
        own: Folders that the user works in; in a hidden folder of theirs a program keeps its own, too.
    """
    bases = [one for one in (*own, os.path.expanduser("~")) if is_below(path, one)]
    parts = os.path.relpath(path, max(bases, key=len, default=os.sep)).split(os.sep)
    if "__pycache__" in parts or any(part.startswith(".") for part in parts[:-1]):
        return False
    if any(is_below(path, one) for one in own):
        return True
    return not any(is_below(path, one) for one in (*machine_folders(), sys.prefix, sys.base_prefix, "/run"))


def in_words(paths: Iterable[str]) -> str:
    """Return how many files these are, and where."""
    found = sorted(paths)
    folders = list(dict.fromkeys(map(os.path.dirname, found)))
    outer = [one for one in folders if not any(one != other and is_below(one, other) for other in folders)]
    more = f" and {len(outer) - _NAMED} more folders" if len(outer) > _NAMED else ""
    return f"{len(found)} file{'s' if len(found) != 1 else ''} in {', '.join(outer[:_NAMED])}{more}"
