"""Checkpoints from one form into another: HF folder, Lightning `.ckpt`, sharded (DCP) folders. Lightning words only."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_compat.engine.checkpoint_io import PREFIX, from_hf, to_hf, write_weights
from hf_compat.errors import ArgumentError, CheckpointError
from hf_compat.hf import checkpoint_dir as names
from hf_compat.recipe.reading import read_torch_file

SHARD_BYTES = 5 * 10**9


def convert(source: str, target: str, shard_bytes: int = SHARD_BYTES) -> str:
    """Convert a checkpoint; what kind each side is follows from its form and name.

    Args:
        source: A Lightning `.ckpt` of an `HFModule`, an HF folder, or a folder of torch.distributed.checkpoint shards.
        target: A path that ends in `.ckpt`, or a folder; it must not exist.
        shard_bytes: Size of the weight files that come from shards, bytes; no more than one is held in memory.

    Returns:
        What was done, in words.

    Raises:
        ArgumentError: The target exists, or there is nothing to convert between these two.
        CheckpointError: The source is not whole, or not readable.
    """
    if os.path.exists(target):
        raise ArgumentError(f"{target} exists and is not overwritten.\n\nHint: name a new path.")
    to_lightning = target.endswith(".ckpt")
    if os.path.isfile(os.path.join(source, ".metadata")) and not to_lightning:
        count = _join_shards(source, target, shard_bytes)
        return f"{count} tensors of the shards in {source} are weights in {target}"
    if os.path.isdir(source) and to_lightning:
        partial = target + ".partial"
        torch.save(from_hf(source), partial)
        os.replace(partial, target)
        return f"the HF folder {source} is the Lightning checkpoint {target}"
    if os.path.isfile(source) and not to_lightning:
        to_hf(read_torch_file(source), target)
        return f"the Lightning checkpoint {source} is the HF folder {target}"
    raise ArgumentError(
        f"There is nothing to convert from {source} to {target}.\n\n"
        "Hint: name a .ckpt file and a folder, in either order, or a folder of shards and a folder."
    )


def _join_shards(source: str, target: str, shard_bytes: int) -> int:
    """Write the tensors of a sharded checkpoint as safetensors with an index, one file's worth in memory at a time."""
    partial = target + ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    placed: dict[str, str] = {}
    total_bytes = 0
    files = list(_grouped(_tensor_sizes(source), shard_bytes))
    for number, keys in enumerate(tqdm(files, desc="weight files"), start=1):
        weights = _load_tensors(source, keys)
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_weights(weights, os.path.join(partial, file))
        placed |= dict.fromkeys(weights, file)
        total_bytes += sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": placed}
    with open(os.path.join(partial, names.SAFE_WEIGHTS_INDEX_NAME), "w", encoding="utf-8") as text:
        json.dump(index, text, indent=2)
    os.replace(partial, target)
    return len(placed)


def _metadata(source: str) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    # Written by torch as a pickle, and read by torch as one; nothing but torch's own classes is let through.
    try:
        return FileSystemReader(source).read_metadata()
    except Exception as error:
        raise CheckpointError(f"{source} has no readable .metadata: {error}") from error


def _tensor_sizes(source: str) -> list[tuple[str, int]]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = _metadata(source).state_dict_metadata.items()
    found = [
        (key, entry.size.numel() * entry.properties.dtype.itemsize)
        for key, entry in entries
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(("optim", "optimizer"))
    ]
    if not found:
        raise CheckpointError(f"{source} holds no weights.")
    return found


def _grouped(sizes: list[tuple[str, int]], shard_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    filled = 0
    for key, size in sizes:
        if group and filled + size > shard_bytes:
            yield group
            group, filled = [], 0
        group.append(key)
        filled += size
    if group:
        yield group


def _load_tensors(source: str, keys: list[str]) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.state_dict_loader import load

    entries = _metadata(source).state_dict_metadata
    state = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in keys}
    load(state, checkpoint_id=source, no_dist=True)
    return {_plain_name(key): tensor for key, tensor in state.items()}


def _plain_name(key: str) -> str:
    """Return a weight's name in the model: without what wrappers and Lightning put before it."""
    for prefix in ("app.", "state_dict.", "model_state.", PREFIX):
        key = key.removeprefix(prefix)
    return key
