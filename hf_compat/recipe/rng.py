"""The states of all random generators as plain values. torch and NumPy only."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def read_rng() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators as numbers, lists and tensors."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - what user code draws from
    states: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return states


def write_rng(states: dict[str, Any]) -> None:
    """Set all generators to states that `read_rng` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    keys = keys.numpy().astype(np.uint32)
    np.random.set_state((name, keys, position, has_gauss, cached))  # noqa: NPY002 - what user code draws from
    torch.random.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.random.set_rng_state(states["cuda"])
