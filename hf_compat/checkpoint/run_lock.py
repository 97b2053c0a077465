"""Which run saves into an output folder: a lock file names its host and process. Files only.

One run saves into a folder at a time. The lock of a run that was killed is taken over with a warning. Whether a process
of another machine or container lives cannot be asked, so a run touches its lock every few seconds: one that is silent
has ended. What runs have under way bears their owner's id, so none takes another's for its own.
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
from types import NoneType

from hf_compat.checkpoint.files import read_json
from hf_compat.errors import CheckpointError, OutputFolderError

logger = logging.getLogger(__name__)

LOCK_NAME = "hf_compat.lock"
HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 30.0  # a run of another machine that has not touched its lock for so long has ended
_LARGEST_LOCK = 4096  # bytes
# ids of the owners in this process; one that is in a lock and not here belongs to an earlier process of the same number
_ACTIVE: set[str] = set()


def _host() -> str:
    """Return this machine's name, in characters that a file's name may have."""
    return re.sub(r"[^A-Za-z0-9._]", "_", socket.gethostname())[:64] or "localhost"


@functools.cache
def _machine() -> str:
    """Return what tells this machine from others of its name: its start, and the container that counts processes."""
    facts = []
    with contextlib.suppress(OSError):  # only Linux has them
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("".join(facts).encode()).hexdigest()[:6]


@dataclass(frozen=True, slots=True)
class Owner:
    """A run, as others see it.

    Args:
        host: Name of its machine.
        pid: Number of its first process.
        token: What tells it from other runs of the same process.
        started: When the process started, in the system's ticks; None where the system does not say.
        machine: What tells its machine from others of that name.
    """

    host: str = field(default_factory=_host)
    pid: int = field(default_factory=os.getpid)
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    started: int | None = None
    machine: str = field(default_factory=_machine)

    @classmethod
    def of_this_process(cls, token: str | None = None) -> Owner:
        """Return a run of this process; a new one where no token is given."""
        return cls(started=_process_facts(os.getpid())[1], token=token or secrets.token_hex(4))

    @property
    def id(self) -> str:
        """Text that stands for this run in the names of what it has under way."""
        return f"{self.host}.{self.machine}-{self.pid}-{self.token}"

    @classmethod
    def of_id(cls, text: str) -> Owner | None:
        """Return the owner that an id names; None for any other text."""
        place, *rest = text.rsplit("-", 2)
        host, _, machine = place.rpartition(".")
        if len(rest) != 2 or not re.fullmatch(r"[0-9]{1,18}", rest[0]):
            return None
        return cls(host=host, machine=machine, pid=int(rest[0]), token=rest[1])

    @property
    def is_of_this_process(self) -> bool:
        """Whether it is a run of the process that asks."""
        return (self.host, self.machine, self.pid) == (_host(), _machine(), os.getpid())

    def is_alive(self) -> bool | None:
        """Return whether the run goes on; None on another machine, or in another container."""
        cannot_ask = os.name == "nt"  # Windows has no signal that does nothing
        if cannot_ask or (self.host, self.machine) != (_host(), _machine()):
            return None
        if self.pid == os.getpid():
            return self.id in _ACTIVE
        return _is_running(self.pid, self.started)


def _is_running(pid: int, started: int | None) -> bool:
    """Return whether there is a process of that number that started then."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is another user's
    state, now = _process_facts(pid)
    return state not in ("Z", "X") and (started is None or now is None or started == now)


