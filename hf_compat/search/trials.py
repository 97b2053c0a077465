"""One trial of a search: what it begins with, its objective, and what is given back after it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from numbers import Real
from typing import Protocol

import lightning.pytorch as pl
import torch
from torch import nn

from hf_compat.callbacks.callback_set import CallbackSet
from hf_compat.checkpoint.model_state import ModelState
from hf_compat.errors import OverrideError, SearchError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.callbacks import CallbackHandler
from hf_compat.hf.search import Metrics, Objective, Space, Trial
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.text import shown


class _Accelerator(Protocol):
    def clear(self) -> object: ...


class SearchHost(Protocol):
    """What a search asks of the Trainer whose `train` runs the trials; the methods are override points."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    model: nn.Module
    model_wrapped: nn.Module
    optimizer: object
    lr_scheduler: object
    callback_handler: CallbackHandler
    lightning_trainer: pl.Trainer | None
    objective: Objective
    _callbacks: CallbackSet
    _fit_model_state: ModelState | None
    _compiled_model: nn.Module | None

    @property
    def accelerator(self) -> _Accelerator: ...

    def hp_space(self, trial: Trial) -> Space: ...

    def compute_objective(self, metrics: Metrics) -> Objective: ...

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Trial = None) -> object: ...

    def evaluate(self) -> Metrics: ...

    def add_callback(self, callback: object) -> None: ...

    def pop_callback(self, callback: object) -> object: ...

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None: ...


def run_trial(trainer: SearchHost, trial: Trial) -> Objective:
    """Train a trial, and evaluate it where the training has not.

    Returns:
        The objective of the last evaluation.
    """
    trainer.objective = None
    trainer.train(resume_from_checkpoint=None, trial=trial)
    if getattr(trainer, "objective", None) is None:
        trainer.objective = checked_objective(trainer, trainer.evaluate())
    return trainer.objective


def checked_objective(trainer: SearchHost, metrics: Metrics) -> Objective:
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


def release_model(trainer: SearchHost) -> None:
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
