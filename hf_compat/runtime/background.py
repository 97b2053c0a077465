"""Checkpoints written while training goes on: the state is copied first, then one thread writes it."""

from __future__ import annotations

import copy
import threading
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


def frozen_copy(data: Nested) -> Nested:
    """Copy nested tensors to the CPU; tensors that share their memory (tied weights) share their copy's."""
    copies: dict[tuple[object, ...], torch.Tensor] = {}

    def on_tensor(tensor: torch.Tensor) -> torch.Tensor:
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if memory not in copies or not tensor.numel():
            copies[memory] = tensor.detach().to("cpu", copy=True)
        return copies[memory]

    return map_nested(on_tensor, data, on_other=copy.deepcopy, rebuild=_with_plain_dicts)


def _with_plain_dicts(data: Nested, items: Nested) -> Nested:
    return items if isinstance(items, dict) else of_same_type(data, items)
