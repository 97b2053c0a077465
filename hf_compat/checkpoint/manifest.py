"""What makes a checkpoint folder whole: it is written durably, listed last and checked before it is read.

A folder of ours holds `manifest.json`: every file with its size and SHA-256, written when all of them are on disk. A
folder without one (written by `transformers`) is judged by what it needs to contain.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.contents import (
    MANIFEST_NAME,
    Contents,
    Listed,
    Writer,
    listed_files,
    read_manifest,
    read_writer,
)
from hf_compat.checkpoint.files import first_line, is_inside, open_regular
from hf_compat.checkpoint.hidden_folders import (
    CONVERTING,
    DELETED,
    REPLACED,
    SAVING,
    has_ended,
    hidden_folder,
    hidden_folders,
    remove_ended,
)
from hf_compat.checkpoint.judging import judge_contents, judge_unlisted
from hf_compat.checkpoint.run_lock import give_back_for_the_dead, is_in_use, is_locked
from hf_compat.checkpoint.saving_place import land_left_over
from hf_compat.checkpoint.sealing import difference_unflushed, entries, finish, flush, is_unfinished, refusal
from hf_compat.checkpoint.sealing import seal as seal
from hf_compat.errors import CheckpointError

logger = logging.getLogger(__name__)


def put_in_place(partial: str, final: str) -> None:
    """Rename a sealed folder to its final name. At every instant the old folder of that name or the new one is whole.

    Files of the old folder that belong to no checkpoint are the user's: they are copied into the new one. So are files
    that the old manifest lists and that were written again since: by the run's own code, before this save.
    """
    if not os.path.isdir(final) and not os.path.islink(final):
        os.replace(partial, final)
        flush(Path(final).parent)
        return
    if os.path.islink(final):
        logger.warning("%s is a link to %s: the new checkpoint takes its place.", final, os.readlink(final))
    else:
        old = Path(final)
        listed = _listed(old)
        sealed_ns = 0 if listed is None else (old / MANIFEST_NAME).lstat().st_mtime_ns
        ours = {
            name
            for name in listed or ()
            if not os.path.lexists(old / name) or (old / name).lstat().st_mtime_ns <= sealed_ns
        }
        for path in entries(old):
            relative = path.relative_to(old).as_posix()
            target = Path(partial) / relative
            if relative in ours or names.is_part_of_checkpoint(relative) or os.path.lexists(target):
                continue
            if path.is_symlink() or path.is_file():  # nothing can be copied out of a pipe or a socket
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target, follow_symlinks=False)
    replaced = os.path.join(os.path.dirname(partial), REPLACED)
    os.mkdir(replaced)
    os.replace(final, os.path.join(replaced, os.path.basename(final)))
    os.replace(partial, final)
    flush(Path(final).parent)
    shutil.rmtree(replaced, ignore_errors=True)  # the new checkpoint is in its place, whatever becomes of the old one


def remove(folder: str) -> None:
    """Delete a checkpoint of ours, with what callbacks and overrides have put into it, as upstream does.

    The folder is renamed first: one that is half deleted is never taken for a checkpoint. What holds no manifest never
    was a checkpoint of ours, and stays.

    Raises:
        OSError: It cannot be deleted, or it is a symbolic link: what that points to is not ours to delete.
    """
    root = Path(folder)
    if _listed(root) is None:
        return
    if root.is_symlink():
        raise OSError("it is a symbolic link")
    with hidden_folder(str(root.parent), SAVING) as place:
        deleted = os.path.join(place, DELETED)
        os.mkdir(deleted)
        os.replace(root, os.path.join(deleted, root.name))
        shutil.rmtree(deleted)


def is_ours(folder: str) -> bool:
    """Return whether a folder holds a manifest of ours, whole or not."""
    return read_manifest(Path(folder)) is not None


def writer_of(folder: str) -> Writer | None:
    """Return who wrote a checkpoint; None where its manifest does not say."""
    return read_writer(Path(folder))


def run_of(folder: str) -> str | None:
    """Return the id of the run that wrote a checkpoint; None where its manifest does not say."""
    writer = writer_of(folder)
    return None if writer is None else writer.run


def next_turn(run_dir: str) -> int:
    """Return the number of the call of `train` that begins to save into a folder."""
    writers = [writer_of(path) for path in names.list_checkpoints(run_dir)]
    return 1 + max((writer.turn for writer in writers if writer is not None), default=0)


def _listed(folder: Path) -> Listed | None:
    """Return the files that a manifest lists, each with what it says about them; None without a readable manifest.

    Names that lead outside the folder are left out: nothing is ever deleted or copied by them.
    """
    return listed_files(folder)


def tidy(run_dir: str) -> None:
    """Remove what killed runs have left behind, after finishing what is whole. For a run that has the folder's lock."""
    recover(run_dir, is_alone=True)
    remove_ended(run_dir, SAVING, is_locked=True)
    remove_ended(run_dir, CONVERTING)


