"""Read weights and optimizer states of DeepSpeed's ZeRO checkpoints one at a time, without DeepSpeed.

ZeRO 1 and 2 flatten a parameter group and cut it into one piece for each rank. ZeRO 3 cuts every parameter that way.
With `tensor_parallel` several processes have such files, each of its parts of the parameters, which are joined.
The float32 master weights are in the ranks' `*_optim_states.pt`, names and shapes in `*_model_states.pt`. Files are
memory-mapped. Only tensors and plain containers are unpickled. Any failure is a `CheckpointError` that names the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_compat.checkpoint.files import first_line, read_text
from hf_compat.checkpoint.reading import Contents, StoredTensor, read_torch_file
from hf_compat.checkpoint.tensor_splits import INFO, TensorSplits
from hf_compat.errors import CheckpointError, CheckpointMismatch
from hf_compat.runtime.text import brief

LATEST_NAME = "latest"
OPTIMIZERS, MODELS = "_optim_states.pt", "_model_states.pt"  # ends of the names of the ranks' files
# DeepSpeed takes `*`, `?` and `[` for patterns, and opens what they match
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_-]+")

RankFile = dict[str, Any]  # what DeepSpeed saved for a rank: tensors and plain containers
Shape = torch.Size | tuple[int, ...]
Slice = tuple[list[torch.Tensor], int, int]  # flat tensors end to end, where in them a slice begins, and its length


class _Unread:
    """Takes the place of DeepSpeed's own objects, which are saved beside the weights and not read."""

    def __init__(self, *args: object) -> None:
        pass


# What DeepSpeed 0.19 puts beside the tensors. Each is read as an empty `_Unread`, but for DeepSpeed itself.
OWN_TYPES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_BESIDE = [(_Unread, name) for name in (*OWN_TYPES, "builtins.getattr")]  # as Python 3.11.0 writes an enum's member


def named_zero_folder(contents: Contents) -> str | None:
    """The name of the folder in DeepSpeed's `latest` file. None without this file."""
    latest = contents.find(LATEST_NAME)
    if latest is None:
        return None
    name = read_text(latest).strip()
    if not _FOLDER_NAME.fullmatch(name):
        raise CheckpointError(
            f"{latest} names {brief(name[:80])}, which may be outside the checkpoint.\n\n"
            "Hint: a folder's name there has letters, digits, `_` and `-` only."
        )
    return name


def rank_files(contents: Contents, subfolder: str, ending: str) -> list[str]:
    """List the ranks' files with an ending, `OPTIMIZERS` or `MODELS`, in the order of the ranks."""
    if not os.path.isdir(contents.folder / subfolder):
        return []
    found = [name for name in contents.names(subfolder) if name.endswith(ending)]
    return [contents.need(name) for name in sorted(found, key=_rank)]


def _rank(name: str) -> tuple[int, int]:
    """Of a rank's file: which part of the parameters it has, and its rank among those that have the same part."""
    found = [re.search(rf"{kind}_rank_(\d+)", os.path.basename(name)) for kind in ("mp", "zero_pp")]
    part, rank = (int(one.group(1)) if one else 0 for one in found)
    return part, rank


def zero_tensors(source: str) -> list[StoredTensor]:
    """List the weights of a ZeRO checkpoint, in float32 (buffers in their own type).

    The source is the folder with the ranks' files, or the one whose `latest` names it.
    """
    with _reading(source) as parts:
        splits = TensorSplits(parts[0].model.get(INFO))
        return _joined(splits, [{stored.name: stored for stored in part.tensors} for part in parts])


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroStates:
    """The optimizer's state in a ZeRO checkpoint, parameter by parameter, for any number of ranks."""

    # For each parameter the float32 weight (`""`), and each value of its shape (`exp_avg` …)
    by_name: dict[str, dict[str, StoredTensor]]
    plain: dict[str, dict[str, object]]  # for each parameter the other values of the optimizer (`step`)
    param_groups: list[dict[str, object]]  # the options of each group, without its parameters
    counts: dict[str, int]  # of updates, samples and skipped updates

    def check(self, folder: str, names: Iterable[str], has_groups: bool) -> None:
        """Refuse a model with parameters of other names, or an optimizer with other groups of them."""
        other = set(names) ^ self.by_name.keys()
        if other or not has_groups:
            which = ", ".join(sorted(other)[:5]) or "other groups of them"
            raise CheckpointMismatch(
                f"{folder} holds the optimizer's state of other parameters than the model's: {which}."
            )


