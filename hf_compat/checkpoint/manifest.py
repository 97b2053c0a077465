"""Write the manifest of a checkpoint, and decide by it whether a folder is complete.

`manifest.json` lists every file with its size and SHA-256. `seal` flushes, hashes and lists the files before training
continues. With `flushes=False` it lists them and hashes small ones, and `flush_and_hash` does the rest beside the
training.
An unflushed entry holds the boot of the system, so that a power cut is noticed. A folder of `transformers` has no
manifest and is judged by its files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.disks import flush
from hf_compat.checkpoint.files import OUTSIDE, first_line, is_inside, open_regular, problem, refusal_behind, write_new
from hf_compat.checkpoint.moving import marker_of, move, take_out
from hf_compat.checkpoint.reading import (
    MANIFEST_KIND,
    MANIFEST_NAME,
    MANIFEST_WRITTEN_FIRST,
    Listed,
    Writer,
    read_manifest,
)
from hf_compat.checkpoint.run_lock import Owner, is_free, queueing
from hf_compat.checkpoint.shares import ALONE, Share
from hf_compat.checkpoint.verifying import sha256_of, sums_of
from hf_compat.errors import CheckpointError
from hf_compat.runtime.indented import indented_json
from hf_compat.runtime.threads import Helpers

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Files up to this size, in bytes, are hashed at once: it takes less time than to put it off.
_HASHED_AT_ONCE = 2**18
_THREADS = 4
# Marks a file that the disk has refused, as its time of change. The system reports such a failure once: the next flush
# succeeds although the data are lost. A full disk takes a time where it takes no content. Even seconds suit every disk.
_REFUSED_NS = 987_654_322 * 10**9
# Refused files on a disk that does not take the mark, either: this process remembers device, inode and time of change.
_UNMARKED: set[tuple[int, int, int]] = set()

FileStats = dict[str, tuple[int, int, int]]  # by file: bytes, time of change in ns, inode
Check = Callable[[], object]  # raises an error


@functools.cache
def this_boot() -> str | None:
    """An id of this start of the system, on this machine. Only Linux has one."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def entries(folder: Path) -> dict[str, bool]:
    """Name what is below a folder, without subfolders, its manifest, and manifests that a kill left half written.

    Each has whether it is a file of the checkpoint: what a link leads to elsewhere, a pipe or a socket is not.
    """

    def tell(error: OSError) -> None:
        if not isinstance(error, PermissionError):  # a folder of the user's
            raise error

    found = {}
    for place, folders, files in os.walk(folder, onerror=tell):
        at = Path(place)
        for one in [*files, *(name for name in folders if os.path.islink(os.path.join(place, name)))]:
            is_manifest = one == MANIFEST_NAME or one.startswith(MANIFEST_WRITTEN_FIRST)
            if not (is_manifest and at == folder):
                path = at / one
                name = path.relative_to(folder).as_posix()
                # no link leads out of the folder on the way to a file that is none itself
                found[name] = path.is_file() and (not path.is_symlink() or is_inside(folder, name))
    return dict(sorted(found.items(), key=lambda item: item[0].split("/")))


def seal(
    folder: str,
    writer: Writer | None = None,
    unlisted: Collection[str] = (),
    flushes: bool = True,
    place: Path | None = None,
    known: Mapping[str, object] = MappingProxyType({}),
    sums: bool = False,
) -> None:
    """Flush every file of a folder to disk, then write its manifest, first in a `place` of its own if there is one.

    The user's files that are `unlisted` may change without damage to the checkpoint. Without `flushes`, the flushing
    is left to `flush_and_hash`, and so are the hashes of large files. With `sums`, the sums of their pages vouch for
    them.
    Those that are `known`, with their entries, are not read.
    """
    root = Path(folder)
    files = [name for name, is_own in entries(root).items() if is_own and name not in unlisted]
    found = _listed(root, [name for name in files if name not in known], flushes, sums)
    listed = {name: known[name] if name in known else found[name] for name in files}
    _replace_manifest(root, listed, writer, is_durable=flushes, place=place)
    if flushes:
        _flush_folders(root, listed)


def flushed(folder: str, names: Iterable[str]) -> Listed:
    """Flush those files of a folder that are there, and return their entries in a manifest."""
    root = Path(folder)
    return _listed(root, [name for name in names if is_inside(root, name) and os.path.isfile(root / name)], True)


