"""Commits to the Hub by huggingface_hub, beside training; what they are made of is set aside first. No HF arguments."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # its own exit handler has to stand before the one below
import contextlib
import functools
import logging
import math
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from hf_compat.checkpoint.layout import OWN_PREFIX, hidden_folders, make_hidden, remove_hidden
from hf_compat.checkpoint.run_lock import Owner
from hf_compat.errors import HubError
from hf_compat.runtime.text import need

logger = logging.getLogger(__name__)

Token = str | bool | None

STAGE_PREFIX = "_hub_push-"  # a push leaves out what begins with an underscore
PROGRESS_SECONDS = 15.0
# A wait ends when a server has had so long for what there is to send.
PATIENCE_SECONDS = 600.0
SLOWEST_BYTES_PER_SECOND = 250_000.0
_LINK = re.compile(r"For more information check: \S+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What one commit brings to a repository.

    Args:
        repo_id: The repository, `owner/name`.
        message: The commit's message.
        source: The folder on this disk whose files it brings.
        ignored: Patterns of files that it leaves out.
        is_stage: `source` is removed when it is sent.
        folder: The folder in the repository that the commit is about; empty for its top.
        token: What the Hub knows the user by; None for the one that is stored on this machine.
        revision: The branch; None for the main one.
    """

    repo_id: str
    message: str
    source: str = ""
    ignored: tuple[str, ...] = ()
    is_stage: bool = False
    folder: str = ""
    token: Token = field(default=None, repr=False)
    revision: str | None = None


class HubClient:
    """The Hub, as one user of it sees it, and the commits that are on their way there.

    Args:
        for_what: What needs huggingface_hub; an error about its absence begins with it.

    Raises:
        MissingPackage: huggingface_hub is not installed.
    """

    def __init__(self, for_what: str) -> None:
        self._hub = need("huggingface_hub", "'hf-compat[hub]'", for_what)
        self._api = self._hub.HfApi(library_name="hf_compat")
        self._jobs: list[tuple[Commit, Future[object]]] = []
        self.missing: dict[str, str] = {}  # by folder in the repository: the message of the commit that it lacks
        self._told: set[str] = set()
        if not _OPEN:  # after the exit handler of `concurrent.futures`: it runs before that one
            getattr(threading, "_register_atexit", atexit.register)(functools.partial(_wait_at_exit, os.getpid()))
        _OPEN.add(self)

    def create_repo(self, name: str, token: Token, private: bool | None) -> str:
        """Make a repository where there is none, and return its whole name.

        Raises:
            HubError: The user may not, or the Hub cannot be reached.
        """
        try:
            made = self._api.create_repo(name, token=token, private=private, exist_ok=True)
            return str(made.repo_id)
        except Exception as error:
            raise hub_error(f"The Hub gives no repository {name!r} to push to", error, token) from error

    def submit(self, commit: Commit) -> Future[object]:
        """Send a commit when those before it are sent; return what will be huggingface_hub's `CommitInfo`."""
        future: Future[object] = self._api.run_as_future(self._send, commit)
        self._jobs = [job for job in self._jobs if not job[1].done()]
        self._jobs.append((commit, future))
        return future

    def _send(self, commit: Commit) -> object:
        try:
            with self._without_bars():
                info: object = self._api.upload_folder(
                    repo_id=commit.repo_id,
                    folder_path=commit.source,
                    path_in_repo=commit.folder or None,
                    commit_message=commit.message,
                    token=commit.token,
                    revision=commit.revision,
                    ignore_patterns=[*commit.ignored, f"{OWN_PREFIX}*"],
                )
        except Exception as error:
            self.note_failure(commit, error)
            raise
        finally:
            if commit.is_stage:
                shutil.rmtree(commit.source, ignore_errors=True)
        self.missing.pop(commit.folder, None)
        return info

    @contextlib.contextmanager
    def _without_bars(self) -> Iterator[None]:
        """Show no progress bars within those of training."""
        utils = self._hub.utils
        shows_bars = not utils.are_progress_bars_disabled()
        if shows_bars:
            utils.disable_progress_bars()
        try:
            yield
        finally:
            if shows_bars:
                utils.enable_progress_bars()

    def note_failure(self, commit: Commit, error: BaseException) -> None:
        """Remember that a commit has not arrived, and say why; the same reason is told once."""
        self.missing[commit.folder] = commit.message
        reason = reason_of(error, commit.token)
        level = logging.INFO if reason in self._told else logging.WARNING
        self._told.add(reason)
        text = "The push %r to %s has failed: %s. No training ends by that."
        logger.log(level, text, commit.message, commit.repo_id, reason.rstrip("."))

    def wait(self) -> None:
        """Wait until everything is sent or has failed; say every 15 seconds what is awaited.

        The wait ends by itself after 10 minutes and the time that a slow line takes. Ctrl-C ends it at once.
        """
        started = time.monotonic()
        jobs = [job for job in self._jobs if not job[1].done()]
        megabytes = sum(_size_of(commit.source) for commit, _ in jobs) / 1e6
        patience = PATIENCE_SECONDS + megabytes * 1e6 / SLOWEST_BYTES_PER_SECOND
        try:
            while jobs := [job for job in jobs if not job[1].done()]:
                waited = time.monotonic() - started
                if waited > patience:
                    self._give_up(jobs, TimeoutError(f"the Hub has not taken it in {waited:.0f} seconds"))
                    return
                text = "Waiting for the push %r to %s (%d to go, %.1f MB; %.0f s so far). Ctrl-C ends the wait."
                logger.info(text, jobs[0][0].message, jobs[0][0].repo_id, len(jobs), megabytes, waited)
                concurrent.futures.wait([future for _, future in jobs], timeout=PROGRESS_SECONDS)
        except KeyboardInterrupt:
            self._give_up(jobs, InterruptedError("you have stopped it"))
            raise

    def _give_up(self, jobs: Iterable[tuple[Commit, Future[object]]], why: OSError) -> None:
        """Wait no longer for commits, and send none that was not begun."""
        self._jobs = []
        for commit, future in jobs:
            if future.cancel() and commit.is_stage:
                shutil.rmtree(commit.source, ignore_errors=True)
            self.note_failure(commit, why)

    def tell_what_is_missing(self, how: str) -> None:
        """Say once, after training, what has not arrived.

        Args:
            how: How to push it later.
        """
        missing, self.missing = self.missing, {}
        if missing:
            told = ", ".join(map(repr, missing.values()))
            logger.warning("The Hub has not got what was to be pushed: %s.\n\nHint: %s.", told, how)

    def kept(self, paths: list[str], ignored: list[str]) -> list[str]:
        """Return the paths that a push of their folder sends: no git folder, no cache, nothing ignored."""
        defaults = getattr(self._hub.utils, "DEFAULT_IGNORE_PATTERNS", [])
        return list(self._hub.utils.filter_repo_objects(paths, ignore_patterns=[*ignored, *defaults]))


