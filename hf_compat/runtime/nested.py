"""Walk, move, slice and join nested data, which is mappings, named tuples, tuples and lists with tensors in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, TypeAlias

import numpy as np
import torch

from hf_compat.errors import DataError

# A batch, a model's outputs or a state, with tensors and any other values of the user's.
Nested: TypeAlias = Any
Array: TypeAlias = np.ndarray[Any, Any]

PADDING_INDEX = -100
# Bytes in page-locked memory at a time. It is scarce, and large copies hide their wait.
_STAGED = 2**26


def map_nested(
    on_tensor: Callable[[torch.Tensor], Nested],
    data: Nested,
    on_other: Callable[[Nested], Nested] | None = None,
    rebuild: Callable[[Nested, Nested], Nested] | None = None,
) -> Nested:
    """Copy the structure of nested data, and replace its leaves.

    Args:
        on_tensor: Converts a tensor.
        data: The nested data, which is not changed.
        on_other: Converts other leaves. None keeps them.
        rebuild: Makes a container from the old one and the dict or list of its new items. None keeps its type.
    """
    if isinstance(data, torch.Tensor):
        return on_tensor(data)
    if type(data) is dict or isinstance(data, Mapping):
        # most batches are mappings of tensors, and a call for each costs time at every micro-batch
        named = {
            key: on_tensor(value)
            if isinstance(value, torch.Tensor)
            else map_nested(on_tensor, value, on_other, rebuild)
            for key, value in data.items()
        }
        return named if type(data) is dict else (rebuild or of_same_type)(data, named)
    if isinstance(data, (list, tuple)):
        listed = [map_nested(on_tensor, value, on_other, rebuild) for value in data]
        return listed if type(data) is list else (rebuild or of_same_type)(data, listed)
    return data if on_other is None else on_other(data)


def join_nested(
    join: Callable[[Sequence[Nested]], Nested],
    batches: Sequence[Nested],
    is_leaf: Callable[[Nested], bool] | None = None,
) -> Nested:
    """Join several pieces of nested data of one structure.

    Args:
        join: Joins the leaves at one place of the structure, in the order of the pieces.
        batches: The pieces, at least one. The first decides the structure.
        is_leaf: Whether a container is a leaf.
    """
    first = batches[0]
    if not isinstance(first, (Mapping, list, tuple)) or (is_leaf is not None and is_leaf(first)):
        return join(batches)
    if isinstance(first, Mapping):
        named = {key: join_nested(join, [batch[key] for batch in batches], is_leaf) for key in first}
        return of_same_type(first, named)
    return of_same_type(first, [join_nested(join, parts, is_leaf) for parts in zip(*batches, strict=True)])


def leaves(data: Nested) -> Iterator[Nested]:
    """Yield the leaves of nested data, in order."""
    if isinstance(data, Mapping):
        data = data.values()
    elif not isinstance(data, (list, tuple)):
        yield data
        return
    for value in data:
        yield from leaves(value)


def is_namedtuple(data: Nested) -> bool:
    """Whether a value is a named tuple, whose type takes its fields one by one."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def of_same_type(data: Nested, items: Nested) -> Nested:
    """Make a container of a container's type.

    Args:
        data: A mapping, list or tuple. `BatchEncoding`, `ModelOutput` and `UserDict` are made from a dict.
        items: A dict for a mapping, otherwise a list.
    """
    if is_namedtuple(data):
        return type(data)(*items)
    return type(data)(data.default_factory, items) if isinstance(data, defaultdict) else type(data)(items)


def copies_beside(device: torch.device) -> bool:
    """Whether a device copies to page-locked memory while it computes. MPS shares the host's memory."""
    return device.type in ("cuda", "xpu")