def _listed(root: Path, names: Iterable[str], flushes: bool, sums: bool = False) -> Listed:
    with Helpers[Listed](_THREADS) as threads:  # flushing and hashing wait outside Python
        facts = {name: threads.submit(_facts, root / name, flushes, sums) for name in names}
        return {name: found.result() for name, found in facts.items()}


def _facts(path: Path, flushes: bool = True, sums: bool = False) -> Listed:
    """Collect what a manifest says about a file, which is forced to the disk first or later."""
    if flushes:
        flush(path)
    stat = path.stat()
    facts: Listed = {"bytes": stat.st_size}
    if not flushes:
        facts |= {"boot": this_boot(), "mtime_ns": stat.st_mtime_ns}
    is_small = stat.st_size <= _HASHED_AT_ONCE
    if flushes or is_small or sums:
        with open(path, "rb", buffering=0) as file:
            if flushes or is_small:
                facts["sha256"] = sha256_of(file)
            else:
                facts["sums"] = sums_of(file)
    return facts


def file_stats(folder: str) -> FileStats:
    """Note size, time and inode of each file of a folder. A file that is put in its place has others."""
    root = Path(folder)
    stats = {name: os.stat(root / name) for name, is_own in entries(root).items() if is_own}
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


@contextlib.contextmanager
def _pinned(root: Path) -> Iterator[int | None]:
    """Open a folder, to replace its manifest by this descriptor. None where the system has no such renames.

    Another run may have taken the output folder over by then. What it has put in the folder's place keeps its manifest.
    """
    if os.rename not in os.supports_dir_fd:
        yield None
        return
    descriptor = os.open(root, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def relist_changed_files(folder: str, before: FileStats) -> list[str]:
    """Write the manifest of a sealed folder anew where files differ from their `file_stats` then. Describe each change.

    Without a manifest, nothing is done.
    """
    root, now = Path(folder), file_stats(folder)
    if now == before:
        return []
    with _pinned(root) as pin:
        manifest = read_manifest(root)
        listed = manifest.files
        if listed is None:
            return []
        added = sorted(name for name in now.keys() - before.keys() if layout.is_part_of_checkpoint(name))
        changed = sorted(name for name in listed.keys() & now.keys() if now[name] != before.get(name))
        changes = {"changed": changed, "removed": sorted(listed.keys() - now.keys()), "added": added}
        kept = {name: facts for name, facts in listed.items() if name in now}
        if any(changes.values()):
            anew = {name: _facts(root / name) for name in (*changed, *added)}
            _flush_folders(root, anew)  # older checkpoints may be gone already, so what it lists has to be on the disk
            _replace_manifest(root, kept | anew, manifest.writer, pin=pin)
            flush(root)
    return [f"{name} is {how}" for how, files in changes.items() for name in files]


def flush_and_hash(folder: str) -> None:
    """Flush the files of a folder that `seal` has only listed, and write its manifest with all hashes.

    A file that was changed or removed since keeps its entry, by which readers notice it. A folder that is removed or
    renamed meanwhile is left alone. If the disk refuses a file, that is an OSError, and the file says so.
    """
    root = Path(folder)
    try:
        with _pinned(root) as pin:
            manifest = read_manifest(root)
            finished = _finished(root, manifest.files or {})
            if not finished:
                return
            # Written beside the folder, so that a copy or removal meanwhile finds no file that comes and goes
            with layout.hidden_folder(str(root.parent), layout.SAVING) as place:
                _replace_manifest(root, finished, manifest.writer, place=Path(place), pin=pin)
        _flush_folders(root, finished)
        flush(root.parent)
    except FileNotFoundError:
        if is_ours(folder):
            raise


def flush_listed(folder: str) -> None:
    """Flush a folder whose manifest has hashes or sums, and write nothing: user code may be reading it."""
    root = Path(folder)
    try:
        finished = _finished(root, read_manifest(root).files or {}, hashes=False)
        if finished:
            flush(root / MANIFEST_NAME)
            _flush_folders(root, finished)
            flush(root.parent)
    except FileNotFoundError:
        if is_ours(folder):
            raise


def _finished(root: Path, files: Listed, hashes: bool = True) -> Listed:
    """Flush the files of a manifest that are not flushed yet, and hash those without a hash. Return their entries.

    Without `hashes`, sums are enough.
    """
    finished = dict(files)
    for name, facts in files.items():
        is_left = isinstance(facts, dict) and (_is_of_this_boot(facts) or (hashes and "sums" in facts))
        if isinstance(facts, dict) and is_left and is_inside(root, name):
            try:
                is_enough = "sha256" in facts or not hashes
                if is_enough:
                    flush(root / name)
                hashed = facts if is_enough else _facts(root / name)
                is_as_listed = "sha256" in hashed and _is_as_listed(root / name, facts)
            except FileNotFoundError:
                continue
            except OSError as error:
                _mark_refused(root / name, error)
                raise
            if is_as_listed:
                finished[name] = {"bytes": facts.get("bytes"), "sha256": hashed["sha256"]}
    return finished


def _is_as_listed(path: Path, facts: Listed) -> bool:
    """Whether a file has its sums, or was not changed since it was listed without."""
    if "sums" not in facts:
        return path.stat().st_mtime_ns == facts.get("mtime_ns")
    with open(path, "rb", buffering=0) as file:
        return sums_of(file) == facts["sums"]


def _mark_refused(path: Path, error: OSError) -> bool:
    """Mark a file that the disk has refused, which is not whole from then on. Whether it has.

    A disk, folder or file that cannot be written to at all has refused nothing.
    """
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT):
        return False
    logger.error("%s could not be written to the disk: %s.", path, os.strerror(error.errno or 0))
    try:
        os.utime(path, ns=(_REFUSED_NS, _REFUSED_NS))
    except OSError:
        with contextlib.suppress(OSError):  # a file that cannot be asked is not taken for whole, either
            _UNMARKED.add(_identity(path))
    return True


