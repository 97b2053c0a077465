"""What the engine asks of whoever owns the steps, and whom it tells about them. Protocols only.

`Trainer` and `NativeSteps` satisfy `TrainingSteps`; `HFBridge` satisfies `UpdateObserver`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

GradNorm = torch.Tensor | float | None


class TrainingSteps(Protocol):
    """The overridable steps of a run."""

    args: Any
    model: nn.Module
    model_wrapped: nn.Module
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    current_gradient_accumulation_steps: int

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns the detached loss."""

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """One evaluation batch; returns loss, logits, labels."""

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of one window and the number of items in them."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `optimizer` and `lr_scheduler`."""

    def _prepare_input(self, data: Any) -> Any: ...

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor: ...

    def _get_grad_norm(self, model: nn.Module, grad_norm: GradNorm = None) -> GradNorm: ...

    def _get_learning_rate(self) -> float: ...


class UpdateObserver(Protocol):
    """Whoever is told what happens inside an update, where Lightning has no hook."""

    def micro_batch_done(self, loss: torch.Tensor, inputs: Any) -> None:
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
    """Nobody is told: `HFModule` in a trainer without `HFBridge`."""

    def micro_batch_done(self, loss: torch.Tensor, inputs: Any) -> None: ...

    def substep_ended(self) -> None: ...

    def optimizer_stepped(self, grad_norm: GradNorm) -> None: ...

    def learning_rate_read(self, learning_rate: float) -> None: ...

    def should_break(self) -> bool:
        return False
