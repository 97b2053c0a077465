"""Let one run at a time save into an output folder, by a lock file that names its host and process.

The lock of a killed run is taken over with a warning. A process of another machine or container cannot be asked whether
it lives. So each run increments a counter in its lock every few seconds, and a lock that does not change belongs to a
run that has ended. Clocks of machines and disks differ, so no two times are compared.

A run that was only stopped comes back to a folder that has another owner by then. It remembers that it has lost the
folder, and never takes the lock again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from hf_compat.checkpoint.files import open_regular, read_small, write_new
from hf_compat.errors import CheckpointError, OutputFolderError
from hf_compat.runtime.text import brief

try:
    import fcntl
except ImportError:  # Windows has no such module
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK_NAME = "hf_compat.lock"
HEARTBEAT_SECONDS = 5.0
# A run of another machine has ended if its lock did not change for so long
SILENCE_SECONDS = 30.0
_LARGEST_LOCK = 4096  # bytes
# Ids of the owners in this process. An id in a lock that is not here belongs to an earlier process of the same number.
ACTIVE: set[str] = set()
_ID = re.compile(r"(?P<host>[A-Za-z0-9._]{1,64})\.(?P<machine>[0-9a-f]{6})-(?P<pid>[0-9]{1,18})-(?P<token>[0-9a-f]{8})")
LONGEST_ID = 105  # bytes of an owner's


@functools.cache
def _host() -> str:
    """This machine's name, in characters that a file's name may have. A run keeps it if the system changes it."""
    return re.sub(r"[^A-Za-z0-9._]", "_", socket.gethostname())[:64] or "localhost"


@functools.cache
def _machine() -> str:
    """Distinguish this machine from others of its name, by its start and the container of its processes."""
    facts = []
    with contextlib.suppress(OSError):  # only Linux has them
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("".join(facts).encode()).hexdigest()[:6]


@dataclass(frozen=True, slots=True)
class Owner:
    """A run, as others see it."""

    host: str = field(default_factory=_host)  # name of its machine
    pid: int = field(default_factory=os.getpid)  # number of its first process
    # Distinguishes it from other runs of the same process
    token: str = field(default_factory=functools.partial(secrets.token_hex, 4))
    # When the process started, in the system's ticks. Its lock says it, if the system does
    started: int | None = field(default=None, compare=False)
    machine: str = field(default_factory=_machine)  # distinguishes its machine from others of that name

    @property
    def id(self) -> str:
        """The text for this run in the names of its hidden folders."""
        return f"{self.host}.{self.machine}-{self.pid}-{self.token}"

    @classmethod
    def of_id(cls, text: str) -> Owner | None:
        """The owner that an id names. None for any other text."""
        match = _ID.fullmatch(text)
        if match is None:
            return None
        return cls(host=match["host"], machine=match["machine"], pid=int(match["pid"]), token=match["token"])

    @property
    def is_of_this_process(self) -> bool:
        """Whether it is a run of this process."""
        return (self.host, self.machine, self.pid) == (_host(), _machine(), os.getpid())

    def is_alive(self) -> bool | None:
        """Whether the run has not ended. None on another machine, or in another container."""
        cannot_ask = os.name == "nt"  # Windows has no signal that does nothing
        if cannot_ask or (self.host, self.machine) != (_host(), _machine()):
            return None
        if self.pid == os.getpid():
            return self.id in ACTIVE
        if self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # it is another user's
        state, started = _process_facts(self.pid)
        return state not in ("Z", "X") and (None in (self.started, started) or self.started == started)


def _process_facts(pid: int) -> tuple[str, int | None]:
    """A process's state and its start in ticks, if the system has them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", None


