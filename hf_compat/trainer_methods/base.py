"""What the parts of a steps share: the attributes that HF's Trainer has and others read or write. HF words only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_compat.data.types import Collator
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.optim.label_smoothing import LabelSmoother
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade


class TrainerBase:
    """Attributes of a steps. All are plain and writable, and read at the moment of use.

    Mirrors:
        The attributes of `transformers.Trainer`, 5.23.
    """

    args: Any  # TrainingArguments, or an object of the same shape
    model: nn.Module
    model_wrapped: nn.Module
    accelerator: AcceleratorFacade
    state: TrainerState
    control: TrainerControl
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    data_collator: Collator
    train_dataset: Any
    eval_dataset: Any
    label_names: list[str]
    label_smoother: LabelSmoother | None
    can_return_loss: bool
    model_accepts_loss_kwargs: bool
    compute_loss_func: Callable[..., torch.Tensor] | None
    compute_metrics: Any  # a function, a torchmetrics object, or a dict of these
    preprocess_logits_for_metrics: Callable[..., Any] | None
    optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None

    # Whether compute_loss divides by the window already; None decides by the model and compute_loss_func.
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
