"""Write the manifest of a checkpoint, and decide by it whether a folder is complete.

`manifest.json` lists every file with its size and SHA-256. `seal` flushes, hashes and lists the files before training
continues. In two parts, `list_unflushed` lists them first, and `finish` flushes and hashes them beside the training.
An unflushed entry holds the boot of the system, so that a power cut is noticed. A folder of `transformers` has no
manifest and is judged by its files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from hf_compat.checkpoint import layout
from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.files import first_line, is_inside, open_regular, write_new
from hf_compat.checkpoint.judging import judge_contents, judge_unlisted
from hf_compat.checkpoint.layout import (
    CONVERTING,
    DELETED,
    REPLACED,
    SAVING,
    has_ended,
    hidden_folder,
    hidden_folders,
    make_hidden,
    remove_ended,
    remove_hidden,
)
from hf_compat.checkpoint.reading import (
    MANIFEST_KIND,
    MANIFEST_NAME,
    Contents,
    Listed,
    Writer,
    has_manifest,
    listed_files,
    marker_of,
    read_manifest,
    read_writer,
    saving_owner,
    why_unreadable,
)
from hf_compat.checkpoint.run_lock import Owner, give_back_for_the_dead, is_in_use, is_locked
from hf_compat.errors import CheckpointError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Files up to this size, in bytes, are hashed at once: it takes less time than to put it off.
_HASHED_AT_ONCE = 2**18
_THREADS = 4

Stamps = dict[str, tuple[int, int, int]]  # by file: bytes, time of change in ns, inode

_WRITTEN_FIRST = f".{MANIFEST_NAME}."


@functools.cache
def this_boot() -> str | None:
    """Return what tells this start of the system from any other, on any machine; None where it does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):  # only Linux has it
        return None


def entries(folder: Path) -> Iterator[Path]:
    """List what is below a folder but subfolders and its manifest: files, links, and what else somebody put there."""
    below = (path for path in sorted(folder.rglob("*")) if path.parent != folder or not _is_manifest(path))
    return (path for path in below if path.is_symlink() or not path.is_dir())


def _half_written() -> str:
    return f"{_WRITTEN_FIRST}{secrets.token_hex(8)}"  # nobody can put a link there before


def _is_manifest(path: Path) -> bool:
    """Return whether a file is a manifest, or one that a kill has left half written."""
    return path.name == MANIFEST_NAME or path.name.startswith(_WRITTEN_FIRST)


def seal(folder: str, writer: Writer | None = None, unlisted: Collection[str] = ()) -> None:
    """Flush every file of a folder to disk, then write its manifest.

    Args:
        folder: The checkpoint.
        writer: Who wrote it.
        unlisted: Files of the user's, which may change without making the checkpoint damaged.
    """
    root = Path(folder)
    listed: Listed = {}
    with ThreadPoolExecutor(_THREADS) as threads:  # both wait outside Python
        names = [name for name in _own_files(root) if name not in unlisted]
        listed.update(zip(names, threads.map(lambda name: _facts(root / name), names), strict=True))
    _replace_manifest(root, listed, writer, root / _half_written())
    _flush_folders(root, listed)


def _facts(path: Path) -> dict[str, object]:
    """Force a file to the disk, and return what a manifest says about it."""
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def list_unflushed(folder: str, writer: Writer | None = None) -> None:
    """Write a manifest of files that are not on the disk yet; big ones are hashed by `finish`, which is to follow."""
    root = Path(folder)
    listed: Listed = {name: _facts_unflushed(root / name) for name in _own_files(root)}
    _replace_manifest(root, listed, writer, root / _half_written(), is_durable=False)


def _facts_unflushed(path: Path) -> dict[str, object]:
    stat = path.stat()
    facts: dict[str, object] = {"bytes": stat.st_size, "boot": this_boot(), "mtime_ns": stat.st_mtime_ns}
    return facts | {"sha256": _sha256(path)} if stat.st_size <= _HASHED_AT_ONCE else facts


def stamps(folder: str) -> Stamps:
    """Return what tells each file of a folder from one that is put in its place: size, time and inode."""
    root = Path(folder)
    stats = {name: os.stat(root / name) for name in _own_files(root)}
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def adopt_changes(folder: str, before: Stamps) -> list[str]:
    """Write the manifest of a sealed folder anew where files were changed, removed or added since.

    Args:
        folder: The checkpoint.
        before: Its `stamps` when it was sealed.

    Returns:
        What was changed; nothing where a manifest is not there any more.
    """
    root, now = Path(folder), stamps(folder)
    listed = read_manifest(root)
    if listed is None or now == before:
        return []
    missing = sorted(listed.keys() - now.keys())
    added = sorted(name for name in now.keys() - before.keys() if layout.is_part_of_checkpoint(name))
    changed = sorted(name for name in listed.keys() & now.keys() if now[name] != before.get(name))
    kept = {name: facts for name, facts in listed.items() if name in now}
    if missing or added or changed:
        _replace_manifest(
            root, kept | {name: _facts(root / name) for name in (*changed, *added)}, read_writer(root),
            root / _half_written(),
        )  # fmt: skip
        _flush_folders(root, kept)
    return [
        f"{name} is {how}"
        for how, files in (("changed", changed), ("removed", missing), ("added", added))
        for name in files
    ]


