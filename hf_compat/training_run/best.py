"""The best evaluation of a run: the metric that is compared, the checkpoint that has it, and what the user is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from hf_compat.checkpoint.layout import checkpoint_step
from hf_compat.errors import MetricError, MissingMetric, warn_user
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.callbacks import eval_metric_name
from hf_compat.hf.enums import SaveStrategy
from hf_compat.hf.metric_names import is_error, is_negated
from hf_compat.hf.metrics import number_of_metric
from hf_compat.hf.state import TrainerState
from hf_compat.runtime.text import brief, shown


def tracked_value(metrics: Mapping[str, float], metric_for_best_model: str) -> float:
    """Return the metric that the arguments name, or raise a MissingMetric or a MetricError."""
    name = eval_metric_name(metric_for_best_model)
    if not isinstance(metrics, Mapping):  # an override may return anything
        raise MetricError(
            f"`evaluate` returned {brief(metrics)}, which is not a mapping with an entry {brief(name)}.\n\n"
            "Hint: return the metrics, or train without `metric_for_best_model`."
        )
    try:
        return number_of_metric(metrics[name], name)
    except KeyError:
        raise MissingMetric(
            f"The `metric_for_best_model` training argument is set to {brief(name)}, which is not found in the "
            f"evaluation metrics. The available evaluation metrics are: {list(metrics)}.\n\n"
            "Hint: name one of them, or let `compute_metrics` return it."
        ) from None


def update_best_metric(state: TrainerState, args: TrainingArguments, metrics: Mapping[str, float]) -> bool:
    """Compare an evaluation with the best one so far, and store it in the state if it is better.

    Returns:
        Whether it is the best so far. False if no metric is tracked.

    Mirrors:
        `transformers.Trainer._determine_best_metric`.
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


def tell_of_direction(args: TrainingArguments) -> None:
    """Warn of a metric whose direction follows from the end of its name, and whose other words say the opposite."""
    name, rises = args.metric_for_best_model, bool(args.greater_is_better)
    if name is None or not args._infers_direction or args.eval_strategy == "no":
        return
    if is_error(name) if rises else is_negated(name):
        kind, best = ("an error", "largest") if rises else ("the opposite of a loss", "smallest")
        warn_user(
            f"`{shown('metric_for_best_model', name)}` looks like {kind}, and `greater_is_better` is not set: as in "
            f"transformers, the {best} value counts as the best.\n\nHint: set `greater_is_better={not rises}`, or "
            f"{rises} if that is meant."
        )


def tell_of_other_best(args: TrainingArguments, state: TrainerState) -> None:
    """Warn of a resumed best evaluation by another metric, or another direction, than that of the arguments."""
    best, name = state.best_metric, args.metric_for_best_model
    if best is None or name is None or args.eval_strategy == "no":
        return
    key = eval_metric_name(name)
    metrics = [entry for entry in state.log_history if any(one.startswith("eval_") for one in entry)]
    values = {entry[key] for entry in metrics if isinstance(entry.get(key), (int, float))}
    if metrics and not values:
        told = f"no evaluation of the checkpoint has {brief(key)}"
    elif len(values) > 1 and best == (min if args.greater_is_better else max)(values):
        told = f"it is the worst one by `{shown('greater_is_better', args.greater_is_better)}`"
    else:
        return
    warn_user(
        f"New evaluations are compared with the checkpoint's best ({best:g}, update {state.best_global_step}), though "
        f"{told}.\n\nHint: resume with the `metric_for_best_model` and `greater_is_better` of before, or begin a new "
        "run with the checkpoint's weights."
    )


def tell_of_best(args: TrainingArguments, state: TrainerState, updates_before: int = 0) -> None:
    """Warn if `load_best_model_at_end` cannot load the weights of the best evaluation.

    One of the `updates_before` was saved before the run was resumed.
    """
    loaded, update = state.best_model_checkpoint, state.best_global_step
    if args.eval_strategy == "no" or (loaded is not None and checkpoint_step(loaded) == update):
        return
    metric = eval_metric_name(str(args.metric_for_best_model))
    if state.best_metric is None:
        told = "The best evaluation is not known, as none was made"
        way_out = "evaluate earlier: lower `eval_delay`, or call `evaluate` in the methods that you override"
    elif not update:
        told = f"The best evaluation is not known, as none gave a number {brief(metric)} that can be compared"
        way_out = "look at the metric, which was NaN or infinite each time"
    else:
        told = f"The best evaluation ({metric}={state.best_metric:g}, update {update}) has no checkpoint"
        way_out = "save after each evaluation (`save_steps` equal to `eval_steps`), or set `save_strategy='best'`"
        if update <= updates_before:
            way_out = f"resume in an output folder that has checkpoint-{update}, too"
    kept = "the weights of the last update stay" if loaded is None else f"{loaded} is loaded, the best that was saved"
    warn_user(f"{told}: {kept}.\n\nHint: {way_out}.")


def tell_of_no_evaluation(args: TrainingArguments, state: TrainerState) -> None:
    """Warn of a delay that lasts until the run's end, where transformers evaluates whatever the interval is."""
    by_steps = args.eval_strategy == "steps"
    done, unit = (state.global_step, "updates") if by_steps else (state.epoch or 0, "epochs")
    if args.eval_strategy == "no" or args.eval_delay <= done or state.global_step < state.max_steps:
        return
    if not any(name.startswith("eval_") for entry in state.log_history for name in entry):
        warn_user(
            f"The training has evaluated nothing: it ended after {done:g} {unit}, "
            f"with `{shown('eval_delay', args.eval_delay)}`.\n\nHint: set a lower one."
        )


def note_best_checkpoint(
    state: TrainerState,
    path_of: Callable[[int], str],
    current: str,
    was_written: Callable[[str], bool] = os.path.exists,
) -> None:
    """Store the path of the best update's checkpoint in the state, if it is the current one or this run wrote it.

    A folder of that name may belong to another run.
    """
    if not state.best_global_step:
        return
    path = path_of(state.best_global_step)
    if path == current or was_written(path):
        state.best_model_checkpoint = path
