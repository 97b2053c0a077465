"""What makes a checkpoint folder whole: it is written durably, listed last and checked before it is read.

HF words; files only.

A folder of ours holds `manifest.json`: every file with its size and SHA-256, written when all of them are on disk. A
folder without one (written by `transformers`) is judged by what it needs to contain.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import time
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
from hf_compat.checkpoint.judging import judge_contents, judge_unlisted
from hf_compat.checkpoint.run_lock import Owner, is_in_use
from hf_compat.checkpoint.saving_place import PLACE_PREFIX, land_left_over, places
from hf_compat.checkpoint.sealing import (
    difference_unflushed,
    entries,
    finish,
    flush,
    is_unfinished,
    remove_half_written,
)
from hf_compat.checkpoint.sealing import seal as seal
from hf_compat.errors import CheckpointError

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"
DELETED_SUFFIX = ".deleted"
# Beside the checkpoints: what a conversion, a replacement or a removal has under way, with the id of its run. Versions
# before had none; saves, too, wrote folders that end in `.partial`.
_LEFT_OVER = re.compile(r"(?P<final>.+)(?P<suffix>\.partial|\.replaced|\.deleted)(-(?P<id>.+))?")
# What a run on another host has under way is touched when nothing was written to it for so long, in seconds.
_SURELY_OVER = 3600.0


def make_partial(final: str) -> str:
    """Make the folder that a checkpoint of another form is converted in, before it gets its final name."""
    for path, suffix, owner in _left_overs(os.path.dirname(final) or "."):
        is_of_this = suffix == PARTIAL_SUFFIX and os.path.basename(_final_of(path)) == os.path.basename(final)
        if is_of_this and owner is not None and _is_over(path, owner):  # without one it may be the user's
            _remove_tree(path, ignore_errors=True)
    partial = f"{final}{PARTIAL_SUFFIX}-{Owner.of_this_process().id}"
    os.makedirs(partial)
    return partial


def put_in_place(partial: str, final: str) -> None:
    """Rename a sealed folder to its final name. At every instant the old folder of that name or the new one is whole.

    Files of the old folder that belong to no checkpoint are the user's: they are copied into the new one.
    """
    if not os.path.isdir(final):
        os.replace(partial, final)
        flush(Path(final).parent)
        return
    _copy_user_files(Path(final), Path(partial))
    replaced = final + REPLACED_SUFFIX + _mark_of_run(partial)
    _remove_tree(replaced, ignore_errors=True)
    os.replace(final, replaced)
    os.replace(partial, final)
    flush(Path(final).parent)
    _remove_tree(replaced, ignore_errors=True)  # the new checkpoint is in its place, whatever becomes of the old one


def _mark_of_run(partial: str) -> str:
    """Return what stands for a run in the names of what it has under way; nothing where the folder does not say."""
    place = os.path.basename(os.path.dirname(os.path.abspath(partial)))
    if place.startswith(PLACE_PREFIX):
        return f"-{place.removeprefix(PLACE_PREFIX)}"
    return os.path.basename(partial).rpartition(PARTIAL_SUFFIX)[2]


def _remove_tree(path: str, ignore_errors: bool = False) -> None:
    """Delete a folder; of a symbolic link the link alone."""
    if not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=ignore_errors)
        return
    with contextlib.suppress(*([OSError] if ignore_errors else [])):
        os.unlink(path)


def _copy_user_files(old: Path, new: Path) -> None:
    """Copy what is no part of a checkpoint; weights or states of another run would be read as the new one's."""
    ours = set(_listed(old) or ())
    for path in entries(old):
        relative = path.relative_to(old).as_posix()
        target = new / relative
        if relative in ours or names.is_part_of_checkpoint(relative) or os.path.lexists(target):
            continue
        if path.is_symlink() or path.is_file():  # nothing can be copied out of a pipe or a socket
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)


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
    deleted = f"{folder}{DELETED_SUFFIX}-{Owner().id}"
    os.replace(folder, deleted)
    _remove_tree(deleted)


def is_ours(folder: str) -> bool:
    """Return whether a folder holds a manifest of ours, whole or not."""
    return _listed(Path(folder)) is not None


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
    """Remove what a run that was killed while saving or deleting has left behind, after finishing what is whole."""
    recover(run_dir)
    for path, suffix, owner in _left_overs_of_checkpoints(run_dir):
        if suffix == DELETED_SUFFIX or _is_over(path, owner):
            _remove_tree(path, ignore_errors=True)
    for place, run in places(run_dir):
        if _is_over(place, run):
            _remove_tree(place, ignore_errors=True)
    remove_half_written(run_dir)


