"""Opening files that somebody else may have written: regular ones only, no larger than expected.

A FIFO, a device or a socket in the place of a file could keep a reader waiting for ever. What cannot be read is a
CheckpointError that names the file, whatever the cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from hf_compat.errors import CheckpointError

SMALL_FILE_BYTES = 64 * 2**20  # of an index, a manifest, a name
# A shortest log (`{"loss":1.0,"step":1},`) has 22 characters, an entry of a safetensors header 16 for each container.
_BYTES_OF_A_CONTAINER, _FEW_CONTAINERS = 12, 10**5
STATE_FILE_BYTES = 2**30  # of a trainer state: a log of each of a million updates takes 150 MB


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, without waiting for anything.

    Raises:
        CheckpointError: It cannot be opened, or it is not a regular file.
    """
    try:
        # without O_NONBLOCK the opening of a FIFO would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{os.fspath(path)} cannot be read: it is not a regular file.")
    return open(descriptor, "rb")


def write_new(path: str | os.PathLike[str], content: bytes, is_durable: bool = False) -> None:
    """Write a file where there is nothing, never through a link. Where the disk refuses it, no part of it stays.

    Raises:
        FileExistsError: Something has that name.
        OSError: It cannot be written.
    """
    with open(path, "xb") as file:
        try:
            file.write(content)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        except OSError:
            os.unlink(path)
            raise


@contextlib.contextmanager
def pinned(path: str | os.PathLike[str]) -> Iterator[str]:
    """Give the path of a regular file to a reader that opens it itself.

    Where the system names open files (Linux), the reader gets the very file that was looked at: one that is replaced
    by a FIFO in between does not keep it waiting.

    Raises:
        CheckpointError: It cannot be opened, or it is not a regular file.
    """
    with open_regular(path) as file:
        by_descriptor = f"/proc/self/fd/{file.fileno()}"
        yield by_descriptor if os.path.exists(by_descriptor) else os.fspath(path)


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuse what is not a regular file.

    Raises:
        CheckpointError: It cannot be opened, or it is not a regular file.
    """
    open_regular(path).close()


def read_small(path: str | os.PathLike[str], limit: int = SMALL_FILE_BYTES) -> bytes:
    """Read a file that is expected to be small.

    Raises:
        CheckpointError: It cannot be read, or it is larger than `limit` bytes.
    """
    with open_regular(path) as file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise unreadable(path, error) from error
    if len(content) > limit:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: it has more than {limit} bytes.")
    return content


def read_text(path: str | os.PathLike[str], limit: int = SMALL_FILE_BYTES) -> str:
    """Read a small file of UTF-8.

    Raises:
        CheckpointError: It cannot be read, is too large, or holds other bytes.
    """
    try:
        return read_small(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise unreadable(path, error) from error


def read_json(path: str | os.PathLike[str], limit: int = SMALL_FILE_BYTES) -> object:
    """Read a small JSON file.

    Raises:
        CheckpointError: It cannot be read, is too large, too deeply nested, or holds no JSON.
    """
    text = read_text(path, limit)
    try:
        return bounded_json(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: no valid JSON ({first_line(error)}).") from error


def bounded_json(text: str) -> object:
    """Parse JSON that somebody else may have written: containers take up to 80 times the memory of their brackets.

    Raises:
        ValueError: It is no JSON, or consists of little but brackets.
        RecursionError: It is nested too deeply.
    """
    containers = text.count("{") + text.count("[")
    if containers > _FEW_CONTAINERS + len(text) // _BYTES_OF_A_CONTAINER:
        raise ValueError(f"its {len(text)} characters are {containers} lists and objects")
    return json.loads(text)


def is_plain_name(name: object) -> bool:
    """Return whether a name is that of a file below a folder: relative, without `..`, and possible at all."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    try:
        parts = os.fsencode(name).split(b"/")
    except UnicodeEncodeError:
        return False
    return not os.path.isabs(name) and not any(part in (b"", b".", b"..") or len(part) > 255 for part in parts)


def is_inside(folder: Path, name: object) -> bool:
    """Return whether a name is plain and leads, links followed, to a place inside the folder."""
    if not is_plain_name(name):
        return False
    try:
        return (folder / str(name)).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle
        return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add a file's name to errors about what came out of it.

    Raises:
        CheckpointError: As within, with the name.
    """
    try:
        yield
    except CheckpointError as error:
        if os.fspath(path) in str(error):
            raise
        raise CheckpointError(f"{os.fspath(path)}: {error}") from error


class _Shortened(reprlib.Repr):
    """Shows the beginning of a value, and never builds the text of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 12
        self.maxstring = self.maxlong = self.maxother = 70

    def repr_instance(self, x: object, level: int) -> str:
        if isinstance(x, Mapping):  # of a kind that shows all of it
            return f"{type(x).__name__}({self.repr_dict(dict(x), level)})"
        if isinstance(x, (bytes, bytearray)):
            return repr(bytes(x[: self.maxstring]))
        return super().repr_instance(x, level)


def short(value: object) -> str:
    """Return a value as an error shows it, at most 60 characters of it."""
    try:
        text = _Shortened().repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer of too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}…"


def unreadable(path: str | os.PathLike[str], error: BaseException) -> CheckpointError:
    """Return the error for a file that cannot be read, with its cause in words."""
    cause = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    return CheckpointError(f"{os.fspath(path)!s} cannot be read: {cause}".replace("\0", "\\0"))
