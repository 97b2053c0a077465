"""What is asked of the Hub, through huggingface_hub; asked again where a failure may pass. No HF arguments here."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol, TypeVar

from hf_compat.errors import HubError
from hf_compat.runtime.text import is_installed, need

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Token = str | bool | None

ATTEMPTS = 10
ATTEMPTS_OF_LARGE_FILES = 4  # of each of its requests huggingface_hub makes six
LONGEST_PAUSE_SECONDS = 30.0
LONGEST_PAUSE_OF_CREATION_SECONDS = 4.0  # somebody waits for it
FILES_AT_ONCE = 5
_LINK = re.compile(r"For more information check: \S+")
# Answers after which the same request may succeed: timeout, conflict with another commit, too many requests.
_PASSING = frozenset({408, 409, 412, 425, 429})
# Files that the Hub keeps in git as they are, where they are small; the others go to its storage for large files.
_PLAIN_TEXT = (".json", ".jsonl", ".md", ".txt", ".jinja", ".yaml", ".yml", ".py", ".csv", ".log")
_PLAIN_TEXT_BYTES = 1_000_000


class Upload(Protocol):
    """One file of a commit: huggingface_hub's `CommitOperationAdd`."""

    path_in_repo: str
    path_or_fileobj: str
    upload_info: _UploadInfo


class _UploadInfo(Protocol):
    size: int


class HubApi(Protocol):
    """What is used of huggingface_hub's `HfApi`."""

    def create_repo(self, repo_id: str, *, token: Token, private: bool | None, exist_ok: bool) -> object: ...

    def preupload_lfs_files(
        self, repo_id: str, additions: list[Upload], *, token: Token, revision: str | None, free_memory: bool
    ) -> None: ...

    def create_commit(
        self, repo_id: str, operations: list[Upload], *, commit_message: str, token: Token, revision: str | None
    ) -> object: ...


class _Validating(Protocol):
    """An `HfApi` that remembers the model card that it has checked last."""

    _valid: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What one commit brings to a repository.

    Args:
        repo_id: The repository, `owner/name`.
        message: The commit's message.
        files: Paths in the repository, each with the file that goes there.
        folder: The folder in the repository that the commit is about; empty for its top.
        token: What the Hub knows the user by; None for the one that is stored on this machine.
        revision: The branch; None for the main one.
    """

    repo_id: str
    message: str
    files: Mapping[str, str]
    folder: str = ""
    token: Token = field(default=None, repr=False)
    revision: str | None = None


class HubClient:
    """The Hub, as one user of it sees it.

    Args:
        for_what: What needs huggingface_hub; an error about its absence begins with it.

    Raises:
        MissingPackage: huggingface_hub is not installed.
    """

    def __init__(self, for_what: str) -> None:
        self._hub = need("huggingface_hub", "'hf-compat[hub]'", for_what)
        self._api = _api_class(self._hub)(library_name="hf_compat")

    def create_repo(self, name: str, token: Token, private: bool | None) -> str:
        """Make a repository where there is none, and return its whole name.

        Raises:
            HubError: The user may not, or the Hub cannot be reached.
        """

        def create(_: int) -> object:
            return self._api.create_repo(name, token=token, private=private, exist_ok=True)

        try:
            longest = min(LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_OF_CREATION_SECONDS)
            made = attempted(create, threading.Event(), longest)
            return str(getattr(made, "repo_id"))  # noqa: B009 - huggingface_hub's
        except Exception as error:
            raise hub_error(f"The Hub gives no repository {name!r} to push to", error, token) from error

    def commit(self, commit: Commit, stop: threading.Event) -> object:
        """Send a commit; what is there already is not sent again.

        Args:
            commit: What to send.
            stop: Once set, nothing is tried again.

        Returns:
            The `CommitInfo`.

        Raises:
            Exception: Whatever huggingface_hub raises, after the last attempt.
        """
        uploads: list[Upload] = [
            self._hub.CommitOperationAdd(path_in_repo=path, path_or_fileobj=file)
            for path, file in sorted(commit.files.items())
        ]

        was_lost = False

        def send(attempt: int) -> object:
            nonlocal was_lost
            # A commit whose answer was lost may have arrived: every other attempt asks what is there. Those between do
            # not: where each second request is lost, the commit has to be the very next one.
            if was_lost and attempt % 2 == 1:
                uploads[:] = map(self._renewed, uploads)
                self._send_large_files(commit, uploads, stop)
            try:
                return self._api.create_commit(
                    commit.repo_id, uploads, commit_message=commit.message, token=commit.token, revision=commit.revision
                )
            except Exception as error:
                was_lost = _status_of(error) in (None, 408, 502, 504)
                raise

        with self._without_bars():
            self._send_large_files(commit, uploads, stop)
            return attempted(send, stop)

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

    def _renewed(self, upload: Upload) -> Upload:
        """Return an upload of which nothing was sent yet; the file's hash is kept."""
        path, file = upload.path_in_repo, upload.path_or_fileobj
        renewed: Upload = self._hub.CommitOperationAdd(path_in_repo=path, path_or_fileobj=file)
        renewed.upload_info = upload.upload_info
        return renewed

    def _send_large_files(self, commit: Commit, uploads: list[Upload], stop: threading.Event) -> None:
        """Send large files one by one, where huggingface_hub would start threads that nobody can end.

        A process waits for these threads at its end, and a server that has gone silent keeps them for ever.
        """
        if is_installed("hf_xet") and not self._hub.constants.HF_HUB_DISABLE_XET:
            return

        def send(upload: Upload) -> None:
            self._api.preupload_lfs_files(
                commit.repo_id, [upload], token=commit.token, revision=commit.revision, free_memory=False
            )

        def send_surely(upload: Upload) -> None:
            attempted(lambda _: send(upload), stop, attempts=ATTEMPTS_OF_LARGE_FILES)

        for_each(send_surely, [upload for upload in uploads if not _is_plain_text(upload)])

    def kept(self, paths: list[str], ignored: list[str]) -> list[str]:
        """Return the paths that a push of their folder sends: no git folder, no cache, nothing ignored."""
        defaults = getattr(self._hub.utils, "DEFAULT_IGNORE_PATTERNS", [])
        return list(self._hub.utils.filter_repo_objects(paths, ignore_patterns=[*ignored, *defaults]))


