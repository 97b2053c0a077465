"""Seeds of every random generator that a run uses. HF words only; needs torch and NumPy."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices).

    Args:
        seed: The seed.
        deterministic: Also ask torch for deterministic algorithms.

    Mirrors:
        `transformers.set_seed`, 5.23.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global generator is what user code draws from
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def seed_of_lightning() -> int | None:
    """Return the seed that `lightning.seed_everything` was last given in this process, or its parent; else None."""
    seed = os.environ.get("PL_GLOBAL_SEED")  # noqa: TID251 - where Lightning keeps it
    return None if seed is None else int(seed)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and switch on every deterministic mode that torch and its backends have.

    Args:
        seed: The seed.
        warn_only: Warn instead of raising where an operation has no deterministic form.

    Mirrors:
        `transformers.enable_full_determinism`, 5.23.
    """
    set_seed(seed)
    settings = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "FLASH_ATTENTION_DETERMINISTIC": "1",
        "ASCEND_LAUNCH_BLOCKING": "1",
        "HCCL_DETERMINISTIC": "1",
    }
    os.environ.update(settings)  # noqa: TID251 - CUDA reads nothing else
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seed a data-loading worker as HF does: the same for all workers of a rank but for torch's own offset.

    Mirrors:
        `transformers.trainer_utils.seed_worker`, 5.23.
    """
    set_seed(num_workers * rank + torch.initial_seed() % 2**32)
