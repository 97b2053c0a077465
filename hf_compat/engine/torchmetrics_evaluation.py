"""torchmetrics as `compute_metrics`, updated batch by batch, so that memory does not grow.

torchmetrics exchanges the metrics' states between ranks when it computes. Logits are not exchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection

from hf_compat.errors import ArgumentError
from hf_compat.runtime.collectives import is_distributed
from hf_compat.runtime.nested import Nested

Metrics = dict[str, Any]  # mostly numbers, by name, as the user's function returns them
# A function of an `EvalPrediction` (and `compute_result`), torchmetrics, or a function that makes torchmetrics.
ComputeMetrics = Callable[..., Any] | Metric | MetricCollection


class TorchMetrics:
    """The torchmetrics of one evaluation, updated batch by batch.

    Args:
        metrics: The metrics, which are reset first.
        device: The device of their states.
    """

    def __init__(self, metrics: MetricCollection, device: torch.device) -> None:
        self.metrics = metrics.to(device)
        self.metrics.reset()
        self._updated = False

    def update(self, predictions: Nested, labels: Nested) -> None:
        """Update the metrics with a batch.

        Args:
            predictions: The model's output (after `preprocess_logits_for_metrics`), the metrics' first argument.
            labels: The labels, their second argument.

        Raises:
            ArgumentError: Outputs or labels are not one tensor.
        """
        for name, value in (("outputs", predictions), ("labels", labels)):
            if not isinstance(value, torch.Tensor):
                raise ArgumentError(
                    f"`compute_metrics` is a torchmetrics metric, and there are several {name} "
                    f"({type(value).__name__}).\n\n"
                    "Hint: let `preprocess_logits_for_metrics` choose the output, or `label_names` the labels."
                )
        self.metrics.update(predictions, labels)
        self._updated = True

    def compute(self) -> Metrics:
        """Return the metrics by name, as numbers or lists of numbers. Empty if no batch had labels."""
        if not self._updated and not is_distributed():  # every rank must compute, even one without samples
            return {}
        computed = self.metrics.compute()
        self.metrics.reset()
        return {name: _plain(value) for name, value in computed.items()}


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def is_metric_source(candidate: object) -> bool:
    """Whether `compute_metrics` is a torchmetrics object or makes one."""
    if isinstance(candidate, (Metric, MetricCollection)):
        return True
    if isinstance(candidate, type):
        return issubclass(candidate, (Metric, MetricCollection))
    if isinstance(candidate, Mapping) or not callable(candidate):
        return False
    try:
        parameters = inspect.signature(candidate).parameters.values()
    except (TypeError, ValueError):
        return False
    # a function without required parameters makes the metrics, as one of metrics needs the predictions
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def torch_metrics(source: ComputeMetrics | None, device: torch.device) -> TorchMetrics | None:
    """Return the torchmetrics of one evaluation. None if `compute_metrics` is a function of predictions.

    Args:
        source: A `Metric`, a `MetricCollection`, one of these classes, or a function without arguments that makes one.
        device: The device of their states.

    Raises:
        ArgumentError: The function returns something else.
    """
    if source is None or not is_metric_source(source):
        return None
    made = source if isinstance(source, (Metric, MetricCollection)) else source()
    if not isinstance(made, (Metric, MetricCollection)):
        raise ArgumentError(
            f"`compute_metrics` takes no argument and gave {made!r}.\n\n"
            "Hint: take an `EvalPrediction`, or return a torchmetrics Metric or MetricCollection."
        )
    return TorchMetrics(made if isinstance(made, MetricCollection) else MetricCollection([made]), device)


def check_metrics(
    compute_metrics: ComputeMetrics | Mapping[str, ComputeMetrics] | None, eval_dataset: object, by_batch: bool
) -> None:
    """Refuse metrics that cannot be computed.

    Args:
        compute_metrics: A function, a torchmetrics object, a function that makes one, or a dict of these.
        eval_dataset: The evaluation data, or a dict of data sets.
        by_batch: `batch_eval_metrics`.

    Raises:
        ArgumentError: A value is not callable, a dict names an unknown data set, or a function lacks a parameter.
    """
    if not isinstance(compute_metrics, Mapping):
        _check_one(compute_metrics, by_batch)
        return
    known = list(eval_dataset) if isinstance(eval_dataset, Mapping) else []
    unknown = [name for name in compute_metrics if name not in known]
    if unknown:
        raise ArgumentError(
            f"`compute_metrics` has metrics for {unknown}, and the evaluation data sets are {known}.\n\n"
            "Hint: pass `eval_dataset` as a dict of the same names."
        )
    for part in compute_metrics.values():
        _check_one(part, by_batch)


def _check_one(compute_metrics: ComputeMetrics | None, by_batch: bool) -> None:
    if compute_metrics is None or is_metric_source(compute_metrics):
        return
    if not callable(compute_metrics):
        raise ArgumentError(
            f"`compute_metrics={compute_metrics!r}` cannot be called.\n\n"
            "Hint: pass a function of an `EvalPrediction`, or a torchmetrics metric."
        )
    if by_batch and "compute_result" not in inspect.signature(compute_metrics).parameters:
        raise ArgumentError(
            "`batch_eval_metrics=True` calls `compute_metrics` with `compute_result`, which it does not take.\n\n"
            "Hint: add a `compute_result: bool` parameter; it is True after the last batch."
        )