def finish(folder: str) -> None:
    """Flush the files of a folder that `list_unflushed` has listed, and write its manifest with all hashes.

    A file that somebody has changed or removed since keeps its entry, which says so to whoever reads the folder. A
    folder that somebody removes or renames meanwhile is left alone.

    Raises:
        OSError: They could not be written to the disk, though the system had taken them. The manifest says so.
    """
    root = Path(folder)
    try:
        _finish_sealing(root)
    except FileNotFoundError:
        if read_manifest(root) is not None:
            raise


def _finish_sealing(root: Path) -> None:
    listed = read_manifest(root)
    if listed is None:
        return
    finished = {}
    for name, facts in listed.items():
        try:
            finished[name] = _finished(root, name, facts)
        except OSError as error:
            refuse(root, name, error)
            raise
    # beside the folder: who copies it, or removes it, meanwhile finds no file that comes and goes
    with hidden_folder(str(root.parent), SAVING) as place:
        _replace_manifest(root, finished, read_writer(root), Path(place) / MANIFEST_NAME)
    _flush_folders(root, finished)
    flush(root.parent)


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder's files were listed in this boot of the system and not yet flushed."""
    listed = read_manifest(folder) or {}
    return any(_is_of_this_boot(facts) for facts in listed.values())


# Files that the disk refused where the manifest could not say so: their names, and the state of that manifest.
_REFUSED: dict[tuple[int, int, int, str], str] = {}


def refuse(root: Path, name: str, error: OSError) -> None:
    """Note that the disk refused a file of an unfinished folder, which is not whole from then on.

    The system reports such a failure once, and the next flush succeeds although the data are lost. So the manifest says
    it to later processes. If the disk does not take that either, this process remembers it. A disk or folder that
    cannot be written to at all has refused nothing.
    """
    listed = read_manifest(root)
    if listed is None or error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT):
        return
    said = os.strerror(error.errno or errno.EIO)
    _REFUSED[*_state_of_manifest(root), name] = said
    with contextlib.suppress(OSError):
        facts = {"refused": said, "mtime_ns": (root / name).stat().st_mtime_ns}
        _replace_manifest(root, {**listed, name: facts}, read_writer(root), root / _half_written())


def _state_of_manifest(root: Path) -> tuple[int, int, int]:
    stat = os.stat(root / MANIFEST_NAME)
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def refusal(root: Path, name: str, facts: object) -> str | None:
    """Why a listed file, which is there, is not on the disk; None where it is. One that was not flushed is flushed.

    A file that somebody has put in its place since is another one.
    """
    said = None
    if isinstance(facts, dict) and _is_of_this_boot(facts):
        said = _REFUSED.get((*_state_of_manifest(root), name))
        try:
            flush(root / name)
        except OSError as error:
            refuse(root, name, error)
            said = None if error.errno == errno.EROFS else os.strerror(error.errno or errno.EIO)
    elif isinstance(facts, dict) and facts.get("mtime_ns") == (root / name).stat().st_mtime_ns:
        said = facts.get("refused")
    return None if said is None else f"{name} could not be written to the disk: {said}"


def difference_unflushed(facts: Mapping[str, object], stat: os.stat_result) -> str | None:
    """Return how a file without a hash differs from what was listed; None where it is as it was written."""
    if "boot" not in facts:
        return "has no hash"
    if not _is_of_this_boot(facts):
        return "was not on the disk when its system stopped, or was written on another machine, and has no hash"
    return None if stat.st_mtime_ns == facts.get("mtime_ns") else "was changed before it was hashed"


def _is_of_this_boot(facts: object) -> bool:
    return isinstance(facts, dict) and this_boot() is not None and facts.get("boot") == this_boot()


def _finished(root: Path, name: str, facts: object) -> object:
    """Flush a file, and return what a manifest says about it."""
    path = root / name
    if not _is_of_this_boot(facts) or not isinstance(facts, dict) or not is_inside(root, name):
        return facts
    try:
        flush(path)
        digest = facts.get("sha256") or _sha256(path)
        is_as_listed = path.stat().st_mtime_ns == facts.get("mtime_ns")
    except FileNotFoundError:
        return facts
    return {"bytes": facts.get("bytes"), "sha256": digest} if is_as_listed else facts