class RunLock:
    """The right to save into a folder, which exists or can be made. Without an owner, for a new run of this process."""

    def __init__(self, folder: str, owner: Owner | None = None) -> None:
        self.folder, self.owner = folder, owner or Owner()
        self.lost: str | None = None  # the error's text, once another run was seen to have the folder
        self._path = os.path.join(folder, LOCK_NAME)
        self.is_held = False  # or was, until it was lost
        self._is_shared = False  # another node's process of this run has written it
        self._looking = threading.Lock()  # a write beside the training asks, too
        self._is_over = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock. Once this run has had it, only make sure that it is still this run's.

        Raises:
            OutputFolderError: A live run has it, this run has lost it, or it cannot be written.
        """
        try:
            with self._looking:
                if not self.is_held:
                    ACTIVE.add(self.owner.id)
                    self._take()
                    self.is_held = True
                elif self.lost is None:
                    self._look_again()
        except OSError as error:
            if not self.is_held:
                ACTIVE.discard(self.owner.id)
            if isinstance(error, OutputFolderError):
                raise
            raise OutputFolderError(
                f"`output_dir={brief(self.folder)}`: no run can save there: {error}.\n\n"
                "Hint: make room or give write permission there, or name another folder."
            ) from error
        if self.lost is not None:
            raise OutputFolderError(self.lost)
        if self._heartbeat is None:
            # Disks may round times, so a count that grows shows that the run lives
            self._heartbeat = threading.Thread(target=self._beat, name="hf_compat-lock", daemon=True)
            self._heartbeat.start()

    def _take(self) -> None:
        os.makedirs(self.folder, exist_ok=True)
        while True:
            with contextlib.suppress(FileExistsError):
                write_new(self._path, _lock_content(self.owner))
                return
            owner = _read_owner(self.folder)  # None while another process writes it
            # this process has it, or one of the same run on another node
            if owner is not None and owner.token == self.owner.token:
                self._is_shared = owner != self.owner
                return
            self._refuse_live(owner)
            if _remove_ended(self.folder, owner):
                logger.warning("%s: the lock of %s is taken over.", self.folder, _description(owner))

    def _refuse_live(self, owner: Owner | None) -> None:
        """Raise an error if the owner of the lock lives. One that cannot be asked is watched first."""
        alive = None if owner is None else owner.is_alive()
        if alive is None:
            message = "%s: waiting for a sign of life of %s, at most %g s."
            logger.warning(message, self.folder, _description(owner), SILENCE_SECONDS)
            alive = not _is_silent(self._path) and os.path.lexists(self._path)
            owner = _read_owner(self.folder) or owner
        if not alive:
            return
        who, way_out = _description(owner), "name another `output_dir`"
        if owner is not None and owner.is_of_this_process:
            who, way_out = "a Trainer of this process that is training", "give each Trainer an `output_dir` of its own"
        elif owner is not None:
            way_out = f"end it (`kill {owner.pid}`), or {way_out}"
        raise OutputFolderError(f"Another run saves into {self.folder}: {who}.\n\nHint: wait for it, or {way_out}.")

    def _look_again(self) -> None:
        """Note whether the lock is still this run's.

        A folder that was deleted is made again: no other run's files are in a folder that only this run has made.
        """
        owner = _read_owner(self.folder)
        if owner is None:
            with contextlib.suppress(FileExistsError):  # it is there, or another run was faster
                os.makedirs(self.folder)
                write_new(self._path, _lock_content(self.owner))
            owner = _read_owner(self.folder)
        if owner is None or owner.token != self.owner.token:
            self._lose(owner)

    def _lose(self, owner: Owner | None) -> None:
        """Remember that the folder is another run's."""
        if owner is not None:
            fact = f"Another run saves into {self.folder}: {_description(owner)}."
        else:
            what = "cannot be read" if os.path.lexists(self._path) else "is gone"
            fact = f"{self.folder} is no longer this run's: its {LOCK_NAME} {what}. Another run may have saved there."
        self.lost = (
            f"{fact} This run had the folder before, and writes nothing more into it. A run that shows no life for "
            f"{SILENCE_SECONDS:g} s (stopped, or its disk did not answer) loses its folder to a run that starts there."
            "\n\nHint: let the other run end; `resume_from_checkpoint=True` then continues from the newest checkpoint. "
            "Or name another `output_dir`."
        )

    def release(self) -> None:
        """Remove the lock if it is still this run's. A forked process removes nothing."""
        if self.owner.pid != os.getpid():
            return
        ACTIVE.discard(self.owner.id)
        self._is_over.set()
        owner = _read_owner(self.folder)
        if owner == self.owner:
            with contextlib.suppress(OSError):  # a folder that is gone, or read-only by now, takes no further saves
                os.unlink(self._path)
        elif self.is_held and not self._is_shared and self.lost is None and os.path.isdir(self.folder):
            self._lose(owner)  # what is written after the training asks for it
        # Last, as Ctrl-C may end this wait: the heartbeat changes no lock that is gone or another run's
        with contextlib.suppress(RuntimeError):  # Ctrl-C came before it had begun. It ends at once if it still begins
            if self._heartbeat is not None:
                self._heartbeat.join(HEARTBEAT_SECONDS)  # if the disk does not answer, it ends with the process

    def _beat(self) -> None:
        """Count in the lock while it is this run's. All other bytes stay, so a reader finds the owner at any time."""
        beats = missed = 0
        while not self._is_over.wait(HEARTBEAT_SECONDS):
            beats += 1
            owner = _read_owner(self.folder)
            # A folder that is being deleted loses its lock before it is gone, so one look is not enough
            missed = missed + 1 if owner is None and os.path.isdir(self.folder) else 0
            if missed > 1 or (owner is not None and owner.token != self.owner.token):
                self._lose(owner)
                return
            with contextlib.suppress(OSError):  # the next save looks again, and says so
                if owner != self.owner:
                    continue
                os.utime(self._path)  # a full disk may take this and no content
                with open(self._path, "r+b", buffering=0) as file:
                    if self.owner.token.encode() in file.read(_LARGEST_LOCK):  # it may just have been taken over
                        file.seek(0)
                        file.write(_lock_content(self.owner, beats))


