"""One trial of a search: what it begins with, its objective, and what is given back after it. HF words."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from numbers import Real

import torch

from hf_compat.errors import OverrideError, SearchError
from hf_compat.runtime.text import shown
from hf_compat.trainer_methods.base import Metrics, Objective, TrainerBase, Trial


def run_trial(trainer: TrainerBase, trial: Trial) -> Objective:
    """Train a trial, and evaluate it where the training has not.

    Returns:
        The objective of the last evaluation.
    """
    trainer.objective = None
    trainer.train(resume_from_checkpoint=None, trial=trial)
    return objective_of_trial(trainer)


def objective_of_trial(trainer: TrainerBase) -> Objective:
    """Return the objective of a trial's last evaluation; one is made where training made none."""
    if getattr(trainer, "objective", None) is None:
        trainer.objective = checked_objective(trainer, trainer.evaluate())
    return trainer.objective


def checked_objective(trainer: TrainerBase, metrics: Metrics) -> Objective:
    """Compute the objective of an evaluation.

    Raises:
        OverrideError: `compute_objective` gives no number, and no numbers either.
    """
    objective = trainer.compute_objective(metrics.copy())
    values = objective if isinstance(objective, Sequence) and not isinstance(objective, str) else [objective]
    if values and all(_is_number(value) for value in values):
        return objective
    known = ", ".join(metrics)
    raise OverrideError(
        f"`{shown('compute_objective', objective)}` is no number; the evaluation gave {known}.\n\n"
        "Hint: return a number, or a list of numbers where the search has several directions."
    )


def _is_number(value: object) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_scalar or (isinstance(value, Real) and not isinstance(value, complex)) or hasattr(value, "__float__")


def is_better(objective: float, best: float | None, direction: str) -> bool:
    """Return whether an objective is better than the best so far; NaN never is."""
    if best is None or math.isnan(best):
        return True
    return objective < best if direction == "minimize" else objective > best


def release_model(trainer: TrainerBase) -> None:
    """Let go of a trial's model and optimizer, so that the next trial's has the memory.

    Mirrors:
        What `transformers.integrations.run_hp_search_optuna` does after a trial, 5.23: `trainer.model` is None then.
    """
    trainer.model = trainer.model_wrapped = None  # type: ignore[assignment]  # as upstream, until the next `train`
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.lightning_trainer = trainer._fit_model_state = trainer._compiled_model = None  # they hold the model, too
    handler = trainer.callback_handler
    handler.model = handler.optimizer = handler.lr_scheduler = None
    trainer.accelerator.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_model_is_there(model: object) -> None:
    """Say what has become of a search's last model, where somebody evaluates it.

    Raises:
        SearchError: It was let go.
    """
    if model is None:
        raise SearchError(
            "The Trainer has no model: the search has let go of its last trial's.\n\n"
            "Hint: set the arguments of the best run, call `train()`, then evaluate; or load the best run's checkpoint."
        )