def _identity(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def _is_refused(path: Path, facts: object) -> bool:
    """Whether the disk has refused a file since it was listed. One that was not flushed is flushed now."""
    try:
        if _is_of_this_boot(facts):
            flush(path)
        # a file that was put in its place has another time
        return path.stat().st_mtime_ns == _REFUSED_NS or _identity(path) in _UNMARKED
    except OSError as error:
        return _mark_refused(path, error)


def _is_of_this_boot(facts: object) -> bool:
    """Whether a file was listed since the system started, and not flushed yet."""
    return isinstance(facts, dict) and this_boot() is not None and facts.get("boot") == this_boot()


def _flush_folders(root: Path, files: Iterable[str]) -> None:
    """Force the entries of files, and of the folders that they are in, to the disk."""
    above = {folder for name in files for folder in Path(name).parents}
    inside = {folder for folder in above if is_inside(root, folder.as_posix())}
    for folder in sorted(root / folder for folder in inside | {Path()}):
        with contextlib.suppress(FileNotFoundError):
            flush(folder)


def _replace_manifest(
    root: Path,
    listed: Mapping[str, object],
    writer: Writer | None,
    is_durable: bool = True,
    place: Path | None = None,
    pin: int | None = None,
) -> None:
    """Write a manifest elsewhere and rename it. A folder that has one has the old or the new one at every instant.

    It is written in a `place`, by default in the folder. With `pin` the folder is the one with this descriptor.
    """
    written = root / f"{MANIFEST_WRITTEN_FIRST}{secrets.token_hex(8)}" if place is None else place / MANIFEST_NAME
    by = {} if writer is None else asdict(writer)
    text = indented_json({"kind": MANIFEST_KIND, "version": 1, **by, "files": listed}, 1)
    write_new(written, text.encode(), is_durable)
    try:
        if pin is None:
            os.replace(written, root / MANIFEST_NAME)
        else:
            os.replace(written, MANIFEST_NAME, dst_dir_fd=pin)
    except OSError:
        written.unlink(missing_ok=True)
        raise


class SavingPlace:
    """Where a run writes one checkpoint: into its hidden folder, or in place.

    User code may look for files beside its checkpoint, so it writes in place. Until the checkpoint is whole, its
    manifest lists no files and names the run. An older folder of that name waits in the hidden folder.

    Every name in the output folder is given and taken by a rename from or into the hidden folder, which is there before
    the run looks at its lock. A run that takes the lock over removes it (`layout.remove_hidden_of_others`). So what a
    run does after it has lost the output folder fails, and what the other run has written stays.
    """

    def __init__(self, final: str, owner: Owner, in_place: bool = False) -> None:
        self.final, self._owner, self._in_place = final, owner, in_place
        self.run_dir, name = os.path.split(final)
        self.hidden = os.path.join(self.run_dir, layout.SAVING + owner.id)
        self._before_named = os.path.join(self.hidden, name)
        self.folder = final if in_place else self._before_named  # to write into
        self._replaced = os.path.join(self.hidden, layout.REPLACED, name)
        self._began = 0
        self._is_begun, self._is_flushed = False, True
        self._sealed: os.stat_result | None = None

    def prepare(self, may_write: Check = lambda: None) -> None:
        """Make the hidden folder anew, and the checkpoint's where it is written in place, if the run `may_write`."""
        if os.path.isdir(self.hidden):  # a save that failed may have left one
            self.discard()
        layout.make_hidden(self.run_dir, layout.SAVING, self._owner)
        may_write()
        self._began = os.stat(self.hidden).st_ctime_ns  # by the clock of the disk
        if self._in_place:
            # The folder gets its name together with its marker, and only once both are on the disk
            os.mkdir(self._before_named)
            content = marker_of(self._owner.id, os.path.basename(self.final))
            write_new(os.path.join(self._before_named, MANIFEST_NAME), content, is_durable=True)
            flush(Path(self._before_named))
            self._set_aside()
            move(self._before_named, self.final)
            self._is_begun = True
            flush(Path(self.run_dir))

    def seal(
        self,
        writer: Writer,
        flushes: bool,
        known: Mapping[str, object] = MappingProxyType({}),
        sums: bool = False,
    ) -> None:
        """Write the manifest. In place, this makes the checkpoint whole. Other ranks have flushed the `known` files.

        Files that were written at the final place during this save are taken over first: they belong to this
        checkpoint. A link there leads to a folder outside, which is not changed. A checkpoint that replaces another is
        flushed in any case, as the other one stays until this one is safe.
        """
        old, known = Path(self.final), dict(known)
        for path in [] if self._in_place or old.is_symlink() else sorted(old.rglob("*")):
            target = Path(self.folder) / path.relative_to(old)
            if not (path.is_symlink() or path.is_file()) or path.lstat().st_ctime_ns < self._began:
                continue
            if not os.path.lexists(target) or target.lstat().st_mtime_ns < path.lstat().st_mtime_ns:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target, follow_symlinks=False)
                known.pop(path.relative_to(old).as_posix(), None)
        carried = _carry_over(Path(self._replaced), Path(self.folder)) if self._in_place else ()
        self._is_flushed = flushes or os.path.lexists(self._replaced if self._in_place else self.final)
        place = Path(self.hidden) if self._in_place else None
        seal(self.folder, writer, carried, self._is_flushed, place, known, sums)
        self._sealed = os.stat(self.folder)

    def put(self) -> None:
        """Rename a sealed folder to its final name. At every instant the old folder of that name or the new is whole.

        Files of the old folder that belong to no checkpoint are the user's and are copied into the new one. So are
        files that the old manifest lists and that were written again since, by the run's own code before this save.
        A reader that came in between may have renamed the sealed folder (`recover`).
        """
        if not self._in_place:
            if os.path.lexists(self.final) and os.path.lexists(self.folder):
                _carry_over(Path(self.final), Path(self.folder))
                self._set_aside()
            try:
                move(self.folder, self.final)
            except FileNotFoundError:
                if self._sealed is None or not os.path.samestat(os.stat(self.final), self._sealed):
                    raise
            if self._is_flushed:
                flush(Path(self.run_dir))
        self._is_begun = False
        layout.remove_hidden(self.hidden)

    def discard(self) -> None:
        """Remove what is left of the save. What had the final name before a save that failed gets it back.

        If a run that took the output folder over has removed the hidden folder, the names there are that run's.
        """
        with contextlib.suppress(OSError):  # the next run tries again
            if self._is_begun and layout.has_record(self.hidden):
                if os.path.isdir(self.final) and not os.path.lexists(os.path.join(self.final, MANIFEST_NAME)):
                    _take_out(self.final, self.hidden)  # user code has made it anew
                self._is_begun = False
            _put_back(self.hidden, self._owner, [self.final])
            layout.remove_hidden(self.hidden)

    def _set_aside(self) -> None:
        if os.path.islink(self.final):
            logger.warning(
                "%s is a link to %s: the new checkpoint takes its place.", self.final, os.readlink(self.final)
            )
        elif not os.path.isdir(self.final):
            return
        if not layout.has_record(self.hidden):  # copying may have made the path anew that another run has removed
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.hidden)
        os.mkdir(os.path.dirname(self._replaced))
        move(self.final, self._replaced)
        for folder in (os.path.dirname(self._replaced), self.hidden, self.run_dir):
            flush(Path(folder))


