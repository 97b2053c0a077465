"""`auto_find_batch_size`: run again with a smaller batch when memory runs out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

_SIGNS = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
)
SHRINK = 0.9
Result = TypeVar("Result")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a batch was too large."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def run_with_fitting_batch_size(
    run: Callable[..., Result], batch_size: int, search: bool, **keywords: object
) -> Result:
    """Call `run(batch_size=…, **keywords)`; with `search`, again with a tenth less while memory runs out.

    Raises:
        RuntimeError: Not even one sample fits.

    Mirrors:
        `transformers.trainer_utils.find_executable_batch_size`, 5.23.
    """
    if not search:
        return run(batch_size=batch_size, **keywords)
    while batch_size > 0:
        try:
            return run(batch_size=batch_size, **keywords)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            smaller = int(batch_size * SHRINK)
            logger.warning("A batch of %d does not fit into memory; trying %d.", batch_size, smaller)
            batch_size = smaller
        # outside the except block: the traceback holds the tensors of the batch that was too large
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    raise RuntimeError("No executable batch size found, reached zero.")