def to_host(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Detach tensors and copy them to the CPU, with one wait for each device."""
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


def nested_detach(tensors: Nested) -> Nested:
    """Detach nested tensors. Mirrors `transformers.trainer_pt_utils.nested_detach`."""
    if type(tensors) is torch.Tensor:  # the usual case, for every batch
        return tensors.detach()
    return map_nested(methodcaller("detach"), tensors)


def nested_numpify(tensors: Nested) -> Nested:
    """Convert nested tensors to arrays on the CPU. bfloat16, which NumPy lacks, becomes float32.

    Mirrors:
        `transformers.trainer_pt_utils.nested_numpify`.
    """
    elsewhere = [leaf for leaf in leaves(tensors) if isinstance(leaf, torch.Tensor) and not leaf.is_cpu]
    copied = iter(to_host(elsewhere) if elsewhere else ())  # it waits once for a device

    def as_array(tensor: torch.Tensor) -> Array:
        host = tensor.detach() if tensor.is_cpu else next(copied)
        return host.float().numpy() if host.dtype == torch.bfloat16 else host.numpy()

    return map_nested(as_array, tensors)


def move_to_device(data: Nested, device: torch.device | None, non_blocking: bool = False) -> Nested:
    """Move the tensors of nested data to a device, if it is not None. Other leaves are kept."""
    if device is None:
        return data
    if type(data) is dict and device.type == "cpu":
        # most batches of a CPU run. The loop is faster than a move without effect, and three times faster than `all`
        for value in data.values():
            if type(value) is not torch.Tensor or not value.is_cpu:
                break
        else:
            return data.copy()
    options = {"non_blocking": True} if non_blocking else {}  # omit the keyword, which is slow for every tensor
    return map_nested(methodcaller("to", device, **options), data)


def slice_nested(data: Nested, start: int, stop: int) -> Nested:
    """Slice nested tensors in their first dimension. Scalars and other leaves are kept."""
    return map_nested(lambda tensor: tensor[start:stop] if tensor.ndim else tensor, data)


def part_of(data: Nested, start: int, stop: int) -> Nested:
    """Slice nested tensors, and copy the slices: one that is pickled takes the memory of its whole tensor along."""
    return map_nested(torch.clone, slice_nested(data, start, stop))


def find_batch_size(tensors: Nested) -> int | None:
    """Return the first dimension of the first tensor or array in a nested batch, or None without any.

    Mirrors:
        `transformers.trainer_pt_utils.find_batch_size`.
    """
    if type(tensors) is dict:  # the usual batch, which needs no generator
        first = next(iter(tensors.values()), None)
        if isinstance(first, torch.Tensor) and first.ndim:
            return int(first.shape[0])
    arrays = (leaf for leaf in leaves(tensors) if isinstance(leaf, (torch.Tensor, np.ndarray)))
    return next((int(array.shape[0]) for array in arrays if array.ndim), None)


def concatenate(batches: Sequence[Nested]) -> Nested:
    """Join batches of one nested structure along the first dimension, without padding.

    Lists of plain values (texts, ids) are joined end to end. Of other leaves the first batch's is kept.
    """

    def is_list_of_values(data: Nested) -> bool:
        is_list = isinstance(data, (list, tuple)) and not is_namedtuple(data)
        return is_list and bool(data) and not isinstance(data[0], (torch.Tensor, Mapping, list, tuple))

    def join(parts: Sequence[Nested]) -> Nested:
        first = parts[0]
        if isinstance(first, (list, tuple)):
            return of_same_type(first, [item for part in parts for item in part])
        if not isinstance(first, torch.Tensor) or not first.ndim:
            return first
        try:
            return torch.cat(list(parts))
        except RuntimeError as error:
            shapes = [tuple(part.shape) for part in parts]
            raise DataError(
                f"One process reads batches of different shapes {shapes} for all, and cannot join them.\n\n"
                "Hint: pad to one length, or set `accelerator_config={'dispatch_batches': False}`, so that each "
                "process reads its own."
            ) from error

    return join_nested(join, batches, is_leaf=is_list_of_values)


def join_batches(batches: Sequence[Nested], padding_index: int = PADDING_INDEX) -> Nested:
    """Join batches of one nested structure along the first dimension.

    If the second dimensions differ, shorter ones are padded at their end. All are joined at once, so the time grows
    linearly with the size of the result.

    Shapes:
        each batch: [samples, length, …] → [all samples, longest length, …]

    Mirrors:
        `transformers.trainer_pt_utils.nested_concat`, applied batch by batch.
    """

    def join(parts: Sequence[Nested]) -> torch.Tensor | Array:
        is_tensor = isinstance(parts[0], torch.Tensor)
        if not is_tensor and not isinstance(parts[0], np.ndarray):
            raise TypeError(f"predictions of type {type(parts[0]).__name__} cannot be joined")
        parts = list(map(torch.atleast_1d if is_tensor else np.atleast_1d, parts))
        lengths = {part.shape[1] for part in parts} if parts[0].ndim > 1 else set()
        if len(lengths) <= 1:
            return torch.cat(parts) if is_tensor else np.concatenate(parts)
        shape = (sum(map(len, parts)), max(lengths), *parts[0].shape[2:])
        joined: torch.Tensor | Array = (
            parts[0].new_full(shape, padding_index) if is_tensor else np.full_like(parts[0], padding_index, shape=shape)
        )
        start = 0
        for part in parts:
            joined[start : start + len(part), : part.shape[1]] = part
            start += len(part)
        return joined

    return join_nested(join, batches)
