"""`Uploads` copies an output folder to its store while training goes on.

Everything else writes into the output folder, and knows nothing of the store. A thread uploads each checkpoint that is
whole on this machine, the newest first, and then the other files. An upload that fails is told of, and made again with
the next save. Only what the thread has logged as stored is safe: that is after the manifest is in the store.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.reading import Writer, read_manifest
from hf_compat.checkpoint.run_lock import LOCK_NAME, Owner
from hf_compat.checkpoint.store import ASIDE, CheckpointStore, Superseded, linked, name_within, told_size
from hf_compat.errors import ArgumentError, CheckpointError, HfCompatError, OutputFolderError, StoreError
from hf_compat.runtime.addresses import store_address
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.text import shown

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 15.0
# A wait ends after this time, plus the time to send the files at this speed
PATIENCE_SECONDS = 600.0
SLOWEST_BYTES_PER_SECOND = 250_000.0
# Beginnings of names in an output folder that are of this machine alone
_OF_MACHINE = (layout.SAVING, layout.CONVERTING, layout.OWN_PREFIX, LOCK_NAME, "_hub_push-", "requeued.json")
_OTHERS = "other files"
# What a resumed run reads beside its checkpoints
_READ_BY_RUNS = ("trackers.json",)

Surplus = Callable[[dict[str, Writer | None]], list[str]]  # who wrote each checkpoint, by path → paths to remove


class Uploads:
    """The store of an output folder, and what is on its way there.

    Args:
        address: The store.
        folder: The output folder.
    """

    def __init__(self, address: str, folder: str) -> None:
        self.store, self.folder = CheckpointStore(address), folder
        self.lost: OutputFolderError | None = None  # another run has taken the store
        self._owner = self._next_owner = ""  # of the run that saves
        self._has_looked = self._cleans = self._has_given_up = False
        self._lock = threading.Condition()  # of what follows
        self._waiting: list[str] = []  # checkpoints, the newest last
        self._surplus: Surplus = lambda writers: []
        self._looks_at_others = False
        self._thread: threading.Thread | None = None
        self._missing: dict[str, StoreError] = {}  # by name in the store: why it is not there
        self._told: set[str] = set()
        self._sent = self._to_send = 0  # bytes of the upload that goes on
        self._now, self._began = "", 0.0  # its name, and when it began
        self._tries_again = False  # once, what has failed, when the training ends
        self._others: dict[str, tuple[int, int]] = {}  # by name: size and time of change of files that are stored
        at_exit = functools.partial(_finish_at_exit, weakref.ref(self), os.getpid())
        # handlers run in reverse order, so this one runs before that of `concurrent.futures`, which requests need
        getattr(threading, "_register_atexit", atexit.register)(at_exit)

    def look(self) -> None:
        """Learn what is in the store, once in a training.

        Raises:
            StoreError: It cannot be read.
        """
        if not self._has_looked:
            self.store.look()
            self._has_looked = True

    def begin(self, owner_id: str) -> None:
        """Take the store for a run that saves, and learn what is in it.

        Raises:
            StoreError: It cannot be read or written.
        """
        self._has_looked = self._has_given_up = False
        self.lost = None
        self.store.take(owner_id)
        self.look()
        self._owner = self._next_owner = owner_id
        self._cleans = True
        logger.info("Checkpoints are written to %s and stored in %s.", self.folder, self.store.address)
        for name in _READ_BY_RUNS:
            path = os.path.join(self.folder, name)
            if not os.path.lexists(path):
                with contextlib.suppress(FileNotFoundError):
                    Path(path).write_bytes(self.store.storage.read(name))

    def writers(self, folder: str) -> dict[str, Writer | None]:
        """By path, who wrote the checkpoints that the store has of a folder. Nothing of a folder that is not stored."""
        return self.store.writers(self.folder, folder)

    # What comes from the store

    def bring(self, path: str, anew: bool = False) -> bool:
        """Fetch a checkpoint that is not in the output folder, or is of an earlier training than the store's.

        With `anew`, fetch it in any case. What has its name gets another one. Whether it was fetched.

        Raises:
            StoreError: It cannot be fetched.
        """
        return self.store.bring(path, self.folder, anew)

    def bring_best(self, checkpoint: str, best: str | None) -> None:
        """Fetch the best checkpoint of a run that goes on from another one."""
        if best is None or layout.checkpoint_step(best) is None:
            return
        path = os.path.join(os.path.dirname(checkpoint), os.path.basename(best))
        if self.bring(path) and (wrong := manifest.problems(path)):
            logger.warning("%s, the best checkpoint so far, came damaged: %s.", path, "; ".join(wrong))

    # What goes there

    @property
    def has_begun(self) -> bool:
        """Whether a run saves there."""
        return bool(self._next_owner)

    def saved(self, checkpoint: str, others: Iterable[str], surplus: Surplus, owner_id: str) -> None:
        """Upload a checkpoint that is whole and changes no more, and those of this run that are not stored.

        Args:
            checkpoint: Its folder.
            others: The run's other checkpoints in the output folder.
            surplus: Chooses what is removed from the store afterwards.
            owner_id: The run.
        """
        if name_within(self.folder, checkpoint) is None:
            logger.warning("%s is not in %s, so it is not uploaded.", checkpoint, self.folder)
            return
        with self._lock:
            if self._now and time.monotonic() - self._began > PROGRESS_SECONDS:
                text = "%s waits until %s is uploaded (%s of %s)."
                sizes = told_size(self._sent), told_size(self._to_send)
                logger.info(text, os.path.basename(checkpoint), self._now, *sizes)
            late = {path for path in others if self._is_missing(path)} | {*self._waiting}
            late_ones = sorted(late - {checkpoint}, key=lambda path: layout.checkpoint_step(path) or 0)
            self._waiting = [*late_ones, checkpoint]
            self._surplus, self._looks_at_others, self._next_owner = surplus, True, owner_id
            self._start()

    def _is_missing(self, path: str) -> bool:
        name = name_within(self.folder, path)
        return name is not None and name not in self.store.whole and name != self._now

    def look_at_others(self) -> None:
        """Upload the files beside the checkpoints that are new or were changed."""
        with self._lock:
            self._looks_at_others = True
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            # A process that has given up to wait may end before it
            self._thread = threading.Thread(target=self._work, name="hf_compat-uploads", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        try:
            while self._step():
                pass
        except OutputFolderError as error:
            self.lost = error
        except Exception as error:  # a mistake of ours, or of a package: it must not look as if all were stored
            logger.exception("The thread that uploads to %s has failed.", self.store.address)
            self._missing[self._now] = StoreError(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # it has ended by an error
                    self._thread, self._now = None, ""
                    self._lock.notify_all()

    def _step(self) -> bool:
        """Do the next thing. Whether there was one."""
        with self._lock:
            if not self._waiting and self._tries_again:
                self._tries_again, self._waiting = False, self._failed()
            checkpoint = self._waiting.pop() if self._waiting else None
            is_last = checkpoint is None and not self._looks_at_others
            if is_last:
                self._thread, self._now = None, ""
                self._lock.notify_all()
                return False
            self._now = _OTHERS if checkpoint is None else str(name_within(self.folder, checkpoint))
            if checkpoint is None:
                self._looks_at_others = False
            self._sent, self._to_send, self._began = 0, 0, time.monotonic()
        if checkpoint is None:
            self._send_others()
        else:
            self._send_checkpoint(checkpoint)
        return True

    def _send_checkpoint(self, path: str) -> None:
        name, began = self._now, time.monotonic()
        try:
            if self._owner != self._next_owner:
                self.begin(self._next_owner)
            if self._cleans:
                self.store.remove_left()
                self._cleans = False
            if self._is_surplus(path):
                raise Superseded
            with linked(path) as source:
                self._to_send = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
                self.store.put(source, name, self._owner, self._count)
        except Superseded:
            self._missing.pop(name, None)
            return
        except (StoreError, CheckpointError) as error:
            self._note(name, error)
            return
        self._missing.pop(name, None)
        seconds = time.monotonic() - began
        logger.info("Stored %s in %s: %s, %.1f s.", name, self.store.address, told_size(self._to_send), seconds)
        self._remove_surplus(path)

    def _count(self, count: int) -> None:
        self._sent += count

    def _is_surplus(self, path: str) -> bool:
        """Whether rotation would remove a checkpoint as soon as it is stored."""
        known = self.writers(os.path.dirname(path))
        return path not in known and path in self._surplus({**known, path: read_manifest(path).writer})

    def _remove_surplus(self, path: str) -> None:
        for old in self._surplus(self.writers(os.path.dirname(path))):
            name = name_within(self.folder, old)
            if name is None or name not in self.store.whole:
                continue
            try:
                self.store.remove(name, self._owner)
            except StoreError as error:
                logger.warning("The old checkpoint %s could not be removed. %s. Training continues.", name, error)

    def keep_alone(self, best: str) -> None:
        """Remove all checkpoints beside the best one from the store, if that is there."""
        if name_within(self.folder, best) in self.store.whole:
            self._surplus = lambda writers: [one for one in writers if one != best]
            self._remove_surplus(best)

    def _send_others(self) -> None:
        for name, path, facts in self._changed():
            try:
                self.store.storage.send(path, name, self._count)
            except FileNotFoundError:
                continue
            except StoreError as error:
                self._note(name, error)
                return  # the rest would fail, too
            self._missing.pop(name, None)
            self._others[name] = facts

    def _changed(self) -> Iterator[tuple[str, str, tuple[int, int]]]:
        """The files beside the checkpoints that are not stored as they are."""
        for place, folders, files in os.walk(self.folder):
            folders[:] = [one for one in sorted(folders) if not self._is_own(os.path.join(place, one))]
            for one in sorted(files):
                path = os.path.join(place, one)
                if self._is_own(path) or not os.path.isfile(path):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(path)
                    facts = stat.st_size, stat.st_mtime_ns
                    name = os.path.relpath(path, self.folder).replace(os.sep, "/")
                    if self._others.get(name) != facts:
                        yield name, path, facts

    @staticmethod
    def _is_own(path: str) -> bool:
        """Whether something in the folder is of this machine, or a checkpoint, which is uploaded as such."""
        name = os.path.basename(path)
        is_checkpoint = layout.checkpoint_step(path) is not None and read_manifest(path).exists
        return name.startswith(_OF_MACHINE) or ASIDE in name or is_checkpoint

    def _note(self, name: str, error: HfCompatError) -> None:
        """Remember why something is not stored, and say it once."""
        self._missing[name] = error if isinstance(error, StoreError) else StoreError(str(error))
        text = "%s is not stored. %s. It is whole in %s, and is uploaded again with the next save. Training continues."
        logger.log(logging.INFO if name in self._told else logging.WARNING, text, name, error, self.folder)
        self._told.add(name)

    # The end

    def wait(self, seconds: float) -> bool:
        """Wait for the thread, at most so long. Whether it has ended."""
        with self._lock:
            return self._lock.wait_for(lambda: self._thread is None, seconds)

    def settle(self) -> None:
        """Wait until everything is stored or has failed."""
        began = time.monotonic()
        while not self.is_over(began):
            pass

    def is_over(self, began: float) -> bool:
        """Wait for 15 seconds, and say for what. Whether nothing is waited for any more.

        A wait that `began` at that `time.monotonic()` ends after 10 minutes, plus the time of a slow connection.
        """
        try:
            if self.wait(1.0):
                return True
            self._tell_progress(time.monotonic() - began)
            if self.wait(PROGRESS_SECONDS):
                return True
        except BaseException:
            self._give_up("the wait was interrupted")
            raise
        waited = time.monotonic() - began
        is_over = waited > PATIENCE_SECONDS + self._to_send / SLOWEST_BYTES_PER_SECOND
        if is_over:
            self._give_up(f"it was not stored within {waited:.0f} seconds")
        return is_over

    def _tell_progress(self, waited: float) -> None:
        text = "Waiting for %s to be stored in %s (%s of %s, %d more, %.0f s so far). Ctrl-C ends the wait."
        sizes = told_size(self._sent), told_size(self._to_send)
        logger.info(text, self._now or _OTHERS, self.store.address, *sizes, len(self._waiting), waited)

    def _give_up(self, why: str) -> None:
        with self._lock:
            waiting, self._waiting = [self._now, *self._waiting], []
            self._has_given_up = True
        for one in filter(None, waiting):
            self._missing[name_within(self.folder, one) or one] = StoreError(why)

    def finish(self) -> None:
        """Upload what is not stored yet, and wait for it.

        Raises:
            StoreError: Something could not be stored. It names all of it, and the local folder.
            OutputFolderError: Another run has taken the store.
        """
        self.retry()
        self.settle()
        self.check()

    @property
    def may_write_at_exit(self) -> bool:
        """Whether the process ends with files that are not stored, and has not given up to store some."""
        has_ended = self.lost is not None or self._has_given_up or not os.path.isdir(self.folder)
        return not has_ended and not self._missing and (not self.wait(0.0) or any(True for _ in self._changed()))

    def retry(self) -> None:
        """Upload once more what has failed, and all other files that were changed."""
        with self._lock:
            self._waiting = [path for path in self._failed() if path not in self._waiting] + self._waiting
            self._looks_at_others = self._tries_again = True
            self._start()

    def _failed(self) -> list[str]:
        names = [name for name in self._missing if layout.checkpoint_step(name) is not None and name != self._now]
        return [os.path.join(self.folder, *name.split("/")) for name in sorted(names)]

    def check(self) -> None:
        """Raise an error if something is not stored, or another run has taken the store."""
        if self.lost is not None:
            raise self.lost
        if self._missing:
            raise StoreError(self.missing())

    def missing(self) -> str:
        """Say what is not stored, and how to store it. Empty if all is."""
        if not self._missing:
            return ""
        names = sorted(self._missing)
        told = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        error = str(next(iter(self._missing.values()))).rstrip(".")
        return (
            f"{told}: not stored in {self.store.address}, but in the local folder {self.folder} alone. {error}.\n\n"
            f"Hint: before this machine is given back, `hf-compat upload {self.folder} {self.store.address}`. Or train "
            "here again with `resume_from_checkpoint=True`, which uploads them, too."
        )


def upload_folder(folder: str, address: str) -> list[str]:
    """Copy an output folder to a store, whole checkpoints first. What is there already stays as it is.

    Returns:
        The names of the checkpoints that are stored now.

    Raises:
        ArgumentError: fsspec does not know the address, or there is no such folder.
        OutputFolderError: Another run begins to save into the store meanwhile.
        StoreError: Something could not be stored.
    """
    path, place = local_path("FOLDER", folder), store_address(address)
    if place is None or not os.path.isdir(path):
        name, value = ("ADDRESS", address) if place is None else ("FOLDER", folder)
        what = "the address of a storage that fsspec knows" if place is None else "a folder"
        raise ArgumentError(f"`{shown(name, value)}` is not {what}.\n\nHint: `hf-compat upload out s3://bucket/run`.")
    uploads, owner = Uploads(place, path), Owner()
    uploads.begin(owner.id)
    whole = [one for one in layout.list_checkpoints(path) if manifest.is_ours(one) and not manifest.problems(one)]
    for one in whole:
        manifest.flush_and_hash(one)
        uploads.saved(one, (), lambda writers: [], owner.id)
    uploads.finish()
    return [os.path.basename(one) for one in whole]


def _finish_at_exit(uploads: weakref.ref[Uploads], process: int) -> None:
    """Upload what a script has written after its training, while requests can still start threads."""
    held = uploads()
    if held is None or os.getpid() != process or not held.may_write_at_exit:
        return
    try:
        held.finish()
    except (HfCompatError, KeyboardInterrupt) as error:
        logger.error("%s", str(error) or held.missing())
