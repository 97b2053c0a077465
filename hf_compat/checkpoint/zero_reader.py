"""Weights out of DeepSpeed's ZeRO checkpoints, one at a time. torch only; DeepSpeed is not needed.

ZeRO 1 and 2 flatten a parameter group and cut it into one piece for each rank; ZeRO 3 cuts every parameter so. The
float32 master weights are in the ranks' `*_optim_states.pt`, names and shapes in `*_model_states.pt`. Files are
memory-mapped, and nothing but tensors and plain containers is unpickled.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_compat.checkpoint.reading import StoredTensor, read_torch_file
from hf_compat.errors import CheckpointError

RankFile = dict[str, Any]  # what DeepSpeed saved for a rank: tensors and plain containers
Load = Callable[[], torch.Tensor]
Shape = torch.Size | tuple[int, ...]


class _Unread:
    """Takes the place of DeepSpeed's own objects, which are saved beside the weights and not read."""

    def __init__(self, *args: object) -> None:
        pass


# What DeepSpeed 0.19 puts beside the tensors. Each is read as an empty `_Unread`.
_BESIDE = [
    (_Unread, f"deepspeed.{name}")
    for name in (
        "runtime.zero.config.ZeroStageEnum",
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "utils.tensor_fragment.fragment_address",
    )
]


def named_zero_folder(source: str) -> str | None:
    """Return the folder that DeepSpeed's `latest` file names; None where there is no such file.

    Raises:
        CheckpointError: It names a folder elsewhere.
    """
    latest = Path(source) / "latest"
    if not latest.is_file():
        return None
    name = latest.read_text().strip()
    if os.path.basename(name) != name:
        raise CheckpointError(f"{latest} names {name!r}, which is outside the checkpoint.")
    return str(Path(source) / name)


def find_zero_folder(source: str) -> str | None:
    """Return the folder with the ranks' files: `source` itself, or the one that its `latest` names; None for others."""
    folder = named_zero_folder(source) or source
    return folder if optimizer_files(folder) else None


def optimizer_files(folder: str) -> list[Path]:
    """List the ranks' optimizer states, in the order of the ranks."""
    return _sorted(folder, "*_optim_states.pt")


def _rank(path: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)", path.name)
    return int(found.group(1)) if found else 0


def zero_tensors(folder: str) -> list[StoredTensor]:
    """List the weights of a ZeRO checkpoint, in float32 (buffers in their own type).

    Raises:
        CheckpointError: Files are missing, damaged, or of a kind that is not known.
    """
    optimizers = [_read(path)["optimizer_state_dict"] for path in optimizer_files(folder)]
    models = [_read(path) for path in _sorted(folder, "*_model_states.pt")]
    if not models or not optimizers:
        raise CheckpointError(f"{folder} lacks the ranks' model or optimizer states.")
    world_size = _world_size(optimizers[0])
    if len(optimizers) != world_size:
        raise CheckpointError(f"{folder} has the optimizer states of {len(optimizers)} ranks, of {world_size}.")
    by_stage3 = "fp32_flat_groups" in optimizers[0]
    trained = _stage3(models[0], optimizers) if by_stage3 else _stage2(models[0], optimizers)
    found = [*trained, *_frozen(models, by_stage3), *_buffers(models[0])]
    return [*found, *_shared(models[0], found)]


def _sorted(folder: str, pattern: str) -> list[Path]:
    return sorted(Path(folder).glob(pattern), key=_rank)


def _read(path: Path) -> RankFile:
    return dict(read_torch_file(str(path), allowed=_BESIDE, mmap=True))


def _world_size(optimizer: RankFile) -> int:
    count = optimizer["partition_count"]
    return int(max(count) if isinstance(count, list) else count)


def _stored(name: str, shape: Shape, load: Load) -> StoredTensor:
    return StoredTensor(name=name, nbytes=4 * math.prod(shape), load=load)


def _stage2(model: RankFile, optimizers: list[RankFile]) -> list[StoredTensor]:
    found = []
    paddings = optimizers[0].get("param_alignment_paddings")
    for group, shapes in enumerate(model["param_shapes"]):
        pieces = [optimizer["single_partition_of_fp32_groups"][group] for optimizer in optimizers]
        offset = 0
        for index, (name, shape) in enumerate(shapes.items()):
            found.append(_stored(name, shape, _slice_of(pieces, offset, shape)))
            offset += math.prod(shape) + (paddings[group][index] if paddings is not None else 0)
    return found


def _slice_of(pieces: list[torch.Tensor], offset: int, shape: Shape) -> Load:
    """Return what reads a slice of pieces that follow each other."""

    def load() -> torch.Tensor:
        start, end, parts = offset, offset + math.prod(shape), []
        for piece in pieces:
            parts.append(piece[max(start, 0) : max(end, 0)])
            start, end = start - piece.numel(), end - piece.numel()
        return torch.cat(parts).view(shape)

    return load


def _stage3(model: RankFile, optimizers: list[RankFile]) -> list[StoredTensor]:
    found = []
    ranks = [optimizer["fp32_flat_groups"] for optimizer in optimizers]
    offset = 0
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            part = math.ceil(math.prod(shape) / len(ranks))
            found.append(_stored(name, shape, _parts_of(ranks, offset, part, shape)))
            offset += part
    return found


def _parts_of(ranks: list[list[torch.Tensor]], offset: int, part: int, shape: Shape) -> Load:
    """Return what reads a part of each rank and joins the parts; the last one may be padded."""

    def load() -> torch.Tensor:
        parts = [_slice_of(pieces, offset, (part,))() for pieces in ranks]
        return torch.cat(parts)[: math.prod(shape)].view(shape)

    return load


def _frozen(models: list[RankFile], by_stage3: bool) -> list[StoredTensor]:
    shapes = models[0].get("frozen_param_shapes") or {}
    found = []
    for name, shape in shapes.items():
        fragments = [model["frozen_param_fragments"][name] for model in (models if by_stage3 else models[:1])]
        found.append(_stored(name, shape, _slice_of([f.flatten() for f in fragments], 0, shape)))
    return found


def _buffers(model: RankFile) -> list[StoredTensor]:
    return [
        StoredTensor(name=name, nbytes=tensor.nbytes, load=lambda tensor=tensor: tensor)  # type: ignore[misc]
        for name in model["buffer_names"]
        if isinstance(tensor := model["module"].get(name), torch.Tensor)
    ]


def _shared(model: RankFile, found: list[StoredTensor]) -> list[StoredTensor]:
    """Tied weights: a second name for a tensor."""
    by_name = {stored.name: stored for stored in found}
    pairs = (model.get("shared_params") or {}).items()
    return [
        StoredTensor(name=name, nbytes=by_name[of].nbytes, load=by_name[of].load)
        for name, of in pairs
        if of in by_name and name not in by_name
    ]


def check_zero_files(folder: str) -> None:
    """Read every file of a ZeRO checkpoint as tensors and plain containers.

    Raises:
        CheckpointError: A file holds anything else, code that runs when it is unpickled say, or is damaged.
    """
    for path in sorted(Path(folder).glob("*.pt")):
        _read(path)
