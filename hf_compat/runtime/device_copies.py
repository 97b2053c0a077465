"""Copy tensors from a device to the host, and states that are written while training continues."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hf_compat.runtime.nested import Nested, copies_beside, leaves, map_nested, of_same_type, to_host

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # the copy's memory, and the tensor

# Bytes up to which the wait takes longer than the copy.
_SMALL = 2**16


def small_ones_on_host(data: Nested) -> Nested:
    """Move the small tensors of nested data to the CPU, with one wait for each device instead of each tensor."""
    tensors = (one for one in leaves(data) if isinstance(one, torch.Tensor))
    small = [one for one in tensors if copies_beside(one.device) and one.nbytes <= _SMALL]
    hosts = dict(zip(map(id, small), to_host(small), strict=True))
    return map_nested(lambda tensor: hosts.get(id(tensor), tensor), data)


class CopiesAhead:
    """Copies batches from page-locked memory to a device while it computes something else."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream: torch.Stream = self._module.Stream(device=device)

    def start(self, batch: Nested) -> Nested:
        """Begin to copy. The result may be used after `take`."""
        with self._module.stream(self._stream):
            return map_nested(lambda tensor: tensor.to(self._device, non_blocking=True), batch)

    def take(self, batch: Nested) -> Nested:
        """Let the device compute from now on after the copy of a batch. The result is the batch."""
        current = self._module.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in leaves(batch):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device.type:
                tensor.record_stream(current)  # its memory was taken on the other stream
        return batch


class DeviceCopies:
    """Copies to page-locked memory on a stream of their own, for which the host waits once."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._under_way: list[tuple[torch.device, torch.Event, Sequence[Pair]]] = []

    def start(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Begin to copy what the devices have computed up to here. Give the pairs on the CPU, which are not copied.

        A device that does not copy beside its computations copies at once.
        """
        by_device: dict[torch.device, list[Pair]] = {}
        on_cpu: list[Pair] = []
        for place, tensor in pairs:
            if tensor.device.type == "cpu":
                on_cpu.append((place, tensor))
            elif copies_beside(tensor.device) and place.is_pinned():
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
        return on_cpu

    def before_change(self) -> None:
        """Let the devices compute from now on after the copies, as it may change the tensors."""
        for device, event, _ in tuple(self._under_way):
            torch.get_device_module(device).current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait for all copies."""
        waited_for, self._under_way = self._under_way, []
        for _, event, _ in waited_for:
            event.synchronize()


PLAIN: tuple[type[torch.Tensor], ...] = (torch.Tensor,)  # other types may hold more than numbers


class CopyMemory:
    """Memory for copies of a state, kept between saves because fresh memory costs more than the copy itself."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[torch.Tensor]] = defaultdict(list)
        self._used: list[tuple[tuple[object, ...], torch.Tensor]] = []

    def begin(self) -> None:
        """Reuse the memory of the previous copies."""
        for form, place in self._used:
            self._free[form].append(place)
        self._used = []

    def end(self) -> None:
        """Free the memory that this save has not used, because the state has another form now."""
        self._free.clear()

    def place_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Find or make the CPU tensor for a strided tensor's copy. It is page-locked for a GPU's."""
        form = (tensor.shape, tensor.stride(), tensor.dtype, copies_beside(tensor.device))
        free = self._free.get(form)
        place = free.pop() if free else torch.empty_like(tensor, device="cpu", pin_memory=copies_beside(tensor.device))
        self._used.append((form, place))
        return place


class LaterCopies:
    """Copies an optimizer's state beside training, at the latest before the optimizer's next step.

    The thread that writes the state makes the copies, or the thread that is about to change it.
    """

    def __init__(self) -> None:
        self.on_device = DeviceCopies()
        self._lock = threading.Lock()
        self._pairs: list[Pair] = []
        self._versions: list[int] = []
        self._error: BaseException | None = None
        self._optimizer: Optimizer | None = None
        self._hook: RemovableHandle | None = None

    def __reduce__(self) -> tuple[type[LaterCopies], tuple[()]]:
        return LaterCopies, ()  # a copy of a Trainer has no copies under way

    def before_steps_of(self, optimizer: object) -> LaterCopies | None:
        """Get ready for an optimizer. The result is None if its state may change outside of its steps.

        Only torch's own optimizers are known to change it in steps alone, and to call hooks before each step.
        """
        if not isinstance(optimizer, Optimizer) or not type(optimizer).__module__.startswith("torch.optim."):
            return None
        own_step = type(optimizer).step
        step = optimizer.step
        if hasattr(step, "_wrapped_by_lr_sched"):  # a schedule wraps it
            step = getattr(step, "__wrapped__", step)
        if getattr(step, "__func__", step) is not own_step or not hasattr(own_step, "hooked"):
            return None
        if self._optimizer is not optimizer:
            self.release()
            self._optimizer, self._hook = optimizer, optimizer.register_step_pre_hook(lambda *_: self.finish())
        self.begin()
        return self

    def release(self) -> None:
        """Forget the optimizer, after all writes have ended."""
        if self._hook is not None:
            self._hook.remove()
        self._optimizer = self._hook = None

    def begin(self) -> None:
        """Forget the copies of a failed save."""
        self._pairs, self._versions, self._error = [], [], None

    def start(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Plan to copy tensors on the CPU. A device begins to copy its own beside its computations. None is left."""
        on_cpu = self.on_device.start(pairs)
        self._pairs = [*self._pairs, *on_cpu]
        self._versions += [tensor._version for _, tensor in on_cpu]
        return []

    def finish(self) -> None:
        """Make the remaining copies, or wait for the thread that makes them. A device continues after its copies."""
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
            except Exception as error:  # Ctrl-C, which ends the training, leaves the copies to the thread that writes
                self._error = error
            self._pairs, self._versions = [], []

    def result(self) -> None:
        """Make the remaining copies, and raise the error of the others."""
        self.finish()
        self.on_device.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error


def frozen_copy(
    data: Nested, memory: CopyMemory | None = None, beside: DeviceCopies | LaterCopies | None = None
) -> Nested:
    """Copy nested tensors to the CPU. Tensors that share their memory, as tied weights do, share their copy.

    Args:
        data: The nested data.
        memory: Memory for the copies. None takes fresh memory.
        beside: Makes the copies, which are complete after its `wait` or `result`. None makes them at once.
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
    left = pairs if beside is None else beside.start(pairs)
    if left:
        _copy_all(left)
    return frozen


def _copy_all(pairs: list[Pair]) -> None:
    on_device = DeviceCopies()
    for place, tensor in on_device.start(pairs):
        place.copy_(tensor)
    on_device.wait()
