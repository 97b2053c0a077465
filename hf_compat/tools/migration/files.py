"""Files as bytes: which are read, how their text is spelled, and writing all of one or nothing. Knows no language."""

from __future__ import annotations

import codecs
import io
import os
import stat
import tempfile
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_compat.errors import MigrationError
from hf_compat.tools.migration.report import Rewritten

# The text of a file in → its text of today, and what is left to a person.
Rewriting = Callable[[str], Rewritten]
_LARGEST = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a text becomes bytes: its encoding, and the mark before it."""

    encoding: str
    mark: bytes = b""

    def text(self, data: bytes) -> str:
        """Return the text of a file's bytes; line endings stay as they are.

        Raises:
            MigrationError: The bytes are no such text.
        """
        try:
            return data.removeprefix(self.mark).decode(self.encoding)
        except UnicodeDecodeError as error:
            raise MigrationError(f"byte {error.start} is no {self.encoding}") from error

    def bytes(self, text: str) -> bytes:
        """Return the bytes of a text."""
        return self.mark + text.encode(self.encoding)


def spelling_of(data: bytes, *, is_python: bool) -> Spelling:
    """Return how a file is spelled: UTF-8, or what the first lines of a Python source declare.

    Raises:
        MigrationError: It declares an encoding that there is not, or is no text.
    """
    mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    if b"\0" in data:
        raise MigrationError("it is no text")
    if not is_python:
        return Spelling("utf-8", mark)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise MigrationError(f"its encoding cannot be read: {error}") from error
    return Spelling("utf-8" if encoding == "utf-8-sig" else encoding, mark)


def read(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        MigrationError: It cannot be read, or is no source by its size.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise MigrationError("it is no regular file")
        if path.stat().st_size > _LARGEST:
            raise MigrationError(f"it has more than {_LARGEST // 2**20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise MigrationError(f"it cannot be read: {error.strerror or error}") from error


def write(path: Path, before: bytes, after: bytes) -> None:
    """Put a file's new bytes in the place of its old ones, all at once; its mode stays, and a link stays one.

    Raises:
        MigrationError: It cannot be written, or somebody else has changed it since it was read; it is as it was then.
    """
    real = path.resolve()
    if not os.access(real, os.W_OK):
        raise MigrationError("it is write-protected")
    if read(real) != before:
        raise MigrationError("it has changed since it was read: nothing is written")
    try:
        _replace(real, after)
    except OSError as error:
        raise MigrationError(f"it cannot be written: {error.strerror or error}") from error


def _replace(real: Path, after: bytes) -> None:
    held = real.stat()
    descriptor, name = tempfile.mkstemp(prefix=f".{real.name}-", dir=real.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, stat.S_IMODE(held.st_mode))
        if (held.st_uid, held.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(name, held.st_uid, held.st_gid)
        os.replace(name, real)
    except OSError:
        os.unlink(name)
        raise
