"""DeepSpeed's engine: what this package calls on it, and how it is recognised. DeepSpeed itself is not imported."""

from __future__ import annotations

from typing import Protocol, TypeGuard

import torch
from torch import nn


class DeepSpeedEngine(Protocol):
    """The members of `deepspeed.DeepSpeedEngine`, 0.19, that are used."""

    module: nn.Module
    checkpoint_engine: object  # what reads and writes its files

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool = True) -> torch.Tensor: ...

    def step(self) -> None: ...

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def get_global_grad_norm(self) -> float | None: ...

    def save_checkpoint(self, save_dir: str) -> bool: ...

    def load_checkpoint(self, load_dir: str, tag: str, *, load_lr_scheduler_states: bool = True) -> object: ...

    def load_universal_checkpoint(self) -> bool: ...

    def zero_optimization_partition_weights(self) -> bool: ...

    def _zero3_consolidated_16bit_state_dict(self) -> dict[str, torch.Tensor] | None: ...


def is_deepspeed_engine(model: object) -> TypeGuard[DeepSpeedEngine]:
    """Return whether a model is DeepSpeed's engine."""
    return type(model).__name__ == "DeepSpeedEngine"


def is_partitioned(model: nn.Module) -> bool:
    """Return whether ZeRO-3 has spread a model's parameters over the processes."""
    parameter = next(model.parameters(), None)
    return hasattr(parameter, "ds_id")
