"""Walk nested data, which is mappings, named tuples, tuples and lists with tensors in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

# A batch, a model's outputs or a state, with tensors and any other values of the user's.
Nested: TypeAlias = Any


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


def as_plain_type(data: Nested, items: Nested) -> Nested:
    """Keep the dict or list of a container's items."""
    return items
