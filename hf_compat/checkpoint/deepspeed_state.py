"""The state of a model in DeepSpeed's engine, for any number of ranks and any stage.

ZeRO 1 and 2 concatenate the parameters of a group and give each rank an equal piece. ZeRO 3 gives each rank a piece of
every parameter. Padding after the last parameter is 0. Each rank takes its own slices of a saved state.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from hf_compat.checkpoint.files import Plain, member_of
from hf_compat.checkpoint.layout import OPTIMIZER_NAME
from hf_compat.checkpoint.model_state import (
    LOADING,
    OPTIMIZER_INDEX,
    SAVING,
    ModelState,
    OptimizerState,
    PlainState,
    replacing,
)
from hf_compat.checkpoint.reading import Contents, LoadResult, StoredTensor, Weights, names_of, read_torch_file
from hf_compat.checkpoint.tensor_splits import TensorSplits, splits_of
from hf_compat.checkpoint.validation import check_optimizer
from hf_compat.checkpoint.zero_reader import (
    MODELS,
    OPTIMIZERS,
    OWN_TYPES,
    ZeroStates,
    check_zero_files,
    named_zero_folder,
    rank_files,
    zero_states,
)
from hf_compat.errors import CheckpointError, CheckpointMismatch
from hf_compat.interop.deepspeed import (
    DeepSpeedEngine,
    gathering,
    is_partitioned,
    tensor_group,
    tensor_place,
    whole_for_a_while,
)
from hf_compat.runtime.collectives import barrier
from hf_compat.runtime.inspection import call_if_there


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A part of a flat group that one parameter fills."""

    parameter: nn.Parameter
    begin: int  # where the part begins in the parameter
    place: int  # where it begins in the group
    length: int  # its numbers; none where another rank has all of the parameter


# What the engine's optimizer steps as one parameter: this rank's numbers, in float32 (shape [n]), and what they are of
_FlatGroup = tuple[torch.Tensor, list[_Piece]]


def take_states(folder: str, engine: DeepSpeedEngine, state: OptimizerState | None = None) -> None:
    """Give the engine's optimizer the states of a checkpoint: weights in float32, values of the optimizer, counts.

    They are those of ZeRO's ranks, or the `state` of torch's optimizer of a whole model, which another strategy wrote.

    Raises:
        CheckpointError: The checkpoint is damaged.
        CheckpointMismatch: It is of another model, or the optimizer is one whose pieces are not known.
    """
    zero = engine.optimizer
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    groups = _flat_groups(zero)
    if not groups or not all(flat.numel() for flat, _ in groups):
        raise CheckpointMismatch(
            f"{folder} holds an optimizer's state, and this run's optimizer ({type(zero).__name__}) keeps its own "
            "elsewhere."
            "\n\nHint: resume with the DeepSpeed configuration that wrote it, on as many processes; or begin from its "
            "weights with `from_pretrained`."
        )
    splits = splits_of(engine.module)
    place = tensor_place() if splits else 0
    saved = zero_states(folder) if state is None else _whole_states(folder, state, zero, names, splits)
    has_groups = len(saved.param_groups) == len(zero.optimizer.param_groups)
    saved.check(folder, (names[piece.parameter] for _, pieces in groups for piece in pieces), has_groups)
    for flat, pieces in groups:
        own = [names[piece.parameter] for piece in pieces]
        # each group steps a count of its own; an optimizer of torch has no state of a parameter without a gradient
        plain = next((saved.plain[name] for name in own if saved.plain[name]), {})
        values = {key: value.clone() if torch.is_tensor(value) else value for key, value in plain.items()}
        for key in dict.fromkeys(key for name in own for key in saved.by_name[name]):
            into = torch.zeros_like(flat, requires_grad=False)
            for piece, name in zip(pieces, own, strict=True):
                if piece.length and key in saved.by_name[name]:
                    whole = splits.part(name, saved.by_name[name][key].load(), place).flatten()
                    part = whole[piece.begin : piece.begin + piece.length]
                    into[piece.place : piece.place + part.numel()].copy_(part)
            if key:
                values[key] = into
            else:
                flat.data.copy_(into)
        zero.optimizer.state[flat] = values
    for options, told in zip(zero.optimizer.param_groups, saved.param_groups, strict=True):
        options.update(told)
    for name, count in saved.counts.items():
        setattr(engine, name, count)
    call_if_there(zero, "_link_all_hp_params")  # what DeepSpeed shows of these values to others


