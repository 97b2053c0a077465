"""Sharded states in a checkpoint: every process writes its part, and any number of processes reads them.

The folders have the names that Accelerate gives them. Nothing is gathered: neither memory nor time grow with the model
on one process.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save

from hf_compat.checkpoint.contents import Contents
from hf_compat.checkpoint.dcp_reader import METADATA_NAME, States, open_dcp, read_dcp
from hf_compat.checkpoint.reading import LoadResult
from hf_compat.runtime.collectives import is_distributed

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"


def has_model_shards(folder: str) -> bool:
    """Return whether a checkpoint holds its weights as shards."""
    return _has_shards(folder, MODEL_FOLDER)


def has_optimizer_shards(folder: str) -> bool:
    """Return whether a checkpoint holds the optimizer's state as shards."""
    return _has_shards(folder, OPTIMIZER_FOLDER)


def write_model_shards(folder: str, model: nn.Module) -> None:
    """Write this process's part of the weights."""
    save({"model": get_model_state_dict(model)}, checkpoint_id=os.path.join(folder, MODEL_FOLDER))


def write_optimizer_shards(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write this process's part of the optimizer's state."""
    state = get_optimizer_state_dict(model, optimizer)
    save({"optimizer": state}, checkpoint_id=os.path.join(folder, OPTIMIZER_FOLDER))


def read_model_shards(folder: str, model: nn.Module) -> LoadResult:
    """Load a model, sharded or whole, from shards that any number of processes wrote."""
    state = {"model": get_model_state_dict(model)}
    _read(state, folder, MODEL_FOLDER)
    result: LoadResult = set_model_state_dict(model, state["model"])
    return result


def read_optimizer_shards(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the state of an optimizer, of a sharded or whole model."""
    dcp = open_dcp(Contents(folder), OPTIMIZER_FOLDER)
    named: States = dict(get_optimizer_state_dict(model, optimizer))
    # The names of parameters of which a folder holds states, and whatever else stands before a full stop
    before = "optimizer.state."
    keys = [key.removeprefix(before) for key in dcp.index.state_dict_metadata if key.startswith(before)]
    known = {
        key[:end] for key in keys for end, letter in enumerate(key) if letter == "."
    }  # a parameter that has had no gradient is not among them
    state = {"optimizer": {**named, "state": {name: named["state"][name] for name in named["state"] if name in known}}}
    read_dcp(dcp, state, in_one_process=not is_distributed())
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=StateDictOptions(strict=False))


def _has_shards(folder: str, subfolder: str) -> bool:
    return Contents(folder).find(f"{subfolder}/{METADATA_NAME}") is not None


def _read(state: States, folder: str, subfolder: str) -> None:
    read_dcp(open_dcp(Contents(folder), subfolder), state, in_one_process=not is_distributed())
