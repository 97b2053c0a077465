"""Nested tensors and arrays: detach, move, and join along the first dimension with padding. torch and NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_compat.errors import DataError

PADDING_INDEX = -100


def nested_detach(data: Any) -> Any:
    """Detach nested tensors. Mirrors `transformers.trainer_pt_utils.nested_detach`, 5.23."""
    if isinstance(data, torch.Tensor):
        return data.detach()
    if isinstance(data, Mapping):
        return type(data)({key: nested_detach(value) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, (list, tuple)):
        return type(data)(nested_detach(value) for value in data)
    return data


def nested_numpify(data: Any) -> Any:
    """Turn nested tensors into arrays on the CPU; bfloat16, which NumPy lacks, becomes float32.

    Mirrors:
        `transformers.trainer_pt_utils.nested_numpify`, 5.23.
    """
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu()
        return data.float().numpy() if data.dtype == torch.bfloat16 else data.numpy()
    if isinstance(data, Mapping):
        return type(data)({key: nested_numpify(value) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, (list, tuple)):
        return type(data)(nested_numpify(value) for value in data)
    return data


def truncate_to(data: Any, limit: int) -> Any:
    """Cut the first dimension of nested tensors; scalars and what is no tensor stay."""
    if isinstance(data, torch.Tensor):
        return data[:limit] if data.ndim else data
    if isinstance(data, Mapping):
        return type(data)({key: truncate_to(value, limit) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, (list, tuple)):
        return type(data)(truncate_to(value, limit) for value in data)
    return data


def slice_nested(data: Any, start: int, stop: int) -> Any:
    """Cut a part out of the first dimension of nested tensors; scalars and what is no tensor stay."""
    if isinstance(data, torch.Tensor):
        return data[start:stop] if data.ndim else data
    if isinstance(data, Mapping):
        return type(data)({key: slice_nested(value, start, stop) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(slice_nested(value, start, stop) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(slice_nested(value, start, stop) for value in data)
    return data


def concatenate(batches: Sequence[Any]) -> Any:
    """Join batches of one nested structure along the first dimension, without padding.

    Raises:
        DataError: Their other dimensions differ.
    """
    first = batches[0]
    if isinstance(first, torch.Tensor):
        try:
            return torch.cat(list(batches)) if first.ndim else first
        except RuntimeError as error:
            shapes = [tuple(batch.shape) for batch in batches]
            raise DataError(
                f"Batches of different shapes {shapes} are to be read by one process for all.\n\n"
                "Hint: pad to one length, or set `accelerator_config={'dispatch_batches': False}`: each process then "
                "reads its own."
            ) from error
    if isinstance(first, Mapping):
        return type(first)({key: concatenate([batch[key] for batch in batches]) for key in first})  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        if first and not isinstance(first[0], (torch.Tensor, Mapping, list, tuple)):
            return type(first)(item for batch in batches for item in batch)
        return type(first)(concatenate(parts) for parts in zip(*batches, strict=True))
    return first


def join_batches(batches: Sequence[Any], padding_index: int = PADDING_INDEX) -> Any:
    """Join batches of one nested structure along the first dimension.

    Where the second dimensions differ, shorter ones are padded at their end. Everything is joined in one go, so the
    cost grows with the size of the result, not with its square.

    Shapes:
        each batch: [samples, length, …] → [all samples, longest length, …]

    Mirrors:
        `transformers.trainer_pt_utils.nested_concat`, 5.23, applied batch by batch.
    """
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return _join_tensors([batch if batch.ndim else batch.reshape(1) for batch in batches], padding_index)
    if isinstance(first, np.ndarray):
        return _join_arrays([np.atleast_1d(batch) for batch in batches], padding_index)
    if isinstance(first, Mapping):
        return type(first)({key: join_batches([b[key] for b in batches], padding_index) for key in first})  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        return type(first)(join_batches(parts, padding_index) for parts in zip(*batches, strict=True))
    raise TypeError(f"predictions of type {type(first).__name__} cannot be joined")


def _lengths(parts: Sequence[Any]) -> set[int]:
    return {part.shape[1] for part in parts} if parts[0].ndim > 1 else set()


def _join_tensors(parts: list[torch.Tensor], padding_index: int) -> torch.Tensor:
    lengths = _lengths(parts)
    if len(lengths) <= 1:
        return torch.cat(parts, dim=0)
    joined = parts[0].new_full((sum(map(len, parts)), max(lengths), *parts[0].shape[2:]), padding_index)
    return _fill(joined, parts)


def _join_arrays(parts: list[np.ndarray[Any, Any]], padding_index: int) -> np.ndarray[Any, Any]:
    lengths = _lengths(parts)
    if len(lengths) <= 1:
        return np.concatenate(parts, axis=0)
    shape = (sum(map(len, parts)), max(lengths), *parts[0].shape[2:])
    return _fill(np.full_like(parts[0], padding_index, shape=shape), parts)


def _fill(joined: Any, parts: Sequence[Any]) -> Any:
    start = 0
    for part in parts:
        joined[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return joined
