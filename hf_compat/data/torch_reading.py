"""Reading from torch's loader. Private attributes of torch's iterators, of torch 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hf_compat.data.types import Batch

_TORCHS = "torch.utils.data.dataloader"


def reader_of(batches: Iterator[Batch]) -> Callable[[], Batch]:
    """Return what reads the next batch of a pass over map-style data: `next`, without a profiler's mark if none runs.

    Torch marks each read for its profiler, whether one runs or not. The mark costs as much as a small collator. While
    a profiler runs, and with iterators that are not torch's own, this is `next`.

    Args:
        batches: A pass over a torch loader.
    """
    marked = type(batches).__next__
    data = getattr(batches, "_next_data", None)
    is_profiled = getattr(torch.autograd, "_profiler_enabled", None)
    is_torchs = getattr(marked, "__module__", None) == _TORCHS and hasattr(batches, "_num_yielded")
    if not is_torchs or data is None or is_profiled is None:
        return batches.__next__

    def read() -> Batch:
        if is_profiled() or batches._sampler_iter is None:  # type: ignore[attr-defined]  # torch's
            return next(batches)
        batch = data()
        batches._num_yielded += 1  # type: ignore[attr-defined]  # as above
        return batch

    return read