def _is_plain_text(upload: Upload) -> bool:
    return upload.path_in_repo.endswith(_PLAIN_TEXT) and upload.upload_info.size < _PLAIN_TEXT_BYTES


@functools.cache
def _api_class(hub: ModuleType) -> Callable[..., HubApi]:
    """Return huggingface_hub's `HfApi`, which checks a model card before each commit, without asking twice.

    Where each second request is lost, a card that is checked before every attempt keeps the commit from arriving.
    """
    return type("Api", (hub.HfApi,), {"_validate_yaml": _validate_once, "_valid": None})


def _validate_once(api: _Validating, content: str, **options: object) -> None:
    if content != api._valid:
        validate = super(type(api), api)._validate_yaml  # type: ignore[misc]  # of huggingface_hub's class
        attempted(lambda _: validate(content, **options), threading.Event())
        api._valid = content


def for_each(do: Callable[[Upload], None], uploads: list[Upload]) -> None:
    """Do something for every upload, for a few at once, in threads that no process waits for at its end.

    Raises:
        Exception: What has failed first; the others were done.
    """
    left, failed = deque(uploads), deque[Exception]()

    def work() -> None:
        with contextlib.suppress(IndexError):  # nothing is left
            while True:
                upload = left.popleft()
                try:
                    do(upload)
                except Exception as error:
                    failed.append(error)

    threads = [threading.Thread(target=work, name="hf_compat-hub-file", daemon=True) for _ in uploads[:FILES_AT_ONCE]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def attempted(
    ask: Callable[[int], Answer],
    stop: threading.Event,
    longest_pause_seconds: float | None = None,
    attempts: int = ATTEMPTS,
) -> Answer:
    """Ask again and again, until there is an answer or no hope, with pauses of 1, 2, 4 … 30 seconds.

    Args:
        ask: Gets the number of the attempt, from 0.
        stop: Once set, nothing is tried again.
        longest_pause_seconds: Where 30 seconds are too long.
        attempts: How often to ask.
    """
    longest = LONGEST_PAUSE_SECONDS if longest_pause_seconds is None else longest_pause_seconds
    for attempt in range(attempts - 1):
        try:
            return ask(attempt)
        except Exception as error:
            pause = min(2.0**attempt, longest)
            if not may_pass(error):
                raise
            logger.info("The Hub has not done what was asked: %s. Asking again in %g s.", reason_of(error, None), pause)
            if stop.wait(pause):
                raise
    return ask(attempts - 1)


def may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed later: the server or the line has failed, not the request."""
    status = _status_of(error)
    if status is not None:
        return status in _PASSING or status >= 500
    if isinstance(error, RuntimeError):  # huggingface_hub's around what kept a large file from arriving
        return error.__cause__ is None or may_pass(error.__cause__)
    if _is_offline(error):
        return False
    is_lost = isinstance(error, (ConnectionError, TimeoutError, json.JSONDecodeError))
    return is_lost or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _status_of(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_offline(error: BaseException) -> bool:
    return type(error).__name__ == "OfflineModeIsEnabled"


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
    if _is_offline(error):
        return "unset HF_HUB_OFFLINE; or leave `push_to_hub` out, and push the folder later"
    status = _status_of(error)
    if status in (401, 403, 404):
        return (
            "log in with `hf auth login` or pass a `hub_token` that may write there; "
            "`hub_model_id` names another repository"
        )
    return "look at `hub_model_id` and the connection; or leave `push_to_hub` out, and push the folder later"