def _remove_ended(folder: str | os.PathLike[str], owner: Owner | None) -> bool:
    """Remove the lock of a run that has ended, if it is still that run's. Whether this process has.

    One process at a time does so. The others return when it has, so that none finds its turnstile in the folder.
    """
    path = os.path.join(folder, LOCK_NAME)
    turnstile = f"{path}.takeover"
    with queueing(path):
        while os.path.lexists(path) and _read_owner(folder) == owner:
            try:
                os.mkdir(turnstile)
            except FileExistsError:
                _wait_at(turnstile)
                continue
            try:
                if not os.path.lexists(path) or _read_owner(folder) != owner:
                    return False  # given back, or another run was faster
                if os.path.isdir(path) and not os.path.islink(path):
                    os.rmdir(path)
                else:
                    os.unlink(path)
                return True
            finally:
                with contextlib.suppress(FileNotFoundError):  # the disk stalled, and another taker gave this one up
                    os.rmdir(turnstile)
    return False


def _wait_at(turnstile: str) -> None:
    """Wait until another taker's folder changes or is gone. That of a killed taker is removed."""
    if not _is_silent(turnstile):
        return
    try:
        os.rmdir(turnstile)
    except FileNotFoundError:
        pass  # another taker has seen it, too
    except OSError as error:
        raise OutputFolderError(
            f"{turnstile} is not the empty folder of a run that takes the lock over, so the lock of a run "
            f"that has ended cannot be taken over.\n\nHint: remove {turnstile}, or name another `output_dir`."
        ) from error


@contextlib.contextmanager
def queueing(path: str) -> Iterator[None]:
    """Let this machine's processes that name a file go on one after the other. Where none can be locked, all go on."""
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            with contextlib.suppress(OSError, CheckpointError):
                file = stack.enter_context(open_regular(path))
                until = time.monotonic() + SILENCE_SECONDS  # one that was stopped there keeps nobody out
                while not _is_locked(file) and time.monotonic() < until:
                    time.sleep(0.005)
        yield


def _is_locked(file: BinaryIO) -> bool:
    """Whether the system lets this process lock a file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_silent(path: str) -> bool:
    """Whether a lock, or a taker's folder, does not change for `SILENCE_SECONDS`.

    If the disk does not answer, the other run cannot show life either, so the watch begins again.
    """
    seen, since, pause = _look(path), time.monotonic(), 0.01
    while seen is not None and time.monotonic() - since < SILENCE_SECONDS:
        asked = time.monotonic()
        time.sleep(pause)
        pause = min(2 * pause, 0.5, SILENCE_SECONDS / 10)
        if _look(path) != seen:
            return False
        if time.monotonic() - asked > SILENCE_SECONDS / 3:
            logger.warning("%s: the disk did not answer for a while; still waiting.", path)
            since = time.monotonic()
    return seen is not None


def _look(path: str) -> tuple[bytes, int] | None:
    """A lock's content and time. None if there is none."""
    try:
        content = read_small(path, _LARGEST_LOCK)  # opened first: a network's disk looks for changes then
    except CheckpointError:  # it is gone, or cannot be read: its time says enough
        content = b""
    try:
        return content, os.lstat(path).st_mtime_ns
    except FileNotFoundError:
        return None


def _description(owner: Owner | None) -> str:
    if owner is None:
        return "a run that cannot be named"
    return f"process {owner.pid} on {owner.host}" + (", which has ended," if owner.is_alive() is False else "")


def _lock_content(owner: Owner, beats: int = 0) -> bytes:
    """The content of a lock, in as many bytes for every count."""
    started = _process_facts(owner.pid)[1]
    return json.dumps({**asdict(owner), "started": started, "beats": f"{beats:012d}"}).encode()


def _read_owner(folder: str | os.PathLike[str]) -> Owner | None:
    """The owner of a folder's lock. None if there is no lock, or it cannot be read."""
    try:
        facts = json.loads(read_small(os.path.join(folder, LOCK_NAME), _LARGEST_LOCK))
        facts.pop("beats", None)
        owner = Owner(**facts)
    except (CheckpointError, ValueError, RecursionError, TypeError, AttributeError):
        return None
    return owner if type(owner.pid) is int else None  # the system is asked about it


def is_free(folder: str | os.PathLike[str]) -> bool:
    """Whether no run has the lock of a folder, by what the system says of processes.

    The lock of one of this host that has died does not count, and is removed. Scripts refuse an output folder that is
    not empty and holds no checkpoint, so a run that was killed before its first save could not be started again. In a
    folder that cannot be written to that lock stays. The lock of another host's run counts.
    """
    owner = _read_owner(folder)
    if owner is not None and owner.is_alive() is False:
        with contextlib.suppress(OSError):
            _remove_ended(folder, owner)
        return True
    return owner is None and not os.path.lexists(os.path.join(folder, LOCK_NAME))
