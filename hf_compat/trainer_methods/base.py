"""The attributes that a Trainer and native mode share, and what both find out about their model and set on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_compat.data.collators import PaddingCollator, default_data_collator
from hf_compat.data.types import Collator, DataSource
from hf_compat.engine.strategies import compiled
from hf_compat.errors import ArgumentError, warn_user
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.interop.transformers_models import loss_shifts_labels, pads_itself, takes_loss_keywords, unwrap_peft
from hf_compat.optim.label_smoothing import LabelSmoother
from hf_compat.plan.translate import compilation_of
from hf_compat.runtime.inspection import accepted_parameters, can_return_loss, find_labels, uncompiled
from hf_compat.runtime.module_tree import ModuleTree
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.training_run.run import TrainingRun

ModelOutput = Any  # any result of the user's model
Dataset = DataSource  # for evaluation also a dict of several
ProcessingClass = Any  # a tokenizer, a processor, or any object with their methods
MetricSource = Any  # a function of predictions, torchmetrics, a function that makes them, or a dict of these
# An HF callback (ours, transformers' own, or a similar one), a Lightning callback or logger, or a class of these.
AnyCallback = Any


class StepsBase:
    """Attributes of a Trainer and of native mode, and the methods that depend on the model.

    Attributes are plain and read when used, so a subclass may replace them.

    Mirrors:
        The attributes of `transformers.Trainer`.
    """

    args: TrainingArguments
    model: nn.Module
    model_wrapped: nn.Module
    _called: nn.Module | None = None  # a native module sets itself, if its own forward calls the model
    accelerator: AcceleratorFacade
    state: TrainerState
    control: TrainerControl
    optimizer: Any  # torch's or any other optimizer, or None at first
    lr_scheduler: Any  # torch's schedule or an object with its methods, or None at first
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
    _run: TrainingRun  # of a Trainer only
    _loss_shifts_labels: bool
    _signature_columns: list[str] | None
    _train_batch_size: int
    _created_lr_scheduler: bool
    _asks_for_count: bool = False  # whether the next micro-batch finds out if its loss depends on the items counted
    _ignored_count: tuple[str, str] | None = None  # what was found, and the way out
    _optimizer_made_of: nn.Module | None = None  # the model of which an optimizer was made, until it is trained with
    _own_optimizer: object = None  # the optimizer that this object has made, or has trained with
    _compiled_model: nn.Module | None = None  # reused by a second `train()`
    _tree: ModuleTree  # of the model that is trained
    _counted_parameters: tuple[nn.Module, int] | None = None  # a model and its size, for floating-point operations

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
        self._tree = ModuleTree()
        self.is_in_train = False
        self.current_flos = 0
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._train_batch_size = self.args.train_batch_size
        self._signature_columns = None
        self._created_lr_scheduler = False

    def _introspect(self) -> None:
        """Inspect the model's inputs and outputs."""
        model = model_with_forward(self)
        accepts = getattr(model, "accepts_loss_kwargs", None)
        accepts = takes_loss_keywords(model) if accepts is None else accepts
        if accepts is None:
            accepts = accepted_parameters(model.forward).takes_any_keyword
        # sequences that processes share are weighted by their own counts
        self.model_accepts_loss_kwargs = accepts and self.accelerator.sequence is None
        labels = self.args.label_names
        self.label_names = find_labels(type(model)) if labels is None else labels
        self.can_return_loss = can_return_loss(type(model))
        self._loss_shifts_labels = loss_shifts_labels(model)
        self.label_smoother = None
        if self.args.label_smoothing_factor != 0:
            if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
                warn_user(
                    "Label smoothing is not compatible with multi-label classification and is off for this Trainer.",
                )
            else:
                self.label_smoother = LabelSmoother(epsilon=self.args.label_smoothing_factor)

    def compiled(self, model: nn.Module) -> nn.Module:
        """Compile a model if the arguments ask for it, once for each model."""
        held = self._compiled_model
        if held is None or uncompiled(held) is not model:
            how = compilation_of(self.args)
            held = self._compiled_model = None if how is None else compiled(model, how)
        return model if held is None else held

    def _set_use_cache(self) -> None:
        """Set `use_cache` in the model's configuration, which changes the last bits of gradients.

        None keeps the model's own value. As in transformers 4.x, activation checkpointing switches the cache off.
        """
        config = getattr(self.model, "config", None)
        if config is not None and self.args.use_cache is not None:
            config.use_cache = self.args.use_cache
        elif getattr(config, "use_cache", False) and self.args.activation_checkpointing:
            self.model.config.use_cache = False  # type: ignore[union-attr]  # it has one

    def _enable_activation_checkpointing(self) -> None:
        options = dict(self.args.activation_checkpointing_kwargs or {})  # type: ignore[arg-type]  # a dict once normalised
        enable = getattr(self.model, "activation_checkpointing_enable", None)
        if callable(enable):
            enable(
                every_n_layers=options.pop("every_n_layers", 1),
                offload=options.pop("offload", False),
                activation_checkpointing_kwargs=options or None,
            )
            return
        enable = getattr(self.model, "gradient_checkpointing_enable", None)
        if not callable(enable):
            raise ArgumentError(
                "`gradient_checkpointing=True` (newer name: `activation_checkpointing`), but "
                f"{type(self.model).__name__} has no method to enable it.\n\n"
                "Hint: add `gradient_checkpointing_enable(gradient_checkpointing_kwargs=None)` to the model."
            )
        enable(gradient_checkpointing_kwargs=options or None)


def model_with_forward(steps: StepsBase) -> nn.Module:
    """Unwrap the module whose forward determines the columns of a batch and the divisor of a loss."""
    return unwrap_peft(steps.accelerator.unwrap_model(steps.model if steps._called is None else steps._called))
