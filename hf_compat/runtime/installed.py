"""Look for entry points of installed packages, without reading what each of them declares."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder


def names_no_entry_point(path: Sequence[str], group: str) -> bool:
    """Whether surely no package in these folders, those of `sys.path`, declares an entry point of a group.

    The files are searched for the group's name and not parsed, which takes Python 50 calls for each package. False
    where a file has the name, and where packages may be elsewhere than in folders: in zip files, or at a finder that is
    not Python's own. Then `importlib.metadata.entry_points` has the answer.
    """
    for finder in sys.meta_path:
        search = getattr(finder, "find_distributions", None)
        if search is not None and search.__module__ != PathFinder.__module__:
            return False
    return all(_lacks(folder, group.encode()) for folder in path)


def _lacks(folder: str, name: bytes) -> bool:
    """Whether surely no package in a folder has a name among its entry points."""
    try:
        entries = os.scandir(folder or ".")
    except FileNotFoundError:  # Python skips it, too
        return True
    except OSError:  # a zip file, for one
        return False
    is_egg = folder.lower().endswith(".egg")
    with entries:
        for entry in entries:
            low = entry.name.lower()
            if not low.endswith((".dist-info", ".egg-info")) and not (is_egg and low == "egg-info"):
                continue
            try:
                with open(f"{entry.path}/entry_points.txt", "rb") as file:
                    if name in file.read():
                        return False
            except (FileNotFoundError, NotADirectoryError):  # it has none
                continue
            except OSError:
                return False
    return True
