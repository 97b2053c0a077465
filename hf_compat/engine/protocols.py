"""Protocols between the engine, the owner of the steps, and the observer of updates.

`Trainer` and `NativeSteps` satisfy `TrainingSteps`. `HFBridge` satisfies `UpdateObserver`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hf_compat.data.types import Batch
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.runtime.nested import Nested

GradNorm = torch.Tensor | float | None
Items = torch.Tensor | int | None  # the number that divides a window's loss
Schedule = LRScheduler | ReduceLROnPlateau


class Gatherer(Protocol):
    """What an evaluation needs of the object that HF's steps call `accelerator`."""

    @property
    def num_processes(self) -> int:
        """The number of ranks that train together."""

    @property
    def process_index(self) -> int:
        """Rank of this process."""

    @property
    def is_alone(self) -> bool:
        """Whether `gather` and `pad_across_processes` return their input, as with one process and no override."""

    def gather(self, tensor: Nested) -> Nested:
        """Join the data of all ranks along the first dimension."""

    def pad_across_processes(self, tensor: Nested, dim: int = 0, pad_index: int = 0) -> Nested:
        """Pad to the longest of all ranks."""


class Accelerator(Gatherer, Protocol):
    """A `Gatherer` with the attributes that a fit sets."""

    run_backward: Callable[..., None] | None  # takes the loss and torch's options
    sync_gradients: bool


class PredictionSteps(Protocol):
    """What an evaluation needs of the owner of the steps, a Trainer or `NativeSteps`."""

    model: nn.Module

    @property
    def args(self) -> TrainingArguments:
        """The training arguments."""

    @property
    def accelerator(self) -> Gatherer:
        """Exchanges results between the ranks."""

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Nested | None, Nested | None]:
        """Predict one evaluation batch. Return loss, logits and labels."""

    def _prepare_input(self, data: Batch) -> Batch: ...


class TrainingSteps(PredictionSteps, Protocol):
    """The overridable steps of a run."""

    model_wrapped: nn.Module
    current_gradient_accumulation_steps: int

    @property
    def accelerator(self) -> Accelerator:
        """Describes how the ranks work together."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, once `create_optimizer_and_scheduler` has run."""

    @property
    def lr_scheduler(self) -> Schedule | None:
        """The learning-rate schedule."""

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Items = None) -> torch.Tensor:
        """Run forward and backward of one micro-batch. Return the detached loss."""

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Items]:
        """Return the micro-batches of one window and their number of items."""

    def compiled(self, model: nn.Module) -> nn.Module:
        """Compile the model that the steps call if the arguments ask for it."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `optimizer` and `lr_scheduler`."""

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor: ...

    def _get_grad_norm(self, model: nn.Module, grad_norm: GradNorm = None) -> GradNorm: ...

    def _get_learning_rate(self) -> float: ...


class UpdateObserver(Protocol):
    """Events within an update for which Lightning has no hook."""

    def micro_batch_done(self, loss: torch.Tensor, inputs: Batch) -> None:
        """Note that a micro-batch's backward pass is done."""

    def substep_ended(self) -> None:
        """Note the end of a micro-batch that was not the last of its update."""

    def optimizer_stepped(self, grad_norm: GradNorm) -> None:
        """Note that the optimizer has stepped. The gradients still exist."""

    def learning_rate_read(self, learning_rate: float) -> None:
        """Take the update's learning rate, read before the schedule steps."""

    def should_break(self) -> bool:
        """Whether to skip the rest of the window."""


class SilentObserver:
    """An observer that does nothing, for an `HFModule` in a trainer without `HFBridge`."""

    def micro_batch_done(self, loss: torch.Tensor, inputs: Batch) -> None: ...

    def substep_ended(self) -> None: ...

    def optimizer_stepped(self, grad_norm: GradNorm) -> None: ...

    def learning_rate_read(self, learning_rate: float) -> None: ...

    def should_break(self) -> bool:
        return False
