"""Which files of a checkpoint may be read: those that its manifest lists, where it has a manifest of ours.

What else lies in such a folder was put or left there by somebody: reading it would mix two checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hf_compat.checkpoint.files import check_regular, is_inside, is_plain_name, read_json
from hf_compat.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
MANIFEST_KIND = "hf_compat checkpoint"
_LARGEST_TURN = 2**53

Listed = dict[str, object]  # each file's name, and what the manifest says about it


def read_manifest(folder: Path) -> Listed | None:
    """Return everything that a manifest of ours lists, good names and bad; None without a readable one."""
    listed = (_read(folder) or {}).get("files")
    return listed if isinstance(listed, dict) else None


@dataclass(frozen=True, slots=True)
class Writer:
    """Who wrote a checkpoint.

    Args:
        run: Id of the run; one that goes on keeps it.
        turn: Which call of `train` in this output folder, counted from 1.
    """

    run: str
    turn: int


def read_writer(folder: Path) -> Writer | None:
    """Return who wrote a checkpoint; None where its manifest does not say."""
    manifest = _read(folder) or {}
    run, turn = manifest.get("run"), manifest.get("turn")
    return Writer(run, turn) if isinstance(run, str) and type(turn) is int and 0 < turn < _LARGEST_TURN else None


def _read(folder: Path) -> dict[str, object] | None:
    try:
        manifest = read_json(folder / MANIFEST_NAME)
    except CheckpointError:
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("kind") == MANIFEST_KIND else None


def listed_files(folder: Path) -> Listed | None:
    """Return what a manifest of ours lists inside its folder; None without a readable one.

    A name that is absolute, has `..`, or leads elsewhere over a link is left out: nobody may read or delete by it.
    """
    listed = read_manifest(folder)
    return None if listed is None else {name: facts for name, facts in listed.items() if is_inside(folder, name)}


# Folders that are read as they are, whatever their manifests say: by real path the files, and which manifest it was.
_AsItIs = Mapping[str, tuple[Listed, tuple[int, int] | None]]
_AS_IT_IS: ContextVar[_AsItIs] = ContextVar("_AS_IT_IS", default=MappingProxyType({}))


@contextlib.contextmanager
def reading_as_it_is(folder: str | os.PathLike[str], files: Iterable[str]) -> Iterator[None]:
    """Let readers read these files of a folder for a while, as if its manifest listed them and no others.

    This ends when the manifest is replaced: what a run saves into the folder is another checkpoint.
    """
    path = os.path.realpath(folder)
    listed: Listed = {name: {} for name in files}
    token = _AS_IT_IS.set({**_AS_IT_IS.get(), path: (listed, _identity(Path(path)))})
    try:
        yield
    finally:
        _AS_IT_IS.reset(token)


def is_read_as_it_is(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is one whose differences somebody has been told."""
    return _listed_as_it_is(Path(folder)) is not None


def _listed_as_it_is(folder: Path) -> Listed | None:
    listed, manifest = _AS_IT_IS.get().get(os.path.realpath(folder), (None, None))
    return listed if listed is not None and manifest == _identity(folder) else None


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        facts = os.lstat(folder / MANIFEST_NAME)
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


class Contents:
    """The files of a checkpoint that may be read.

    Args:
        folder: The checkpoint. One without a manifest (of `transformers`) has no list: all its files may be read. The
            manifest of one that is read as it is (`reading_as_it_is`) does not count.

    Raises:
        CheckpointError: It has a manifest, which is not readable.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.listed = _listed_as_it_is(self.folder)
        if self.listed is None:
            self.listed = listed_files(self.folder)
        if self.listed is None and os.path.lexists(self.folder / MANIFEST_NAME):
            raise CheckpointError(f"{self.folder / MANIFEST_NAME} is not readable.")

    def find(self, name: str) -> str | None:
        """Return a file's path; None where the folder has none, or, with a warning, where no manifest lists it.

        Args:
            name: Its name relative to the folder, with `/`.

        Raises:
            CheckpointError: It is there and not a regular file, or not readable.
        """
        path = self.folder / name
        if not is_plain_name(name) or not os.path.lexists(path) or os.path.isdir(path):
            return None
        if self.listed is not None and name not in self.listed:
            logger.warning("%s is not read: %s does not list it.", path, MANIFEST_NAME)
            return None
        check_regular(path)
        return str(path)

    def need(self, name: str) -> str:
        """Return the path of a file that has to be there.

        Raises:
            CheckpointError: It is not, or may not be read.
        """
        path = self.find(name)
        if path is None:
            raise CheckpointError(f"{self.folder} holds no {name!r} that may be read.")
        return path

    def names(self, subfolder: str = "") -> list[str]:
        """List the names of the files of the folder, or of a subfolder, that may be read.

        Raises:
            CheckpointError: The folder cannot be listed, or one of the files cannot be read.
        """
        try:
            found = sorted(os.listdir(self.folder / subfolder))
        except OSError as error:
            raise CheckpointError(f"{self.folder / subfolder} cannot be listed: {error.strerror}.") from error
        before = f"{subfolder}/" if subfolder else ""
        return [before + name for name in found if name != MANIFEST_NAME and self._may_read(before + name)]

    def _may_read(self, name: str) -> bool:
        path = self.folder / name
        return os.path.isfile(path) and (self.listed is None or name in self.listed)
