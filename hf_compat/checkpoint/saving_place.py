"""Where a checkpoint is written before it is whole: under its final name, in a hidden folder of the output folder.

`_save` and `save_model` of the user's read the number in that name and write files beside the folder. What lies there
goes to the output folder when the checkpoint is whole, as if it had been written there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hf_compat.checkpoint.hidden_folders import OWN_PREFIX, SAVING, make_hidden, remove_hidden
from hf_compat.checkpoint.layout import checkpoint_step
from hf_compat.checkpoint.run_lock import LOCK_NAME, Owner

_Inode = tuple[int, int]


class SavingPlace:
    """The hidden folder of one run; it holds one save at a time.

    Where code of the user's writes beside the checkpoint, the files of the output folder stand in it a second time, as
    hard links: appending to one of them, replacing or deleting it there does so in the output folder. Folders do not.

    Args:
        run_dir: The output folder, which exists.
        owner: The run.
        mirrors: Whether to make these links. They cost each save as much as there are files.
    """

    def __init__(self, run_dir: str, owner: Owner, mirrors: bool = True) -> None:
        self.run_dir, self._mirrors = run_dir, mirrors
        self._owner = owner
        self.path = os.path.join(run_dir, SAVING + owner.id)
        self._mirrored: dict[str, _Inode] = {}
        self._deleted: list[str] = []
        self._began = 0

    def inside(self, final: str) -> str:
        """Return where a checkpoint is written that will stand at `final`."""
        return os.path.join(self.path, os.path.basename(final))

    def prepare(self) -> None:
        """Make it anew; a save that failed may have left one.

        Raises:
            OSError: It cannot be made.
        """
        remove_hidden(self.path)
        os.makedirs(self.run_dir, exist_ok=True)
        make_hidden(self.run_dir, SAVING, self._owner)
        self._began = os.stat(self.path).st_ctime_ns  # by the clock of the disk
        self._mirrored = dict(_mirror(self.run_dir, self.path)) if self._mirrors else {}
        self._deleted = []

    def discard(self) -> None:
        """Remove it, with all that was written there."""
        remove_hidden(self.path)

    def note_deletions(self) -> None:
        """Look which files of the output folder were deleted or renamed here; no process has landed anything yet."""
        self._deleted = [name for name in self._mirrored if not os.path.lexists(os.path.join(self.path, name))]

    def adopt(self, final: str) -> None:
        """Take over what was written at the final place while this save went on: it belongs to this checkpoint.

        A link there leads to somebody's own folder, which stays as it is.
        """
        if os.path.islink(final):
            return
        for path in _files_below(Path(final)):
            target = Path(self.inside(final)) / path.relative_to(final)
            is_older = path.lstat().st_ctime_ns < self._began
            if is_older or (os.path.lexists(target) and target.lstat().st_mtime_ns >= path.lstat().st_mtime_ns):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)

    def land(self, final: str) -> None:
        """Move what lies beside the checkpoint to the output folder.

        Raises:
            OSError: Something cannot be moved.
        """
        for name in self._deleted:
            with contextlib.suppress(FileNotFoundError):
                if _inode(os.path.join(self.run_dir, name)) == self._mirrored[name]:
                    os.unlink(os.path.join(self.run_dir, name))
        for entry in _beside(self.path, final):
            is_mirror = entry.name in self._mirrored and _inode(entry.path) == self._mirrored[entry.name]
            if not is_mirror:
                _move(entry.path, os.path.join(self.run_dir, entry.name), self.path, self.run_dir)


def land_left_over(place: str, final: str) -> None:
    """Move what a killed save has left beside its checkpoint; a file of that name that is newer stays."""
    run_dir = os.path.dirname(place)
    for entry in _beside(place, final):
        target = os.path.join(run_dir, entry.name)
        are_files = entry.is_file(follow_symlinks=False) and os.path.isfile(target)
        if are_files and entry.stat().st_mtime_ns <= os.stat(target).st_mtime_ns:
            continue  # one file under both names, or an older one
        _move(entry.path, target, place, run_dir)


def _mirror(run_dir: str, place: str) -> Iterator[tuple[str, _Inode]]:
    for entry in sorted(os.scandir(run_dir), key=lambda entry: entry.name):
        is_taken = (
            entry.name.startswith(LOCK_NAME) or checkpoint_step(entry.name) is not None
        )  # by a checkpoint's folder
        if is_taken or not entry.is_file(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):  # not every file system has links, and callbacks replace their files
            os.link(entry.path, os.path.join(place, entry.name))
            yield entry.name, _inode(os.path.join(place, entry.name))


def _inode(path: str) -> _Inode:
    facts = os.lstat(path)
    return facts.st_dev, facts.st_ino


def _beside(place: str, final: str) -> list[os.DirEntry[str]]:
    entries = [entry for entry in os.scandir(place) if not entry.name.startswith(OWN_PREFIX)]
    return sorted((entry for entry in entries if entry.name != os.path.basename(final)), key=lambda entry: entry.name)


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def _move(source: str, target: str, place: str, run_dir: str) -> None:
    """Move a file, a link or a folder; into a folder that is there each file for itself."""
    if os.path.islink(source):
        text = _led_out(os.readlink(source), os.path.dirname(source), place, run_dir)
        os.unlink(source)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        os.symlink(text, target)
    elif os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
        for name in sorted(os.listdir(source)):
            _move(os.path.join(source, name), os.path.join(target, name), place, run_dir)
        os.rmdir(source)
    else:
        os.replace(source, target)


def _led_out(text: str, folder: str, place: str, run_dir: str) -> str:
    """Return what a link says when it stands in the output folder and leads to the same thing there."""
    leads_to = os.path.abspath(os.path.join(folder, text))
    inside, outside = os.path.abspath(place), os.path.abspath(run_dir)
    moved = outside + leads_to.removeprefix(inside) if (leads_to + os.sep).startswith(inside + os.sep) else leads_to
    if os.path.isabs(text):
        return moved
    return os.path.relpath(moved, os.path.abspath(folder).replace(inside, outside, 1))
