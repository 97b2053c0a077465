"""What the engine asks of the object that owns the steps, and what it reports to an observer. Protocols only.

`Trainer` and `NativeSteps` satisfy `TrainingSteps`; `HFBridge` satisfies `UpdateObserver`.
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
Items = torch.Tensor | int | None  # of a window: what its loss is divided by
Schedule = LRScheduler | ReduceLROnPlateau


class Gatherer(Protocol):
    """What an evaluation asks of the object that HF's steps know as `accelerator`."""

    @property
    def num_processes(self) -> int:
        """Processes that train together."""

    @property
    def process_index(self) -> int:
        """Rank of this process."""

    @property
    def is_alone(self) -> bool:
        """Whether `gather` and `pad_across_processes` give what they get: one process, and nobody replaced them."""

    def gather(self, tensor: Nested) -> Nested:
        """Return what all processes hold, joined along the first dimension."""

    def pad_across_processes(self, tensor: Nested, dim: int = 0, pad_index: int = 0) -> Nested:
        """Pad to the longest of all processes."""


class Accelerator(Gatherer, Protocol):
    """What a fit sets on it besides."""

    run_backward: Callable[..., None] | None  # of a loss, with options of torch's
    sync_gradients: bool


class PredictionSteps(Protocol):
    """What an evaluation asks of the owner of the steps: a Trainer, or `NativeSteps`."""

    model: nn.Module

    @property
    def args(self) -> TrainingArguments:
        """The training arguments."""

    @property
    def accelerator(self) -> Gatherer:
        """What exchanges results between the processes."""

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Nested | None, Nested | None]:
        """One evaluation batch; returns loss, logits, labels."""

    def _prepare_input(self, data: Batch) -> Batch: ...


class TrainingSteps(PredictionSteps, Protocol):
    """The overridable steps of a run."""

    model_wrapped: nn.Module
    current_gradient_accumulation_steps: int

    @property
    def accelerator(self) -> Accelerator:
        """How the processes of the run work together."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, from `create_optimizer_and_scheduler` on."""

    @property
    def lr_scheduler(self) -> Schedule | None:
        """The schedule of the learning rate."""

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Items = None) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns the detached loss."""

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Items]:
        """The micro-batches of one window and the number of items in them."""

    def compiled(self, model: nn.Module) -> nn.Module:
        """The model as steps call it, compiled where the arguments say so."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `optimizer` and `lr_scheduler`."""

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor: ...

    def _get_grad_norm(self, model: nn.Module, grad_norm: GradNorm = None) -> GradNorm: ...

    def _get_learning_rate(self) -> float: ...


class UpdateObserver(Protocol):
    """What the engine calls within an update, where Lightning has no hook."""

    def micro_batch_done(self, loss: torch.Tensor, inputs: Batch) -> None:
        """A micro-batch's backward pass is done."""

    def substep_ended(self) -> None:
        """A micro-batch that was not the last of its update has ended."""

    def optimizer_stepped(self, grad_norm: GradNorm) -> None:
        """The optimizer has stepped; gradients are still there."""

    def learning_rate_read(self, learning_rate: float) -> None:
        """The learning rate of the update that was just made, read before the schedule moves on."""

    def should_break(self) -> bool:
        """Whether the rest of the window is left out."""


class SilentObserver:
    """An observer that does nothing: `HFModule` in a trainer without `HFBridge`."""

    def micro_batch_done(self, loss: torch.Tensor, inputs: Batch) -> None: ...

    def substep_ended(self) -> None: ...

    def optimizer_stepped(self, grad_norm: GradNorm) -> None: ...

    def learning_rate_read(self, learning_rate: float) -> None: ...

    def should_break(self) -> bool:
        return False
