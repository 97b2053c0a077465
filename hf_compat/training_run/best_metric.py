"""A run's best evaluation, and the checkpoint saved at it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hf_compat.errors import MetricError, MissingMetric
from hf_compat.hf.builtin_callbacks import eval_metric_name
from hf_compat.hf.enums import SaveStrategy
from hf_compat.hf.metrics import number_of_metric
from hf_compat.hf.state import TrainerState

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments


def tracked_value(metrics: Mapping[str, float], metric_for_best_model: str) -> float:
    """Return the metric that the arguments name.

    Raises:
        MissingMetric: It is not among the metrics (a `KeyError`).
        MetricError: It is not a number, or the metrics are not a mapping.
    """
    name = eval_metric_name(metric_for_best_model)
    if not isinstance(metrics, Mapping):  # an override may return anything
        raise MetricError(
            f"`evaluate` returned {metrics!r}, which is not a mapping with an entry {name!r}.\n\n"
            "Hint: return the metrics, or train without `metric_for_best_model`."
        )
    try:
        return number_of_metric(metrics[name], name)
    except KeyError:
        raise MissingMetric(
            f"The `metric_for_best_model` training argument is set to {name!r}, which is not found in the "
            f"evaluation metrics. The available evaluation metrics are: {list(metrics)}.\n\n"
            "Hint: name one of them, or let `compute_metrics` return it."
        ) from None


def check_tracked_value(metrics: Mapping[str, float], metric_for_best_model: str | None) -> None:
    """Refuse a tracked metric that cannot be compared. A missing one is accepted.

    Raises:
        MetricError: It is not a number.
    """
    if metric_for_best_model is not None and eval_metric_name(metric_for_best_model) in metrics:
        tracked_value(metrics, metric_for_best_model)


def note_best_metric(state: TrainerState, args: TrainingArguments, metrics: Mapping[str, float]) -> bool:
    """Compare an evaluation with the best one so far, and store it in the state if it is better.

    Returns:
        Whether it is the best so far. False if no metric is tracked.

    Raises:
        MissingMetric: The tracked metric is not among the metrics.
        MetricError: It is not a number.

    Mirrors:
        `transformers.Trainer._determine_best_metric`, 5.23.
    """
    if args.metric_for_best_model is None:
        return False
    value = tracked_value(metrics, args.metric_for_best_model)
    if state.best_metric is None:
        state.best_metric = float("-inf") if args.greater_is_better else float("inf")
    is_best = bool(value > state.best_metric if args.greater_is_better else value < state.best_metric)
    if is_best:
        state.best_metric = value
        if args.save_strategy != SaveStrategy.NO:
            state.best_global_step = state.global_step
    return is_best


def note_best_checkpoint(
    state: TrainerState,
    path_of: Callable[[int], str],
    current: str,
    was_written: Callable[[str], bool] = os.path.exists,
) -> None:
    """Store the path of the best update's checkpoint in the state, if it was written or is about to be.

    Args:
        state: The run's state, before it is saved.
        path_of: Returns the path of an update's checkpoint.
        current: Path of the checkpoint that is about to be written.
        was_written: Whether this run wrote a checkpoint. A folder of that name may belong to another run.
    """
    if not state.best_global_step:
        return
    path = path_of(state.best_global_step)
    if path == current or was_written(path):
        state.best_model_checkpoint = path