def recover(run_dir: str, is_alone: bool = False) -> None:
    """Finish saves that were killed after everything was on disk. Nothing is deleted.

    Args:
        run_dir: The output folder.
        is_alone: Whether no other run saves there, as the caller has the lock. Where there is none, nobody does either.
    """
    for place, owner in hidden_folders(run_dir, SAVING):
        if has_ended(owner, is_alone or not is_locked(run_dir)):
            _finish(place)
    # In a folder that is read-only it stays as it is. If the disk refuses it, its manifest says so.
    for path in names.list_checkpoints(run_dir):
        if is_unfinished(Path(path)):
            with contextlib.suppress(OSError):
                finish(path)


def _finish(place: str) -> None:
    """Put a checkpoint that is whole, and what lies beside it, where they would be had the run not been killed."""
    for path in names.list_checkpoints(place) + names.list_checkpoints(os.path.join(place, REPLACED)):
        final = os.path.join(os.path.dirname(place), os.path.basename(path))
        if not os.path.lexists(final) and is_ours(path) and not problems(path):
            # every process of a run may ask for its last checkpoint: one of them is first
            with contextlib.suppress(OSError):
                if os.path.dirname(path) == place:
                    land_left_over(place, final)
                os.replace(path, final)


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
        wrong = [problem for name, facts in listed.items() if (problem := compare(root, name, facts))]
        return wrong or list(judge_contents(Contents(root)))
    except OSError as error:
        return [f"{error.filename or folder} cannot be read: {error.strerror}"]
    except CheckpointError as error:
        return [first_line(error)]


def compare(root: Path, name: str, facts: object) -> str | None:
    """Return what is wrong with a file, going by what the manifest says about it."""
    if not is_inside(root, name):
        return f"{name if name.isprintable() else ascii(name)} is outside the folder"
    if not os.path.lexists(root / name):
        return f"{name} is missing"
    try:
        with open_regular(root / name) as file:
            size = os.fstat(file.fileno()).st_size
            if refused := refusal(root, name, facts):
                return refused
            if not isinstance(facts, dict) or size != facts.get("bytes"):
                return f"{name} has {size} bytes, not what {MANIFEST_NAME} says"
            if "sha256" not in facts:
                how = difference_unflushed(facts, os.fstat(file.fileno()))
                return None if how is None else f"{name} {how}"
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # a buffered file
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except CheckpointError as error:
        return f"{name}: {first_line(error)}"
    return None if digest == facts.get("sha256") else f"{name} is damaged (its hash differs)"


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Find the newest complete checkpoint of a folder, or None.

    Unless a run is saving there, this first finishes the save of a killed run, if all of its files were on disk. It
    deletes only the lock of a dead process of this host. The next run that saves there removes everything else that
    killed runs have left. Newer checkpoints that are incomplete or damaged are skipped. A warning names each of them,
    with the reason.

    Raises:
        FileNotFoundError: `folder` does not exist.
        CheckpointError: It cannot be listed.

    Mirrors:
        `transformers.trainer_utils.get_last_checkpoint`, 5.23.

    Differs:
        Upstream compares the names only. Here, checkpoints of the last run come before those of earlier runs.
    """
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"No such directory: {os.fspath(folder)!r}")
    give_back_for_the_dead(folder)
    if not is_in_use(folder):
        recover(os.fspath(folder))
    return newest_checkpoint(folder, problems)


def newest_checkpoint(folder: str | os.PathLike[str], judge: Callable[[str], list[str]]) -> str | None:
    """Return the newest checkpoint with which nothing is wrong, and warn of each newer one.

    The newest is the last run's with the most updates; an earlier run may have left one with more.

    Args:
        folder: The output folder.
        judge: Lists what is wrong with a checkpoint.
    """
    paths = names.list_checkpoints(folder)
    for path in reversed(_in_order_of_writing(paths)):
        wrong = judge(path)
        if not wrong:
            beyond = [os.path.basename(other) for other in paths[paths.index(path) + 1 :] if not judge(other)]
            if beyond:
                logger.warning(
                    "%s is taken: the last run wrote it. Of an earlier run: %s. Name one of them to go on from it.",
                    path,
                    ", ".join(beyond),
                )
            return path
        way_out = f" If it was edited on purpose: `hf-compat seal {path}`." if is_ours(path) else ""
        logger.warning("%s is not whole and is skipped: %s.%s", path, "; ".join(wrong), way_out)
    return None


def _in_order_of_writing(paths: list[str]) -> list[str]:
    """Order checkpoints by the call of `train` that wrote them, then by update.

    Those that do not say who wrote them, of `transformers` or of a version before, go by update with the last call's.
    """
    turns = {path: None if (writer := writer_of(path)) is None else writer.turn for path in paths}
    last = max(filter(None, turns.values()), default=0)
    return sorted(paths, key=lambda path: (turns[path] or last, names.checkpoint_step(path) or 0))
