"""A file says on which device its tensors were, and they are loaded there, unless `map_location` says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from helpers.pretended.tensors import DeviceTensor, is_active, machine

_rebuild = torch._utils._rebuild_tensor


def _location(storage: Any) -> str | None:
    if not is_active():
        return None
    key = getattr(storage, "_untyped_storage", storage)._cdata
    found = machine().storages.get(key)
    return None if found is None else str(machine().device(found.index))


def _onto_device(storage: Any, location: str) -> Any:
    if not is_active() or not str(location).startswith(machine().kind):
        return None
    index = machine().index_of(location)
    assert index is not None
    machine().loaded[storage._cdata] = (index, storage)
    return storage


def rebuild_tensor(storage: Any, storage_offset: int, size: Any, stride: Any) -> torch.Tensor:
    """`torch._utils._rebuild_tensor`, for storages of a device, too."""
    made = _rebuild(storage, storage_offset, size, stride)
    found = machine().loaded.get(storage._untyped_storage._cdata)
    if found is None:
        return made
    machine().count["h2d"] += 1
    return DeviceTensor(made, found[0])


def register() -> Callable[[], None]:
    """Tell torch where storages are; return what takes it back."""
    before = list(torch.serialization._package_registry)
    torch.serialization.register_package(1, _location, _onto_device)
    torch._utils._rebuild_tensor = rebuild_tensor

    def restore() -> None:
        torch.serialization._package_registry[:] = before
        torch._utils._rebuild_tensor = _rebuild

    return restore
