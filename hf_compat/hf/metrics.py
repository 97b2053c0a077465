"""Numbers about runs: speeds, plain-Python metrics, and their human form. HF words only."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from hf_compat.runtime.nested import Nested, map_nested

# A number, or what a metric function of the user's returns for one.
Metric: TypeAlias = Any


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Measure the time since `start_time` and the rates that follow from it.

    Args:
        split: Prefix of the keys (`train`, `eval` …).
        start_time: `time.time()` at the start, in seconds.
        num_samples: Samples processed since.
        num_steps: Steps processed since.
        num_tokens: Tokens processed since.

    Returns:
        `{split}_runtime` in seconds, and `{split}_{samples,steps,tokens}_per_second` for the counts given.

    Mirrors:
        `transformers.trainer_utils.speed_metrics`, 5.23.
    """
    runtime_seconds = time.time() - start_time
    metrics = {f"{split}_runtime": round(runtime_seconds, 4)}
    if runtime_seconds == 0:
        return metrics
    counts = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    for unit, count in counts.items():
        if count is not None:
            metrics[f"{split}_{unit}_per_second"] = round(count / runtime_seconds, 3)
    return metrics


def denumpify_detensorize(metrics: Nested) -> Nested:
    """Replace NumPy scalars and one-element tensors by Python numbers, in nested containers too.

    Mirrors:
        `transformers.trainer_utils.denumpify_detensorize`, 5.23.
    """
    return map_nested(_number_of_tensor, metrics, on_other=_number_of_scalar)


def _number_of_tensor(tensor: torch.Tensor) -> torch.Tensor | float:
    return tensor.item() if tensor.numel() == 1 else tensor


def _number_of_scalar(value: Nested) -> Nested:
    return value.item() if isinstance(value, np.generic) else value


def metrics_format(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Give metrics their human form: durations as h:mm:ss.cc, memory in MB, FLOPs in GF, floats to 4 digits.

    Mirrors:
        `transformers.Trainer.metrics_format`, 5.23.
    """
    return {key: _format_metric(key, value) for key, value in metrics.items()}


def _format_metric(key: str, value: Metric) -> Metric:
    if "_mem_" in key:
        return f"{value >> 20}MB"
    if "_runtime" in key:
        hundredths = int(abs(value - int(value)) * 100)
        return f"{datetime.timedelta(seconds=int(value))}.{hundredths:02d}"
    if key == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value
