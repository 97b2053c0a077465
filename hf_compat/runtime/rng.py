"""The states of all random generators as plain values. torch and NumPy only."""

from __future__ import annotations

import random
from typing import Any, TypeAlias

import numpy as np
import torch

# By generator (`python`, `numpy`, `cpu`, `cuda`): its state, in a form that only it knows.
RandomStates: TypeAlias = dict[str, Any]


def read_rng() -> RandomStates:
    """Return the states of Python's, NumPy's and torch's generators as numbers, lists and tensors."""
    states: RandomStates = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the global generator is what user code draws from
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return pack_legacy_rng(states)


def write_rng(states: RandomStates) -> None:
    """Set all generators to states that `read_rng` returned."""
    legacy = unpack_rng(states)
    random.setstate(legacy["python"])
    np.random.set_state(legacy["numpy"])  # noqa: NPY002 - the global generator is what user code draws from
    torch.random.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.random.set_rng_state(states["cuda"])


def unpack_rng(states: RandomStates) -> RandomStates:
    """Return states in the form that `transformers` keeps in `rng_state.pth`."""
    version, numbers, gauss = states["python"]
    name, keys, *rest = states["numpy"]
    legacy = {"python": (version, tuple(numbers), gauss), "numpy": (name, keys.numpy().astype(np.uint32), *rest)}
    return {**legacy, **{device: states[device] for device in ("cpu", "cuda") if device in states}}


def pack_legacy_rng(states: RandomStates) -> RandomStates:
    """Return states that `transformers` kept in `rng_state.pth` as plain values."""
    version, numbers, gauss = states["python"]
    name, keys, *rest = states["numpy"]
    plain = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
    }
    return {**plain, **{device: states[device] for device in ("cpu", "cuda") if device in states}}


def legacy_globals() -> list[object]:
    """List what NumPy's random state consists of, for torch's allow-list."""
    # both names of NumPy's rebuild function: files written under NumPy 1 use the older one
    rebuild = np._core.multiarray._reconstruct  # type: ignore[attr-defined]  # private, and in every pickle of an array
    return [
        rebuild,
        (rebuild, "numpy.core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        type(np.dtype(np.uint32)),
    ]
