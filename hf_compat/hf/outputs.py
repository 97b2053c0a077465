"""What training, evaluation and prediction hand back. HF words only; imports nothing of the package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

# A prediction is an array or a nested tuple/list/dict of arrays: the boundary to what models return.
Arrays = Any


class EvalPrediction:
    """The argument of a `compute_metrics` function.

    Args:
        predictions: The model's outputs, one row a sample; a tuple where the model gives several.
        label_ids: The labels, padded with -100 where their lengths differ.
        inputs: The main input, when `include_for_metrics` asks for it.
        losses: The loss of each sample's batch, when `include_for_metrics` asks for it.

    Mirrors:
        `transformers.EvalPrediction`, 5.23: it also unpacks like the tuple of its parts that are not None.
    """

    def __init__(
        self,
        predictions: Arrays,
        label_ids: Arrays,
        inputs: Arrays | None = None,
        losses: Arrays | None = None,
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
    """The result of `evaluation_loop`. Mirrors `transformers.trainer_utils.EvalLoopOutput`, 5.23."""

    predictions: Arrays
    label_ids: Arrays | None
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """The result of `predict`. Mirrors `transformers.trainer_utils.PredictionOutput`, 5.23."""

    predictions: Arrays
    label_ids: Arrays | None
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    """The result of `train`. Mirrors `transformers.trainer_utils.TrainOutput`, 5.23."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]
