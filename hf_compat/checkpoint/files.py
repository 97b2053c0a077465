"""Open files that may come from elsewhere, and walk their pickles before a loader follows them.

Only regular files of an expected size are read, since a FIFO or a socket could block the reader. A loader hashes keys,
calls functions and allocates memory, so a kilobyte of pickle can take hours or gigabytes. The walk imports, calls and
hashes nothing. Any failure is a CheckpointError that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import stat
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from hf_compat.checkpoint.disks import force
from hf_compat.checkpoint.verifying import CHUNK, RunningHash, comparing, kept_content, sha256_of_mapped
from hf_compat.errors import CheckpointError, MissingCheckpoint

SMALL_FILE_BYTES = 64 * 2**20  # of an index, a manifest, a name
# The shortest log (`{"loss":1.0,"step":1},`) has 22 characters. A safetensors header has 16 for each container.
_BYTES_OF_A_CONTAINER, _FEW_CONTAINERS = 12, 10**5
STATE_FILE_BYTES = 2**30  # of a trainer state: a log of each of a million updates takes 150 MB


_OPENED = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # else a FIFO waits for a writer


def open_regular(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading, without waiting for anything."""
    with reading(path):
        descriptor = os.open(path, _OPENED)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{os.fspath(path)} cannot be read: it is not a regular file.")
    return open(descriptor, "rb", buffering=buffering)


class ReadOnce(io.RawIOBase):
    """An open file for a reader that moves about in it, as readers of zip files do. Each byte is read once, as a rule.

    In memory are the file's end, where such a reader looks first, and some bytes after those that were read last, which
    the same call of the system brings.

    Args:
        file: It has no buffer.
        running: Is told of all bytes in their order, also of those that the reader leaves out.
    """

    _END, _AFTER = 2**16, 2**14  # bytes in memory

    def __init__(self, file: BinaryIO, running: RunningHash | None = None) -> None:
        self._file, self._running = file, running
        self.size, self._place, self._next = os.fstat(file.fileno()).st_size, 0, 0
        self._held: dict[str, tuple[int, memoryview]] = {}  # by name of a part: where it begins

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._place = base + offset
        return self._place

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # readers give these
        """Fill a buffer, or read up to the end of the file."""
        view = memoryview(buffer).cast("B")
        if self._running is not None and self._place <= self._running.place + CHUNK:
            self._hash_up_to(self._running, self._place)
        done = self._fill(view, self._place)
        if self._running is not None:
            self._running.add(self._place, view[:done])
        self._place += done
        return done

    def read_at(self, offset: int, length: int) -> io.BytesIO:
        """Read some bytes into a stream of their own, and no second copy of them. Its rest is zero past the end."""
        found = io.BytesIO(bytes(length))
        self.seek(offset)
        with found.getbuffer() as content:
            self.readinto(content)
        return found

    def hexdigest(self) -> str:
        """Hash the rest, and return the hash of the whole file."""
        running = RunningHash() if self._running is None else self._running
        self._hash_up_to(running, self.size)
        return running.hexdigest()

    def _hash_up_to(self, running: RunningHash, place: int) -> None:
        while running.place < place:
            part = memoryview(bytearray(min(CHUNK, place - running.place)))
            done = self._fill(part, running.place)
            if not done:
                break
            running.add(running.place, part[:done])

    def _fill(self, view: memoryview, place: int) -> int:
        """Fill a view with the bytes from a place on. Return how many there are."""
        done = 0
        while done < len(view):
            more = self._from_memory(view[done:], place + done) or self._from_disk(view[done:], place + done)
            if not more:
                break
            done += more
        return done

    def _from_memory(self, view: memoryview, place: int) -> int:
        for start, held in self._held.values():
            if start <= place < start + len(held):
                part = held[place - start :][: len(view)]
                view[: len(part)] = part
                return len(part)
        return 0

    def _from_disk(self, view: memoryview, place: int) -> int:
        end = max(self.size - self._END, 0)
        if place >= self.size:
            return 0
        if "end" not in self._held and end <= place != self._next:
            return self._hold("end", end, self.size) and self._from_memory(view, place)
        stop = self._held["end"][0] if "end" in self._held else self.size
        if len(view) < self._AFTER:
            return self._hold("after", place, min(place + self._AFTER, stop)) and self._from_memory(view, place)
        view = view[: stop - place]
        after = memoryview(bytearray(min(self._AFTER, stop - place - len(view))))
        count = self._read([view, after], place)
        if count > len(view):
            self._held["after"] = place + len(view), after[: count - len(view)]
        return min(count, len(view))

    def _hold(self, part: str, begin: int, stop: int) -> int:
        held = memoryview(bytearray(stop - begin))
        self._held[part] = begin, held[: self._read([held], begin)]
        return len(self._held[part][1])

    def _read(self, views: list[memoryview], place: int) -> int:
        if hasattr(os, "preadv"):
            count = os.preadv(self._file.fileno(), views, place)
        else:  # Windows
            self._file.seek(place)
            content = self._file.read(len(views[0]))
            views[0][: len(content)], count = content, len(content)
        self._next = place + count
        return count


