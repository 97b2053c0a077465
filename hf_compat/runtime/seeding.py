"""Seed all random generators of a run, and read and restore their states as plain values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from hf_compat.runtime.launch import environment


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices).

    Args:
        seed: The seed.
        deterministic: Also ask torch for deterministic algorithms.

    Mirrors:
        `transformers.set_seed`.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global generator is what user code draws from
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def seed_of_lightning() -> int | None:
    """The seed of the last `lightning.seed_everything` in this process or its parent, or None."""
    seed = environment.get("PL_GLOBAL_SEED")  # where Lightning keeps it
    return None if seed is None else int(seed)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and switch on every deterministic mode of torch and its backends.

    Args:
        seed: The seed.
        warn_only: Warn about operations without a deterministic form instead of raising.

    Mirrors:
        `transformers.enable_full_determinism`.
    """
    set_seed(seed)
    settings = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "FLASH_ATTENTION_DETERMINISTIC": "1",
        "ASCEND_LAUNCH_BLOCKING": "1",
        "HCCL_DETERMINISTIC": "1",
    }
    environment.update(settings)  # CUDA reads nothing else
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seed a data-loading worker, by its rank and torch's own seed of the worker.

    Mirrors:
        `transformers.trainer_utils.seed_worker`.
    """
    set_seed(num_workers * rank + torch.initial_seed() % 2**32)


# Generator (`python`, `numpy`, `cpu`, `cuda`, `mps`) → its state, in a form of its own.
RandomStates: TypeAlias = dict[str, Any]


def read_rng(before: RandomStates | None = None, of_all_gpus: bool = False) -> RandomStates:
    """Read the states of Python's, NumPy's and torch's generators as numbers, lists and tensors.

    Those `of_all_gpus` are a list. Tensors that equal those of the states `before` are these themselves, so that a file
    holds them once.
    """
    states = pack_legacy_rng(read_legacy_rng(of_all_gpus))
    for name in ("python", "numpy"):
        numbers = None if before is None else before[name][1]
        if isinstance(numbers, torch.Tensor) and torch.equal(states[name][1], numbers):
            states[name][1] = numbers
    return states


def read_legacy_rng(of_all_gpus: bool = False) -> RandomStates:
    """Read the states in the form of `rng_state.pth` in `transformers`, whose processes list those of all GPUs."""
    states: RandomStates = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the global generator is what user code draws from
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        read = torch.cuda.random.get_rng_state_all if of_all_gpus else torch.cuda.random.get_rng_state
        states["cuda"] = read()
    elif torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()  # transformers leaves it out
    return states


def is_same(state: object, other: object) -> bool:
    """Whether the states of one generator are equal."""
    if isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(state) == len(other) and all(map(is_same, state, other))
    return type(state) is type(other) and bool(state == other)


def write_rng(states: RandomStates) -> None:
    """Set all generators to states of either form."""
    legacy = unpack_rng(states)
    random.setstate(legacy["python"])
    np.random.set_state(legacy["numpy"])  # noqa: NPY002 - the global generator is what user code draws from
    torch.random.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        of_cuda = states["cuda"]
        if isinstance(of_cuda, (list, tuple)):  # transformers writes those of all GPUs if several processes train
            of_cuda = dict(enumerate(of_cuda)).get(torch.cuda.current_device())
        if of_cuda is not None:
            torch.cuda.random.set_rng_state(of_cuda)
    elif torch.backends.mps.is_available() and "mps" in states:
        torch.mps.set_rng_state(states["mps"])


def unpack_rng(states: RandomStates) -> RandomStates:
    """Convert states of either form to that of `rng_state.pth` in `transformers`."""
    name, keys, *rest = states["numpy"]
    python, of_numpy = python_state(states), (name, np.asarray(keys).astype(np.uint32), *rest)
    return {**states, "python": python, "numpy": of_numpy}


def python_state(states: RandomStates) -> tuple[Any, ...]:
    """The state of Python's generator, from states of either form."""
    version, numbers, gauss = states["python"]
    return version, tuple(numbers.tolist() if isinstance(numbers, torch.Tensor) else numbers), gauss


def pack_legacy_rng(states: RandomStates) -> RandomStates:
    """Convert states of `rng_state.pth` in `transformers` to plain values and tensors.

    A pickle of a list of numbers has each of them as an object, which takes a call.
    """
    version, numbers, gauss = states["python"]
    name, keys, *rest = states["numpy"]
    python, of_numpy = (
        [version, torch.from_numpy((np.asarray(numbers, np.uint64) & 0xFFFFFFFF).astype(np.int64)), gauss],
        [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
    )
    return {**states, "python": python, "numpy": of_numpy}


# The function in every pickle of an array, under NumPy 1's name and NumPy 2's: a file may come from either
_REBUILD = np.empty(0).__reduce__()[0]
# The types and functions of NumPy's random state, for torch's allow-list
LEGACY_GLOBALS: Sequence[object] = (
    (_REBUILD, "numpy.core.multiarray._reconstruct"),
    (_REBUILD, "numpy._core.multiarray._reconstruct"),
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
)
