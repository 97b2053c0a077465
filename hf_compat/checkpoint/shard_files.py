"""Sharded checkpoints: every process writes its part, through torch.distributed.checkpoint, and any number reads them.

The folders have the names that Accelerate gives them. Nothing is gathered: neither memory nor time grow with the model
on one process.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hf_compat.checkpoint.convert import alone, check_shard_metadata
from hf_compat.runtime.collectives import is_distributed

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"


def has_shards(checkpoint: str) -> bool:
    """Say whether a checkpoint holds its weights as shards."""
    return os.path.isfile(os.path.join(checkpoint, MODEL_FOLDER, ".metadata"))


def write_shards(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Write this process's part of the model, and of the optimizer's state where one is given."""
    save({"model": get_model_state_dict(model)}, checkpoint_id=os.path.join(folder, MODEL_FOLDER))
    if optimizer is not None:
        state = get_optimizer_state_dict(model, optimizer)
        save({"optimizer": state}, checkpoint_id=os.path.join(folder, OPTIMIZER_FOLDER))


def read_model_shards(checkpoint: str, model: nn.Module) -> Any:
    """Load a model, sharded or whole, from shards that any number of processes wrote."""
    state = {"model": get_model_state_dict(model)}
    _load(state, os.path.join(checkpoint, MODEL_FOLDER))
    return set_model_state_dict(model, state["model"])


def read_optimizer_shards(checkpoint: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load an optimizer's state, of a sharded or whole model."""
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    _load(state, os.path.join(checkpoint, OPTIMIZER_FOLDER))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _load(state: dict[str, Any], folder: str) -> None:
    check_shard_metadata(os.path.join(folder, ".metadata"))  # torch itself unpickles whatever is there
    with alone():
        load(state, checkpoint_id=folder, no_dist=not is_distributed())
