"""`TrainerBase` declares the attributes of a Trainer, for the groups of its methods.

`TrainerApi` declares the methods that the objects of a run call. A group inherits from the others whose methods it
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from hf_compat.callbacks.callback_set import CallbackSet
from hf_compat.checkpoint.model_state import ModelState
from hf_compat.hf.search import HPSearchBackend, Trial
from hf_compat.hub.pushes import Pushes
from hf_compat.plan.translate import CurrentPlan
from hf_compat.runtime.inspection import delegated
from hf_compat.runtime.nested import Nested
from hf_compat.trainer_methods.dataloaders import DataloaderMethods
from hf_compat.trainer_methods.lightning_options import CheckedOptions
from hf_compat.trainer_methods.memory import UnmeasuredMemory
from hf_compat.trainer_methods.model import ModelMethods
from hf_compat.trainer_methods.steps import OptimizationMethods, StepMethods
from hf_compat.training_run.interface import TrainerApi
from hf_compat.training_run.resumer import Resumer
from hf_compat.training_run.saver import Saver

if TYPE_CHECKING:

    class _Declared(TrainerApi, Protocol): ...

else:
    _Declared = object


class TrainerBase(StepMethods, ModelMethods, DataloaderMethods, OptimizationMethods, _Declared):
    """Attributes of a Trainer alone, besides those of `TrainerApi`."""

    # for a hyperparameter search
    model_init: Callable[..., nn.Module] | None
    hp_search_backend: HPSearchBackend | None = None
    hp_name: Callable[..., str] | None = None
    _trial: Trial = None
    _own_attributes: frozenset[str] = frozenset()  # the names of the attributes that the constructor has set

    _lightning_options: CheckedOptions
    _pushes: Pushes
    _saver: Saver
    _resumer: Resumer
    _callbacks: CallbackSet
    _plan: CurrentPlan
    _memory_tracker: UnmeasuredMemory
    gather_function: Callable[..., Nested]
    model_preparation_time: float
    _checks_optimizer = False  # whether the optimizer of the fit holds the model's own parameters, not shards
    _fit_model_state: ModelState | None = None  # from the last fit, as DeepSpeed's engine keeps the weights

    # Subclasses of transformers' Trainer read or write these.
    _tr_loss: torch.Tensor = delegated("_run.losses.since_last_log")
    _total_loss_scalar: float = delegated("_run.losses.total")
    _globalstep_last_logged: int = delegated("_run.losses.last_logged")
    _initial_num_input_tokens_seen: int = delegated("_run.tokens_before")
    initial_num_input_tokens_seen_for_session = _initial_num_input_tokens_seen  # its name in 5.0
    _initial_global_step: int = delegated("_run.updates_before")
