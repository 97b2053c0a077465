"""Named values beside the loss: what `compute_loss` logs, averaged until the next log and over the processes.

Values stay on their device until they are read: logging a number costs no wait for the GPU.
"""

from __future__ import annotations

from typing import Any, Protocol, TypedDict, runtime_checkable

import torch

from hf_compat.runtime.collectives import gather_objects


@runtime_checkable
class ComputedMetric(Protocol):
    """A metric that gathers and averages by itself: a torchmetrics `Metric`."""

    def compute(self) -> Any:  # what a metric computes is its author's choice; `float` has to accept it
        """Return the metric's value."""

    def reset(self) -> None:
        """Forget what was gathered."""


LoggedValue = float | torch.Tensor | ComputedMetric


class AveragesState(TypedDict):
    """Sums and weights by name, in plain values."""

    sums: dict[str, float]
    weights: dict[str, float]


class StepAverages:
    """Means of named values since they were last taken."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor | float] = {}
        self._weights: dict[str, float] = {}
        self._metrics: dict[str, ComputedMetric] = {}

    def add(self, name: str, value: LoggedValue, weight: float = 1.0) -> None:
        """Add a value to a mean, or note a torchmetrics metric that computes its own.

        Args:
            name: The name in the logs.
            value: A number, a tensor (its mean counts), or a torchmetrics `Metric` that was updated.
            weight: Weight in the mean: the samples of the batch, say.
        """
        if isinstance(value, torch.Tensor):
            number: float | torch.Tensor = value.detach().float().mean()
        elif not isinstance(value, float) and isinstance(value, ComputedMetric):
            self._metrics[name] = value
            return
        else:
            number = float(value)
        self._sums[name] = self._sums.get(name, 0.0) + number * weight
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def take(self) -> dict[str, float]:
        """Return the means over all processes, and begin the next ones. Every process has to call it."""
        own = {name: (float(total), self._weights[name]) for name, total in self._sums.items()}
        parts: list[dict[str, tuple[float, float]]] = gather_objects(own)
        means = {}
        for name in dict.fromkeys(name for part in parts for name in part):  # one may have logged what another has not
            totals, weights = zip(*(part[name] for part in parts if name in part), strict=True)
            means[name] = sum(totals) / sum(weights)
        for name, metric in self._metrics.items():
            means[name] = float(metric.compute())
            metric.reset()
        self._sums, self._weights, self._metrics = {}, {}, {}
        return means

    def state_dict(self) -> AveragesState:
        """Return sums and weights, in plain values."""
        return {"sums": {n: float(s) for n, s in self._sums.items()}, "weights": dict(self._weights)}

    def load_state_dict(self, state: AveragesState) -> None:
        """Go on where a state stood."""
        self._sums, self._weights = dict(state["sums"]), dict(state["weights"])
