"""Speeds and metrics of runs, their formatting, and the results of training, evaluation and prediction."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from hf_compat.errors import MetricError, warn_once
from hf_compat.runtime.nested import Nested, map_nested
from hf_compat.runtime.text import brief

# Durations and rates, which differ each time and do not measure a model's quality.
TIMED = ("_runtime", "_per_second", "_model_preparation_time")
# A number, or the value that a user's metric function returns.
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
        `transformers.trainer_utils.speed_metrics`.
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
    """Replace NumPy scalars and one-element tensors by Python numbers, also in nested containers.

    Mirrors:
        `transformers.trainer_utils.denumpify_detensorize`.
    """
    return map_nested(
        lambda tensor: tensor.item() if tensor.numel() == 1 else tensor,
        metrics,
        on_other=lambda value: value.item() if isinstance(value, np.generic) else value,
    )


def plain_metrics(metrics: object, source: str) -> dict[str, Metric]:
    """Convert metrics to JSON types. Tensors and arrays become numbers or lists.

    Raises:
        MetricError: The value is not a mapping, or a metric cannot be written as JSON.
    """
    if not isinstance(metrics, Mapping):
        raise MetricError(
            f"`{source}` returned {_shown(metrics)}, which is not a mapping.\n\n"
            "Hint: return a dict from the metrics' names to numbers."
        )
    for name in metrics:
        if not isinstance(name, str):
            raise MetricError(
                f"`{source}` returned a metric under the name {brief(name)}, which is not a string.\n\n"
                f"Hint: use str({brief(name)})."
            )
    try:
        return {name: _plain_metric(value, name, source) for name, value in metrics.items()}
    except RecursionError:
        raise MetricError(
            f"`{source}` returned a metric that contains itself, which cannot be logged or saved.\n\n"
            "Hint: return a number, a text, or a list or dict of these."
        ) from None


def returned_metrics(metrics: Mapping[str, object], source: str) -> dict[str, Metric]:
    """Convert metrics as `plain_metrics` does, but keep arrays and tensors of several elements.

    Upstream returns them as they are, so scripts compute with them. Logs and files get lists.
    """
    plain = plain_metrics(metrics, source)
    return {
        name: metrics[name]
        if isinstance(value, list) and isinstance(metrics[name], (torch.Tensor, np.ndarray))
        else value
        for name, value in plain.items()
    }


_PLAIN = frozenset({float, int, str, bool, type(None)})


def _plain_metric(value: object, name: str, source: str) -> Metric:
    """Convert a metric to JSON's types, also within lists and dicts."""
    if type(value) in _PLAIN:  # most are
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.item() if value.numel() == 1 else value.to_dense().tolist()
    elif isinstance(value, (np.ndarray, np.generic)):
        value = value.item() if value.size == 1 else value.tolist()
    elif isinstance(value, (Decimal, Fraction)):
        value = float(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain_metric(part, f"{name}.{key}", source) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_plain_metric(part, f"{name}[{index}]", source) for index, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, (int, float, str)):
        return value
    raise MetricError(
        f"`{source}` returned {_shown(value)} as the metric {brief(name)}, which cannot be logged or saved.\n\n"
        "Hint: return a number, a text, or a list or dict of these."
    )


def loggable(logs: Mapping[str, Metric]) -> dict[str, Metric]:
    """Keep the values of a log that can be written as JSON, and warn about the others."""
    kept = {}
    for name, value in logs.items():
        try:
            kept[str(name)] = _plain_metric(value, str(name), "log")
        except MetricError:
            warn_once(f"`log`: {brief(name)} is a {type(value).__name__}, which the state's log history cannot hold.")
    return kept


def _shown(value: object) -> str:
    return f"{brief(value, 80)} ({type(value).__name__})"


def number_of_metric(value: object, name: str) -> float:
    """Convert a metric to a number that can be compared."""
    plain = _plain_metric(value, name, "evaluate")
    if isinstance(plain, (int, float)):
        return plain
    raise MetricError(
        f"The metric {brief(name)}, which `metric_for_best_model` names, is {_shown(value)}, which is not a number.\n\n"
        "Hint: let `compute_metrics` return a number under this name, or name another metric."
    )


def metrics_format(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Format durations as h:mm:ss.cc, memory in MB, FLOPs in GF and floats to 4 digits.

    Mirrors:
        `transformers.Trainer.metrics_format`.
    """
    formatted: dict[str, Metric] = {}
    for key, value in metrics.items():
        if "_mem_" in key:
            formatted[key] = f"{value >> 20}MB"
        elif "_runtime" in key:
            hundredths = int(abs(value - int(value)) * 100)
            formatted[key] = f"{datetime.timedelta(seconds=int(value))}.{hundredths:02d}"
        elif key == "total_flos":
            formatted[key] = f"{int(value) >> 30}GF"
        else:
            formatted[key] = round(value, 4) if isinstance(value, float) else value
    return formatted


# A model's output, which is an array or a nested tuple, list or dict of arrays.
Arrays = Any


class EvalPrediction:
    """The argument of a `compute_metrics` function.

    Args:
        predictions: The model's outputs, one row per sample. A tuple if the model has several outputs.
        label_ids: The labels, padded with -100 to equal lengths.
        inputs: The main input, when `include_for_metrics` asks for it.
        losses: The loss of each sample's batch, when `include_for_metrics` asks for it.

    Mirrors:
        `transformers.EvalPrediction`. It also unpacks like a tuple of the parts that are not None.
    """

    def __init__(
        self, predictions: Arrays, label_ids: Arrays, inputs: Arrays | None = None, losses: Arrays | None = None
    ) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        extras = tuple(part for part in (inputs, losses) if part is not None)
        self.elements: tuple[Arrays, ...] = (predictions, label_ids, *extras)

    def __iter__(self) -> Iterator[Arrays]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Arrays:
        if not 0 <= index < len(self.elements):
            raise IndexError(f"EvalPrediction has {len(self.elements)} parts, there is none at {index}")
        return self.elements[index]


class EvalLoopOutput(NamedTuple):
    """The result of `evaluation_loop`. Mirrors `transformers.trainer_utils.EvalLoopOutput`."""

    predictions: Arrays
    label_ids: Arrays | None
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """The result of `predict`. Mirrors `transformers.trainer_utils.PredictionOutput`."""

    predictions: Arrays
    label_ids: Arrays | None
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    """The result of `train`. Mirrors `transformers.trainer_utils.TrainOutput`."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]
