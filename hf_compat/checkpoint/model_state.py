"""`ModelState` gives weights and optimizer state of a model, however a strategy holds it.

Whole models and FSDP 2 are here, DeepSpeed's in `deepspeed_state.py`. Shards are written by every process and read by
any number of them, under Accelerate's names. Temporary hooks let a user's override save or load whole weights of a
sharded model.
"""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import get_rank
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.dcp_reader import METADATA_NAME, States, open_dcp, read_dcp
from hf_compat.checkpoint.reading import (
    Contents,
    LoadResult,
    Weights,
    names_of,
    naming_misfit,
    read_torch_file,
    read_weights,
    weight_files,
)
from hf_compat.checkpoint.tensor_splits import splits_of
from hf_compat.checkpoint.torch_writer import save_torch
from hf_compat.checkpoint.validation import check_optimizer, check_weights, settle_states
from hf_compat.checkpoint.zero_reader import OPTIMIZERS, named_zero_folder, rank_files, zero_states
from hf_compat.errors import CheckpointError
from hf_compat.interop.deepspeed import is_deepspeed_engine, is_partitioned
from hf_compat.interop.transformers_models import as_held
from hf_compat.optim.stepping import behaviour_of
from hf_compat.runtime.collectives import barrier, broadcast_object, raise_first
from hf_compat.runtime.device_copies import small_ones_on_host
from hf_compat.runtime.inspection import call_if_there, uncompiled
from hf_compat.runtime.meshes import as_before_split, split_again, tensor_ranks

SAVING, LOADING = "register_state_dict_post_hook", "register_load_state_dict_pre_hook"