def zero_states(source: str) -> ZeroStates:
    """Read the optimizer's state of a ZeRO checkpoint."""
    with _reading(source) as parts:
        model, optimizer = parts[0].model, parts[0].optimizers[0]
        inner = "optimizer_state_dict" if _is_stage3(optimizer) else "base_optimizer_state"
        first, groups = optimizer[inner]["state"], optimizer[inner]["param_groups"]
        flat = sorted(first)  # the places of flat groups, in their order
        values = [(key, value) for index in flat for key, value in first[index].items()]
        # in the same order on every rank, as they exchange the values one after the other
        keys = dict.fromkeys(key for key, value in values if isinstance(value, torch.Tensor) and value.dim() == 1)
        names = [name for shapes in model["param_shapes"] for name in shapes]
        by_name: dict[str, dict[str, StoredTensor]] = {name: {} for name in names}
        for key in ("", *keys):
            found = []
            for part in parts:
                states = [optimizer[inner]["state"] for optimizer in part.optimizers]
                pieces = [[state[index][key] for index in flat] for state in states] if key else []
                of_key = _trained(part.model, part.optimizers[0], pieces) if key else part.tensors
                found.append({stored.name: stored for stored in of_key if stored.name in by_name})
            for stored in _joined(TensorSplits(model.get(INFO)), found):
                by_name[stored.name][key] = stored
        plain = {key: value for index in flat[:1] for key, value in first[index].items() if key not in keys}
        return ZeroStates(
            by_name=by_name,
            plain=dict.fromkeys(names, plain),
            param_groups=[{key: value for key, value in group.items() if key != "params"} for group in groups],
            counts={name: int(model.get(name, 0)) for name in ("global_steps", "global_samples", "skipped_steps")},
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """What the processes with the same parts of the parameters have saved. Without `tensor_parallel` it is all."""

    model: RankFile  # of the first of them
    optimizers: list[RankFile]
    tensors: list[StoredTensor]  # the weights


@contextlib.contextmanager
def _reading(source: str) -> Iterator[list[_Part]]:
    """Read model states and optimizer states, and list the weights.

    Any other content than DeepSpeed's, which shows here or within the context, is an error of ours.
    """
    contents = Contents(source)
    subfolder = named_zero_folder(contents) or ""
    folder = contents.folder / subfolder
    by_part: dict[int, tuple[list[RankFile], list[RankFile]]] = {}
    for kind, ending in enumerate((MODELS, OPTIMIZERS)):
        for path in rank_files(contents, subfolder, ending):
            by_part.setdefault(_rank(path)[0], ([], []))[kind].append(_read(path))
    if not by_part or not all(models and found for models, found in by_part.values()):
        raise CheckpointError(f"{folder} lacks the ranks' model or optimizer states.")
    try:
        parts = [_part(folder, models, found) for _, (models, found) in sorted(by_part.items())]
        if len(parts) != (needed := TensorSplits(parts[0].model.get(INFO)).ranks):
            raise CheckpointError(f"{folder} has {len(parts)} parts of the parameters, of {needed}.")
        yield parts
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{folder} does not hold what DeepSpeed writes ({cause}).") from error


def _part(folder: Path, models: list[RankFile], found: list[RankFile]) -> _Part:
    optimizers = [states["optimizer_state_dict"] for states in found]
    count = optimizers[0]["partition_count"]
    world_size = int(max(count) if isinstance(count, list) else count)
    if len(optimizers) != world_size:
        raise CheckpointError(f"{folder} has the optimizer states of {len(optimizers)} ranks, of {world_size}.")
    by_stage3 = _is_stage3(optimizers[0])
    key = "fp32_flat_groups" if by_stage3 else "single_partition_of_fp32_groups"  # each rank's parts, by groups
    tensors = _trained(models[0], optimizers[0], [optimizer[key] for optimizer in optimizers])
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        of_ranks = models if by_stage3 else models[:1]
        fragments = [model["frozen_param_fragments"][name].flatten() for model in of_ranks]
        tensors.append(stored_slices(name, shape, [(fragments, 0, math.prod(shape))]))
    tensors += [
        StoredTensor(name=name, nbytes=tensor.nbytes, load=tensor.detach)
        for name in models[0]["buffer_names"]
        if isinstance(tensor := models[0]["module"].get(name), torch.Tensor)
    ]
    # Tied weights: a second name for a tensor
    by_name = {stored.name: stored for stored in tensors}
    pairs = (models[0].get("shared_params") or {}).items()
    shared = [(name, of) for name, of in pairs if of in by_name and name not in by_name]
    tensors += [dataclasses.replace(by_name[of], name=name) for name, of in shared]
    return _Part(models[0], optimizers, tensors)


def _joined(splits: TensorSplits, parts: Sequence[dict[str, StoredTensor]]) -> list[StoredTensor]:
    """Join the tensors of all parts by their names. A tensor that is not split is that of the first part."""
    if not splits:
        return list(parts[0].values())
    whole = []
    for name, stored in parts[0].items():
        loads = [part[name].load for part in parts]
        load = functools.partial(splits.joined, name, loads)
        whole.append(StoredTensor(name=name, nbytes=stored.nbytes * splits.ranks, load=load))
    return whole


def _is_stage3(optimizer: RankFile) -> bool:
    return "fp32_flat_groups" in optimizer


def _read(path: str) -> RankFile:
    content = read_torch_file(path, allowed=_BESIDE, mmap=True)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} cannot be read: it holds no state of DeepSpeed.")
    return content


