"""How DeepSpeed's `tensor_parallel` splits each parameter between processes, as it says in models and checkpoints.

Its `affine_map` gives for each parameter the shape of the whole, and for each process which strided piece of the whole
lies in which strided piece of its own part. A piece that several processes have names them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypedDict

import torch
from torch import distributed, nn

from hf_compat.errors import CheckpointError


class Piece(TypedDict):
    """A piece of a process's part: where it lies in the whole (offset and strides), where in the part, who has it."""

    shape: list[int]
    source: tuple[int, list[int]]
    dest: tuple[int, list[int]]
    locations: list[int]


class Part(TypedDict):
    """A process's part of a parameter."""

    shard_shape: list[int]
    pieces: list[Piece]


class Layout(TypedDict):
    """How a parameter is split."""

    logical_shape: list[int]
    ranks: dict[int, Part]


INFO = "universal_checkpoint_info"  # an attribute of a model, and a key of its checkpoints
# Of the whole and of a part, and the first process that has it
Pair = tuple[torch.Tensor, torch.Tensor, int]


class TensorSplits:
    """The parts of parameters. `ranks` is the number of processes between which each is split."""

    def __init__(self, info: Mapping[str, Mapping[str, dict[str, Layout]]] | None) -> None:
        found = ((info or {}).get("affine_map") or {}).get("params") or {}
        self._layouts: dict[str, Layout] = {
            re.sub(r"\\(.)", r"\1", pattern.removeprefix("^").removesuffix("$")): layout
            for pattern, layout in found.items()
        }
        self.ranks = max((len(layout["ranks"]) for layout in self._layouts.values()), default=1)

    def __bool__(self) -> bool:
        return self.ranks > 1

    def whole_shape(self, name: str, own: torch.Size) -> torch.Size:
        layout = self._layouts.get(name)
        return own if layout is None else torch.Size(layout["logical_shape"])

    def whole_size(self, name: str, own: int) -> int:
        layout = self._layouts.get(name)
        return own if layout is None else torch.Size(layout["logical_shape"]).numel()

    def part(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Cut a process's part out of a whole tensor."""
        if name not in self._layouts:
            return whole
        part = whole.new_empty(self._layouts[name]["ranks"][rank]["shard_shape"])
        for of_whole, of_part, _ in self._pieces(name, whole.contiguous(), part, rank):
            of_part.copy_(of_whole)
        return part

    def joined(self, name: str, parts: Sequence[Callable[[], torch.Tensor]]) -> torch.Tensor:
        """Make the whole tensor of the parts of all processes, each of which is loaded in turn."""
        whole = parts[0]()
        if name not in self._layouts:
            return whole
        first, whole = whole, whole.new_empty(self._layouts[name]["logical_shape"])
        for rank, load in enumerate(parts):
            part = first if rank == 0 else load()
            for of_whole, of_part, owner in self._pieces(name, whole, part.contiguous(), rank):
                if owner == rank:
                    of_whole.copy_(of_part)
        return whole

    def gathered(self, name: str, part: torch.Tensor, rank: int, group: distributed.ProcessGroup) -> torch.Tensor:
        """Make the whole tensor on every process of a group, bit for bit. Each gives its own part."""
        if name not in self._layouts:
            return part
        whole = part.new_zeros(self._layouts[name]["logical_shape"])
        for of_whole, of_part, owner in self._pieces(name, whole, part.contiguous(), rank):
            if owner == rank:
                of_whole.copy_(of_part)
        # as bytes, of which all others are 0, no sum is rounded
        distributed.all_reduce(whole.view(-1).view(torch.uint8), group=group)
        return whole

    def _pieces(self, name: str, whole: torch.Tensor, part: torch.Tensor, rank: int) -> Iterator[Pair]:
        of_rank = self._layouts[name]["ranks"][rank]
        if part.shape != torch.Size(of_rank["shard_shape"]):
            raise CheckpointError(
                f"{name} has the shape {tuple(part.shape)} on a process, not {of_rank['shard_shape']}."
            )
        for piece in of_rank["pieces"]:
            shape: list[int] = piece["shape"]
            ends = []
            for tensor, (offset, stride) in ((whole, piece["source"]), (part, piece["dest"])):
                last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
                if not 0 <= offset <= last < tensor.numel() and torch.Size(shape).numel():
                    raise CheckpointError(f"{name} has a part that lies outside of {tuple(tensor.shape)}.")
                ends.append(tensor.as_strided(shape, stride, tensor.storage_offset() + offset))
            yield ends[0], ends[1], min(piece["locations"])


def splits_of(model: nn.Module) -> TensorSplits:
    """How DeepSpeed has split a model. Empty if it has not."""
    return TensorSplits(getattr(model, INFO, None))