def _process_facts(pid: int) -> tuple[str, int | None]:
    """Return a process's state and its start in ticks, where the system has them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", None


class RunLock:
    """The right to save into a folder.

    Args:
        folder: The output folder, which exists or can be made.
        owner: Whose right it is; a new run of this process where none is given.
    """

    def __init__(self, folder: str, owner: Owner | None = None) -> None:
        self.folder = folder
        self.owner = Owner.of_this_process() if owner is None else owner
        self._path = os.path.join(folder, LOCK_NAME)
        self._aside = f"{self._path}.{self.owner.token}"
        self._heartbeat: _Heartbeat | None = None

    def try_to_acquire(self) -> OutputFolderError | None:
        """Take the lock, or return why that is not possible."""
        try:
            self.acquire()
        except OutputFolderError as error:
            return error
        return None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            OutputFolderError: A run that is alive has it, or it cannot be written.
        """
        _ACTIVE.add(self.owner.id)
        try:
            self._write()
        except OSError as error:
            _ACTIVE.discard(self.owner.id)
            if isinstance(error, OutputFolderError):
                raise
            raise OutputFolderError(
                f"`output_dir={self.folder!r}`: no run can save there: {error}.\n\n"
                "Hint: make room or give write permission there, or name another folder."
            ) from error
        self._heartbeat = _Heartbeat(self._path, self.owner)
        self._heartbeat.start()

    def renew(self) -> None:
        """Make sure, before a save, that the lock is still this run's; one that somebody deleted is written again.

        Raises:
            OutputFolderError: Another run has taken the folder over.
        """
        if _read_owner(self._path) != self.owner:
            self._write()

    def _write(self) -> None:
        os.makedirs(self.folder, exist_ok=True)
        while not self._create():
            owner = _read_owner(self._path)
            if owner is not None and owner.token == self.owner.token:
                return  # a process of the same run, on another node, has it
            self._refuse_where_alive(owner)
            if self._take_over(owner):
                return

    def _create(self) -> bool:
        """Write the lock where there is none. It appears whole: nobody reads one that is still empty."""
        self._write_aside()
        try:
            os.link(self._aside, self._path)
        except FileExistsError:
            return False
        except OSError:
            return self._create_without_links()  # not every file system has them
        finally:
            os.unlink(self._aside)
        return True

    def _write_aside(self) -> None:
        try:
            with open(self._aside, "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.owner)))
        except OSError:  # the disk is full
            with contextlib.suppress(OSError):
                os.unlink(self._aside)
            raise

    def _create_without_links(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self.owner)))
        return True

    def _refuse_where_alive(self, owner: Owner | None) -> None:
        alive = None if owner is None else owner.is_alive()
        if alive or (alive is None and self._is_touched(owner)):
            raise OutputFolderError(_refusal(self.folder, _read_owner(self._path) or owner))

    def _take_over(self, owner: Owner | None) -> bool:
        """Put this run's lock in the place of one whose run has ended; one process at a time does so."""
        turnstile = f"{self._path}.takeover"
        try:
            os.mkdir(turnstile)
        except FileExistsError:
            _pass_by(turnstile)
            return False
        try:
            if not os.path.lexists(self._path) or _read_owner(self._path) != owner:
                return False  # given back, or another run was faster
            logger.warning("%s: the lock of %s is taken over.", self.folder, _description(owner))
            if os.path.isdir(self._path) and not os.path.islink(self._path):
                os.rmdir(self._path)
            self._write_aside()
            os.replace(self._aside, self._path)
            return True
        finally:
            os.rmdir(turnstile)

    def _is_touched(self, owner: Owner | None) -> bool:
        """Watch the lock of a process that cannot be asked, until its run shows a sign of life or is surely over."""
        seen = _changed(self._path)
        with open(self._aside, "w"):
            age = (_changed(self._aside) or 0.0) - (seen or 0.0)  # by the clock of the disk
        os.unlink(self._aside)
        give_up = time.monotonic() + SILENCE_SECONDS - max(age, 0.0)
        if time.monotonic() < give_up:
            logger.warning("%s: waiting for a sign of life of %s.", self.folder, _description(owner))
        while time.monotonic() < give_up:
            time.sleep(min(0.5, SILENCE_SECONDS / 10))
            now = _changed(self._path)
            if now != seen:
                return now is not None
        return False

    def release(self) -> None:
        """Give the lock back, where it is still this run's. A process that was forked off gives nothing back."""
        if not self.owner.is_of_this_process:
            return
        _ACTIVE.discard(self.owner.id)
        if self._heartbeat is not None:
            self._heartbeat.stop()
        with contextlib.suppress(OSError):  # a folder that is gone, or read-only by now, takes no further saves
            if _read_owner(self._path) == self.owner:
                os.unlink(self._path)


