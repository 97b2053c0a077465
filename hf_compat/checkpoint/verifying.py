"""Compare the files of a checkpoint with their hashes by the same reading that loads them.

A resume reads each file once. What is small stays in memory from the look at all files until it is loaded. What is
large is hashed while it is loaded, before anything uses it.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hf_compat.errors import CheckpointError

# Files up to this size, in bytes, are read into memory by one call. A reader of a file makes hundreds.
READ_AT_ONCE = 2**22
_MOST_KEPT = 2**26  # bytes of all files in memory
CHUNK = 2**20  # bytes of a file that are hashed at a time
_PAGE = 2**12  # bytes that a disk loses, or keeps, together
_POPULATE_READ = 22  # Linux's MADV_POPULATE_READ reads the pages of a mapping, and says if the disk refuses them


class RunningHash:
    """The SHA-256 of a file's bytes, which come in their order, though some come again."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.place = 0  # so many bytes have come

    def add(self, begin: int, content: memoryview) -> None:
        """Take bytes that lie from a place on. Those beyond a gap do not count."""
        if begin <= self.place < begin + len(content):
            self._digest.update(content[self.place - begin :])
            self.place = begin + len(content)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def sha256_of(file: BinaryIO) -> str:
    """Hash a file from its place on."""
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def sums_of(file: BinaryIO) -> str:
    """Hash the sums of a file's pages, several times faster than the file itself. A lost or changed page shows.

    A save lists the sums of large files whose hashes would make callbacks wait. Changes within a page that cancel each
    other out do not show.
    """
    digest, buffer, size = hashlib.sha256(), bytearray(CHUNK), 0
    with memoryview(buffer) as view:
        while count := _fill(file, view):
            size += count
            view[count:] = bytes(CHUNK - count)
            pages = np.frombuffer(view[: -(-count // _PAGE) * _PAGE], "<u8").reshape(-1, _PAGE // 8)
            digest.update(pages.sum(axis=1, dtype="<u8").tobytes())
            del pages
    return f"{digest.hexdigest()} {size}"


def _fill(file: BinaryIO, view: memoryview) -> int:
    """Read until a buffer is full or the file ends. Return how many bytes there are."""
    place = 0
    while place < len(view) and (count := file.readinto(view[place:])):  # type: ignore[attr-defined]  # unbuffered
        place += count
    return place


def sha256_of_mapped(file: BinaryIO) -> str:
    """Hash a file that its reader maps into memory, too: the disk is read once, and nothing is copied.

    Raises:
        OSError: The disk refuses a part. A mapping alone would end the process then.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            running = RunningHash()
            while running.place < size:
                mapped.madvise(_POPULATE_READ, running.place, min(CHUNK, size - running.place))
                with memoryview(mapped) as whole, whole[running.place : running.place + CHUNK] as part:
                    running.add(running.place, part)
            return running.hexdigest()
    except (AttributeError, OSError, ValueError):  # another system, an older one, a refusal, an empty file
        file.seek(0)
        return sha256_of(file)


def refuse_damaged(path: str) -> None:
    """Raise the error about a file with another hash than its manifest has."""
    raise CheckpointError(f"{path} is damaged (its hash differs).")


class Unread:
    """Files of checkpoints that nothing has loaded yet, with what their manifests say of them.

    Args:
        defers: Whether those who load large files hash them. Otherwise that comes before anything is loaded.
    """

    def __init__(self, defers: bool = False) -> None:
        self.defers = defers
        self.tell: Callable[[str], None] = refuse_damaged  # what becomes of a file that was hashed while it was loaded
        self._kept: dict[str, bytes] = {}
        self._expected: dict[str, str] = {}

    def is_right(self, path: str, file: BinaryIO, size: int, expected: str, is_loaded: bool) -> bool:
        """Whether an open file has its hash. One that is loaded later is kept for that, or hashed then.

        Those of safetensors are not kept: their reader of bytes gives another order, in which ranks exchange them.
        """
        is_small = size <= min(READ_AT_ONCE, _MOST_KEPT - sum(map(len, self._kept.values())))
        if is_small and path.endswith(".safetensors"):
            return sha256_of(file) == expected
        if is_loaded and is_small:
            content = self._kept[path] = file.read(size)
            return hashlib.sha256(content).hexdigest() == expected
        if is_loaded and self.defers:
            self._expected[path] = expected
            return True
        return sha256_of(file) == expected

    def only(self, folder: str | None) -> None:
        """Forget the files that are not in this folder."""
        home = None if folder is None else Path(folder)
        for files in (self._kept, self._expected):
            for path in [path for path in files if Path(path).parent != home]:
                del files[path]

    def content(self, path: str) -> bytes | None:
        """Give the content of a file that was kept. The next reader reads the file."""
        return self._kept.pop(path, None)

    def expects(self, path: str) -> bool:
        """Whether a file's reader compares its hash."""
        return path in self._expected

    def expected(self, path: str) -> str | None:
        """Give the hash of such a file. The next reader need not compare it."""
        return self._expected.pop(path, None)

    def left(self) -> list[str]:
        """Name the files that were not hashed yet."""
        return list(self._expected)


_NOTHING = Unread()
_UNREAD: ContextVar[Unread] = ContextVar("_UNREAD", default=_NOTHING)


@contextlib.contextmanager
def loading(unread: Unread) -> Iterator[None]:
    """Let readers take the files that are unread, within this context."""
    token = _UNREAD.set(unread)
    try:
        yield
    finally:
        _UNREAD.reset(token)


def kept_content(path: str | os.PathLike[str]) -> bytes | None:
    """The content of a file that was read and found right, if it was kept."""
    return _UNREAD.get().content(os.fspath(path))


def running_hash(path: str) -> RunningHash | None:
    """A hash for a file that is about to be read in parts, if its reader compares it."""
    return RunningHash() if _UNREAD.get().expects(path) else None


@contextlib.contextmanager
def comparing(path: str | os.PathLike[str], digest: Callable[[], str]) -> Iterator[None]:
    """Compare the hash of a file, if its reader has to, when the file is loaded. If that fails, the hash says why.

    `digest` gives the hash of what was read.
    """
    unread, name = _UNREAD.get(), os.fspath(path)
    expected = unread.expected(name)
    try:
        yield
    except Exception:
        if expected is not None and digest() != expected:
            unread.tell(name)
        raise
    if expected is not None and digest() != expected:
        unread.tell(name)