def _own_files(root: Path) -> Iterator[str]:
    """List the regular files of a folder; what a link that leads elsewhere leads to is no part of the checkpoint."""
    names = (path.relative_to(root).as_posix() for path in entries(root) if path.is_file())
    return (name for name in names if is_inside(root, name))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Force a file or folder to disk; folders cannot be opened for that everywhere."""
    with contextlib.suppress(PermissionError, IsADirectoryError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _flush_folders(root: Path, listed: Listed) -> None:
    above = {folder for name in listed if is_inside(root, name) for folder in Path(name).parents}
    for folder in sorted(root / folder for folder in above | {Path()}):
        with contextlib.suppress(FileNotFoundError):
            flush(folder)


def _replace_manifest(
    root: Path, listed: Listed, writer: Writer | None, written: Path, is_durable: bool = True
) -> None:
    """Write a manifest, elsewhere at first: a folder that has one has the old one or the new one at every instant."""
    by = {} if writer is None else asdict(writer)
    text = json.dumps({"kind": MANIFEST_KIND, "version": 1, **by, "files": listed}, indent=1)
    write_new(written, text.encode(), is_durable)
    try:
        os.replace(written, root / MANIFEST_NAME)
    except OSError:
        written.unlink(missing_ok=True)
        raise


logger = logging.getLogger(__name__)


class SavingPlace:
    """Where a run writes one checkpoint: into its hidden folder, or in place.

    Code of the user's may look for what lies beside its checkpoint, so it writes in place. Until the checkpoint is
    whole, its manifest lists no files and names the run. What had the name before waits in the hidden folder.

    Args:
        final: The folder that the checkpoint becomes.
        owner: The run.
        in_place: Whether code of the user's takes part in writing.

    Attributes:
        path: The hidden folder.
        folder: The folder to write into.
        is_there: Whether something had the final name before. Call `prepare` first.
    """

    def __init__(self, final: str, owner: Owner, in_place: bool = False) -> None:
        self.final, self._owner, self._in_place = final, owner, in_place
        self.run_dir, name = os.path.split(final)
        self.path = os.path.join(self.run_dir, SAVING + owner.id)
        self._hidden = os.path.join(self.path, name)
        self.folder = final if in_place else self._hidden
        self._replaced = os.path.join(self.path, REPLACED, name)
        self._began = 0
        self._is_begun = False

    @property
    def is_there(self) -> bool:
        return os.path.lexists(self._replaced if self._in_place else self.final)

    def prepare(self) -> None:
        """Make the hidden folder anew, and the checkpoint's where it is written in place.

        Raises:
            OSError: They cannot be made.
        """
        self.discard()  # a save that failed may have left one
        os.makedirs(self.run_dir, exist_ok=True)
        make_hidden(self.run_dir, SAVING, self._owner)
        self._began = os.stat(self.path).st_ctime_ns  # by the clock of the disk
        if self._in_place:
            # The folder gets its name together with its marker, and only once both are on the disk
            os.mkdir(self._hidden)
            marker = json.dumps(marker_of(self.final, self._owner.id))
            write_new(os.path.join(self._hidden, MANIFEST_NAME), marker.encode(), is_durable=True)
            flush(Path(self._hidden))
            self._set_aside()
            os.replace(self._hidden, self.final)
            self._is_begun = True
            flush(Path(self.run_dir))

    def adopt(self) -> None:
        """Take over what was written at the final place while this save went on, since it belongs to this checkpoint.

        A link there leads to a folder outside, which is not changed.
        """
        old = Path(self.final)
        for path in [] if self._in_place or old.is_symlink() else sorted(old.rglob("*")):
            target = Path(self.folder) / path.relative_to(old)
            if not (path.is_symlink() or path.is_file()) or path.lstat().st_ctime_ns < self._began:
                continue
            if not os.path.lexists(target) or target.lstat().st_mtime_ns < path.lstat().st_mtime_ns:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target, follow_symlinks=False)

    def seal(self, writer: Writer, is_flushed: bool) -> None:
        """Write the manifest. In place, this makes the checkpoint whole."""
        carried = _carry_over(Path(self._replaced), Path(self.folder)) if self._in_place else ()
        if is_flushed:
            seal(self.folder, writer, carried)
        else:
            list_unflushed(self.folder, writer)

    def put(self, is_flushed: bool) -> None:
        """Rename a sealed folder to its final name. At every instant the old folder of that name or the new is whole.

        Files of the old folder that belong to no checkpoint are the user's and are copied into the new one. So are
        files that the old manifest lists and that were written again since, by the run's own code before this save.
        """
        if not self._in_place:
            _carry_over(Path(self.final), Path(self.folder))
            self._set_aside()
            os.replace(self.folder, self.final)
            if is_flushed:
                flush(Path(self.run_dir))
        self.discard()

    def discard(self) -> None:
        """Remove what is left of the save. What had the final name before a save that failed gets it back."""
        with contextlib.suppress(OSError):  # the next run tries again
            if self._is_begun:
                if os.path.isdir(self.final) and not os.path.lexists(os.path.join(self.final, MANIFEST_NAME)):
                    _take_out(self.final, self.path)  # user code has made it anew
                self._is_begun = False
            _put_back(self.path, self._owner, [self.final])
            remove_hidden(self.path)

    def _set_aside(self) -> None:
        if os.path.islink(self.final):
            logger.warning(
                "%s is a link to %s: the new checkpoint takes its place.", self.final, os.readlink(self.final)
            )
        elif not os.path.isdir(self.final):
            return
        os.mkdir(os.path.dirname(self._replaced))
        os.replace(self.final, self._replaced)
        for folder in (os.path.dirname(self._replaced), self.path, self.run_dir):
            flush(Path(folder))


def _carry_over(old: Path, new: Path) -> set[str]:
    """Copy the user's own files of a folder that is replaced, and name them."""
    if old.is_symlink() or not old.is_dir():
        return set()
    listed = listed_files(old)
    sealed_ns = 0 if listed is None else (old / MANIFEST_NAME).lstat().st_mtime_ns
    ours = {
        name
        for name in listed or ()
        if not os.path.lexists(old / name) or (old / name).lstat().st_mtime_ns <= sealed_ns
    }
    carried = set()
    for path in entries(old):
        name = path.relative_to(old).as_posix()
        if name in ours or names.is_part_of_checkpoint(name) or os.path.lexists(new / name):
            continue
        if path.is_symlink() or path.is_file():  # a pipe or a socket has nothing to copy
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, new / name, follow_symlinks=False)
            if not path.is_symlink():
                flush(new / name)
            carried.add(name)
    return carried


