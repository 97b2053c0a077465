"""Copy tensors from a device to the host, and states that are written while training continues.

Many small tensors take one wait. Large ones are copied beside the computation.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hf_compat.runtime.nested import Nested, leaves, map_nested, of_same_type

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # where a tensor is copied to, and the tensor

_SMALL = 2**16  # bytes; of larger tensors the copy takes longer than the wait
_STAGED = 2**26  # bytes that go to page-locked memory at a time: it is scarce, and large copies hide their wait


def copies_beside(device: torch.device) -> bool:
    """Whether a device copies to page-locked memory while it computes; MPS shares its memory and has no need to."""
    return device.type in ("cuda", "xpu")


def to_host(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors on the CPU, detached. The small ones of a device come with one wait for all of them."""
    found = [tensor.detach() for tensor in tensors]
    copied: list[torch.Tensor] = []
    devices: set[torch.device] = set()
    staged = 0
    for tensor in found:
        if not copies_beside(tensor.device) or staged + tensor.nbytes > _STAGED:
            copied.append(tensor.cpu())
            continue
        staged += tensor.nbytes
        devices.add(tensor.device)
        copied.append(tensor.to("cpu", non_blocking=True))  # torch takes page-locked memory for it
    for device in devices:
        torch.get_device_module(device).current_stream(device).synchronize()
    return copied


def small_ones_on_host(data: Nested) -> Nested:
    """Return nested data whose small tensors of a device are on the CPU: one wait brings them, instead of one each."""
    small = [one for one in leaves(data) if isinstance(one, torch.Tensor) and _is_small(one)]
    hosts = dict(zip(map(id, small), to_host(small), strict=True))
    return map_nested(lambda tensor: hosts.get(id(tensor), tensor), data)


def _is_small(tensor: torch.Tensor) -> bool:
    return copies_beside(tensor.device) and tensor.nbytes <= _SMALL


class CopiesAhead:
    """Copies batches from page-locked memory to a device while it computes something else.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream: torch.Stream = self._module.Stream(device=device)

    def start(self, batch: Nested) -> Nested:
        """Begin to copy; what is returned may be used once `take` was called."""
        with self._module.stream(self._stream):
            return map_nested(lambda tensor: tensor.to(self._device, non_blocking=True), batch)

    def take(self, batch: Nested) -> Nested:
        """Let what the device computes from now on come after the copy of a batch, and return the batch."""
        current = self._module.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in leaves(batch):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device.type:
                tensor.record_stream(current)  # its memory was taken on the other stream
        return batch


class DeviceCopies:
    """Copies to page-locked memory on a stream of their own, which the host waits for once, where it needs them."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._under_way: list[tuple[torch.device, torch.Event, Sequence[Pair]]] = []

    def start(self, pairs: Sequence[Pair]) -> None:
        """Begin to copy what the devices have computed up to here; what is in other memory is copied at once."""
        by_device: dict[torch.device, list[Pair]] = {}
        for place, tensor in pairs:
            if copies_beside(tensor.device) and place.is_pinned():
                by_device.setdefault(tensor.device, []).append((place, tensor))
            else:
                place.copy_(tensor)
        for device, its_pairs in by_device.items():
            module = torch.get_device_module(device)
            if device not in self._streams:
                self._streams[device] = module.Stream(device=device)
            stream = self._streams[device]
            stream.wait_stream(module.current_stream(device))
            with module.stream(stream):
                for place, tensor in its_pairs:
                    place.copy_(tensor, non_blocking=True)
            self._under_way.append((device, stream.record_event(), its_pairs))

    def before_change(self) -> None:
        """Let what the devices compute from now on come after the copies: it may change the tensors."""
        for device, event, _ in tuple(self._under_way):
            torch.get_device_module(device).current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait until all copies are there."""
        waited_for, self._under_way = self._under_way, []
        for _, event, _ in waited_for:
            event.synchronize()


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