def write_new(path: str | os.PathLike[str], content: bytes, is_durable: bool = False) -> None:
    """Write a new file, never through a link. If the disk refuses it, no part of it stays.

    Raises:
        FileExistsError: Something has that name.
        OSError: It cannot be written.
    """
    with open(path, "xb") as file:
        try:
            file.write(content)
            file.flush()
            if is_durable:
                force(file.fileno(), path)
        except OSError:
            os.unlink(path)
            raise


@contextlib.contextmanager
def pinned(path: str | os.PathLike[str]) -> Iterator[str]:
    """Give the path of a regular file to a reader that opens it itself, and name the file in the reader's errors.

    On Linux, which has names for open files, the reader gets the file that was checked. A FIFO that takes its place in
    between does not make it wait.
    """
    with open_regular(path, buffering=0) as file, reading(path), comparing(path, lambda: sha256_of_mapped(file)):
        by_descriptor = f"/proc/self/fd/{file.fileno()}"
        yield by_descriptor if os.path.exists(by_descriptor) else os.fspath(path)


def read_small(path: str | os.PathLike[str], limit: int = SMALL_FILE_BYTES) -> bytes:
    """Read a file that is expected to be small."""
    content = kept_content(path)
    if content is None:
        with open_regular(path, buffering=0) as file, reading(path):
            content = _read_compared(file, path, limit)
    if len(content) > limit:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: it has more than {limit} bytes.")
    return content


def _read_compared(file: BinaryIO, path: str | os.PathLike[str], limit: int) -> bytes:
    """Read up to one byte more than a limit."""
    content = b""
    with comparing(path, lambda: hashlib.sha256(content).hexdigest()):
        while len(content) <= limit and (more := file.read(limit + 1 - len(content))):
            content += more
    return content


def read_text(path: str | os.PathLike[str], limit: int = SMALL_FILE_BYTES) -> str:
    """Read a small file of UTF-8."""
    with reading(path):
        return read_small(path, limit).decode("utf-8")


def read_json(path: str | os.PathLike[str], limit: int = SMALL_FILE_BYTES) -> object:
    """Read a small JSON file."""
    with reading(path):
        text = read_small(path, limit).decode("utf-8")
    containers = text.count("{") + text.count("[")  # each takes up to 80 times the memory of its brackets
    try:
        if containers > _FEW_CONTAINERS + len(text) // _BYTES_OF_A_CONTAINER:
            raise ValueError(f"its {len(text)} characters are {containers} lists and objects")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: no valid JSON ({first_line(error)}).") from error


def is_plain_name(name: object) -> bool:
    """Whether a name is possible for a file below a folder: relative and without `..`."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    try:
        parts = os.fsencode(name).split(b"/")
    except UnicodeEncodeError:
        return False
    return not (os.path.isabs(name) or {b"", b".", b".."} & set(parts) or max(map(len, parts)) > 255)


OUTSIDE = "is outside the folder"  # what is wrong with a file that is not inside


def is_inside(folder: Path, name: object) -> bool:
    """Whether a name is plain and leads, through any links, to a place inside the folder."""
    if not is_plain_name(name):
        return False
    path, has_link = os.fspath(folder), False
    for part in str(name).split("/"):
        path = f"{path}/{part}"
        has_link = has_link or os.path.islink(path)
    if not has_link:  # then the name leads where it says
        return True
    try:
        return (folder / str(name)).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle
        return False


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# Errors of the system that a name or a file's content brings about. By all others, it does not deliver what is there.
_OF_NAMES = frozenset((
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO, errno.ENODEV,
))  # fmt: skip


def refusal_behind(error: BaseException | None) -> OSError | None:
    """The system's error behind another one, by which it does not deliver a file. It says nothing of its content."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None and error.errno not in _OF_NAMES:
            return error
        error = error.__cause__
    return None


class Refused(str):
    """What is wrong with a file that the system does not deliver, which may be whole."""

    __slots__ = ()