def _take_out(checkpoint: str, place: str) -> None:
    """Move a checkpoint that did not become whole into a hidden folder, which is deleted."""
    os.makedirs(os.path.join(place, DELETED), exist_ok=True)
    os.replace(checkpoint, os.path.join(place, DELETED, os.path.basename(checkpoint)))


def _put_back(place: str, owner: Owner, checkpoints: Iterable[str]) -> None:
    """Take out what a save that did not end has written in place, and give what it replaces its name again."""
    run_dir, replaced = os.path.dirname(place), os.path.join(place, REPLACED)
    if not os.path.isdir(place):
        return
    for path in checkpoints:
        if saving_owner(Path(path)) == owner.id and has_manifest(Path(path)):
            _take_out(path, place)
    for name in sorted(os.listdir(replaced)) if os.path.isdir(replaced) else ():
        if not os.path.lexists(os.path.join(run_dir, name)):
            os.replace(os.path.join(replaced, name), os.path.join(run_dir, name))


def remove(folder: str) -> None:
    """Delete a checkpoint of ours, with what callbacks and overrides have put into it, as upstream does.

    The folder is renamed first: one that is half deleted is never taken for a checkpoint. What holds no manifest never
    was a checkpoint of ours, and stays.

    Raises:
        OSError: It cannot be deleted, or it is a symbolic link: what that points to is not ours to delete.
    """
    root = Path(folder)
    if read_manifest(root) is None:
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
            _finish(place, owner)
    # In a folder that is read-only it stays as it is. If the disk refuses it, its manifest says so.
    for path in names.list_checkpoints(run_dir):
        if is_unfinished(Path(path)):
            with contextlib.suppress(OSError):
                finish(path)


def _finish(place: str, owner: Owner) -> None:
    """Put a checkpoint that is whole, or what it was to replace, where it would be had the run not been killed."""
    for path in names.list_checkpoints(place):
        final = os.path.join(os.path.dirname(place), os.path.basename(path))
        if not os.path.lexists(final) and is_ours(path) and not problems(path):
            # every process of a run may ask for its last checkpoint: one of them is first
            with contextlib.suppress(OSError):
                os.replace(path, final)
    with contextlib.suppress(OSError):
        _put_back(place, owner, names.list_checkpoints(os.path.dirname(place)))


def problems(folder: str) -> list[str]:
    """List what is wrong with a checkpoint folder; nothing is wrong with a whole one, which every reader can read."""
    root = Path(folder)
    if not os.path.isdir(root):
        return [f"{folder} is no folder"]
    try:
        if not has_manifest(root):
            return list(judge_unlisted(root))
        listed = read_manifest(root)
        if listed is None:
            return [why_unreadable(root)]
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
