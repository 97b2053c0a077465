"""`TrainerBase` declares the Trainer's attributes, and the methods that its groups call of each other.

The set-up that the Trainer shares with native mode is here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hf_compat.callbacks.callback_set import CallbackSet
from hf_compat.checkpoint.model_state import ModelState
from hf_compat.data.collators import PaddingCollator, default_data_collator
from hf_compat.data.types import Batch, Collator, DataSource, Loader
from hf_compat.engine.module import WindowModule
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.callbacks import CallbackHandler
from hf_compat.hf.metrics import EvalLoopOutput, TrainOutput
from hf_compat.hf.search import HPSearchBackend, Metrics, Objective, Space, Trial
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.hub.pushes import Pushes
from hf_compat.interop.transformers_models import pads_itself
from hf_compat.optim.label_smoothing import LabelSmoother
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.translate import CurrentPlan
from hf_compat.runtime.signals import StopSignals
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.trainer_methods.evaluator import CheckedOptions, Evaluator
from hf_compat.training_run.resumer import Resumer
from hf_compat.training_run.run import TrainingRun
from hf_compat.training_run.saver import Saver

ModelOutput = Any  # any result of the user's model
Dataset = DataSource  # for evaluation also a dict of several
ProcessingClass = Any  # a tokenizer, a processor, or any object with their methods
MetricSource = Any  # a function of predictions, torchmetrics, a function that makes them, or a dict of these
Scheduler = LRScheduler | ReduceLROnPlateau
# An HF callback (ours, transformers' own, or a similar one), a Lightning callback or logger, or a class of these.
AnyCallback = Any


def _attribute_of_run(path: str) -> Any:  # the run's value there, a tensor or a number
    """Make a property for an attribute of transformers' Trainer that the run has here."""
    owner, _, name = path.rpartition(".")

    def keeper(trainer: TrainerBase) -> object:
        return getattr(trainer._run, owner) if owner else trainer._run

    def write(trainer: TrainerBase, value: object) -> None:
        setattr(keeper(trainer), name, value)

    return property(lambda trainer: getattr(keeper(trainer), name), write)


