"""Equality to the last bit, of everything a case records."""

from __future__ import annotations

import numpy as np
import torch


def same(left, right) -> bool:
    """Say whether two nested results are equal bit for bit (NaN equals NaN)."""
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        is_list = isinstance(right, (list, tuple))
        return is_list and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and same(left.float().numpy(), right.float().numpy())
    if isinstance(left, np.ndarray):
        if not isinstance(right, np.ndarray) or left.dtype != right.dtype or left.shape != right.shape:
            return False
        return np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    return left == right or (left != left and right != right)


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
        return f"{path}: {len(left)} and {len(right)} entries"
    return f"{path}: transformers {str(left)[:300]} | hf_compat {str(right)[:300]}"
