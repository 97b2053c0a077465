"""A model that every process holds whole: one device, or DDP. torch words only."""

from __future__ import annotations

import os

import torch
from torch import nn

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.model_state.base import OptimizerState, TorchState, WeightsWriter
from hf_compat.checkpoint.reading import LoadResult, Weights, names_of
from hf_compat.checkpoint.torch_writer import save_torch


class PlainState(TorchState):
    """Whole weights, and an optimizer with the state of all of them."""

    can_be_copied = True

    @property
    def _uncompiled(self) -> nn.Module:
        inner = getattr(self.model, "_orig_mod", self.model)
        assert isinstance(inner, nn.Module)
        return inner

    def whole_weights(self) -> Weights:
        return self._uncompiled.state_dict()

    def write_weights(self, folder: str, write: WeightsWriter, for_checkpoint: bool) -> None:
        write(folder)  # it asks the model itself

    def write_optimizer(self, folder: str, optimizer: torch.optim.Optimizer, is_writer: bool) -> None:
        if is_writer:
            save_torch(optimizer.state_dict(), os.path.join(folder, names.OPTIMIZER_NAME))

    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        return optimizer.state_dict()

    def set_weights(self, weights: Weights) -> LoadResult:
        model = self._uncompiled
        return model.load_state_dict(names_of(model, weights), strict=False)

    def _set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
        optimizer.load_state_dict(state)