# Those whose commits a process waits for at its end: huggingface_hub starts threads for a commit, too late by then.
_OPEN: weakref.WeakSet[HubClient] = weakref.WeakSet()


def _wait_at_exit(process: int) -> None:
    if os.getpid() != process:  # a forked one, such as a loader's worker: the threads are its parent's
        return
    for client in list(_OPEN):
        with contextlib.suppress(KeyboardInterrupt):  # what was given up is told
            client.wait()


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
) -> str:
    """Keep files as they are now, whatever becomes of them while they are sent: rotation, the next save, a growing log.

    Args:
        files: Paths in the repository, each with its file.
        output_dir: Where to keep them.
        unchanging: Files that are removed but never written to, by the path of the same content: they are linked.
        link_from_bytes: Other files of this size are linked, too; copies would take too long.

    Returns:
        The folder that holds them under these paths.

    Raises:
        OSError: There is no room, or something cannot be read.
    """
    remove_left_over(output_dir)
    os.makedirs(output_dir, exist_ok=True)
    stage = make_hidden(output_dir, STAGE_PREFIX, Owner())
    try:
        for path, file in files.items():
            source, place = unchanging.get(path, file), os.path.join(stage, path)
            try:
                is_linked = path in unchanging or os.path.getsize(source) >= link_from_bytes
                os.makedirs(os.path.dirname(place), exist_ok=True)
                _link_or_copy(source, place) if is_linked else shutil.copyfile(source, place)
            except FileNotFoundError:  # else a short-lived file of somebody else's
                if path in unchanging:
                    raise
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return stage


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


def _size_of(folder: str) -> int:
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it is sent by now, and gone
                size += os.path.getsize(os.path.join(place, name))
    return size


def _status_of(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def hub_error(fact: str, error: Exception, token: Token, way_out: str | None = None) -> HubError:
    """Return an error of ours that is also of the class of huggingface_hub's: an `except` written for that matches.

    Args:
        fact: What has failed.
        error: What huggingface_hub has raised.
        token: Left out of the message.
        way_out: What to do; by the kind of the failure where none is given.
    """
    kind = _error_class(type(error))
    ours = kind(f"{fact}: {reason_of(error, token)}\n\nHint: {way_out or _way_out(error)}.")
    ours.__dict__.update(vars(error))  # the response, and what the server has said
    return ours


def _error_class(foreign: type[Exception]) -> type[HubError]:
    def make(self: Exception, message: str) -> None:
        Exception.__init__(self, message)  # huggingface_hub's classes ask for a response

    def text(self: Exception) -> str:
        return str(self.args[0])

    bases = (HubError,) if issubclass(HubError, foreign) else (HubError, foreign)
    try:
        return type("HubError", bases, {"__init__": make, "__str__": text, "__module__": HubError.__module__})
    except TypeError:  # two layouts that no class can have at once
        return HubError


def reason_of(error: BaseException, token: Token) -> str:
    """Return an error in one line, without the token."""
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
    text = " ".join(_LINK.sub("", str(cause)).split()) or type(cause).__name__
    return text.replace(token, "<HUB_TOKEN>") if isinstance(token, str) and token else text


def _way_out(error: Exception) -> str:
    if type(error).__name__ == "OfflineModeIsEnabled":
        return "unset HF_HUB_OFFLINE; or leave `push_to_hub` out, and push the folder later"
    status = _status_of(error)
    if status in (401, 403, 404):
        return (
            "log in with `hf auth login` or pass a `hub_token` that may write there; "
            "`hub_model_id` names another repository"
        )
    return "look at `hub_model_id` and the connection; or leave `push_to_hub` out, and push the folder later"
