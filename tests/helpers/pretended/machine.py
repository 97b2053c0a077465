"""What a pretended device knows: what is waited for, where, how much memory is held, which work is in order."""

from __future__ import annotations

import collections
import itertools
import threading
import traceback
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

from helpers.pretended.streams import Clock, Mark, PendingCopy, Stream

PACKAGES = ("/hf_compat/", "/transformers/", "/accelerate/", "/lightning/")


class RaceError(RuntimeError):
    """Work that reads or writes what other work is not known to have finished."""


@dataclass(eq=False)
class Storage:
    """Memory of a device: who works on it, and how many tensors hold it."""

    index: int
    size: int
    holders: int = 0
    written: Mark | None = None
    read: dict[Stream, Mark] = field(default_factory=dict)
    made_on: Stream | None = None
    recorded_on: set[Stream] = field(default_factory=set)


class Machine:
    """The devices of one kind that a program sees.

    Args:
        kind: `cuda`, `mps`, `xpu` …
        count: How many.

    Attributes:
        count: Kernels, copies and waits so far, by kind.
        where: The waits by kind and line of code.
        races: What was found where nothing could be raised.
    """

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.devices = kind, count
        self.count: collections.Counter[str] = collections.Counter()
        self.where: collections.Counter[str] = collections.Counter()
        self.races: list[str] = []
        self.storages: dict[int, Storage] = {}
        self.finished: Clock = {}  # what the host has waited for
        self.pending: dict[int, PendingCopy] = {}  # by the host's storage
        self.pinned: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used again
        self.loaded: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._memory, self._peak = [0] * count, [0] * count
        self._defaults = [Stream(self, index, is_default=True) for index in range(count)]
        self._of_thread = threading.local()
        self._lock = threading.RLock()
        self.calls: list[str] = []  # what of `torch.cuda` changes nothing here: empty_cache …

    # Devices ------------------------------------------------------------------------------------------------------

    def device(self, index: int) -> torch.device:
        return torch.device(self.kind, index)

    @property
    def current(self) -> int:
        return getattr(self._of_thread, "index", 0)

    @current.setter
    def current(self, index: int) -> None:
        if not 0 <= index < self.devices:
            raise RuntimeError(f"{self.kind.upper()} error: invalid device ordinal")
        self._of_thread.index = index

    def index_of(self, device: torch.device | str | int | None) -> int | None:
        """The number of a device of this kind; None for another kind's."""
        if device is None:
            return None
        if isinstance(device, int):
            index: int | None = device
        else:
            found = torch.device(device)
            if found.type != self.kind:
                return None
            index = found.index
        index = self.current if index is None else index
        if index >= self.devices:
            raise RuntimeError(f"{self.kind.upper()} error: invalid device ordinal")
        return index

    # What is waited for -------------------------------------------------------------------------------------------

    def wait(self, kind: str) -> None:
        """Count a wait of the host, and the line of the packages that made it."""
        self.count[f"wait:{kind}"] += 1
        frames = [one for one in traceback.extract_stack(limit=60) if any(p in one.filename for p in PACKAGES)]
        place = f"{frames[-1].filename.rsplit('site-packages/')[-1]}:{frames[-1].lineno}" if frames else "elsewhere"
        self.where[f"{kind} {place}"] += 1

    def waits(self) -> dict[str, int]:
        return {name[5:]: number for name, number in self.count.items() if name.startswith("wait:")}

    def wait_for_current(self, kind: str, index: int) -> None:
        """Wait for all that was queued on a device's current stream."""
        self.wait(kind)
        stream = self.current_stream(index)
        self.finish({**stream.seen, stream: stream.number})

    def finish(self, clock: Clock) -> None:
        """Let the work of a clock be done: its copies are there."""
        with self._lock:
            for stream, number in clock.items():
                self.finished[stream] = max(self.finished.get(stream, 0), number)
            done = [key for key, copy in self.pending.items() if copy.mark.is_before(self.finished)]
            for key in done:
                self._complete(self.pending.pop(key))

    def finish_all(self) -> None:
        self.finish({copy.mark.stream: copy.mark.number for copy in self.pending.values()})

    def _complete(self, copy: PendingCopy) -> None:
        if copy.is_to_host:
            _bytes(copy.host).copy_(_bytes(copy.content))
        elif not torch.equal(_bytes(copy.host), _bytes(copy.content)):
            self.races.append("the host changed memory that a copy to the device was still reading")

    # Streams ------------------------------------------------------------------------------------------------------

    def current_stream(self, index: int | None = None) -> Stream:
        at = self.current if index is None else index
        streams: dict[int, Stream] = self._of_thread.__dict__.setdefault("streams", {})
        return streams.get(at, self._defaults[at])

    def default_stream(self, index: int | None = None) -> Stream:
        return self._defaults[self.current if index is None else index]

    def set_stream(self, stream: Stream) -> None:
        self._of_thread.__dict__.setdefault("streams", {})[stream.device_index] = stream

    def work(self, index: int, reads: list[torch.Tensor], writes: list[torch.Tensor], name: str) -> Mark:
        """Queue work on a device's current stream, and check that it comes after what it needs."""
        stream = self.current_stream(index)
        mark = stream.begin_work()
        for tensor in reads:
            storage = self.storages.get(_key(tensor))
            if storage is None:
                continue
            self._check(storage.written, stream, f"{name} reads what another stream writes")
            storage.read[stream] = mark
        for tensor in writes:
            storage = self.storages.get(_key(tensor))
            if storage is None:
                continue
            self._check(storage.written, stream, f"{name} writes what another stream writes")
            for other in storage.read.values():
                self._check(other, stream, f"{name} writes what another stream reads")
            storage.written = mark
        return mark

    @staticmethod
    def _check(before: Mark | None, stream: Stream, text: str) -> None:
        if before is not None and not before.is_before(stream.seen):
            raise RaceError(f"{text}, and does not wait for it")

    # Memory -------------------------------------------------------------------------------------------------------

    def hold(self, inner: torch.Tensor, index: int) -> int:
        """Count one tensor more that holds a storage; return what `release` takes."""
        key = _key(inner)
        with self._lock:
            storage = self.storages.get(key)
            if storage is None:
                size = inner.untyped_storage().nbytes()
                made_on = self.current_stream(index)
                mark = Mark(made_on, made_on.number)
                storage = self.storages[key] = Storage(index, size, written=mark, made_on=made_on)
                self._memory[index] += size
                self._peak[index] = max(self._peak[index], self._memory[index])
            storage.holders += 1
        return key

    def release(self, key: int) -> None:
        """Count one tensor less; freed memory may be given out again at once on the stream that it was made on."""
        with self._lock:
            storage = self.storages.get(key)
            if storage is None:
                return
            storage.holders -= 1
            if storage.holders:
                return
            del self.storages[key]
            self._memory[storage.index] -= storage.size
            made_on = storage.made_on
            for stream, mark in storage.read.items():
                is_known = stream is made_on or stream in storage.recorded_on or mark.is_before(self.finished)
                if made_on is not None and not is_known and not mark.is_before(made_on.seen):
                    self.races.append("memory was freed that another stream still reads (record_stream)")

    def memory(self, index: int) -> int:
        return self._memory[index]

    def peak_memory(self, index: int) -> int:
        return self._peak[index]

    def reset_peak_memory(self, index: int) -> None:
        self._peak[index] = self._memory[index]

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.pinned[storage._cdata] = storage
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return _key(tensor) in self.pinned

    # Copies that nobody waited for --------------------------------------------------------------------------------

    def check_host(self, tensor: torch.Tensor) -> None:
        """Refuse that the host reads what a copy has not brought yet, or writes what one is still reading."""
        copy = self.pending.get(_key(tensor)) if self.pending else None
        if copy is not None and copy.is_to_host:
            raise RaceError("the host reads a copy from the device, and has not waited for it")

    def leave_pending(self, copy: PendingCopy) -> None:
        with self._lock:
            if copy.is_to_host:
                _bytes(copy.host).fill_(0xA5)
            self.pending[_key(copy.host) if copy.is_to_host else -next(_others)] = copy


_others = itertools.count(1)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        flat = tensor.detach()
        if not flat.is_contiguous():
            flat = flat.as_strided((flat.untyped_storage().nbytes() // flat.element_size(),), (1,), 0)
        return flat.reshape(-1).view(torch.uint8)