class TrainerBase:
    """Attributes and methods that several groups use. Each group overrides its own methods.

    Attributes are plain and writable. They are read when used, so that subclasses may replace them.

    Mirrors:
        The attributes of `transformers.Trainer`, 5.23.
    """

    args: TrainingArguments
    model: nn.Module
    model_wrapped: nn.Module
    _called: nn.Module | None = None  # a native module sets itself, if its own forward calls the model
    accelerator: AcceleratorFacade
    state: TrainerState
    control: TrainerControl
    optimizer: Any  # torch's or any other optimizer, or None at first
    lr_scheduler: Any  # a `Scheduler` or an object with its methods, or None at first
    processing_class: ProcessingClass
    data_collator: Collator
    train_dataset: Dataset
    eval_dataset: Dataset
    label_names: list[str]
    label_smoother: LabelSmoother | None
    can_return_loss: bool
    model_accepts_loss_kwargs: bool
    compute_loss_func: Callable[..., torch.Tensor] | None
    compute_metrics: MetricSource
    preprocess_logits_for_metrics: Callable[..., Any] | None
    optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None

    # Whether compute_loss divides by the window itself. None derives it from the model and compute_loss_func.
    loss_is_scaled_for_ga: bool | None = None

    current_gradient_accumulation_steps: int
    current_flos: float
    is_in_train: bool
    is_deepspeed_enabled: bool = False
    is_fsdp_enabled: bool = False
    _loss_shifts_labels: bool
    _signature_columns: list[str] | None
    _train_batch_size: int
    _created_lr_scheduler: bool

    # for a hyperparameter search
    model_init: Callable[..., nn.Module] | None
    hp_search_backend: HPSearchBackend | None = None
    hp_name: Callable[..., str] | None = None
    hp_space: Callable[..., Space]
    compute_objective: Callable[[Metrics], Objective]
    objective: Objective
    _trial: Trial = None

    # of a Trainer only, not of native mode
    callback_handler: CallbackHandler
    lightning_trainer: pl.Trainer | None
    _lightning_options: CheckedOptions
    stop_signals: StopSignals
    _run: TrainingRun
    _pushes: Pushes
    _saver: Saver
    _resumer: Resumer
    _callbacks: CallbackSet
    _evaluator: Evaluator
    _plan: CurrentPlan
    _fit_model_state: ModelState | None = None  # from the last fit, as DeepSpeed's engine keeps the weights
    _compiled_model: nn.Module | None = None  # reused by a second `train()`

    def _loading_whole_weights(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    # Attributes of transformers' Trainer that subclasses read or write, and that the run has here.
    _tr_loss = _attribute_of_run("losses.since_last_log")
    _total_loss_scalar = _attribute_of_run("losses.total")
    _globalstep_last_logged = _attribute_of_run("losses.last_logged")
    _initial_num_input_tokens_seen = _attribute_of_run("tokens_before")
    initial_num_input_tokens_seen_for_session = _initial_num_input_tokens_seen  # its name in 5.0
    _initial_global_step = _attribute_of_run("updates_before")

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Trial = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        raise NotImplementedError

    def evaluate(
        self, eval_dataset: Dataset = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Metrics:
        raise NotImplementedError

    def evaluation_loop(
        self,
        dataloader: Loader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        raise NotImplementedError

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, ModelOutput, ModelOutput]:
        raise NotImplementedError

    def _prepare_input(self, data: Batch) -> Batch:
        raise NotImplementedError

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        raise NotImplementedError

    def _log_of_lightning(self, metrics: Mapping[str, Any], step: int | None) -> None:
        raise NotImplementedError

    def store_flos(self) -> None:
        raise NotImplementedError

    def get_eval_dataloader(self, eval_dataset: Dataset = None) -> Loader:
        raise NotImplementedError

    def get_test_dataloader(self, test_dataset: Dataset) -> Loader:
        raise NotImplementedError

    def is_local_process_zero(self) -> bool:
        raise NotImplementedError

    def is_world_process_zero(self) -> bool:
        raise NotImplementedError

    def num_examples(self, dataloader: Loader) -> int:
        raise NotImplementedError

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Batch], torch.Tensor | int | None]:
        raise NotImplementedError

    def _load_rng_state(self, checkpoint: str | None) -> None:
        raise NotImplementedError

    def floating_point_ops(self, inputs: Batch) -> int:
        raise NotImplementedError

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        raise NotImplementedError

    def _get_learning_rate(self) -> float:
        raise NotImplementedError

    def _save_checkpoint(self, model: nn.Module, trial: Trial, metrics: object = None) -> None:
        raise NotImplementedError

    def _evaluate(self, trial: Trial, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False) -> Metrics:
        raise NotImplementedError

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        model: nn.Module,
        trial: Trial,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        raise NotImplementedError

    def _check_arguments_of_trial(self) -> None:
        raise NotImplementedError

    def _hp_search_setup(self, trial: Trial) -> None:
        raise NotImplementedError

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        raise NotImplementedError

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        raise NotImplementedError

    def _finish_current_push(self) -> None:
        raise NotImplementedError

    def _remove_neftune_noise(self) -> None:
        raise NotImplementedError

    def compiled(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

    def _model_with_forward(self) -> nn.Module:
        raise NotImplementedError

    def _wrapped_between_runs(self) -> nn.Module:
        raise NotImplementedError

    def _make_module(self, plan: LightningPlan) -> WindowModule:
        raise NotImplementedError

    def add_callback(self, callback: AnyCallback) -> None:
        raise NotImplementedError

    def pop_callback(self, callback: AnyCallback) -> AnyCallback:
        raise NotImplementedError


class SetupMethods(TrainerBase):
    """The parts of a constructor that do not need the model."""

    def _set_up_data(
        self,
        train_dataset: Dataset,
        eval_dataset: Dataset,
        data_collator: Collator | None,
        processing_class: ProcessingClass,
    ) -> None:
        """Set the data sets and the collator. By default the collator stacks tensors, or the processor pads them."""
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        pads = processing_class is not None and pads_itself(processing_class)
        self.data_collator = data_collator or (PaddingCollator(processing_class) if pads else default_data_collator)

    def _set_up_counters(self) -> None:
        """Set the state and counters of a new run."""
        self.state = TrainerState(
            is_local_process_zero=self.args.local_process_index == 0,
            is_world_process_zero=self.args.process_index == 0,
        )
        self.control = TrainerControl()
        self.is_in_train = False
        self.current_flos = 0
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._train_batch_size = self.args.train_batch_size
        self._signature_columns = None
        self._created_lr_scheduler = False