def problem(text: str, error: BaseException | None) -> str:
    """Say what is wrong, by an error that may come from the system."""
    return text if refusal_behind(error) is None else Refused(text)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add a file's name to errors about its content."""
    try:
        yield
    except CheckpointError as error:
        if os.fspath(path) in str(error):
            raise
        raise type(error)(f"{os.fspath(path)}: {error}") from error


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make any error of a reader a CheckpointError that names the file. Damaged files raise anything."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        kind = MissingCheckpoint if isinstance(error, FileNotFoundError) else CheckpointError
        raise kind(f"{os.fspath(path)} cannot be read: {cause}".replace("\0", "\\0")) from error


Plain = Any  # tensors and plain containers, as the reader of each file knows

# A container that is referred to twice counts twice, as it does for code that walks through the content.
_MOST_PARTS = 10**7
_DEEPEST = 100
# Bytes that tensors may need beyond their own storage. A stride of 0 makes gigabytes of one number.
_MOST_REPEATED_BYTES = 2**26
_MOST_NAMES = 10**4
# Packages whose objects, or tensors and arrays of whose parts, a loader makes of a pickle.
_MADE = frozenset(
    ("", "builtins", "collections", "_codecs", "copyreg", "numpy", "torch", "apollo_torch", "galore_torch", "torchao")
)
_LEAVES = frozenset((int, float, str, bytes, bool, type(None)))
# torch before 1.6 writes five pickles instead of a zip file. The fourth is the content.
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_OLD_PICKLES = 5
_CONTAINERS: dict[tuple[str, str], type] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
    **{(module, kind.__name__): kind for module in ("builtins", "__builtin__") for kind in (set, frozenset)},
}


class Named:
    """Takes the place of an object, with the name of its class and the values from the pickle."""

    module = name = ""
    given: list[object]
    states: list[object]

    def __new__(cls, *given: object, **keywords: object) -> Named:
        # Refuse to allocate as many bytes as a number says. No writer of tensors and arrays needs that
        is_torchs = cls.module.partition(".")[0] == "torch" and cls.name.endswith(("Tensor", "Storage", "_qtensor"))
        is_array = cls.name == "_reconstruct" and given[1:2] != ((0,),)
        is_bytes = cls.name == "bytearray" and isinstance(given[0] if given else 0, int)
        if is_array or (given and (is_torchs or is_bytes or cls.name == "ndarray")):
            raise pickle.UnpicklingError(f"it calls {cls.module}.{cls.name} with a size")
        made = object.__new__(cls)
        made.given, made.states = [*given, *keywords.values()], []
        return made

    def __setstate__(self, state: object) -> None:
        self.states.append(state)

    def append(self, item: object) -> None:
        self.given.append(item)

    def __setitem__(self, key: object, item: object) -> None:
        self.given += (key, item)

    @property
    def state(self) -> object:
        """The last state that the pickle has given the object. None if it has given none."""
        return self.states[-1] if self.states else None

    @property
    def parts(self) -> Sequence[object]:
        """What a loader walks through. An object that none makes stays closed, and may be a circle."""
        return [*self.given, *self.states] if self.module.partition(".")[0] in _MADE else ()


class _Walker(pickle._Unpickler):  # written in Python: each step can be replaced
    """Builds the content of a pickle from `Named` objects, and notes the values that are hashed."""

    stack: list[object]
    memo: dict[int, object]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # it allocates memory before it reads, and torch never writes it

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file)
        self._size = size
        self._claimed = 0
        self._storages: dict[object, int] = {}
        self._types: dict[tuple[str, str], type] = {}
        self.hashed: list[object] = []
        hashed = self.hashed

        def note(self: object) -> int:
            hashed.append(self)  # a loader walks through all of its parts, each time
            return id(self)

        self._named = type("Named", (Named,), {"__hash__": note})
        self.tuple = type("Tuple", (tuple,), {"__hash__": note, "__slots__": ()})

    def find_class(self, module: str, name: str) -> type:
        made = _CONTAINERS.get((module, name)) or self._types.get((module, name))
        if made is None:
            made = self._types[module, name] = type(name, (self._named,), {"module": module, "name": name})
            if len(self._types) > _MOST_NAMES:
                raise pickle.UnpicklingError("it names too many classes")
        return made

    def persistent_load(self, pid: object) -> Named:
        if isinstance(pid, tuple) and len(pid) > 4 and isinstance(pid[4], int):  # its key and its count of numbers
            key = pid[2] if isinstance(pid[2], (str, bytes)) else None
            self._claimed += max(pid[4] - self._storages.get(key, 0), 0)
            self._storages[key] = max(pid[4], self._storages.get(key, 0))
            if self._claimed > self._size:
                raise pickle.UnpicklingError("its storages have more numbers than it has bytes")
        return Named(pid)