def _carry_over(old: Path, new: Path) -> set[str]:
    """Copy the user's own files of a folder that is replaced, and name them."""
    if old.is_symlink() or not old.is_dir():
        return set()
    listed = read_manifest(old).files or {}
    sealed_ns = (old / MANIFEST_NAME).lstat().st_mtime_ns if listed else 0
    carried = set()
    for name in entries(old):
        path = old / name
        is_of_save = name in listed and path.lstat().st_mtime_ns <= sealed_ns
        if is_of_save or layout.is_part_of_checkpoint(name) or os.path.lexists(new / name):
            continue
        if path.is_symlink() or path.is_file():  # a pipe or a socket has nothing to copy
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, new / name, follow_symlinks=False)
            if not path.is_symlink():
                flush(new / name)
            carried.add(name)
    _flush_folders(new, carried)
    return carried


def _take_out(checkpoint: str, place: str) -> None:
    """Move a checkpoint that did not become whole into a hidden folder, which is deleted."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(os.path.join(place, layout.DELETED))
    take_out(checkpoint, os.path.join(place, layout.DELETED, os.path.basename(checkpoint)))


def _put_back(place: str, owner: Owner, checkpoints: Iterable[str]) -> None:
    """Take out what a save that did not end has written in place, and give what it replaces its name again.

    Another host's process may do so at the same time: each goes on where the other was faster.
    """
    run_dir, replaced = os.path.dirname(place), os.path.join(place, layout.REPLACED)
    if not layout.has_record(place):
        return
    set_aside = sorted(os.listdir(replaced)) if os.path.isdir(replaced) else []
    for path in checkpoints:
        manifest = read_manifest(path)
        is_marked = manifest.exists and manifest.saving == owner.id
        if is_marked or (os.path.basename(path) in set_aside and _is_unmarked(path)):
            with contextlib.suppress(OSError):
                _take_out(path, place)
    for name in set_aside:
        if not os.path.lexists(os.path.join(run_dir, name)):
            with contextlib.suppress(OSError):
                move(os.path.join(replaced, name), os.path.join(run_dir, name))


def _is_unmarked(checkpoint: str) -> bool:
    """Whether a folder was made to be written in place, and has no marker yet."""
    is_folder = os.path.isdir(checkpoint) and not os.path.islink(checkpoint)
    return is_folder and all(name.startswith(MANIFEST_WRITTEN_FIRST) for name in os.listdir(checkpoint))


def _name_whole_ones(place: str) -> None:
    """Rename the whole checkpoints of a save's hidden folder to their names, where no older folder has them.

    Their owner may be about to do so, too.
    """
    for path in layout.list_checkpoints(place):
        final = os.path.join(os.path.dirname(place), os.path.basename(path))
        if not os.path.lexists(final) and is_ours(path) and not problems(path):
            with contextlib.suppress(OSError):
                os.replace(path, final)


def remove(folder: str, may_write: Check = lambda: None) -> None:
    """Delete a checkpoint of ours, with the files of callbacks and overrides in it, as upstream does.

    The folder is renamed first, so one that is half deleted is never taken for a checkpoint. A folder without a
    manifest stays, since it never was a checkpoint of ours. `may_write` raises an error if the run has lost the output
    folder.

    Raises:
        OSError: It cannot be deleted, or it is a symbolic link, whose target is not ours to delete.
    """
    root = Path(folder)
    if not is_ours(folder):
        return
    if root.is_symlink():
        raise OSError("it is a symbolic link")
    with layout.hidden_folder(str(root.parent), layout.SAVING) as place:
        may_write()  # a run that takes the lock after this look removes the place first
        _take_out(folder, place)
        shutil.rmtree(os.path.join(place, layout.DELETED))


def is_ours(folder: str) -> bool:
    """Whether a folder has a manifest of ours that lists files. That of a save in place lists none until its end."""
    return read_manifest(folder).files is not None


def recover(run_dir: str, has_lock: bool = False) -> dict[str, Writer | None]:
    """Finish saves that were killed after everything was on disk. With the folder's lock, remove what else they left.

    Several processes may do so at once, and beside a run that saves. Each step is one rename: the first process makes
    it, and the others find it made. So all of them see the same checkpoints.

    Returns:
        By path, who wrote each checkpoint of ours in the folder, oldest step first.
    """
    is_alone = has_lock or is_free(run_dir)
    ended = []
    for place, owner in layout.hidden_folders(run_dir, layout.SAVING):
        alive = owner.is_alive()
        if alive:
            continue
        _name_whole_ones(place)
        if alive is None and not is_alone:  # it may be within a save
            continue
        ended.append(place)
        with contextlib.suppress(OSError), queueing(os.path.join(place, layout.RECORD)):
            _put_back(place, owner, layout.list_checkpoints(run_dir))
    writers: dict[str, Writer | None] = {}
    for path in layout.list_checkpoints(run_dir):
        manifest = read_manifest(path)
        if manifest.files is None:
            continue
        writers[path] = manifest.writer
        if is_alone and any(map(_is_of_this_boot, manifest.files.values())):  # not all of them are flushed yet
            # In a folder that is read-only it stays as it is. If the disk refuses a file, the file says so.
            with contextlib.suppress(OSError):
                flush_and_hash(path)
    if has_lock:
        layout.remove_ended(run_dir, layout.CONVERTING)
        for place in ended:
            layout.remove_hidden_of_others(place)
    return writers


def problems(folder: str, share: Share = ALONE) -> list[str]:
    """List what is wrong with a checkpoint folder, by its manifest. One without a manifest is judged by its files.

    Of several processes each looks at its share of the files, and the first one at those that no manifest lists.
    """
    root = Path(folder)
    if not os.path.isdir(root):
        return [f"{folder} is not a folder"]
    try:
        manifest = read_manifest(root)
        if not manifest.exists:
            from hf_compat.checkpoint.unlisted_checkpoints import check_unlisted  # it builds on this file

            if share.rank == 0:
                check_unlisted(root)
            return []
        if manifest.files is None:
            return [problem(manifest.why_unreadable, manifest.error)]
        found = []
        for name in share.of(manifest.files):
            wrong = compare(root, name, manifest.files[name], share)
            if wrong is not None:
                found.append(wrong)
        return found
    except OSError as error:
        return [problem(f"{error.filename or folder} cannot be read: {error.strerror}", error)]
    except CheckpointError as error:
        return [problem(first_line(error).removesuffix("."), error)]


def compare(root: Path, name: str, facts: object, share: Share = ALONE) -> str | None:
    """Say what is wrong with a file, by its entry in the manifest. Where it is loaded later, its hash may come then.

    Raises:
        CheckpointError: No edit of the user's made this: it is outside the folder, or the disk refused it.
    """
    if not is_inside(root, name):
        raise CheckpointError(f"{name if name.isprintable() else ascii(name)} {OUTSIDE}")
    if not os.path.lexists(root / name):
        return f"{name} is missing"
    has_boot = isinstance(facts, dict) and "boot" in facts
    if has_boot and _is_refused(root / name, facts):
        raise CheckpointError(f"{name} could not be written to the disk")
    try:
        with open_regular(root / name, buffering=0) as file:
            stat = os.fstat(file.fileno())
            if not isinstance(facts, dict) or stat.st_size != facts.get("bytes"):
                return f"{name} has {stat.st_size} bytes, not what {MANIFEST_NAME} says"
            if "sha256" in facts:
                is_right = _has_hash(file, str(root / name), name, facts["sha256"], stat.st_size, share)
                return None if is_right else f"{name} is damaged (its hash differs)"
            if "sums" in facts:
                return None if sums_of(file) == facts["sums"] else f"{name} is damaged (its sums differ)"
    except (OSError, CheckpointError) as error:
        refusal = error if isinstance(error, OSError) else refusal_behind(error)
        text = first_line(error) if refusal is None else f"cannot be read: {refusal.strerror}"
        return problem(f"{name}{':' * (refusal is None)} {text}", error)
    if not has_boot:
        return f"{name} has no hash"
    if not _is_of_this_boot(facts):
        return f"{name} was not on the disk when its system stopped, or was written on another machine, and has no hash"
    return None if stat.st_mtime_ns == facts.get("mtime_ns") else f"{name} was changed before it was hashed"


def _has_hash(file: BinaryIO, path: str, name: str, expected: object, size: int, share: Share) -> bool:
    """Whether an open file has its hash, unless its reader compares it later."""
    if share.leaves_to_readers(name):
        return True
    if share.unread is None or not isinstance(expected, str):
        return sha256_of(file) == expected
    return share.unread.is_right(path, file, size, expected, layout.is_loaded(name))
