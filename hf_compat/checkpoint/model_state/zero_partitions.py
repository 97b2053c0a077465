"""States of a ZeRO checkpoint into an engine of any number of ranks and any stage: each rank takes its own slices.

ZeRO 1 and 2 lay the parameters of a group end to end and give each rank an equal piece. ZeRO 3 gives each rank a piece
of every parameter. What fills a piece up after the last parameter's end is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from hf_compat.checkpoint.zero_reader import ZeroStates, zero_states
from hf_compat.errors import CheckpointMismatch
from hf_compat.interop.deepspeed import DeepSpeedEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A part of a flat group that one parameter fills.

    Args:
        parameter: The parameter.
        begin: Where the part begins in the parameter.
        place: Where it begins in the group.
        length: Its numbers; none where another rank has all of the parameter.
    """

    parameter: nn.Parameter
    begin: int
    place: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _FlatGroup:
    """What the engine's optimizer steps as one parameter.

    Args:
        flat: This rank's numbers, in float32. Shape [n].
        pieces: What they are of.
    """

    flat: torch.Tensor
    pieces: tuple[_Piece, ...]


def take_states(folder: str, engine: DeepSpeedEngine) -> None:
    """Give the engine's optimizer the states of a checkpoint: weights in float32, values of the optimizer, counts.

    Raises:
        CheckpointError: The checkpoint is damaged.
        CheckpointMismatch: It is of another model, or the optimizer is one whose pieces are not known.
    """
    saved, zero = zero_states(folder), engine.optimizer
    groups = _flat_groups(zero)
    if not groups or not all(group.flat.numel() for group in groups):
        raise CheckpointMismatch(
            f"{folder} holds states of ZeRO, and this run's optimizer ({type(zero).__name__}) keeps its own elsewhere."
            "\n\nHint: resume with the DeepSpeed configuration that wrote it, on as many processes; or begin from its "
            "weights with `from_pretrained`."
        )
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    other = {names[piece.parameter] for group in groups for piece in group.pieces} ^ saved.by_name.keys()
    if other or len(saved.param_groups) != len(zero.optimizer.param_groups):
        which = ", ".join(sorted(other)[:5]) or "other groups of them"
        raise CheckpointMismatch(f"{folder} holds the optimizer's state of other parameters than the model's: {which}.")
    for group in groups:
        _fill(group, saved, names, zero.optimizer)
    for options, told in zip(zero.optimizer.param_groups, saved.param_groups, strict=True):
        options.update(told)
    for name, count in saved.counts.items():
        setattr(engine, name, count)
    if hasattr(zero, "_link_all_hp_params"):  # what DeepSpeed shows of these values to others
        zero._link_all_hp_params()


def _fill(
    group: _FlatGroup, saved: ZeroStates, names: dict[nn.Parameter, str], optimizer: torch.optim.Optimizer
) -> None:
    """Fill a flat group, and the values that the optimizer keeps of it."""
    first = names[group.pieces[0].parameter]
    # each group steps a count of its own
    values = {key: value.clone() if torch.is_tensor(value) else value for key, value in saved.plain[first].items()}
    for key in saved.by_name[first]:
        into = torch.zeros_like(group.flat, requires_grad=False)
        for piece in group.pieces:
            if piece.length:
                whole = saved.by_name[names[piece.parameter]][key].load().flatten()
                part = whole[piece.begin : piece.begin + piece.length]
                into[piece.place : piece.place + part.numel()].copy_(part)
        if key:
            values[key] = into
        else:
            group.flat.data.copy_(into)
    optimizer.state[group.flat] = values


def _flat_groups(zero: Any) -> list[_FlatGroup]:
    """Return the flat groups of a ZeRO optimizer; none of another, or of one that leaves them on a disk."""
    stage2 = getattr(zero, "single_partition_of_fp32_groups", None)
    if stage2 is not None and hasattr(zero, "round_robin_bit16_offsets"):
        layouts = zip(stage2, zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
        return [_FlatGroup(flat=flat, pieces=tuple(_end_to_end(flat, *layout))) for flat, *layout in layouts]
    stage3 = getattr(zero, "fp32_partitioned_groups_flat", None)
    if stage3 is not None and hasattr(zero, "fp16_groups"):
        return [
            _FlatGroup(flat=flat, pieces=tuple(_each_in_parts(group)))
            for flat, group in zip(stage3, zero.fp16_groups, strict=True)
        ]
    return []


def _end_to_end(flat: torch.Tensor, parameters: list[nn.Parameter], offsets: list[int]) -> Iterator[_Piece]:
    start = distributed.get_rank() * flat.numel()
    for parameter, offset in zip(parameters, offsets, strict=True):
        begin, end = max(offset, start), min(offset + parameter.numel(), start + flat.numel())
        yield _Piece(parameter=parameter, begin=begin - offset, place=begin - start, length=max(end - begin, 0))


def _each_in_parts(parameters: list[nn.Parameter]) -> Iterator[_Piece]:
    lengths = [parameter.ds_tensor.ds_numel for parameter in parameters]  # type: ignore[attr-defined]  # DeepSpeed's
    for parameter, length, place in zip(parameters, lengths, itertools.accumulate(lengths, initial=0), strict=False):
        yield _Piece(parameter=parameter, begin=distributed.get_rank() * length, place=place, length=length)
