"""Checkpoints written while training goes on: the state is copied first, then one thread writes it."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable

import torch

from hf_compat.runtime.nested import Nested, map_nested, of_same_type


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

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the CPU."""
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.to("cpu", copy=True)
        free = self._free.get(_form(tensor))
        copied = free.pop() if free else torch.empty_like(tensor, device="cpu")
        self._used.append(copied)
        return copied.copy_(tensor)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def frozen_copy(data: Nested, memory: CopyMemory | None = None) -> Nested:
    """Copy nested tensors to the CPU; tensors that share their memory (tied weights) share their copy's.

    Args:
        data: The nested data.
        memory: Where the copies are to be; fresh memory where none is given.
    """
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    copy_tensor = (memory or CopyMemory()).copy

    def on_tensor(tensor: torch.Tensor) -> torch.Tensor:
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in copies or not tensor.numel():
            copies[place] = copy_tensor(tensor)
        return copies[place]

    return map_nested(on_tensor, data, on_other=copy.deepcopy, rebuild=_with_plain_dicts)


def _with_plain_dicts(data: Nested, items: Nested) -> Nested:
    return items if isinstance(items, dict) else of_same_type(data, items)