def _whole_states(
    folder: str, state: OptimizerState, zero: Any, names: dict[nn.Parameter, str], splits: TensorSplits
) -> ZeroStates:
    """Find the values of each parameter in the state of a whole optimizer, which numbers parameters in their order.

    Raises:
        CheckpointMismatch: The engine's optimizer is not torch's, or the state is of other parameters.
    """
    if not type(zero.optimizer).__module__.startswith("torch."):
        raise CheckpointMismatch(
            f"{folder} holds an optimizer's state for whole parameters. Only torch's optimizers can take it over in "
            f"parts under ZeRO, and this run's is {type(zero.optimizer).__name__}.\n\n"
            "Hint: resume with the strategy that wrote it, or begin from the weights with `from_pretrained`."
        )
    groups = zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.fp16_groups
    order = [parameter for group in groups for parameter in group]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(order) != len(numbers):
        raise CheckpointMismatch(
            f"{folder} holds the optimizer's state of {len(numbers)} parameters, and this run trains {len(order)}."
        )
    by_name: dict[str, dict[str, StoredTensor]] = {}
    plain: dict[str, dict[str, object]] = {}
    for parameter, number in zip(order, numbers, strict=True):
        name = names[parameter]
        shape = splits.whole_shape(name, getattr(parameter, "ds_shape", parameter.shape))
        by_name[name], plain[name] = {}, {}
        for key, one in (state["state"].get(number) or {}).items():
            if not torch.is_tensor(one) or key == "step":
                plain[name][key] = one
            elif one.shape == shape:
                by_name[name][key] = StoredTensor(name=name, nbytes=4 * one.numel(), load=one.float)
            else:
                raise CheckpointMismatch(
                    f"{folder} holds `{key}` of {name} with the shape {tuple(one.shape)}, not {tuple(shape)}.\n\n"
                    "Hint: resume with the strategy that wrote it."
                )
    of_groups = state["param_groups"]
    if len(of_groups) != len(zero.optimizer.param_groups):  # DeepSpeed drops an empty group
        of_groups = [group for group in of_groups if group["params"]]
    options = [{key: one for key, one in group.items() if key != "params"} for group in of_groups]
    return ZeroStates(by_name=by_name, plain=plain, param_groups=options, counts={})


