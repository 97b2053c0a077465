"""Checkpoints from one form into another: HF folder, Lightning `.ckpt`, shards. Lightning words."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.lightning_io import from_hf, to_hf, write_weights
from hf_compat.checkpoint.reading import first_line, read_torch_file
from hf_compat.checkpoint.zero_reader import StoredTensor, find_zero_folder, zero_tensors
from hf_compat.errors import ArgumentError, CheckpointError

SHARD_BYTES = 5 * 10**9
# What wrappers put before a weight's name; taken away where every name has it.
WRAPPER_PREFIXES = ("app.", "state_dict.", "_forward_module.", "module.", "model.")


def convert(source: str, target: str, shard_bytes: int = SHARD_BYTES, keep_names: bool = False) -> str:
    """Convert a checkpoint; what kind each side is follows from its form and name.

    Args:
        source: A Lightning `.ckpt` of an `HFModule`, an HF folder, or a folder of shards: DeepSpeed's ZeRO 1 to 3, or
            torch.distributed.checkpoint's (FSDP).
        target: A path that ends in `.ckpt`, or a folder; it must not exist.
        shard_bytes: Size of the weight files that come from shards, bytes; no more than one is held in memory.
        keep_names: Leave the weights' names as the shards have them.

    Returns:
        What was done, in words.

    Raises:
        ArgumentError: The target exists, or there is nothing to convert between these two.
        CheckpointError: The source is not whole, or not readable.
    """
    if os.path.exists(target):
        raise ArgumentError(f"{target} exists and is not overwritten.\n\nHint: name a new path.")
    to_lightning = target.endswith(".ckpt")
    stored = None if to_lightning else _shards(source)
    if stored is not None:
        count = _write_shards(stored, target, shard_bytes, keep_names)
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


def _shards(source: str) -> list[StoredTensor] | None:
    """List the tensors of a folder of shards; None for anything else."""
    if not os.path.isdir(source):
        return None
    if os.path.isfile(os.path.join(source, ".metadata")):
        return _dcp_tensors(source)
    zero = find_zero_folder(source)
    return zero_tensors(zero) if zero is not None else None


def _write_shards(stored: list[StoredTensor], target: str, shard_bytes: int, keep_names: bool) -> int:
    """Write tensors as safetensors with an index, one file's worth in memory at a time."""
    if not stored:
        raise CheckpointError("The shards hold no weights.")
    partial = target + ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    prefix = "" if keep_names else _common_prefix([tensor.name for tensor in stored])
    groups = list(_grouped(stored, shard_bytes))
    placed: dict[str, str] = {}
    total_bytes = 0
    for number, group in enumerate(tqdm(groups, desc="weight files"), start=1):
        weights = {tensor.name.removeprefix(prefix): tensor.load() for tensor in group}
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_weights(weights, os.path.join(partial, file))
        placed |= dict.fromkeys(weights, file)
        total_bytes += sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": placed}
    with open(os.path.join(partial, names.SAFE_WEIGHTS_INDEX_NAME), "w", encoding="utf-8") as text:
        json.dump(index, text, indent=2)
    os.replace(partial, target)
    return len(placed)


def _common_prefix(all_names: list[str]) -> str:
    """Return what wrappers have put before every name: each of their prefixes once, in any order."""
    prefix, left = "", list(WRAPPER_PREFIXES)
    while True:
        found = next((p for p in left if all(name.startswith(prefix + p) for name in all_names)), None)
        if found is None:
            return prefix
        left.remove(found)
        prefix += found


def _grouped(stored: list[StoredTensor], shard_bytes: int) -> Iterator[list[StoredTensor]]:
    group: list[StoredTensor] = []
    filled = 0
    for tensor in stored:
        if group and filled + tensor.nbytes > shard_bytes:
            yield group
            group, filled = [], 0
        group.append(tensor)
        filled += tensor.nbytes
    if group:
        yield group


def _dcp_tensors(source: str) -> list[StoredTensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    # torch writes this index as a pickle of its own classes, so that is all that is let through
    check_shard_metadata(os.path.join(source, ".metadata"))
    entries = FileSystemReader(source).read_metadata().state_dict_metadata
    return [
        StoredTensor(
            name=key,
            nbytes=entry.size.numel() * entry.properties.dtype.itemsize,
            load=lambda key=key, entry=entry: _load_dcp(source, key, entry),  # type: ignore[misc]
        )
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(("optim.", "optimizer."))
    ]


_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX_NAMES = {
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((_METADATA, name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "WindowsPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "WindowsPath")),  # Python 3.13's
}


class _IndexOnly(pickle.Unpickler):
    """Reads what torch writes into the index of shards, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_NAMES or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(f"The index of the shards names {module}.{name}, which does not belong there.")


def check_shard_metadata(path: str) -> None:
    """Refuse an index that holds more than torch writes or names files elsewhere, before torch reads it.

    Raises:
        CheckpointError: It does, or it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            places = {info.relative_path for info in (_IndexOnly(file).load().storage_data or {}).values()}
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle raises
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    for place in places:
        if os.path.isabs(place) or ".." in place.replace("\\", "/").split("/"):
            raise CheckpointError(f"{path} names {place!r}, which is outside the checkpoint.")


def _load_dcp(source: str, key: str, entry: Any) -> torch.Tensor:
    from torch.distributed.checkpoint.state_dict_loader import load

    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
    with alone():
        load(state, checkpoint_id=source, no_dist=True)
    return state[key]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Leave out torch's remark that one process reads: it is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
        yield
