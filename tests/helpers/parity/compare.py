"""Equality to the last bit, of everything a case records: type, dtype, shape and bits."""

from __future__ import annotations

import numpy as np
import torch


def same(left, right) -> bool:
    """Return whether two nested results are equal bit for bit, down to their types (NaN equals the same NaN)."""
    if _is_namedtuple(left) and _is_namedtuple(right):  # each package has its own PredictionOutput
        return left._fields == right._fields and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):  # ordered ones, too
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        is_alike = left.dtype == right.dtype and left.shape == right.shape
        return is_alike and torch.equal(_bytes(left), _bytes(right))
    if isinstance(left, np.ndarray):
        return _same_arrays(left, right)
    return left == right or (left != left and right != right)


def _is_namedtuple(value) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _same_arrays(left: np.ndarray, right: np.ndarray) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.hasobject:  # addresses are no content
        return all(map(same, left.ravel().tolist(), right.ravel().tolist()))
    return left.tobytes() == right.tobytes()


def first_difference(left, right, path: str = "") -> str:
    """Name the first place where two results differ, with both values."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(k for k in right if k not in left)]:
            if key not in left or key not in right or not same(left[key], right[key]):
                return first_difference(left.get(key, "<absent>"), right.get(key, "<absent>"), f"{path}.{key}")
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        for index, (a, b) in enumerate(zip(left, right, strict=False)):
            if not same(a, b):
                return first_difference(a, b, f"{path}[{index}]")
        if len(left) != len(right):
            return f"{path}: {len(left)} and {len(right)} entries"
    return f"{path}: transformers {_shown(left)} | hf_compat {_shown(right)}"


def _shown(value) -> str:
    form = f"{value.dtype} {tuple(value.shape)} " if isinstance(value, (torch.Tensor, np.ndarray)) else ""
    return f"{type(value).__name__} {form}{str(value)[:300]}"
