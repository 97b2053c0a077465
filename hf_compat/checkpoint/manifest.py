"""What makes a checkpoint folder whole: it is written durably, listed last and checked before it is read.

HF words; files only.

A folder of ours holds `manifest.json`: every file with its size and SHA-256, written when all of them are on disk. A
folder without one (written by `transformers`) is judged by what it needs to contain.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.contents import MANIFEST_KIND, MANIFEST_NAME, Contents, Listed, listed_files, read_manifest
from hf_compat.checkpoint.files import first_line, is_inside, open_regular
from hf_compat.checkpoint.judging import judge_contents, judge_unlisted
from hf_compat.errors import CheckpointError

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"
DELETED_SUFFIX = ".deleted"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST_NAME)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Force a file or folder to disk; folders cannot be opened for that everywhere."""
    with contextlib.suppress(PermissionError, IsADirectoryError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def seal(folder: str) -> None:
    """Flush every file of a folder to disk, then write its manifest."""
    root = Path(folder)
    listed = {}
    for path in _files(root):
        _flush(path)
        listed[path.relative_to(root).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    text = json.dumps({"kind": MANIFEST_KIND, "version": 1, "files": listed}, indent=1)
    with open(root / MANIFEST_NAME, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    for subfolder in {path.parent for path in _files(root)} | {root}:
        _flush(subfolder)


def put_in_place(partial: str, final: str) -> None:
    """Rename a sealed folder to its final name. At every instant the old folder of that name or the new one is whole.

    Files of the old folder that no checkpoint lists are the user's: they are copied into the new one.
    """
    if os.path.isdir(final):
        _copy_user_files(Path(final), Path(partial))
        replaced = final + REPLACED_SUFFIX
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
        os.replace(partial, final)
        shutil.rmtree(replaced)
    else:
        os.replace(partial, final)
    _flush(Path(final).parent)


def _copy_user_files(old: Path, new: Path) -> None:
    ours = set(_listed(old) or ()) | {MANIFEST_NAME}
    for path in _files(old):
        relative = path.relative_to(old).as_posix()
        target = new / relative
        if relative not in ours and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def remove(folder: str) -> None:
    """Delete the files of a checkpoint of ours; files that its manifest does not list stay where they are.

    The folder is renamed first: one that is half deleted is never taken for a checkpoint.
    """
    root = Path(folder)
    listed = _listed(root)
    if listed is None:
        return
    if any(path.relative_to(root).as_posix() not in listed for path in _files(root)):
        (root / MANIFEST_NAME).unlink()
        for name in listed:
            (root / name).unlink(missing_ok=True)
        return
    deleted = folder + DELETED_SUFFIX
    os.replace(folder, deleted)
    shutil.rmtree(deleted)


def is_ours(folder: str) -> bool:
    """Return whether a folder holds a manifest of ours, whole or not."""
    return _listed(Path(folder)) is not None


def _listed(folder: Path) -> Listed | None:
    """Return the files that a manifest lists, each with what it says about them; None without a readable manifest.

    Names that lead outside the folder are left out: nothing is ever deleted or copied by them.
    """
    return listed_files(folder)


def tidy(run_dir: str) -> None:
    """Remove what a run that was killed while saving or deleting has left behind."""
    if not os.path.isdir(run_dir):
        return
    for entry in list(os.scandir(run_dir)):
        for suffix in (PARTIAL_SUFFIX, DELETED_SUFFIX, REPLACED_SUFFIX):
            stem = entry.name.removesuffix(suffix)
            if stem != entry.name and names.checkpoint_step(stem) is not None and entry.is_dir():
                shutil.rmtree(entry.path, ignore_errors=True)


def recover(run_dir: str) -> None:
    """Finish a save that was killed after everything was on disk, between two renames."""
    if not os.path.isdir(run_dir):
        return
    for suffix in (PARTIAL_SUFFIX, REPLACED_SUFFIX):
        for entry in list(os.scandir(run_dir)):
            final = entry.path.removesuffix(suffix)
            is_left_over = final != entry.path and names.checkpoint_step(final) is not None
            if is_left_over and not os.path.exists(final) and is_ours(entry.path) and not problems(entry.path):
                os.replace(entry.path, final)


def problems(folder: str) -> list[str]:
    """List what is wrong with a checkpoint folder; nothing is wrong with a whole one, which every reader can read."""
    root = Path(folder)
    if not os.path.isdir(root):
        return [f"{folder} is no folder"]
    try:
        if not os.path.lexists(root / MANIFEST_NAME):
            return list(judge_unlisted(root))
        listed = read_manifest(root)
        if listed is None:
            return [f"{MANIFEST_NAME} is not readable"]
        wrong = [problem for name, facts in listed.items() if (problem := _compare(root, name, facts))]
        return wrong or list(judge_contents(Contents(root)))
    except OSError as error:
        return [f"{error.filename or folder} cannot be read: {error.strerror}"]
    except CheckpointError as error:
        return [first_line(error)]


def _compare(root: Path, name: str, facts: object) -> str | None:
    """Return what is wrong with a file, going by what the manifest says about it."""
    if not is_inside(root, name):
        return f"{name if name.isprintable() else ascii(name)} is outside the folder"
    if not os.path.lexists(root / name):
        return f"{name} is missing"
    try:
        with open_regular(root / name) as file:
            size = os.fstat(file.fileno()).st_size
            if not isinstance(facts, dict) or size != facts.get("bytes"):
                return f"{name} has {size} bytes, not what {MANIFEST_NAME} says"
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # a buffered file
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except CheckpointError as error:
        return f"{name}: {first_line(error)}"
    return None if digest == facts.get("sha256") else f"{name} is damaged (its hash differs)"


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest whole checkpoint of a folder, or None.

    Newer ones that are incomplete or damaged are skipped; a warning names each of them and what is wrong.

    Raises:
        FileNotFoundError: `folder` does not exist.
        CheckpointError: It cannot be listed.

    Mirrors:
        `transformers.trainer_utils.get_last_checkpoint`, 5.23.

    Differs:
        Upstream goes by the names alone.
    """
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"No such directory: {os.fspath(folder)!r}")
    return newest_checkpoint(folder, problems)


def newest_checkpoint(folder: str | os.PathLike[str], judge: Callable[[str], list[str]]) -> str | None:
    """Return the newest checkpoint with which nothing is wrong, and warn of each newer one.

    Args:
        folder: The output folder.
        judge: Lists what is wrong with a checkpoint.
    """
    for path in reversed(names.list_checkpoints(folder)):
        wrong = judge(path)
        if not wrong:
            return path
        logger.warning("%s is not whole and is skipped: %s.", path, "; ".join(wrong))
    return None
