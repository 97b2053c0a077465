"""Backends, best run, default spaces and default objective of a hyperparameter search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hf_compat.errors import SearchError
from hf_compat.hf.enums import ExplicitEnum
from hf_compat.hf.metrics import TIMED
from hf_compat.runtime.text import shown

Space = dict[str, Any]  # names and values of arguments, or samplers of ray and wandb
Trial = Any  # the trial object of a search library
Metrics = dict[str, float]
Objective = float | Sequence[float] | None  # several if the search has several directions


class HPSearchBackend(ExplicitEnum):
    """A library that proposes the trials of a search. Mirrors `transformers.trainer_utils.HPSearchBackend`."""

    OPTUNA = "optuna"
    RAY = "ray"
    WANDB = "wandb"


class BestRun(NamedTuple):
    """The best trial of a search.

    Args:
        run_id: The trial's id. Its checkpoints are in `run-<run_id>` unless `hp_name` gives another name.
        objective: The value that it reached, or a list of values for several objectives.
        hyperparameters: The arguments that the trial set.
        run_summary: The backend's summary of the search, such as ray's analysis or the id of wandb's sweep.

    Mirrors:
        `transformers.trainer_utils.BestRun`.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: Space
    run_summary: object = None


def default_compute_objective(metrics: Mapping[str, float]) -> float | None:
    """Sum the metrics besides the evaluation loss. If there are none, the objective is that loss.

    Args:
        metrics: The result of `evaluate`. Durations, rates and the epoch do not count.

    Mirrors:
        `transformers.trainer_utils.default_compute_objective`.

    Differs:
        `eval_model_preparation_time` does not count. An evaluation before the search adds it to all later ones.
    """
    ranked = ranked_metrics(metrics)
    return sum(ranked.values()) if ranked else metrics.get("eval_loss")


def ranked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that the default objective is the sum of."""
    return {k: v for k, v in metrics.items() if k not in ("eval_loss", "epoch") and not k.endswith(TIMED)}


def default_hp_space_optuna(trial: Trial) -> Space:
    """Let optuna propose learning rate, epochs, seed and micro-batch.

    Mirrors:
        `transformers.trainer_utils.default_hp_space_optuna`.
    """
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def hp_params(trial: object) -> Space:
    """Read the hyperparameters of a trial of optuna, or the dict of ray and wandb.

    Raises:
        SearchError: It is neither (a `RuntimeError`).

    Mirrors:
        `transformers.integrations.hp_params`.
    """
    params = trial if isinstance(trial, dict) else getattr(trial, "params", None)
    if not isinstance(params, dict):
        raise SearchError(f"`{shown('trial', trial)}` is not a trial.\n\nHint: pass an optuna trial or a dict.")
    return params
