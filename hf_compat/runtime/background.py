"""Checkpoints written while training goes on: the state is copied first, then one thread writes it."""

from __future__ import annotations

import copy
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch

from hf_compat.runtime.nested import Nested, map_nested, of_same_type

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # where a tensor is copied to, and the tensor

_THREADS = 4
_TASK = 2**25  # bytes that a thread copies at a time


class BackgroundWriter:
    """Run one write at a time beside training. The next call raises its error; the process exits after it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Start a write, after waiting for the one before; raise the error of that one."""
        self.wait()
        # no daemon: the interpreter does not exit before the checkpoint is whole
        self._thread = threading.Thread(target=self._run, args=(write,), name="hf_compat-checkpoint", daemon=False)
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise the error of a write that has ended."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the write under way, and raise its error."""
        error = self.settle()
        if error is not None:
            raise error

    def settle(self) -> BaseException | None:
        """Wait for the write under way, and return its error: for whoever has another one to raise."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error


class CopyMemory:
    """Memory for copies of a state, kept from one save to the next: fresh memory costs more than the copy itself."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[torch.Tensor]] = defaultdict(list)
        self._used: list[torch.Tensor] = []

    def begin(self) -> None:
        """Take the memory of the copies before, which nobody reads any more."""
        for tensor in self._used:
            self._free[_form(tensor)].append(tensor)
        self._used = []

    def end(self) -> None:
        """Give back what this save has not used: the state has another form now."""
        self._free.clear()

    def release(self) -> None:
        """Give back all of it."""
        self._free.clear()
        self._used = []

    def place_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the CPU that a strided one can be copied to."""
        free = self._free.get(_form(tensor))
        place = free.pop() if free else torch.empty_like(tensor, device="cpu")
        self._used.append(place)
        return place


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def frozen_copy(data: Nested, memory: CopyMemory | None = None) -> Nested:
    """Copy nested tensors to the CPU; tensors that share their memory (tied weights) share their copy's.

    Args:
        data: The nested data.
        memory: Where the copies are to be; fresh memory where none is given.
    """
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    pairs: list[Pair] = []
    memory = memory or CopyMemory()

    def on_tensor(tensor: torch.Tensor) -> torch.Tensor:
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place in copies and tensor.numel():
            return copies[place]
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
            copies[place] = tensor.to("cpu", copy=True)
        else:
            copies[place] = memory.place_for(tensor)
            pairs.append((copies[place], tensor))
        return copies[place]

    frozen = map_nested(on_tensor, data, on_other=copy.deepcopy, rebuild=_with_plain_dicts)
    _copy_all(pairs)
    return frozen


def _copy_all(pairs: list[Pair]) -> None:
    """Copy tensors, large ones in several threads where torch itself would use one."""
    cores = os.cpu_count() or 1
    on_cpu = [pair for pair in pairs if pair[1].device.type == "cpu"]
    is_small = sum(tensor.nbytes for _, tensor in on_cpu) <= _TASK
    if is_small or torch.get_num_threads() >= cores or torch.is_inference_mode_enabled():  # that is a thread's own
        _copy_each(pairs)
        return
    with ThreadPoolExecutor(min(_THREADS, cores), "hf_compat-copy") as threads:
        copied = threads.map(_copy_each, _tasks(on_cpu))
        _copy_each([pair for pair in pairs if pair[1].device.type != "cpu"])
        for _ in copied:  # raises what went wrong
            pass


def _copy_each(pairs: Sequence[Pair]) -> None:
    for place, tensor in pairs:
        place.copy_(tensor)


def _tasks(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Divide tensors among tasks of some size."""
    task: list[Pair] = []
    size = 0
    for pair in pairs:
        task.append(pair)
        size += pair[1].nbytes
        if size >= _TASK:
            yield task
            task, size = [], 0
    yield task


def _with_plain_dicts(data: Nested, items: Nested) -> Nested:
    return items if isinstance(items, dict) else of_same_type(data, items)