class _Heartbeat:
    """Touches a lock while its run lives."""

    def __init__(self, path: str, owner: Owner) -> None:
        self._path, self._owner = path, owner
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_compat-lock", daemon=True)
        self.start = self._thread.start

    def _run(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # the next save looks again, and says so
                if _read_owner(self._path) == self._owner:
                    os.utime(self._path)

    def stop(self) -> None:
        """End it; where the disk does not answer, it ends with the process."""
        self._over.set()
        self._thread.join(HEARTBEAT_SECONDS)


def _pass_by(turnstile: str) -> None:
    """Wait a moment for another taker; one that was killed there does not come back."""
    time.sleep(0.05)
    entered = _changed(turnstile)
    if entered is not None and time.time() - entered > SILENCE_SECONDS:
        with contextlib.suppress(OSError):  # somebody else has seen it, too
            os.rmdir(turnstile)


def _refusal(folder: str, owner: Owner | None) -> str:
    if owner is not None and owner.is_of_this_process:
        return (
            f"Another run saves into {folder}: a Trainer of this process that is training.\n\n"
            "Hint: wait for it, or give each Trainer an `output_dir` of its own."
        )
    who = "a process that cannot be named" if owner is None else f"process {owner.pid} on {owner.host}"
    end = "" if owner is None else f", end it (`kill {owner.pid}`)"
    return f"Another run saves into {folder}: {who}.\n\nHint: wait for it{end}, or name another `output_dir`."


def _description(owner: Owner | None) -> str:
    if owner is None:
        return "a run that cannot be named"
    if owner.is_alive() is None:
        return f"process {owner.pid} on {owner.host}"
    return f"process {owner.pid} on this host, which has ended,"


def _changed(path: str) -> float | None:
    """Return when a file was touched last, in seconds; None where there is none."""
    try:
        return os.lstat(path).st_mtime
    except FileNotFoundError:
        return None


def _read_owner(path: str) -> Owner | None:
    """Read a lock; None where it is not readable."""
    try:
        facts = read_json(path, _LARGEST_LOCK)
        owner = Owner(**facts) if isinstance(facts, dict) else None
    except (CheckpointError, TypeError):
        return None
    if owner is None or type(owner.pid) is not int or not isinstance(owner.started, (int, NoneType)):
        return None
    return owner if all(isinstance(text, str) for text in (owner.host, owner.token, owner.machine)) else None


def is_in_use(folder: str | os.PathLike[str]) -> bool:
    """Return whether a run that is alive on this host saves into a folder."""
    owner = _read_owner(os.path.join(folder, LOCK_NAME))
    return owner is not None and owner.is_alive() is True


def remove_ended_lock(folder: str | os.PathLike[str]) -> bool:
    """Remove the lock of a run that has ended without giving it back, as one that was killed.

    That of another machine's run, which cannot be asked, counts as such once it is silent. Nothing waits for that.

    Returns:
        Whether the folder has no lock now.
    """
    path = os.path.join(folder, LOCK_NAME)
    with contextlib.suppress(OSError):  # another process sees to it, or the folder is read-only
        if _is_left(path):
            turnstile = f"{path}.takeover"
            os.mkdir(turnstile)
            try:
                if _is_left(path):  # still: a run that takes it over goes through here, too
                    os.unlink(path)
            finally:
                os.rmdir(turnstile)
    return not os.path.lexists(path)


def _is_left(path: str) -> bool:
    """Return whether there is a lock, and its run surely has ended."""
    touched, owner = _changed(path), _read_owner(path)
    alive = None if owner is None else owner.is_alive()
    silent = touched is not None and time.time() - touched > SILENCE_SECONDS
    return touched is not None and (silent if alive is None else not alive)
