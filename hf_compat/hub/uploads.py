"""Pushes under way: what is sent is set aside first, then one thread sends it beside training. No HF arguments here."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # its own exit handler has to stand before the one below
import contextlib
import functools
import logging
import math
import os
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from hf_compat.checkpoint.hidden_folders import hidden_folders, make_hidden, remove_hidden
from hf_compat.checkpoint.run_lock import Owner
from hf_compat.hub.client import Commit, HubClient, reason_of

logger = logging.getLogger(__name__)

STAGE_PREFIX = "_hub_push-"  # a push leaves out what begins with an underscore
PROGRESS_SECONDS = 15.0
# A wait ends when a server has had so long for what there is to send.
PATIENCE_SECONDS = 600.0
SLOWEST_BYTES_PER_SECOND = 250_000.0


@dataclass(slots=True)
class _Push:
    commit: Commit
    stage: str | None
    future: Future[object]
    bytes: int


class Uploads:
    """Send commits one after the other, beside training; remember what has not arrived."""

    def __init__(self, client: HubClient) -> None:
        self.client = client
        self.missing: dict[str, str] = {}  # by folder in the repository: the message of the commit that it lacks
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._waiting: deque[_Push] = deque()
        self._current: _Push | None = None
        self._stop = threading.Event()
        _OPEN.add(self)

    def submit(self, commit: Commit, stage: str | None = None) -> Future[object]:
        """Send a commit when those before it are sent.

        Args:
            commit: What to send.
            stage: A folder to remove afterwards.

        Returns:
            What will be the `CommitInfo`.
        """
        # Huggingface_hub starts some for each file
        if not _registered.is_set():
            _registered.set()
            getattr(threading, "_register_atexit", atexit.register)(functools.partial(_wait_at_exit, os.getpid()))
        size = sum(os.path.getsize(file) for file in commit.files.values())
        push = _Push(commit, stage, Future(), size)
        with self._lock:
            self._waiting.append(push)
            if self._current is None:
                self._current = self._waiting.popleft()
                self._start(self._current)
        return push.future

    def _start(self, push: _Push) -> None:
        # a daemon: whoever waits for it decides for how long
        send = threading.Thread(target=self._send_all, args=(push, self._stop), name="hf_compat-hub", daemon=True)
        send.start()

    def _send_all(self, push: _Push, stop: threading.Event) -> None:
        following: _Push | None = push
        while following is not None:
            self._send(following, stop)
            with self._lock:
                if stop.is_set():
                    return
                following = self._current = self._waiting.popleft() if self._waiting else None

    def _send(self, push: _Push, stop: threading.Event) -> None:
        info, failed = None, None
        try:
            if push.future.set_running_or_notify_cancel():
                info = self.client.commit(push.commit, stop)
        except Exception as error:
            failed = error
        finally:
            if push.stage is not None:
                shutil.rmtree(push.stage, ignore_errors=True)
        if failed is not None:
            self.note_failure(push.commit, failed, push.future)
        elif not push.future.done():
            self.missing.pop(push.commit.folder, None)
            push.future.set_result(info)

    def note_failure(self, commit: Commit, error: Exception, future: Future[object] | None = None) -> None:
        """Remember that a commit has not arrived, and say why; the same reason is told once."""
        if future is not None and future.done():
            return
        self.missing[commit.folder] = commit.message
        reason = reason_of(error, commit.token)
        level = logging.INFO if reason in self._told else logging.WARNING
        self._told.add(reason)
        text = "The push %r to %s has failed: %s. No training ends by that."
        logger.log(level, text, commit.message, commit.repo_id, reason.rstrip("."))
        if future is not None:
            future.set_exception(error)

    def under_way(self) -> list[_Push]:
        """Return what was not sent yet."""
        with self._lock:
            return [push for push in [self._current, *self._waiting] if push is not None and not push.future.done()]

    def wait(self) -> None:
        """Wait until everything is sent or has failed; say every 15 seconds what is awaited.

        The wait ends by itself after 10 minutes and the time that a slow line takes. Ctrl-C ends it at once.
        """
        started = time.monotonic()
        patience = PATIENCE_SECONDS + sum(push.bytes for push in self.under_way()) / SLOWEST_BYTES_PER_SECOND
        try:
            while pushes := self.under_way():
                waited = time.monotonic() - started
                if waited > patience:
                    self.abandon(TimeoutError(f"the Hub has not taken it in {waited:.0f} seconds"))
                    return
                first, size = pushes[0].commit, sum(push.bytes for push in pushes) / 1e6
                text = "Waiting for the push %r to %s (%d to go, %.1f MB; %.0f s so far). Ctrl-C ends the wait."
                logger.info(text, first.message, first.repo_id, len(pushes), size, waited)
                concurrent.futures.wait([push.future for push in pushes], timeout=PROGRESS_SECONDS)
        except KeyboardInterrupt:
            self.abandon(InterruptedError("you have stopped it"))
            raise

    def abandon(self, why: OSError) -> None:
        """Wait no longer for what is under way; it has not arrived."""
        pushes = self.under_way()
        with self._lock:
            self._stop.set()
            self._stop = threading.Event()
            self._current = None
            self._waiting.clear()
        for push in pushes:
            is_sent = not push.future.cancel()  # a thread is at it, and may be for ever
            self.note_failure(push.commit, why, push.future if is_sent else None)
            if push.stage is not None:
                shutil.rmtree(push.stage, ignore_errors=True)

    def tell_what_is_missing(self, how: str) -> None:
        """Say once, after training, what has not arrived.

        Args:
            how: How to push it later.
        """
        missing, self.missing = self.missing, {}
        if missing:
            told = ", ".join(map(repr, missing.values()))
            logger.warning("The Hub has not got what was to be pushed: %s.\n\nHint: %s.", told, how)


_OPEN: weakref.WeakSet[Uploads] = weakref.WeakSet()
_registered = threading.Event()


def _wait_at_exit(process: int) -> None:
    if os.getpid() != process:  # a forked one, such as a loader's worker: the threads are its parent's
        return
    for uploads in list(_OPEN):
        with contextlib.suppress(KeyboardInterrupt):  # what was abandoned is told
            uploads.wait()


class PushInProgress:
    """Pushes that began together.

    Args:
        jobs: What `Future` each of them has.

    Mirrors:
        `transformers.utils.PushInProgress`, 5.23.
    """

    def __init__(self, jobs: Iterable[Future[object]] | None = None) -> None:
        self.jobs = list(jobs or ())

    def is_done(self) -> bool:
        """Return whether all have arrived or failed."""
        return all(job.done() for job in self.jobs)

    def wait_until_done(self) -> None:
        """Wait for all of them."""
        concurrent.futures.wait(self.jobs)

    def cancel(self) -> None:
        """Cancel those that have not begun."""
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]


def files_below(folder: str, choose: Callable[[list[str]], list[str]]) -> dict[str, str]:
    """Return the files of a folder that are to be pushed: their paths within it, with `/`, and their places.

    Args:
        folder: The folder.
        choose: Returns those paths of a list that are pushed.
    """
    root = Path(folder)
    within = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return {path: str(root / path) for path in choose(within)}


def set_aside(
    files: Mapping[str, str], output_dir: str, unchanging: Mapping[str, str], link_from_bytes: float = math.inf
) -> tuple[dict[str, str], str]:
    """Keep files as they are now, whatever becomes of them while they are sent: rotation, the next save, a growing log.

    Args:
        files: Paths in the repository, each with its file.
        output_dir: Where to keep them.
        unchanging: Files that are removed but never written to, by the path of the same content: they are linked.
        link_from_bytes: Other files of this size are linked, too; copies would take too long.

    Returns:
        The same paths with the files set aside, and the folder that holds them.

    Raises:
        OSError: There is no room, or something cannot be read.
    """
    remove_left_over(output_dir)
    os.makedirs(output_dir, exist_ok=True)
    stage = make_hidden(output_dir, STAGE_PREFIX, Owner())
    try:
        kept = {path: os.path.join(stage, path) for path in files}
        for path, place in kept.copy().items():
            source = unchanging.get(path, files[path])
            try:
                is_linked = path in unchanging or os.path.getsize(source) >= link_from_bytes
                os.makedirs(os.path.dirname(place), exist_ok=True)
                _link_or_copy(source, place) if is_linked else shutil.copyfile(source, place)
            except FileNotFoundError:
                if path in unchanging:
                    raise
                del kept[path]  # a short-lived file of somebody else's
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return kept, stage


def _link_or_copy(source: str, place: str) -> None:
    try:
        os.link(os.path.realpath(source), place)
    except OSError:  # a file system without links
        shutil.copyfile(source, place)


def remove_left_over(output_dir: str) -> None:
    """Remove what processes that have ended had set aside."""
    for path, owner in hidden_folders(output_dir, STAGE_PREFIX):
        if not owner.is_of_this_process and owner.is_alive() is False:
            remove_hidden(path)