def stored_slices(name: str, shape: Shape, slices: list[Slice]) -> StoredTensor:
    """Make the tensor of a shape that slices make up one after the other. The last one may be padded."""

    def load() -> torch.Tensor:
        parts = []
        for pieces, start, length in slices:
            end = start + length
            for piece in pieces:
                parts.append(piece[max(start, 0) : max(end, 0)])
                start, end = start - piece.numel(), end - piece.numel()
        return torch.cat(parts)[: math.prod(shape)].view(shape)

    # Refuse pieces that do not hold as many numbers as a tensor needs
    for pieces, offset, length in slices:
        if not all(isinstance(piece, torch.Tensor) and piece.dim() == 1 for piece in pieces):
            raise TypeError("a rank's part of the weights is not a flat tensor")
        if not all(piece.is_floating_point() for piece in pieces):
            raise TypeError("a rank's part of the weights holds no floating-point numbers")
        held = sum(piece.numel() for piece in pieces)
        if held < offset + length:
            raise ValueError(f"the ranks hold {held} numbers where {offset + length} are needed")
    return StoredTensor(name=name, nbytes=4 * math.prod(shape), load=load)


def _trained(model: RankFile, optimizer: RankFile, ranks: list[list[torch.Tensor]]) -> list[StoredTensor]:
    """List the trained parameters, or a value of their optimizer, from each rank's flat groups."""
    found = []
    paddings = optimizer.get("param_alignment_paddings")
    offset = 0  # in a rank's part by ZeRO 3, else in the group
    for group, shapes in enumerate(model["param_shapes"]):
        offset = offset if _is_stage3(optimizer) else 0
        for index, (name, shape) in enumerate(shapes.items()):
            if _is_stage3(optimizer):
                part = math.ceil(math.prod(shape) / len(ranks))
                found.append(stored_slices(name, shape, [(pieces, offset, part) for pieces in ranks]))
                offset += part
            else:
                of_group = [pieces[group] for pieces in ranks]
                found.append(stored_slices(name, shape, [(of_group, offset, math.prod(shape))]))
                offset += math.prod(shape) + (paddings[group][index] if paddings is not None else 0)
    return found


def check_zero_files(contents: Contents, subfolder: str) -> None:
    """Read every file of a ZeRO checkpoint as tensors and plain containers."""
    for name in contents.names(subfolder):
        if name.endswith(".pt"):
            _read(contents.need(name))
