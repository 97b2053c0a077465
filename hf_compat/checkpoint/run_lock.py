"""Let one run at a time save into an output folder, by a lock file that names its host and process.

The lock of a killed run is taken over with a warning. A process of another machine or container cannot be asked whether
it lives. So each run increments a counter in its lock every few seconds, and a lock that does not change belongs to a
run that has ended. Clocks of machines and disks differ, so no two times are compared.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hf_compat.checkpoint.files import read_small, write_new
from hf_compat.errors import CheckpointError, OutputFolderError

logger = logging.getLogger(__name__)

LOCK_NAME = "hf_compat.lock"
HEARTBEAT_SECONDS = 5.0
# A run of another machine has ended if its lock did not change for so long
SILENCE_SECONDS = 30.0
_LARGEST_LOCK = 4096  # bytes
# Ids of the owners in this process. An id in a lock that is not here belongs to an earlier process of the same number.
ACTIVE: set[str] = set()
_ID = re.compile(r"(?P<host>[A-Za-z0-9._]{1,64})\.(?P<machine>[0-9a-f]{6})-(?P<pid>[0-9]{1,18})-(?P<token>[0-9a-f]{8})")


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
        self._path = os.path.join(folder, LOCK_NAME)
        self._is_over = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, or make sure that it is still this run's. One that is gone is written again.

        Raises:
            OutputFolderError: A live run has it, or it cannot be written.
        """
        ACTIVE.add(self.owner.id)
        try:
            os.makedirs(self.folder, exist_ok=True)
            while True:
                with contextlib.suppress(FileExistsError):
                    write_new(self._path, _lock_content(self.owner))
                    break
                owner = _read_owner(self.folder)  # None while another process writes it
                # this process has it, or one of the same run on another node
                if owner is not None and owner.token == self.owner.token:
                    break
                self._refuse_live(owner)
                if self._take_over(owner):
                    break
        except OSError as error:
            ACTIVE.discard(self.owner.id)
            if isinstance(error, OutputFolderError):
                raise
            raise OutputFolderError(
                f"`output_dir={self.folder!r}`: no run can save there: {error}.\n\n"
                "Hint: make room or give write permission there, or name another folder."
            ) from error
        if self._heartbeat is None:
            # Disks may round times, so a count that grows shows that the run lives
            self._heartbeat = threading.Thread(target=self._beat, name="hf_compat-lock", daemon=True)
            self._heartbeat.start()

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

    def _take_over(self, owner: Owner | None) -> bool:
        """Replace the lock of a run that has ended. One process at a time does so."""
        turnstile = f"{self._path}.takeover"
        try:
            os.mkdir(turnstile)
        except FileExistsError:
            if _is_silent(turnstile):  # else wait for the other taker. The folder of a killed one is removed
                try:
                    os.rmdir(turnstile)
                except FileNotFoundError:
                    pass  # another taker has seen it, too
                except OSError as error:
                    raise OutputFolderError(
                        f"{turnstile} is not the empty folder of a run that takes the lock over, so the lock of a run "
                        f"that has ended cannot be taken over.\n\nHint: remove {turnstile}, or name another "
                        "`output_dir`."
                    ) from error
            return False
        try:
            if not os.path.lexists(self._path) or _read_owner(self.folder) != owner:
                return False  # given back, or another run was faster
            logger.warning("%s: the lock of %s is taken over.", self.folder, _description(owner))
            if os.path.isdir(self._path) and not os.path.islink(self._path):
                os.rmdir(self._path)
            aside = f"{self._path}.{secrets.token_hex(8)}"
            write_new(aside, _lock_content(self.owner))
            os.replace(aside, self._path)
            return True
        finally:
            with contextlib.suppress(FileNotFoundError):  # the disk stalled, and another taker gave this one up
                os.rmdir(turnstile)

    def release(self) -> None:
        """Remove the lock if it is still this run's. A forked process removes nothing."""
        if self.owner.pid != os.getpid():
            return
        ACTIVE.discard(self.owner.id)
        self._is_over.set()
        with contextlib.suppress(RuntimeError):  # Ctrl-C came before it had begun. It ends at once if it still begins
            if self._heartbeat is not None:
                self._heartbeat.join(HEARTBEAT_SECONDS)  # if the disk does not answer, it ends with the process
        with contextlib.suppress(OSError):  # a folder that is gone, or read-only by now, takes no further saves
            if _read_owner(self.folder) == self.owner:
                os.unlink(self._path)

    def _beat(self) -> None:
        """Count in the lock while it is this run's. All other bytes stay, so a reader finds the owner at any time."""
        beats = 0
        while not self._is_over.wait(HEARTBEAT_SECONDS):
            beats += 1
            with contextlib.suppress(OSError):  # the next save looks again, and says so
                if _read_owner(self.folder) != self.owner:
                    continue
                os.utime(self._path)  # a full disk may take this and no content
                with open(self._path, "r+b", buffering=0) as file:
                    if self.owner.token.encode() in file.read(_LARGEST_LOCK):  # it may just have been taken over
                        file.seek(0)
                        file.write(_lock_content(self.owner, beats))


def _is_silent(path: str) -> bool:
    """Whether a lock, or a taker's folder, does not change for `SILENCE_SECONDS`.

    If the disk does not answer, the other run cannot show life either, so the watch begins again.
    """
    seen, since = _look(path), time.monotonic()
    while seen is not None and time.monotonic() - since < SILENCE_SECONDS:
        asked = time.monotonic()
        time.sleep(min(0.5, SILENCE_SECONDS / 10))
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
    """Whether no live run of this host saves into a folder, by what the system says of processes.

    The lock of one that has died is removed. Scripts refuse an output folder that is not empty and holds no checkpoint,
    so a run that was killed before its first save could not be started again. In a folder that cannot be written to the
    lock stays, and counts.
    """
    owner = _read_owner(folder)
    alive = None if owner is None else owner.is_alive()
    if alive is False:
        lock = RunLock(os.fspath(folder))
        try:
            lock.acquire()
        except OutputFolderError:
            return False
        lock.release()
    return not alive
