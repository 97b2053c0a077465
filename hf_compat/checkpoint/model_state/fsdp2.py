"""A model that FSDP 2 has sharded: its states are gathered, or written as shards."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.model_state.base import OptimizerState, TorchState, WeightsWriter
from hf_compat.checkpoint.model_state.shards import write_model_shards, write_optimizer_shards
from hf_compat.checkpoint.model_state.whole import gathered, giving, shard_of, taking
from hf_compat.checkpoint.reading import LoadResult, Weights
from hf_compat.errors import CheckpointError
from hf_compat.optim.stepping import stepping_of
from hf_compat.runtime.collectives import barrier

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_WHOLE = StateDictOptions(full_state_dict=True, strict=False)


class FSDP2State(TorchState):
    """Every process has a shard of each parameter and of the optimizer's state.

    Args:
        model: The sharded model.
        writes_shards: Whether checkpoints hold shards, which every process writes for itself.
    """

    def __init__(self, model: nn.Module, writes_shards: bool) -> None:
        super().__init__(model)
        self.writes_shards = writes_shards

    def whole_weights(self) -> Weights:
        weights: dict[str, Any] = get_model_state_dict(self.model, options=_GATHERED)
        return weights

    def giving_whole(self) -> AbstractContextManager[None]:
        self.model.state_dict()  # what the last forward pass has left whole becomes shards again
        return giving(self.model, {parameter: gathered(parameter) for parameter in self.model.parameters()})

    def taking_whole(self) -> AbstractContextManager[None]:
        return taking(self.model, shard_of)

    def write_weights(self, folder: str, write: WeightsWriter, for_checkpoint: bool) -> None:
        if not (for_checkpoint and self.writes_shards):
            super().write_weights(folder, write, for_checkpoint)
            return
        write(folder, state_dict={})
        barrier()  # the folder is there
        write_model_shards(folder, self.model)

    def write_optimizer(self, folder: str, optimizer: torch.optim.Optimizer, is_writer: bool) -> None:
        if self.writes_shards:
            write_optimizer_shards(folder, self.model, optimizer)
            return
        state = self.whole_optimizer_state(optimizer)
        if is_writer:
            torch.save(state, os.path.join(folder, names.OPTIMIZER_NAME))

    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Gather the optimizer's state, in the form that an optimizer of a whole model has and reads.

        Returns:
            The state; it is empty on all processes but the first.
        """
        named: dict[str, Any] = dict(get_optimizer_state_dict(self.model, optimizer, options=_GATHERED))
        if not named.get("param_groups"):  # this process is not the first one
            return {}
        order = [name for group in named["param_groups"] for name in group["params"]]
        index = {name: position for position, name in enumerate(order)}
        groups = [{**group, "params": [index[name] for name in group["params"]]} for group in named["param_groups"]]
        return {"state": {index[name]: state for name, state in named["state"].items()}, "param_groups": groups}

    def set_weights(self, weights: Weights) -> LoadResult:
        result: LoadResult = set_model_state_dict(self.model, dict(weights), options=_FROM_WHOLE)
        return result

    def _set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
        if stepping_of(optimizer).switches:  # torch steps it to have states, and finds none to put them in
            raise CheckpointError(
                f"The state of {type(optimizer).__name__} cannot be loaded into a model that FSDP 2 shards.\n\n"
                "Hint: resume without `fsdp`, or begin with the checkpoint's weights."
            )
        parameter_names = {parameter: name for name, parameter in self.model.named_parameters()}
        order = [parameter_names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        groups = [{**group, "params": [order[i] for i in group["params"]]} for group in state["param_groups"]]
        named: Any = {"state": {order[i]: values for i, values in state["state"].items()}, "param_groups": groups}
        set_optimizer_state_dict(self.model, optimizer, named, options=_FROM_WHOLE)
        # torch makes a state for each parameter first: without gradients so far, one has none to go on from
        for parameter, name in parameter_names.items():
            if name not in named["state"]:
                optimizer.state.pop(parameter, None)
