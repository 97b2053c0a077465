"""What is isolated, and where what a command writes ends up. The standard library only."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass

# Where a command finds the folder of its isolation; also which process is isolated already.
VARIABLE = "HF_COMPAT_ISOLATED_IN"
# Not tried: `copies`. For machines on which overlays are there and do not do.
CHOSEN = "HF_COMPAT_ISOLATION"
_COPIED, _LAYERS = "copied.json", "layers"


def is_below(path: str, folder: str) -> bool:
    """Return whether a path is a folder or lies in it; both absolute."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One isolated command.

    Args:
        folder: A folder for all that it leaves; real inside, too.
        working_folder: Where the user has called; absolute.
        open_to: Folders that stay real.
        how: `overlay` or `copies`.
        is_kept: Whether what it has written is kept where whoever has started it is killed.
    """

    folder: str
    working_folder: str
    open_to: tuple[str, ...] = ()
    how: str = "overlay"
    is_kept: bool = True

    def in_folder(self, name: str) -> str:
        """Return the path of a part of the folder."""
        return os.path.join(self.folder, name)

    def inside(self, path: str) -> str:
        """Return what a path of the user's is for the command: only a whole one is another."""
        is_copied = self.how == "copies" and is_below(path, self.working_folder)
        return f"{self.in_folder('files')}{path}" if is_copied else path

    def write(self) -> None:
        """Write it down."""
        with open(self.in_folder("plan.json"), "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, path: str) -> Plan:
        """Read what `write` has written."""
        with open(path, encoding="utf-8") as file:
            told = json.load(file)
        return cls(**{**told, "open_to": tuple(told["open_to"])})

    def new_layer(self, folder: str) -> str:
        """Make a place for what is written into a folder, and return it."""
        layers = self.in_folder(_LAYERS)
        os.makedirs(layers, exist_ok=True)
        place = os.path.join(layers, str(len(os.listdir(layers))))
        os.mkdir(place)
        with open(os.path.join(place, "of"), "w", encoding="utf-8") as file:
            file.write(folder)
        return place

    def note_copies(self, copies: dict[str, tuple[int, ...]]) -> None:
        """Write down what was laid into the folder, so that what the command has changed can be told from it."""
        with open(self.in_folder(_COPIED), "w", encoding="utf-8") as file:
            json.dump(copies, file)

    def remove(self) -> None:
        """Remove the folder, with all that the command has written."""
        self._leave_mount_points()
        remove_tree(self.folder)

    def _leave_mount_points(self) -> None:
        """Remove where mounts were, in another namespace; one that is not empty here stops everything else."""
        for name in ("root", "real"):
            if os.path.isdir(self.in_folder(name)):
                os.rmdir(self.in_folder(name))

    def settle(self) -> None:
        """Leave of the isolation what the command has written, in `files/`."""
        self._leave_mount_points()
        deleted = [*self._gather_layers(), *self._leave_out_copies()]
        if deleted:
            with open(self.in_folder("deleted.txt"), "w", encoding="utf-8", errors="surrogateescape") as file:
                file.writelines(f"{path}\n" for path in sorted(deleted))
        for name in ("plan.json", "entered.json"):
            os.unlink(self.in_folder(name))

    def _gather_layers(self) -> Iterator[str]:
        """Move what the layers hold into one tree; yield the user's files that the command has deleted."""
        layers = self.in_folder(_LAYERS)
        if not os.path.isdir(layers):
            return
        for number in sorted(os.listdir(layers), key=int):
            place = os.path.join(layers, number)
            with open(os.path.join(place, "of"), encoding="utf-8") as file:
                of = file.read()
            upper = os.path.join(place, "upper")
            for parent, _, names in os.walk(upper):
                for path in (os.path.join(parent, name) for name in names):
                    if _is_whiteout(path):
                        os.unlink(path)
                        yield os.path.join(of, os.path.relpath(path, upper))
            if os.path.isdir(upper) and os.listdir(upper):
                _merge(upper, f"{self.in_folder('files')}{of}")
        remove_tree(layers)

    def _leave_out_copies(self) -> Iterator[str]:
        """Remove the copies and links that the command has left alone; yield those that it has deleted."""
        if not os.path.exists(self.in_folder(_COPIED)):
            return
        with open(self.in_folder(_COPIED), encoding="utf-8") as file:
            copies: dict[str, list[int]] = json.load(file)
        files = self.in_folder("files")
        for parent, _, _ in os.walk(files):
            os.chmod(parent, os.stat(parent).st_mode | stat.S_IRWXU)
        for path, mark in copies.items():
            if not os.path.lexists(files + path):
                yield path
            elif mark == list(mark_of(files + path)):
                os.unlink(files + path)
        for parent, _, _ in os.walk(files, topdown=False):
            if not os.listdir(parent):
                os.rmdir(parent)
        os.unlink(self.in_folder(_COPIED))


def mark_of(path: str) -> tuple[int, ...]:
    """Return numbers that change with a file."""
    told = os.lstat(path)
    return (told.st_ino, told.st_ctime_ns, told.st_size)


def real_path(path: str) -> str:
    """Return where a path of the user's leads without the isolation that this process is in."""
    inside = os.environ.get(VARIABLE)  # noqa: TID251 - runtime/ imports torch, and this room nothing
    real = f"{inside}/real"
    return real + os.path.abspath(path) if inside and os.listdir(real) else path


def _is_whiteout(path: str) -> bool:
    told = os.lstat(path)
    return stat.S_ISCHR(told.st_mode) and told.st_rdev == 0


def _merge(source: str, target: str) -> None:
    """Move a tree to where a part of it may stand already."""
    if not os.path.isdir(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(source, target)
        return
    for entry in list(os.scandir(source)):
        if entry.is_dir(follow_symlinks=False):
            _merge(entry.path, os.path.join(target, entry.name))
        else:
            os.replace(entry.path, os.path.join(target, entry.name))


def remove_tree(folder: str) -> None:
    """Remove a tree; folders in it that may not be entered become so first."""

    def open_and_retry(_: object, path: str, __: object) -> None:
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        for one in (os.path.dirname(path), *([path] if is_folder else [])):
            os.chmod(one, stat.S_IRWXU)
        shutil.rmtree(path) if is_folder else os.unlink(path)

    shutil.rmtree(folder, onerror=open_and_retry)
