"""Copies of a state that is written while training goes on."""

from __future__ import annotations

import copy
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hf_compat.runtime.device_copies import DeviceCopies, Pair, copies_beside
from hf_compat.runtime.nested import Nested, map_nested, of_same_type

PLAIN: tuple[type[torch.Tensor], ...] = (torch.Tensor,)  # others may be more than their numbers
_THREADS = 4
_TASK = 2**25  # bytes that a thread copies at a time


class CopyMemory:
    """Memory for copies of a state, kept from one save to the next: fresh memory costs more than the copy itself."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[torch.Tensor]] = defaultdict(list)
        self._used: list[tuple[tuple[object, ...], torch.Tensor]] = []

    def begin(self) -> None:
        """Take the memory of the copies before, which nobody reads any more."""
        for form, place in self._used:
            self._free[form].append(place)
        self._used = []

    def end(self) -> None:
        """Give back what this save has not used: the state has another form now."""
        self._free.clear()

    def release(self) -> None:
        """Give back all of it."""
        self._free.clear()
        self._used = []

    def place_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the CPU that a strided one can be copied to; page-locked for one of a GPU."""
        form = (tensor.shape, tensor.stride(), tensor.dtype, copies_beside(tensor.device))
        free = self._free.get(form)
        place = free.pop() if free else torch.empty_like(tensor, device="cpu", pin_memory=copies_beside(tensor.device))
        self._used.append((form, place))
        return place


class LaterCopies:
    """Copies of tensors that nothing changes before the next update: made beside what comes before that.

    Whoever needs them first makes them: the thread that writes them, or the one that is about to change the tensors.
    """

    def __init__(self) -> None:
        self.on_device = DeviceCopies()
        self._lock = threading.Lock()
        self._pairs: list[Pair] = []
        self._versions: list[int] = []
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Forget what a save that failed has left."""
        self._pairs, self._versions, self._error = [], [], None

    def add(self, pairs: Sequence[Pair]) -> None:
        """Promise to copy tensors of the CPU; those of a device are copied by it, beside what it computes."""
        self.on_device.start([pair for pair in pairs if not _is_on_cpu(pair)])
        pairs = [pair for pair in pairs if _is_on_cpu(pair)]
        self._pairs = [*self._pairs, *pairs]
        self._versions += [tensor._version for _, tensor in pairs]

    def finish(self) -> None:
        """Make what is not made yet, or wait for the thread that does; a device goes on after its copies."""
        self.on_device.before_change()
        if not self._pairs:  # at every update
            return
        with self._lock:
            if not self._pairs:
                return
            try:
                _copy_all(self._pairs)
                if [tensor._version for _, tensor in self._pairs] != self._versions:
                    raise RuntimeError(
                        "the optimizer's state was changed while it was copied, within a training step "
                        "(`async_save=True`). Change it in a callback's event, or set `async_save=False`"
                    )
            except BaseException as error:
                self._error = error
                if not isinstance(error, Exception):  # Ctrl-C, for whoever waits here
                    raise
            finally:
                self._pairs, self._versions = [], []

    def result(self) -> None:
        """Make what is not made yet; raise what went wrong."""
        self.finish()
        self.on_device.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error


class StateCopies:
    """What copies an optimizer's state while a run trains on; the optimizer's next step waits for it."""

    def __init__(self) -> None:
        self._later: LaterCopies | None = None
        self._optimizer: Optimizer | None = None
        self._hook: RemovableHandle | None = None

    def before_steps_of(self, optimizer: object) -> LaterCopies | None:
        """Return what makes copies before an optimizer's next step; None where its state may change before that.

        Only of torch's own optimizers is it known that nothing but a step changes their state, and that hooks come
        before each step, whoever calls it.
        """
        if not isinstance(optimizer, Optimizer) or not _steps_as_torch_does(optimizer):
            return None
        later = self._later
        if later is None or self._optimizer is not optimizer:
            self.release()
            later = LaterCopies()
            self._later, self._optimizer = later, optimizer
            self._hook = optimizer.register_step_pre_hook(lambda *_: later.finish())
        later.begin()
        return later

    def finish(self) -> None:
        """Make the copies that are not made yet: what comes next may change the state."""
        if self._later is not None:
            self._later.finish()

    def release(self) -> None:
        """Let go of the optimizer; nothing is copied any more."""
        if self._hook is not None:
            self._hook.remove()
        self._later = self._optimizer = self._hook = None


def _steps_as_torch_does(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is torch's own, and its step, which a schedule wraps, is too."""
    kind = type(optimizer)
    step = vars(optimizer).get("step", optimizer.step)
    if hasattr(step, "_wrapped_by_lr_sched"):
        step = getattr(step, "__wrapped__", step)
    is_own = getattr(step, "__func__", step) is kind.step and hasattr(kind.step, "hooked")
    return kind.__module__.startswith("torch.optim.") and is_own


def frozen_copy(
    data: Nested,
    memory: CopyMemory | None = None,
    later: LaterCopies | None = None,
    beside: DeviceCopies | None = None,
) -> Nested:
    """Copy nested tensors to the CPU; tensors that share their memory (tied weights) share their copy's.

    Args:
        data: The nested data.
        memory: Where the copies are to be; fresh memory where none is given.
        later: Makes the copies; they are made at once where none is given.
        beside: Makes those of a device's tensors, which are there once it was waited for.
    """
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    pairs: list[Pair] = []
    memory = memory or CopyMemory()

    def on_tensor(tensor: torch.Tensor) -> torch.Tensor:
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place in copies and tensor.numel():
            return copies[place]
        tensor = tensor.detach()
        if type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.is_quantized:
            copies[place] = tensor.to("cpu", copy=True)
        else:
            copies[place] = memory.place_for(tensor)
            pairs.append((copies[place], tensor))
        return copies[place]

    def with_plain_dicts(container: Nested, items: Nested) -> Nested:
        return items if isinstance(items, dict) else of_same_type(container, items)

    frozen = map_nested(on_tensor, data, on_other=copy.deepcopy, rebuild=with_plain_dicts)
    if later is not None:
        later.add(pairs)
        return frozen
    if beside is not None:
        beside.start([pair for pair in pairs if not _is_on_cpu(pair)])
        pairs = [pair for pair in pairs if _is_on_cpu(pair)]
    _copy_all(pairs)
    return frozen


def _copy_all(pairs: list[Pair]) -> None:
    """Copy tensors, large ones in several threads where torch itself would use one."""
    cores = os.cpu_count() or 1
    on_device = DeviceCopies()
    on_device.start([pair for pair in pairs if not _is_on_cpu(pair)])
    on_cpu = [pair for pair in pairs if _is_on_cpu(pair)]
    is_small = sum(tensor.nbytes for _, tensor in on_cpu) <= _TASK
    if is_small or torch.get_num_threads() >= cores or torch.is_inference_mode_enabled():  # that is a thread's own
        _copy_each(on_cpu)
    else:
        with ThreadPoolExecutor(min(_THREADS, cores), "hf_compat-copy") as threads:
            for _ in threads.map(_copy_each, _tasks(on_cpu)):  # raises what went wrong
                pass
    on_device.wait()


def _is_on_cpu(pair: Pair) -> bool:
    return pair[1].device.type == "cpu"


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