def _flat_groups(zero: Any) -> list[_FlatGroup]:
    """Return the flat groups of a ZeRO optimizer; none of another, or of one that leaves them on a disk."""
    rank, groups = distributed.get_rank(zero.dp_process_group), []
    stage2 = getattr(zero, "single_partition_of_fp32_groups", None)
    if stage2 is not None and hasattr(zero, "round_robin_bit16_offsets"):  # the parameters of a group end to end
        layouts = zip(stage2, zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
        for flat, parameters, offsets in layouts:
            pieces, start = [], rank * flat.numel()
            for parameter, offset in zip(parameters, offsets, strict=True):
                begin, end = max(offset, start), min(offset + parameter.numel(), start + flat.numel())
                length = max(end - begin, 0)
                pieces.append(_Piece(parameter=parameter, begin=begin - offset, place=begin - start, length=length))
            groups.append((flat, pieces))
        return groups
    stage3 = getattr(zero, "fp32_partitioned_groups_flat", None)
    if stage3 is not None and hasattr(zero, "fp16_groups"):  # of each parameter a part
        for flat, parameters in zip(stage3, zero.fp16_groups, strict=True):
            pieces, place = [], 0
            for parameter in parameters:
                length = parameter.ds_tensor.ds_numel
                pieces.append(_Piece(parameter=parameter, begin=rank * length, place=place, length=length))
                place += length
            groups.append((flat, pieces))
    return groups


class DeepSpeedState(ModelState):
    """DeepSpeed has the optimizer's state in parts from ZeRO 1 on, and the weights from ZeRO 3 on.

    Before a fit the engine does not exist yet, but `from_pretrained` may already have made the model in parts. With
    `tensor_parallel` it splits layers, too.
    """

    def __init__(self, model: nn.Module, engine: DeepSpeedEngine) -> None:
        super().__init__(model)
        self.engine = engine  # None outside a fit, where the model has no optimizer
        self.splits = splits_of(model)

    def whole_weights(self) -> Weights:
        if not (self.splits or is_partitioned(self.model)):
            return self.model.state_dict()
        is_first = distributed.get_rank() == 0
        gathered = {parameter: whole for parameter, whole in self._copied_whole() if is_first}
        with replacing(self.model, SAVING, gathered.get):
            return self.model.state_dict() if is_first else {}

    def giving_whole(self) -> AbstractContextManager[None]:
        if not (self.splits or is_partitioned(self.model)):
            return contextlib.nullcontext()
        return replacing(self.model, SAVING, dict(self._copied_whole()).get)

    def taking_whole(self) -> AbstractContextManager[None]:
        if self.splits:
            names, place = {parameter: name for name, parameter in self.model.named_parameters()}, tensor_place()
            return replacing(self.model, LOADING, lambda own, whole: self.splits.part(names[own], whole, place))
        return whole_for_a_while(self.model.parameters()) if is_partitioned(self.model) else contextlib.nullcontext()

    def running(self, config: dict[str, Any] | None) -> AbstractContextManager[None]:
        if self.engine is not None or config is None:  # the engine's hooks stay on the model after a fit
            return contextlib.nullcontext()
        return gathering(self.model, config)

    def write_optimizer(self, folder: str, optimizer: torch.optim.Optimizer, is_writer: bool) -> None:
        if is_writer:
            os.makedirs(folder, exist_ok=True)
        barrier()
        self.engine.save_checkpoint(folder)

    def load_optimizer(self, folder: str, optimizer: torch.optim.Optimizer) -> bool:
        """Load the engine's own files, weights included; the state of another kind of optimizer is not read.

        Files of another number of processes, or of another stage of ZeRO, are read parameter by parameter.
        """
        contents = Contents(folder)
        name = named_zero_folder(contents)
        if name is None:
            path = contents.find(OPTIMIZER_NAME)
            if path is not None:
                content = read_torch_file(path)
                if isinstance(self.engine.optimizer, torch.optim.Optimizer):  # stage 0 has nothing in parts
                    PlainState(self.model).set_optimizer_state(path, content, self.engine.optimizer)
                else:
                    check_optimizer(path, content)
                    take_states(folder, self.engine, content)
            elif contents.find(OPTIMIZER_INDEX) is not None:
                raise CheckpointMismatch(
                    f"{folder} has the optimizer's state in shards of FSDP, which DeepSpeed cannot take.\n\n"
                    "Hint: resume under FSDP and save a whole checkpoint (`fsdp_config` without "
                    "`state_dict_type=SHARDED_STATE_DICT`), or begin from the weights with `from_pretrained`."
                )
            return path is not None
        if self.engine.load_universal_checkpoint():
            raise CheckpointError(
                f"{folder} is not read: DeepSpeed unpickles whatever is in a universal checkpoint.\n\n"
                "Hint: leave `load_universal` out of DeepSpeed's configuration."
            )
        check_zero_files(contents, name)  # on every rank and before any exchange: one that fails alone lets all wait
        ranks = len(rank_files(contents, name, OPTIMIZERS))  # 0 without ZeRO: the optimizer's state is with the weights
        models = [os.path.basename(path) for path in rank_files(contents, name, MODELS)]
        by_stage3 = any(model.startswith("zero_pp_rank") for model in models)  # it writes one for each rank
        parts, splits = 1 if by_stage3 else len(models), self.splits
        own = (distributed.get_world_size(), self.engine.zero_optimization_partition_weights(), splits.ranks)
        if ranks and (ranks, by_stage3, parts) != own:
            take_states(folder, self.engine)
            return True
        if parts != splits.ranks:
            raise CheckpointMismatch(
                f"{folder} has the optimizer's state in {parts} parts (`tensor_parallel`), and this run "
                f"has {splits.ranks}. Without ZeRO they are not joined.\n\n"
                "Hint: resume with the same `autotp_size`, or begin from the weights with `from_pretrained`. ZeRO 1 "
                "and 2 go on with any number."
            )

        def load(path: str, map_location: object = None) -> Plain:
            # DeepSpeed looks for its files by a pattern, and may have found some elsewhere
            file = os.path.relpath(path, contents.folder).replace(os.sep, "/")
            types = [pkgutil.resolve_name(name) for name in OWN_TYPES]
            return read_torch_file(contents.need(file), allowed=[*types, (member_of, "builtins.getattr")])

        # DeepSpeed's own reader unpickles whatever it finds. The engine gets the objects that were checked: the file is
        # read once, so it cannot be replaced in between
        reader = self.engine.checkpoint_engine
        reader.load = load
        try:
            self.engine.load_checkpoint(folder, tag=name, load_lr_scheduler_states=False)
        finally:
            del reader.load
        return True

    def set_weights(self, weights: Weights) -> LoadResult:
        named = names_of(self.model, weights)
        if not is_partitioned(self.model):
            with self.taking_whole():
                return self.model.load_state_dict(named, strict=False)
        owned: dict[str, Weights] = {}
        for name, tensor in named.items():
            prefix, _, own_name = name.rpartition(".")
            owned.setdefault(prefix, {})[own_name] = tensor
        for prefix, module in self.model.named_modules():
            if prefix in owned:
                with whole_for_a_while(module.parameters(recurse=False)):  # no more than one module is ever gathered
                    module.load_state_dict(owned[prefix], strict=False)
        known = self.model.state_dict().keys()
        return LoadResult([name for name in known if name not in named], [name for name in named if name not in known])

    def _copied_whole(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Copy each parameter whole to the CPU, one module after the other. Every process takes part."""
        if self.splits:
            group, place = tensor_group(), tensor_place()
            for name, parameter in self.model.named_parameters():
                yield parameter, self.splits.gathered(name, parameter.detach(), place, group).to("cpu", copy=True)
            return
        for module in self.model.modules():
            with whole_for_a_while(module.parameters(recurse=False)):
                for parameter in module.parameters(recurse=False):
                    yield parameter, parameter.detach().to("cpu", copy=True)
