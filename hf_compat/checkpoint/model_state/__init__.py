"""Choose the `ModelState` for the way in which a strategy holds a model."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_compat.checkpoint.model_state.base import FSDP2State, ModelState, PlainState
from hf_compat.checkpoint.model_state.deepspeed import DeepSpeedState
from hf_compat.interop.deepspeed import is_deepspeed_engine, is_partitioned

__all__ = ["DeepSpeedState", "FSDP2State", "ModelState", "PlainState", "make_model_state"]


def make_model_state(model: nn.Module, wrapped: object = None, writes_shards: bool = False) -> ModelState:
    """Make the object that reads and writes a model's weights and its optimizer's state.

    DeepSpeed's engine, which is the `wrapped` object of a fit, has the weights. FSDP 2 writes shards, or gathers whole
    states.
    """
    if is_deepspeed_engine(wrapped) or is_partitioned(model):
        return DeepSpeedState(model, wrapped if is_deepspeed_engine(wrapped) else None)
    if isinstance(model, FSDPModule):
        return FSDP2State(model, writes_shards)
    return PlainState(model)
