"""Convert checkpoints between HF folders, Lightning's `.ckpt` and shards."""

from __future__ import annotations

import json
import os

import torch

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.dcp_reader import METADATA_NAME, dcp_tensors
from hf_compat.checkpoint.files import naming, open_regular, reading
from hf_compat.checkpoint.forms import COUNT
from hf_compat.checkpoint.lightning_io import (
    checked_paths,
    from_hf,
    read_lightning,
    to_hf,
    warn_of_left_out,
    write_weights,
    writing,
)
from hf_compat.checkpoint.reading import Contents, StoredTensor
from hf_compat.checkpoint.zero_reader import OPTIMIZERS, named_zero_folder, rank_files, zero_tensors
from hf_compat.errors import ArgumentError, CheckpointError
from hf_compat.runtime.console import progress_bar
from hf_compat.runtime.text import brief

SHARD_BYTES = 5 * 10**9
_TORCH_BEGINS = (b"PK\x03\x04", b"\x80")  # a zip file; before 1.6 a pickle
# Wrappers put these before a weight's name. One that every name has is removed.
WRAPPER_PREFIXES = ("app.", "state_dict.", "_forward_module.", "module.", "model.")


def convert(source: str, target: str, shard_bytes: int = SHARD_BYTES, keep_names: bool = False) -> str:
    """Convert a checkpoint. The form and the name of each path say what kind of checkpoint it is.

    Args:
        source: A Lightning `.ckpt` of an `HFModule`, an HF folder, or a folder of shards: DeepSpeed's ZeRO 1 to 3, or
            torch.distributed.checkpoint's (FSDP).
        target: A path that ends in `.ckpt`, or a folder; it must not exist.
        shard_bytes: Size of the weight files that shards become, in bytes; one at a time is held in memory.
        keep_names: Keep the weights' names as the shards have them.

    Returns:
        What was done, in words.

    Raises:
        ArgumentError: The target exists or cannot be made, or there is nothing to convert between these two.
        CheckpointError: The source is not whole, or not readable.
        CheckpointWriteError: The target could not be written.
    """
    source, target = checked_paths(source, target)
    if not COUNT.holds(shard_bytes) or not shard_bytes:
        raise ArgumentError(
            f"`shard_bytes` is {brief(shard_bytes, 60)}, not a number of bytes.\n\nHint: 5_000_000_000, say."
        )
    with naming(source):
        to_lightning = target.endswith(".ckpt")
        stored: list[StoredTensor] | None = None
        if os.path.isdir(source) and not to_lightning:
            if os.path.lexists(os.path.join(source, METADATA_NAME)):
                stored = dcp_tensors(source)
            else:
                contents = Contents(source)
                if rank_files(contents, named_zero_folder(contents) or "", OPTIMIZERS):
                    stored = zero_tensors(source)
        if stored is not None:
            # safetensors with an index, one file's worth of tensors in memory at a time
            if not stored:
                raise CheckpointError("The shards hold no weights.")
            with writing(target) as place:
                os.mkdir(place)
                count = _write_files(stored, place, shard_bytes, keep_names)
            return f"{count} tensors of the shards in {source} are weights in {target}"
        if os.path.isdir(source) and to_lightning:
            checkpoint = from_hf(source)
            with writing(target) as place:
                torch.save(checkpoint, place)
            return f"the HF folder {source} is the Lightning checkpoint {target}"
        if os.path.isfile(source) and not to_lightning:
            # Its own error would speak of something else
            with open_regular(source) as file:
                if not file.read(4).startswith(_TORCH_BEGINS):
                    raise CheckpointError(
                        f"{source} is not a Lightning checkpoint, since it is not a file of `torch.save`."
                    )
            checkpoint = read_lightning(source)
            to_hf(checkpoint, target)
            warn_of_left_out(source, checkpoint)
            return f"the Lightning checkpoint {source} is the HF folder {target}"
        raise ArgumentError(
            f"There is nothing to convert from {source} to {target}.\n\n"
            "Hint: name a .ckpt file and a folder, in either order, or a folder of shards and a folder."
        )


def _write_files(stored: list[StoredTensor], partial: str, shard_bytes: int, keep_names: bool) -> int:
    # The wrappers' prefixes that every name begins with, each once and in any order
    prefix, left = "", [] if keep_names else list(WRAPPER_PREFIXES)
    while found := next((p for p in left if all(tensor.name.startswith(prefix + p) for tensor in stored)), None):
        left.remove(found)
        prefix += found
    groups: list[list[StoredTensor]] = []
    filled = 0
    for tensor in stored:
        if not groups or filled + tensor.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    file_of: dict[str, str] = {}
    total_bytes = 0
    for number, group in enumerate(progress_bar(groups, desc="weight files"), start=1):
        weights = {}
        for tensor in group:
            with reading(f"The stored tensor {tensor.name!r}"):
                weights[tensor.name.removeprefix(prefix)] = tensor.load()
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_weights(weights, os.path.join(partial, file))
        file_of |= dict.fromkeys(weights, file)
        total_bytes += sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    with open(os.path.join(partial, layout.SAFE_WEIGHTS_INDEX_NAME), "w", encoding="utf-8") as text:
        json.dump(index, text, indent=2)
    return len(file_of)
