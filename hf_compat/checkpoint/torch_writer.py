"""Write the files of `torch.save` with several threads.

`torch.save` computes checksums and writes tensors one after the other, in one thread. For an optimizer's state that is
most of the time of a save. Here `torch.serialization._save` makes the same records. The file is the same, too: a zip
archive without compression, whose records begin at multiples of 64 bytes.
"""

from __future__ import annotations

import collections
import inspect
import os
import pickle
import struct
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hf_compat.runtime.threads import Helpers

try:  # the extra `speed`: the same checksums, six times as fast
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

_THREADS = 4
_ALIGNMENT = 64
_WRITTEN_AT_ONCE = 2**16  # smaller records, in bytes, are not worth a task of their own
_UNDER_WAY = 2**29  # bytes of copies of a device's memory that may wait to be written
_CHUNK = 2**20  # bytes that are summed and written at a time: a processor's cache holds them meanwhile
_LARGEST_32, _LARGEST_16 = 2**32 - 1, 2**16 - 1
_PARAMETERS = ["obj", "zip_file", "pickle_module", "pickle_protocol", "_disable_byteorder_record"]


def save_torch(data: object, path: str) -> None:
    """Write tensors and plain containers as `torch.save` does."""
    make_records: Any = getattr(torch.serialization, "_save", None)  # private: another release may have another
    can_write = make_records is not None and hasattr(os, "pwrite")  # Windows has no such call
    if not can_write or list(inspect.signature(make_records).parameters) != _PARAMETERS:
        torch.save(data, path)
        return
    with open(path, "wb") as file, Helpers[None](min(_THREADS, os.cpu_count() or 1)) as threads:
        archive = _Archive(file, Path(path).stem, threads)
        make_records(data, archive, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
        archive.write_record("version", "3\n", 2)
        archive.close()


@dataclass(slots=True)
class _Record:
    """One file of an archive: its name, its size, where its header begins, and its checksum."""

    name: bytes
    size: int
    offset: int
    checksum: int = 0

    @property
    def header_size(self) -> int:
        """Bytes up to its content, which begins at a multiple of 64."""
        least = 30 + len(self.name) + len(self._sizes()) + 4
        return least + -(self.offset + least) % _ALIGNMENT

    def _sizes(self) -> bytes:
        """The field for a size beyond 32 bits."""
        return struct.pack("<HHQQ", 1, 16, self.size, self.size) if self.size >= _LARGEST_32 else b""

    def header(self) -> bytes:
        sizes, short = self._sizes(), _short(self.size)
        filled = self.header_size - 30 - len(self.name) - len(sizes) - 4
        extra = sizes + struct.pack("<2sH", b"FB", filled) + b"Z" * filled
        needs = 45 if sizes else 20
        fields = (b"PK\x03\x04", needs, 0, 0, 0, 0x21, self.checksum, short, short, len(self.name), len(extra))
        return struct.pack("<4sHHHHHIIIHH", *fields) + self.name + extra

    def entry(self) -> bytes:
        """Its entry in the archive's directory."""
        large = [number for number in (self.size, self.size) if self.size >= _LARGEST_32]
        large += [self.offset] if self.offset >= _LARGEST_32 else []
        extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        short, needs = _short(self.size), 45 if large else 20
        numbers = (needs, needs, 0, 0, 0, 0x21, self.checksum, short, short, len(self.name), len(extra), 0, 0, 0, 0)
        return struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", *numbers, _short(self.offset)) + self.name + extra


def _short(number: int) -> int:
    """A number for a field of 32 bits. All ones say that another field holds it."""
    return 2**32 - 1 if number >= _LARGEST_32 else number


class _Archive:
    """Takes records from torch. It knows at once where each begins, and threads write them."""

    def __init__(self, file: BinaryIO, root: str, threads: Helpers[None]) -> None:
        self._file, self._root, self._threads = file, root, threads
        self._records: list[_Record] = []
        self._under_way: collections.deque[tuple[int, Future[None]]] = collections.deque()
        self._bytes_under_way = 0
        self._end = 0

    def write_record(self, name: str, data: object, size: int) -> None:
        """Write a record. torch calls this with texts, bytes and storages."""
        record = _Record(f"{self._root}/{name}".encode(), size, self._end)
        self._records.append(record)
        self._end += record.header_size + size
        # What torch gives as a record: a text, bytes, or a storage on the CPU, whose memory is not copied
        if isinstance(data, (str, bytes)):
            content = memoryview(data.encode() if isinstance(data, str) else data)
        else:
            assert isinstance(data, torch.UntypedStorage)
            content = torch.empty(0, dtype=torch.uint8).set_(data).numpy().data
        if size <= _WRITTEN_AT_ONCE:
            self._write(record, content)
            return
        self._under_way.append((size, self._threads.submit(self._write, record, content)))
        self._bytes_under_way += size
        while self._bytes_under_way > _UNDER_WAY:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        size, written = self._under_way.popleft()
        self._bytes_under_way -= size
        written.result()

    def _write(self, record: _Record, content: memoryview) -> None:
        begin, checksum = record.offset + record.header_size, 0
        for start in range(0, len(content), _CHUNK):
            chunk = content[start : start + _CHUNK]
            checksum = crc32(chunk, checksum)
            self._write_at(begin + start, chunk)
        record.checksum = checksum
        self._write_at(record.offset, record.header())

    def _write_at(self, offset: int, content: bytes | memoryview) -> None:
        view = memoryview(content)
        done = 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], offset + done)

    def close(self) -> None:
        """Wait for the threads, and write the archive's directory."""
        while self._under_way:
            self._wait_for_one()
        directory = b"".join(record.entry() for record in self._records)
        # After the directory comes its place, in 64 bits if they are needed
        size = len(directory)
        start, count = self._end, len(self._records)
        fields = (b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
        long = struct.pack("<4sQHHIIQQQQ", *fields) + struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
        few = 2**16 - 1 if count >= _LARGEST_16 else count
        closing = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, few, few, _short(size), _short(start), 0)
        is_large = count >= _LARGEST_16 or max(start, size) >= _LARGEST_32
        self._write_at(self._end, directory + ((long if is_large else b"") + closing))