@contextlib.contextmanager
def replacing(
    model: nn.Module, moment: str, value: Callable[[nn.Parameter, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Let `state_dict` (`SAVING`) or `load_state_dict` (`LOADING`) of a model and of its parts take other tensors.

    `value` makes the tensor of a parameter, and is given the one that would be saved or loaded. Meanwhile each part has
    its own class, not that of `fully_shard`: a model card would say `FSDPMyModel`, and `from_pretrained` of it fails.
    """

    def put(module: nn.Module, state: Weights, prefix: str, *_: object) -> None:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = value(parameter, state[prefix + name])

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            kind = type(module)
            if isinstance(module, FSDPModule):
                stack.callback(setattr, module, "__class__", kind)
                module.__class__ = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
            stack.callback(getattr(module, moment)(put).remove)
        yield


def shard_of(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return a process's own part of a tensor that every process has whole; nothing is exchanged."""
    if not isinstance(parameter, DTensor) or isinstance(whole, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


MODEL_FOLDER, OPTIMIZER_FOLDER = layout.MODEL_FOLDER, layout.OPTIMIZER_FOLDER
# a checkpoint with these files has shards beside them
MODEL_INDEX, OPTIMIZER_INDEX = f"{MODEL_FOLDER}/{METADATA_NAME}", f"{OPTIMIZER_FOLDER}/{METADATA_NAME}"

OptimizerState = dict[str, Any]  # what `Optimizer.state_dict()` returns: each optimizer has its own values


class ModelState(abc.ABC):
    """The weights and the optimizer's state of a model, in and out of checkpoint folders.

    Every process calls every method: where the model is sharded they exchange its parts.
    """

    # whether a checkpoint can be copied to memory first and written later
    can_be_copied = False

    def __init__(self, model: nn.Module) -> None:
        self.model = uncompiled(model)

    @abc.abstractmethod
    def whole_weights(self) -> Weights:
        """Return the whole weights; where they are gathered, the first process gets them."""

    def write_weights(self, folder: str, write: Callable[..., None], for_checkpoint: bool) -> None:
        """Write the weights by `Trainer._save`, which writes whole ones. Only those of a checkpoint may be shards."""
        write(folder, state_dict=self.whole_weights())

    def giving_whole(self) -> AbstractContextManager[None]:
        """Let `state_dict` of the model and of its parts give whole tensors, on every process."""
        return contextlib.nullcontext()

    def taking_whole(self) -> AbstractContextManager[None]:
        """Let `load_state_dict` of the model and of its parts take whole tensors, which every process has."""
        return contextlib.nullcontext()

    def running(self, config: dict[str, Any] | None) -> AbstractContextManager[None]:
        """Let the model run outside a fit. DeepSpeed has a configuration, if it trains."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def write_optimizer(self, folder: str, optimizer: torch.optim.Optimizer, is_writer: bool) -> None:
        """Write the optimizer's state. One process is the writer of what all of them have in common."""

    def load_weights(self, folder: str) -> LoadResult:
        """Load weights, which the folder holds whole or as shards."""
        contents = Contents(folder)
        if contents.find(MODEL_INDEX) is not None:  # any number of processes wrote the shards
            state = {"model": get_model_state_dict(self.model)}
            read_dcp(open_dcp(contents, MODEL_FOLDER), state)
            loaded: LoadResult = set_model_state_dict(self.model, state["model"])
            return loaded
        weights = as_held(self.model, read_weights(folder, contents))
        check_weights(folder, weights, self.model, ", ".join(weight_files(contents)[:3]))
        result = self.set_weights(weights)
        call_if_there(self.model, "tie_weights")  # transformers' models have it
        return result

    @abc.abstractmethod
    def load_optimizer(self, folder: str, optimizer: torch.optim.Optimizer) -> bool:
        """Load the optimizer's state. False if the folder has none that this way of holding a model can read.

        Raises:
            CheckpointError: It is damaged, or of other parameters (`CheckpointMismatch`).
        """

    @abc.abstractmethod
    def set_weights(self, weights: Weights) -> LoadResult:
        """Load whole weights, which every process has, under the names of `whole_weights`."""


class TorchState(ModelState):
    """A model with an optimizer of torch, whose state is one file or shards, of this package or of transformers."""

    def load_optimizer(self, folder: str, optimizer: torch.optim.Optimizer) -> bool:
        contents = Contents(folder)
        if contents.find(OPTIMIZER_INDEX) is not None:
            dcp = open_dcp(contents, OPTIMIZER_FOLDER)
            named: States = dict(get_optimizer_state_dict(self.model, optimizer))
            split, order = named["param_groups"], [name for name, _ in self.model.named_parameters()]
            named["param_groups"] = as_before_split(split, order)
            # The names of parameters of which a folder holds states, and whatever else stands before a full stop. A
            # parameter that has had no gradient is not among them
            before = "optimizer.state."
            keys = [key.removeprefix(before) for key in dcp.index.state_dict_metadata if key.startswith(before)]
            known = {key[:end] for key in keys for end, letter in enumerate(key) if letter == "."}
            held = {name: values for name, values in named["state"].items() if name in known}
            state = {"optimizer": {**named, "state": held}}
            read_dcp(dcp, state)
            options = StateDictOptions(strict=False)
            state["optimizer"]["param_groups"] = split_again(state["optimizer"]["param_groups"], split)
            set_optimizer_state_dict(self.model, optimizer, state["optimizer"], options=options)
            settle_states(folder, optimizer)
            return True
        path = contents.find(layout.OPTIMIZER_NAME)
        if path is not None:
            self.load_optimizer_file(path, optimizer)
            return True
        zero = named_zero_folder(contents)
        if zero is None or not rank_files(contents, zero, OPTIMIZERS):
            return False
        # What DeepSpeed's ranks have in parts, as an optimizer of a whole model has it
        saved = zero_states(folder)
        own_groups = as_before_split(optimizer.param_groups, self.model.parameters())
        own = {parameter: name.removeprefix("_orig_mod.") for name, parameter in self.model.named_parameters()}
        groups = [[own[parameter] for parameter in group["params"]] for group in own_groups]
        order = [name for group in groups for name in group]
        told = list(saved.param_groups)
        if len(told) == len([group for group in groups if group]) < len(groups):
            rest = iter(told)  # DeepSpeed drops an empty group, for which the optimizer's own options serve
            told = [next(rest) if own_group["params"] else own_group for own_group in own_groups]
        saved.check(folder, order, has_groups=len(groups) == len(told))
        states = {}
        for place, name in enumerate(order):
            kept = saved.plain[name] | {key: stored.load() for key, stored in saved.by_name[name].items() if key}
            states[place] = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in kept.items()}
        places = iter(range(len(order)))
        whole = {
            "state": {place: values for place, values in states.items() if values},
            "param_groups": [
                {**options, "params": [next(places) for _ in group]}
                for options, group in zip(told, groups, strict=True)
            ],
        }
        self.set_optimizer_state(os.path.join(folder, zero), whole, optimizer)
        return True

    def load_optimizer_file(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        """Load the state of an optimizer of a whole model from a file."""
        self.set_optimizer_state(path, read_torch_file(path), optimizer)

    def set_optimizer_state(self, path: str, content: object, optimizer: torch.optim.Optimizer) -> None:
        """Load the state, read at a path, of an optimizer of a whole model, which every process has."""
        check_optimizer(path, content, optimizer)
        with naming_misfit(path):
            optimizer.load_state_dict(cast(OptimizerState, content))
        settle_states(path, optimizer)


class PlainState(TorchState):
    """Whole weights, and an optimizer with the state of all of them."""

    can_be_copied = True

    def whole_weights(self) -> Weights:
        return self.model.state_dict()

    def write_weights(self, folder: str, write: Callable[..., None], for_checkpoint: bool) -> None:
        write(folder)  # it asks the model itself

    def write_optimizer(self, folder: str, optimizer: torch.optim.Optimizer, is_writer: bool) -> None:
        if is_writer:
            save_torch(small_ones_on_host(optimizer.state_dict()), os.path.join(folder, layout.OPTIMIZER_NAME))

    def set_weights(self, weights: Weights) -> LoadResult:
        return self.model.load_state_dict(names_of(self.model, weights), strict=False)


_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_WHOLE = StateDictOptions(full_state_dict=True, strict=False)
_FROM_FIRST = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=True)


class MeshState(TorchState):
    """Every process has a part of most parameters and of their optimizer states, and may write it as it is."""

    def __init__(self, model: nn.Module, writes_shards: bool) -> None:
        super().__init__(model)
        self.writes_shards = writes_shards

    def whole_weights(self) -> Weights:
        weights: States = get_model_state_dict(self.model, options=_GATHERED)
        return weights

    def giving_whole(self) -> AbstractContextManager[None]:
        self.model.state_dict()  # what the last forward pass has left whole becomes shards again
        whole: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in self.model.parameters():
            tensor = parameter.detach()
            if isinstance(tensor, DTensor):  # all processes exchange their parts
                on_mesh = tensor.to(tensor.device_mesh.device_type)  # shards may wait on the CPU
                assert isinstance(on_mesh, DTensor)
                tensor = on_mesh.full_tensor().cpu()
            whole[parameter] = tensor
        return replacing(self.model, SAVING, whole.get)

    def taking_whole(self) -> AbstractContextManager[None]:
        return replacing(self.model, LOADING, shard_of)

    def write_weights(self, folder: str, write: Callable[..., None], for_checkpoint: bool) -> None:
        config: Any = getattr(self.model, "config", None)
        loaded = getattr(config, "distributed_config", None)
        with contextlib.ExitStack() as stack:
            if loaded is not None:
                # `save_pretrained` would gather what `from_pretrained` has sharded, which takes all processes. Here the
                # weights are gathered before, and the first process writes.
                stack.callback(setattr, config, "distributed_config", loaded)
                config.distributed_config = None
            if not (for_checkpoint and self.writes_shards):
                super().write_weights(folder, write, for_checkpoint)
                return
            write(folder, state_dict={})  # all but the weights
        barrier()  # the folder is there
        self._save_shards({"model": get_model_state_dict(self.model)}, os.path.join(folder, MODEL_FOLDER))

    def _save_shards(self, state: States, folder: str) -> None:
        """Let every process write its parts. What all of them have, such as counts of steps, the first one writes.

        torch would spread that over all files, and each process of a resume would open all of them. Where ranks hold
        copies of shards, they still divide the work.
        """
        meshes = [parameter for parameter in self.model.parameters() if isinstance(parameter, DTensor)]
        has_copies = any(place.is_replicate() for parameter in meshes for place in parameter.placements)
        save(state, checkpoint_id=folder, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=not has_copies))

    def write_optimizer(self, folder: str, optimizer: torch.optim.Optimizer, is_writer: bool) -> None:
        if self.writes_shards:
            shards: States = dict(get_optimizer_state_dict(self.model, optimizer))
            order = [name for name, _ in self.model.named_parameters()]
            shards["param_groups"] = as_before_split(shards["param_groups"], order)
            self._save_shards({"optimizer": shards}, os.path.join(folder, OPTIMIZER_FOLDER))
            return
        named: States = dict(get_optimizer_state_dict(self.model, optimizer, options=_GATHERED))
        state: OptimizerState = {}
        if named.get("param_groups"):  # only the first process gets them
            whole = as_before_split(named["param_groups"], (name for name, _ in self.model.named_parameters()))
            index = {name: place for place, name in enumerate(name for group in whole for name in group["params"])}
            groups = [{**group, "params": [index[name] for name in group["params"]]} for group in whole]
            state = {"state": {index[name]: values for name, values in named["state"].items()}, "param_groups": groups}
        if is_writer:
            torch.save(state, os.path.join(folder, layout.OPTIMIZER_NAME))

    def set_weights(self, weights: Weights) -> LoadResult:
        result: LoadResult = set_model_state_dict(self.model, dict(weights), options=_FROM_WHOLE)
        return result

    def load_optimizer_file(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        """Let the first process read the file. Every process takes its part of each tensor in turn."""
        named, error = None, None
        if get_rank() == 0:
            try:
                named = self._named(path, read_torch_file(path), optimizer)
            except CheckpointError as found:
                error = found
        raise_first(error)
        self._take(path, named, optimizer)

    def set_optimizer_state(self, path: str, content: object, optimizer: torch.optim.Optimizer) -> None:
        self._take(path, self._named(path, content, optimizer), optimizer, _FROM_WHOLE)

    def _named(self, path: str, content: object, optimizer: torch.optim.Optimizer) -> States:
        """Check a whole state, and give its parameters their names."""
        own = as_before_split(optimizer.param_groups, self.model.parameters())
        check_optimizer(path, content, optimizer, own)
        if behaviour_of(optimizer).switches:  # torch steps it to have states, and finds none to put them in
            raise CheckpointError(
                f"The state of {type(optimizer).__name__} cannot be loaded into a model that FSDP 2 shards.\n\n"
                "Hint: resume without `fsdp`, or begin with the checkpoint's weights."
            )
        state, names = cast(OptimizerState, content), {one: name for name, one in self.model.named_parameters()}
        order = [names[parameter] for group in own for parameter in group["params"]]
        with naming_misfit(path):
            groups = [{**group, "params": [order[i] for i in group["params"]]} for group in state["param_groups"]]
            split = [{**group, "params": [names[one] for one in group["params"]]} for group in optimizer.param_groups]
            groups = split_again(groups, split)
            return {"state": {order[i]: values for i, values in state["state"].items()}, "param_groups": groups}

    def _take(
        self,
        path: str,
        named: States | None,
        optimizer: torch.optim.Optimizer,
        options: StateDictOptions = _FROM_FIRST,
    ) -> None:
        """Take this process's part of a whole state. With `_FROM_FIRST` only the first process has it."""
        known = None if named is None else list(named["state"])
        known = broadcast_object(known) if options is _FROM_FIRST else known
        with naming_misfit(path):
            set_optimizer_state_dict(self.model, optimizer, named or {}, options=options)
        # torch makes a state for each parameter first: without gradients so far, one has none to go on from
        for name, parameter in self.model.named_parameters():
            if name not in (known or ()):
                optimizer.state.pop(parameter, None)
        settle_states(path, optimizer)


def make_model_state(model: nn.Module, wrapped: object = None, writes_shards: bool = False) -> ModelState:
    """Make the object that reads and writes a model's weights and its optimizer's state.

    DeepSpeed's engine, which is the `wrapped` object of a fit, has the weights. A model that processes share is written
    as shards, or gathered.
    """
    if is_deepspeed_engine(wrapped) or is_partitioned(model) or splits_of(model):
        from hf_compat.checkpoint.deepspeed_state import DeepSpeedState  # it builds on this file

        return DeepSpeedState(model, wrapped if is_deepspeed_engine(wrapped) else None)
    if isinstance(model, FSDPModule) or tensor_ranks(model) > 1:
        return MeshState(model, writes_shards)
    return PlainState(model)
