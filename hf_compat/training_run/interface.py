"""`TrainerApi`: what the objects of a run call and read of the Trainer that owns them. They know nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import lightning.pytorch as pl
import torch
from torch import nn

import hf_compat.upstream  # noqa: F401 - loads Lightning
from hf_compat.checkpoint.model_state import ModelState
from hf_compat.checkpoint.reading import Weights
from hf_compat.data.types import Batch, Collator, DataSource
from hf_compat.engine.windows import Accelerator, TrainingSteps
from hf_compat.hf.callbacks import Callback, CallbackHandler
from hf_compat.hf.search import Metrics, Objective, Space, Trial
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.signals import StopSignals
from hf_compat.training_run.run import TrainingRun


class LightningCallbacks(Protocol):
    """A Trainer's callbacks, of which Lightning's have states. `order` has those of both kinds."""

    lightning: list[pl.Callback]
    order: list[pl.Callback | Callback]


class RunAccelerator(Accelerator, Protocol):
    """The attributes of the Trainer's `accelerator` that a run reads."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None: ...
    def unwrap_model(self, model: nn.Module) -> nn.Module: ...
    def clear(self) -> object: ...


class _Pushes(Protocol):
    unpushed: str | None

    def push_checkpoint(self, folder: str) -> None: ...


class TrainerApi(TrainingSteps, Protocol):
    """The Trainer, as seen by the objects that do its work. Subclasses may override the methods.

    The table `STAGES` names those that load a checkpoint.
    """

    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    processing_class: object
    data_collator: Collator
    stop_signals: StopSignals
    lightning_trainer: pl.Trainer | None
    is_in_train: bool
    current_flos: float
    hub_model_id: str | None
    hp_space: Callable[..., Space]
    compute_objective: Callable[[Metrics], Objective]
    _search_direction: str | list[str] | None  # of a search that is under way
    objective: Objective
    _run: TrainingRun
    _train_batch_size: int
    _fit_model_state: ModelState | None
    _compiled_model: nn.Module | None

    @property
    def accelerator(self) -> RunAccelerator: ...
    @property
    def _callbacks(self) -> LightningCallbacks: ...
    @property
    def _model_state(self) -> ModelState: ...
    @property
    def _pushes(self) -> _Pushes: ...

    # Callbacks and logs
    def add_callback(self, callback: Callback) -> None: ...
    def pop_callback(self, callback: Callback) -> Callback: ...
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None: ...
    def _log_of_lightning(self, metrics: Mapping[str, float], step: int | None) -> None: ...
    def is_world_process_zero(self) -> bool: ...

    # Training and evaluation
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Trial = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> object: ...
    def evaluate(
        self, eval_dataset: DataSource = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Metrics: ...
    def _evaluate(
        self, trial: Trial, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> Metrics: ...
    @property
    def _maybe_log_save_evaluate(self) -> Callable[..., None]: ...  # overrides of any release have its arguments
    def _refuse_late_overrides(self) -> None: ...
    def _hp_search_setup(self, trial: Trial) -> None: ...
    def _report_to_hp_search(self, trial: Trial, step: int, metrics: Metrics) -> None: ...
    def _call_wrap_model(self, training: bool) -> None: ...
    def store_flos(self) -> None: ...
    def floating_point_ops(self, inputs: Batch) -> int: ...
    def _track_num_input_tokens(self, inputs: Batch) -> None: ...
    def get_sp_size(self) -> int: ...

    # Saving and pushing
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...
    def _save(self, output_dir: str | None = None, state_dict: Weights | None = None) -> None: ...
    def _save_checkpoint(self, model: nn.Module, trial: Trial) -> None: ...
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...
    def _save_scaler(self, output_dir: str) -> None: ...
    def _save_rng_state(self, output_dir: str) -> None: ...
    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None: ...
    def _sorted_checkpoints(
        self, output_dir: str | None = None, checkpoint_prefix: str = ..., use_mtime: bool = False
    ) -> list[str]: ...
    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None: ...
    def push_to_hub(self, commit_message: str | None = ..., *, revision: str | None = None) -> object: ...
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None: ...