def recover(run_dir: str) -> None:
    """Finish a save that was killed after everything was on disk, between two renames."""
    for place, run in places(run_dir):
        if _is_over(place, run):
            _finish(place)
    for suffix in (PARTIAL_SUFFIX, REPLACED_SUFFIX):
        for path, kind, owner in _left_overs_of_checkpoints(run_dir):
            final = _final_of(path)
            is_left_over = kind == suffix and not os.path.exists(final) and _is_over(path, owner)
            if is_left_over and is_ours(path) and not problems(path):
                # every process of a run may ask for its last checkpoint: one of them is first
                with contextlib.suppress(OSError):
                    os.replace(path, final)
    _finish_unflushed(run_dir)


def _finish_unflushed(run_dir: str) -> None:
    """Flush and hash what a run that was killed has listed; in a folder that is read-only it stays as it is."""
    for path in names.list_checkpoints(run_dir):
        if is_unfinished(Path(path)):
            with contextlib.suppress(OSError):
                finish(path)


def _finish(place: str) -> None:
    """Put a checkpoint that is whole, and what lies beside it, where they would be had the run not been killed."""
    for path in names.list_checkpoints(place):
        final = os.path.join(os.path.dirname(place), os.path.basename(path))
        if not os.path.lexists(final) and is_ours(path) and not problems(path):
            with contextlib.suppress(OSError):  # as below
                land_left_over(place, final)
                os.replace(path, final)


def _left_overs(run_dir: str) -> list[tuple[str, str, Owner | None]]:
    """List what saves and removals have left in a folder: path, suffix, and the run where the name tells it."""
    if not os.path.isdir(run_dir):
        return []
    matches = [(entry, _LEFT_OVER.fullmatch(entry.name)) for entry in os.scandir(run_dir) if os.path.isdir(entry)]
    return [
        (entry.path, match["suffix"], Owner.of_id(match["id"] or ""))
        for entry, match in sorted(matches, key=lambda found: found[0].name)
        if match is not None
    ]


def _left_overs_of_checkpoints(run_dir: str) -> list[tuple[str, str, Owner | None]]:
    return [found for found in _left_overs(run_dir) if names.checkpoint_step(_final_of(found[0])) is not None]


def _final_of(path: str) -> str:
    """Return the name that a folder gets, or had, when it is in its place."""
    match = _LEFT_OVER.fullmatch(os.path.basename(path))
    assert match is not None  # it is from the list of those that match
    return os.path.join(os.path.dirname(path), match["final"])


def _is_over(path: str, owner: Owner | None) -> bool:
    """Return whether nobody works on a left-over any more."""
    alive = False if owner is None else owner.is_alive()
    return not alive if alive is not None else time.time() - _last_change(Path(path)) > _SURELY_OVER


def _last_change(folder: Path) -> float:
    """Return when something in a folder was changed last; it may be deleted while it is looked at."""
    times = [0.0]
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if path.is_dir() or facts.st_nlink == 1:  # of a file with two names, the other one may be in use
                times.append(facts.st_mtime)
    return max(times)


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
            if not isinstance(facts, dict) or size != facts.get("bytes"):
                return f"{name} has {size} bytes, not what {MANIFEST_NAME} says"
            if "sha256" not in facts:
                how = difference_unflushed(root / name, facts, os.fstat(file.fileno()))
                return None if how is None else f"{name} {how}"
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # a buffered file
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except CheckpointError as error:
        return f"{name}: {first_line(error)}"
    return None if digest == facts.get("sha256") else f"{name} is damaged (its hash differs)"


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest whole checkpoint of a folder, or None.

    Unless a run is saving there, what killed runs have left is seen to first: a save of which everything was on disk
    is finished, one that was not is removed, and so is a lock. Newer checkpoints that are incomplete or damaged are
    skipped; a warning names each of them and what is wrong.

    Raises:
        FileNotFoundError: `folder` does not exist.
        CheckpointError: It cannot be listed.

    Mirrors:
        `transformers.trainer_utils.get_last_checkpoint`, 5.23.

    Differs:
        Upstream goes by the names alone. Here, what the last run wrote comes before what an earlier one left.
    """
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"No such directory: {os.fspath(folder)!r}")
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
