"""Reading what a checkpoint holds, without ever running what is in it. Files and tensors only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import safetensors.torch
import torch

from hf_compat.checkpoint import layout as names
from hf_compat.errors import CheckpointError

Weights = dict[str, torch.Tensor]
Plain = Any  # tensors and plain containers: what a file holds, its reader knows
Allowed = Sequence[Any]  # as torch lists safe globals: types and functions, or one of these with another name
COMPILED = "_orig_mod."  # what torch.compile puts into the names of weights


class LoadResult(Protocol):
    """What torch answers when weights were loaded."""

    @property
    def missing_keys(self) -> list[str]: ...

    @property
    def unexpected_keys(self) -> list[str]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint that is not in memory.

    Args:
        name: Its name.
        nbytes: Its size, bytes.
        load: Reads it.
    """

    name: str
    nbytes: int
    load: Callable[[], torch.Tensor]


def read_torch_file(path: str, allowed: Allowed = (), mmap: bool = False) -> Plain:
    """Read a file that `torch.save` wrote, as tensors and plain containers.

    Args:
        path: The file.
        allowed: Further types that may be in it.
        mmap: Leave tensors on disk until they are used.

    Raises:
        CheckpointError: It is damaged, or holds anything else; nothing of it is run.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch and pickle raise what they like; the file is the fact
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def read_safetensors(path: str) -> Weights:
    """Read weights from a safetensors file.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        return safetensors.torch.load_file(path, device="cpu")
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def read_weights(folder: str) -> Weights:
    """Read a folder's weights: one file, or the shards of an index.

    Raises:
        CheckpointError: There are none, one is damaged, or an index names a file outside the folder.
    """
    for name, read in ((names.SAFE_WEIGHTS_NAME, read_safetensors), (names.WEIGHTS_NAME, read_torch_file)):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return plain_names(read(path))
    for name in (names.SAFE_WEIGHTS_INDEX_NAME, names.WEIGHTS_INDEX_NAME):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return plain_names(_read_shards(folder, path))
    raise CheckpointError(
        f"Can't find a valid checkpoint at {folder}: it has no {names.SAFE_WEIGHTS_NAME}.\n\n"
        "Hint: name a checkpoint-<updates> folder."
    )


def plain_names(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Take out of names what `torch.compile` puts into them, so that a model reads them compiled or not."""
    return {name.replace(COMPILED, ""): tensor for name, tensor in weights.items()}


def names_of(model: torch.nn.Module, weights: Weights) -> Weights:
    """Name weights as a model does; parts of it may be compiled."""
    own = {name.replace(COMPILED, ""): name for name in model.state_dict() if COMPILED in name}
    return {own.get(name, name): tensor for name, tensor in weights.items()} if own else weights


def shard_names(index: str) -> list[str]:
    """List the files that an index names.

    Raises:
        CheckpointError: It is no index, or names a file outside its folder.
    """
    try:
        with open(index, encoding="utf-8") as file:
            shards = sorted(set(json.load(file)["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is no readable index: {first_line(error)}") from error
    for shard in shards:
        if os.path.basename(shard) != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{index} names the file {shard!r}, which is outside the checkpoint.")
    return shards


def _read_shards(folder: str, index: str) -> Weights:
    weights: Weights = {}
    for shard in shard_names(index):
        path = os.path.join(folder, shard)
        weights |= read_safetensors(path) if shard.endswith(".safetensors") else read_torch_file(path)
    return weights


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
