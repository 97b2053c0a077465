"""Copies from a device to the host's memory: many tensors with one wait, or beside the computation without any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from hf_compat.runtime.nested import Nested, leaves, map_nested

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
