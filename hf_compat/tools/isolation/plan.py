"""The plan of an isolated command, and the files that it has written."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

# The folder of a command's isolation. It is set only in isolated processes.
VARIABLE = "HF_COMPAT_ISOLATED_IN"
# `copies` avoids overlays, on machines that offer them but not well enough.
CHOSEN = "HF_COMPAT_ISOLATION"
LAYERS = "layers"
_CACHES = ("CACHE", "TMPDIR", "TMP", "TEMP", "CACHE_DIR", "HF_HOME", "TORCH_HOME")
NAMED = 3  # files or folders that a message names


def is_below(path: str, folder: str) -> bool:
    """Whether an absolute path is a folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One isolated command."""

    folder: str  # the folder of everything that it leaves. It is real inside, too
    working_folder: str
    open_to: tuple[str, ...] = ()  # folders that stay real
    how: str = "overlay"
    is_kept: bool = True  # whether its files are kept if its parent is killed

    def in_folder(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def inside(self, path: str) -> str:
        """The path of a user's file for the command. Only an absolute path may differ."""
        is_copied = self.how == "copies" and is_below(path, self.working_folder)
        return f"{self.in_folder('files')}{path}" if is_copied else path

    def write(self) -> None:
        with open(self.in_folder("plan.json"), "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, path: str) -> Plan:
        with open(path, encoding="utf-8") as file:
            told = json.load(file)
        return cls(**{**told, "open_to": tuple(told["open_to"])})

    def new_layer(self, folder: str) -> str:
        """Make a layer for the files that are written into a folder."""
        layers = self.in_folder(LAYERS)
        os.makedirs(layers, exist_ok=True)
        place = os.path.join(layers, str(len(os.listdir(layers))))
        os.mkdir(place)
        with open(os.path.join(place, "of"), "w", encoding="utf-8") as file:
            file.write(folder)
        return place

    def remove(self) -> None:
        self._remove_mount_points()
        remove_tree(self.folder)

    def _remove_mount_points(self) -> None:
        """Remove the mount points of another namespace. One that is not empty here raises, which protects its files."""
        for name in ("root", "real"):
            if os.path.isdir(self.in_folder(name)):
                os.rmdir(self.in_folder(name))

    def settle(self, ways: Iterable[Callable[[Plan], Iterable[str]]]) -> None:
        """Keep only the files that the command has written, in `files/`. Each way yields the deleted files."""
        self._remove_mount_points()
        deleted = [path for settle in ways for path in settle(self)]
        if deleted:
            with open(self.in_folder("deleted.txt"), "w", encoding="utf-8", errors="surrogateescape") as file:
                file.writelines(f"{path}\n" for path in sorted(deleted))
        for name in ("plan.json", "entered.json"):
            os.unlink(self.in_folder(name))


def mark_of(path: str) -> tuple[int, ...]:
    """Numbers that change with a file."""
    told = os.lstat(path)
    return (told.st_ino, told.st_ctime_ns, told.st_size)


def real_path(path: str) -> str:
    """The path of a user's file outside of this process's isolation."""
    inside = os.environ.get(VARIABLE)  # noqa: TID251 - runtime/ imports torch
    real = f"{inside}/real"
    return real + os.path.abspath(path) if inside and os.listdir(real) else path


def remove_tree(folder: str) -> None:
    """Remove a tree, including folders without permissions."""

    def open_and_retry(_: object, path: str, __: object) -> None:
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        for one in (os.path.dirname(path), *([path] if is_folder else [])):
            os.chmod(one, stat.S_IRWXU)
        shutil.rmtree(path) if is_folder else os.unlink(path)

    shutil.rmtree(folder, onerror=open_and_retry)


def machine_folders() -> Iterator[str]:
    """Yield the folders of temporary files, caches and devices."""
    yield from (tempfile.gettempdir(), os.path.expanduser("~/.cache"), os.path.expanduser("~/.triton"), "/dev", "/proc")
    for name, value in os.environ.items():  # noqa: TID251 - runtime/ imports torch
        if name.endswith(_CACHES) and os.path.isabs(value):
            yield value


def files_below(folder: str) -> Iterator[str]:
    """Yield the regular files in a tree of written files by their absolute paths outside of the isolation."""
    for parent, _, names in os.walk(folder):
        for path in (os.path.join(parent, name) for name in names):
            if os.path.isfile(path) and not os.path.islink(path):
                yield path.removeprefix(folder)


def is_of_the_command(path: str, own: Iterable[str]) -> bool:
    """Whether a file is the command's own, not one that programs keep for themselves.

    Those in hidden folders of the user's `own` folders are not.
    """
    bases = [one for one in (*own, os.path.expanduser("~")) if is_below(path, one)]
    parts = os.path.relpath(path, max(bases, key=len, default=os.sep)).split(os.sep)
    if "__pycache__" in parts or any(part.startswith(".") for part in parts[:-1]):
        return False
    if any(is_below(path, one) for one in own):
        return True
    return not any(is_below(path, one) for one in (*machine_folders(), sys.prefix, sys.base_prefix, "/run"))


def in_words(paths: Iterable[str]) -> str:
    """Write the number of files and their folders."""
    found = sorted(paths)
    folders = list(dict.fromkeys(map(os.path.dirname, found)))
    outer = [one for one in folders if not any(one != other and is_below(one, other) for other in folders)]
    more = f" and {len(outer) - NAMED} more folders" if len(outer) > NAMED else ""
    return f"{len(found)} file{'s' if len(found) != 1 else ''} in {', '.join(outer[:NAMED])}{more}"