def member_of(kind: object, name: str) -> object:
    """Stand in for `getattr` in a pickle. Python 3.11.0 to 3.11.3 write the members of enums by it.

    Raises:
        pickle.UnpicklingError: It asks for anything else.
    """
    if not isinstance(kind, type) or not hasattr(kind, "__members__"):
        raise pickle.UnpicklingError("it calls builtins.getattr")
    return kind.__members__[name]


for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):

    def _with_own_tuple(walker: _Walker, step: Callable[[_Walker], None] = _Walker.dispatch[_code[0]]) -> None:
        step(walker)
        walker.stack[-1] = walker.tuple(walker.stack[-1])

    _Walker.dispatch[_code[0]] = _with_own_tuple


def walked(path: str, file: BinaryIO, size: int) -> Plain:
    """Read a pickle, with a `Named` in place of each object and function. `path` and `size` are those of its file."""
    walker = _Walker(file, size)
    with reading(path):
        try:
            content = walker.load()
        except KeyError as error:  # Python's reader looks up each instruction
            raise CheckpointError(f"{path} cannot be read: it is not a file of `torch.save` or `pickle`.") from error
    if max(walker.memo, default=0) > size:  # Python's own loader allocates memory for as many
        raise CheckpointError(f"{path} cannot be read: it counts more objects than it has bytes.")
    refuse_huge_content(path, [content, walker.hashed])
    return content


def walked_torch_file(path: str, file: BinaryIO) -> Plain:
    """Read a file of `torch.save` with a `Named` in place of each tensor, and no storage."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if not zipfile.is_zipfile(file):
        file.seek(0)
        first, *rest = (walked(path, file, size) for _ in range(_OLD_PICKLES))
        if first != _OLD_MAGIC:
            raise CheckpointError(f"{path} cannot be read: it is not a file of `torch.save`.")
        return rest[2]
    with reading(path), zipfile.ZipFile(file) as archive:
        _check_stored(archive, size)
        content, count = None, 0
        for name in archive.namelist():
            if name.rpartition("/")[2] == "data.pkl":
                content, count = walked(path, io.BytesIO(archive.read(name)), size), count + 1
    if count != 1:
        raise CheckpointError(f"{path} cannot be read: it holds {count} pickles where torch writes one.")
    return content


def is_whole_zip(file: BinaryIO) -> bool:
    """Whether a file of `torch.save` has its checksums. A file with compressed entries is refused, and not unpacked.

    Raises:
        OSError: The system does not deliver it.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _check_stored(archive, file.seek(0, os.SEEK_END))
            return archive.testzip() is None
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError, ValueError, MemoryError) as error:
        if refusal_behind(error) is not None:
            raise
        return False


def _check_stored(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse entries that are compressed or overlap. torch writes none, and a kilobyte may become gigabytes."""
    unpacked = 0
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed, and torch compresses nothing")
        unpacked += entry.file_size
    if unpacked > size:
        raise ValueError("its entries overlap")


def refuse_huge_content(path: str, content: Plain) -> None:
    """Refuse a content that is too large to walk through or to hold. A few bytes may become gigabytes."""
    import torch  # here: the command line reads files without it

    count, depth, repeated = 1, 0, 0
    level = {id(content): (content, 1)}  # what is at one depth, and how often
    while level:
        inside: dict[int, tuple[Plain, int]] = {}
        for item, times in level.values():
            if isinstance(item, torch.Tensor):
                if item.is_meta:
                    raise CheckpointError(f"{path} cannot be read: it holds tensors without data.")
                # the bytes beyond those of its storage
                more = max(item.nbytes - item.untyped_storage().nbytes(), 0) if item.layout == torch.strided else 0
                repeated += times * more
            parts = item.parts if isinstance(item, Named) else item
            parts = [*parts, *parts.values()] if isinstance(parts, Mapping) else parts
            if not isinstance(parts, (list, tuple, set, frozenset)):
                continue
            if depth == _DEEPEST:
                raise CheckpointError(
                    f"{path} cannot be read: its contents are nested too deeply, or contain themselves."
                )
            count += times * len(parts)
            for part in parts:
                if type(part) not in _LEAVES:
                    inside[id(part)] = part, times + inside.get(id(part), (part, 0))[1]
        level, depth = inside, depth + 1
        if count > _MOST_PARTS or repeated > _MOST_REPEATED_BYTES:
            raise CheckpointError(
                f"{path} cannot be read: its few bytes stand for {count} parts or more, and for {repeated} bytes of "
                "repeated numbers."
            )
