"""Commits to the Hub by huggingface_hub, beside training. Their files are copied or linked first."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # registers its exit handler before the one below
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
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from hf_compat.checkpoint.layout import OWN_PREFIX, make_hidden, remove_ended
from hf_compat.checkpoint.run_lock import Owner
from hf_compat.errors import HubError
from hf_compat.runtime.text import brief, need

logger = logging.getLogger(__name__)

Token = str | bool | None

STAGE_PREFIX = "_hub_push-"  # a push leaves out names that begin with an underscore
PROGRESS_SECONDS = 15.0
# A wait ends after this time, plus the time to send the files at this speed.
PATIENCE_SECONDS = 600.0
SLOWEST_BYTES_PER_SECOND = 250_000.0
_LINK = re.compile(r"For more information check: \S+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The content of one commit."""

    repo_id: str  # `owner/name`
    message: str
    source: str = ""  # the local folder of its files
    ignored: tuple[str, ...] = ()  # patterns of files to leave out
    is_stage: bool = False  # whether to remove `source` when it is sent
    folder: str = ""  # in the repository
    token: Token = field(default=None, repr=False)  # None uses the one stored on this machine
    revision: str | None = None  # None for the main branch


class HubClient:
    """The Hub, and the commits on their way there."""

    def __init__(self, for_what: str) -> None:
        self._hub = need("huggingface_hub", "[hub]", for_what)
        self._api = self._hub.HfApi(library_name="hf_compat")
        self._jobs: list[tuple[Commit, Future[object]]] = []
        self.missing: dict[str, str] = {}  # messages of commits that failed, by folder in the repository
        self._logged: set[str] = set()
        at_exit = functools.partial(_wait_at_exit, weakref.ref(self), os.getpid())
        # handlers run in reverse order, so this one runs before that of `concurrent.futures`
        getattr(threading, "_register_atexit", atexit.register)(at_exit)

    def create_repo(self, name: str, token: Token, private: bool | None) -> str:
        """Create a repository if it is missing. Give its full name."""
        try:
            made = self._api.create_repo(name, token=token, private=private, exist_ok=True)
            return str(made.repo_id)
        except Exception as error:
            raise hub_error(f"The Hub gives no repository {brief(name)} to push to", error, token) from error

    def submit(self, commit: Commit) -> Future[object]:
        """Send a commit after the earlier ones. The future gives huggingface_hub's `CommitInfo`."""
        future: Future[object] = self._api.run_as_future(self._send, commit)
        self._jobs = [job for job in self._jobs if not job[1].done()]
        self._jobs.append((commit, future))
        return future

    def _send(self, commit: Commit) -> object:
        utils = self._hub.utils
        shows_bars = not utils.are_progress_bars_disabled()
        if shows_bars:  # they would appear within those of training
            utils.disable_progress_bars()
        try:
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
            if shows_bars:
                utils.enable_progress_bars()
            if commit.is_stage:
                shutil.rmtree(commit.source, ignore_errors=True)
        self.missing.pop(commit.folder, None)
        return info

    def note_failure(self, commit: Commit, error: BaseException) -> None:
        """Record that a commit has failed, and log why. The same reason is logged once."""
        self.missing[commit.folder] = commit.message
        reason = reason_of(error, commit.token)
        level = logging.INFO if reason in self._logged else logging.WARNING
        self._logged.add(reason)
        text = "The push %s to %s has failed: %s. No training ends by that."
        logger.log(level, text, brief(commit.message), commit.repo_id, reason.rstrip("."))

    def wait(self) -> None:
        """Wait until all commits are sent or have failed. Log the next one every 15 seconds.

        The wait ends after 10 minutes plus the time that a slow connection needs. Ctrl-C ends it at once.
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
                text = "Waiting for the push %s to %s (%d to go, %.1f MB, %.0f s so far). Ctrl-C ends the wait."
                first = jobs[0][0]
                logger.info(text, brief(first.message), first.repo_id, len(jobs), megabytes, waited)
                concurrent.futures.wait([future for _, future in jobs], timeout=PROGRESS_SECONDS)
        except KeyboardInterrupt:
            self._give_up(jobs, InterruptedError("you have stopped it"))
            raise

    def _give_up(self, jobs: Iterable[tuple[Commit, Future[object]]], why: OSError) -> None:
        """Stop waiting for commits, and cancel those that have not begun."""
        self._jobs = []
        for commit, future in jobs:
            if future.cancel() and commit.is_stage:
                shutil.rmtree(commit.source, ignore_errors=True)
            self.note_failure(commit, why)

    def files_of(self, folder: str, ignored: Iterable[str] = ()) -> dict[str, str]:
        """List the files of a folder that a push sends, without a git folder, caches and ignored files.

        Returns:
            Their paths within the folder, with `/`, and their paths on this machine.
        """
        root = Path(folder)
        within = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
        patterns = [*ignored, *getattr(self._hub.utils, "DEFAULT_IGNORE_PATTERNS", [])]
        return {
            path: str(root / path) for path in self._hub.utils.filter_repo_objects(within, ignore_patterns=patterns)
        }


def _wait_at_exit(client: weakref.ref[HubClient], process: int) -> None:
    """Wait for commits at the end of a process, while huggingface_hub can still start threads."""
    held = client()
    if held is not None and os.getpid() == process:  # not forked, such as a loader's worker, without the threads
        with contextlib.suppress(KeyboardInterrupt):  # logged already
            held.wait()


class PushInProgress:
    """Pushes that began together.

    Mirrors:
        `transformers.utils.PushInProgress`.
    """

    def __init__(self, jobs: Iterable[Future[object]] | None = None) -> None:
        self.jobs = list(jobs or ())

    def is_done(self) -> bool:
        """Whether all have arrived or failed."""
        return all(job.done() for job in self.jobs)

    def wait_until_done(self) -> None:
        """Wait for all of them."""
        concurrent.futures.wait(self.jobs)

    def cancel(self) -> None:
        """Cancel those that have not begun."""
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]


def set_aside(
    files: Mapping[str, str], output_dir: str, unchanging: Mapping[str, str], link_from_bytes: float = math.inf
) -> str:
    """Keep files as they are now, while rotation removes them, the next save replaces them or a log grows.

    Files are named by their path in the repository. `unchanging` ones may be removed, but are never written to, so they
    are linked. Others of at least `link_from_bytes` are linked, too, as copies would take too long.
    """
    remove_ended(output_dir, STAGE_PREFIX)
    os.makedirs(output_dir, exist_ok=True)
    stage = make_hidden(output_dir, STAGE_PREFIX, Owner())
    try:
        for path, file in files.items():
            source, place = unchanging.get(path, file), os.path.join(stage, path)
            try:
                is_linked = path in unchanging or os.path.getsize(source) >= link_from_bytes
                os.makedirs(os.path.dirname(place), exist_ok=True)
                with contextlib.suppress(OSError):  # a file system without links
                    if is_linked:
                        os.link(os.path.realpath(source), place)
                        continue
                shutil.copyfile(source, place)
            except FileNotFoundError:
                if path in unchanging:
                    raise  # other files may be short-lived files of another program
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return stage


def _size_of(folder: str) -> int:
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # sent by now, and gone
                size += os.path.getsize(os.path.join(place, name))
    return size


def hub_error(fact: str, error: Exception, token: Token, way_out: str | None = None) -> HubError:
    """Make a `HubError` that an `except` for huggingface_hub's own error catches, too."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if way_out is None and type(error).__name__ == "OfflineModeIsEnabled":
        way_out = "unset HF_HUB_OFFLINE. Or leave `push_to_hub` out, and push the folder later"
    elif way_out is None and status in (401, 403, 404):
        way_out = (
            "log in with `hf auth login`, or pass a `hub_token` that may write there. "
            "`hub_model_id` names another repository"
        )
    elif way_out is None:
        way_out = "check `hub_model_id` and the connection. Or leave `push_to_hub` out, and push the folder later"
    # huggingface_hub's classes need a response, and write it into the text
    plain = {"__init__": Exception.__init__, "__str__": Exception.__str__, "__module__": HubError.__module__}
    bases = (HubError,) if issubclass(HubError, type(error)) else (HubError, type(error))
    try:
        kind = type("HubError", bases, plain)
    except TypeError:  # the classes have incompatible layouts
        kind = HubError
    ours: HubError = kind(f"{fact}: {reason_of(error, token)}\n\nHint: {way_out}.")
    ours.__dict__.update(vars(error))  # the server's response
    return ours


def reason_of(error: BaseException, token: Token) -> str:
    """Put an error into one line, without the token."""
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
    text = " ".join(_LINK.sub("", str(cause)).split()) or type(cause).__name__
    return text.replace(token, "<HUB_TOKEN>") if isinstance(token, str) and token else text
