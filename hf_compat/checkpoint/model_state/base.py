"""`ModelState`: what every way of holding a model answers about weights and optimizer state."""

from __future__ import annotations

import abc
import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import nn

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.contents import Contents
from hf_compat.checkpoint.forms import check_optimizer, check_optimizer_took_over
from hf_compat.checkpoint.model_state.shards import (
    has_model_shards,
    has_optimizer_shards,
    read_model_shards,
    read_optimizer_shards,
)
from hf_compat.checkpoint.reading import (
    LoadResult,
    Weights,
    fitting,
    follow_parameters,
    names_of,
    read_torch_file,
    read_weights,
)
from hf_compat.checkpoint.torch_writer import save_torch
from hf_compat.checkpoint.zero_reader import named_zero_folder, optimizer_files, zero_states
from hf_compat.errors import CheckpointMismatch
from hf_compat.interop.transformers_models import as_held
from hf_compat.runtime.device_copies import small_ones_on_host

OptimizerState = dict[str, Any]  # what `Optimizer.state_dict()` returns: each optimizer has its own values


class WeightsWriter(Protocol):
    """`Trainer._save`: writes weights and what belongs to them; an empty `state_dict` writes no weights."""

    def __call__(self, output_dir: str | None = None, state_dict: Weights | None = None) -> None: ...


class ModelState(abc.ABC):
    """The weights and the optimizer's state of a model, in and out of checkpoint folders.

    Every process calls every method: where the model is sharded they exchange its parts.

    Args:
        model: The model itself.
    """

    # whether a checkpoint can be copied to memory first and written later
    can_be_copied = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @abc.abstractmethod
    def whole_weights(self) -> Weights:
        """Return the whole weights; where they are gathered, the first process gets them."""

    def write_weights(self, folder: str, write: WeightsWriter, for_checkpoint: bool) -> None:
        """Write the weights.

        Args:
            folder: The folder.
            write: Writes whole weights, and what belongs to them.
            for_checkpoint: Whether they are to be resumed from; else they are the user's, and always whole.
        """
        write(folder, state_dict=self.whole_weights())

    def giving_whole(self) -> AbstractContextManager[None]:
        """Let `state_dict` of the model and of its parts give whole tensors, on every process."""
        return contextlib.nullcontext()

    def taking_whole(self) -> AbstractContextManager[None]:
        """Let `load_state_dict` of the model and of its parts take whole tensors, which every process has."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def write_optimizer(self, folder: str, optimizer: torch.optim.Optimizer, is_writer: bool) -> None:
        """Write the optimizer's state.

        Args:
            folder: The folder.
            optimizer: The optimizer.
            is_writer: Whether this process writes what all of them have in common.
        """

    def load_weights(self, folder: str) -> LoadResult:
        """Load weights, which the folder holds whole or as shards.

        Raises:
            CheckpointError: It holds none, or they are damaged.
        """
        if has_model_shards(folder):
            return read_model_shards(folder, self.model)
        result = self.set_weights(as_held(self.model, read_weights(folder)))
        tie_weights = getattr(self.model, "tie_weights", None)  # transformers' models have it
        if callable(tie_weights):
            tie_weights()
        return result

    @abc.abstractmethod
    def load_optimizer(self, folder: str, optimizer: torch.optim.Optimizer) -> bool:
        """Load the optimizer's state.

        Returns:
            Whether the folder has one that this way of holding a model can read.

        Raises:
            CheckpointError: It is damaged.
        """

    @abc.abstractmethod
    def set_weights(self, weights: Weights) -> LoadResult:
        """Load whole weights, which every process has, under the names of `whole_weights`."""


class TorchState(ModelState):
    """A model with an optimizer of torch: its state is read from one file, or from shards, whoever wrote them."""

    def load_optimizer(self, folder: str, optimizer: torch.optim.Optimizer) -> bool:
        if has_optimizer_shards(folder):
            read_optimizer_shards(folder, self.model, optimizer)
            check_optimizer_took_over(folder, optimizer)
            return True
        contents = Contents(folder)
        path = contents.find(names.OPTIMIZER_NAME)
        if path is not None:
            self.set_optimizer_state(path, read_torch_file(path), optimizer)
            return True
        zero = named_zero_folder(contents)
        if zero is None or not optimizer_files(contents, zero):
            return False
        self.set_optimizer_state(os.path.join(folder, zero), self._state_of_zero(folder, optimizer), optimizer)
        return True

    def _state_of_zero(self, folder: str, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Return the state that DeepSpeed's ranks have in parts as an optimizer of a whole model has it.

        Raises:
            CheckpointError: It is damaged.
            CheckpointMismatch: It is of other parameters.
        """
        saved = zero_states(folder)
        own = {parameter: name.removeprefix("_orig_mod.") for name, parameter in self.model.named_parameters()}
        groups = [[own[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        order = [name for group in groups for name in group]
        other = set(order) ^ saved.by_name.keys()
        if other or len(groups) != len(saved.param_groups):
            which = ", ".join(sorted(other)[:5]) or "other groups of them"
            raise CheckpointMismatch(
                f"{folder} holds the optimizer's state of other parameters than the model's: {which}."
            )
        moments = [{key: stored.load().clone() for key, stored in saved.by_name[name].items() if key} for name in order]
        plain = [
            {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in saved.plain[name].items()
            }
            for name in order
        ]
        places = iter(range(len(order)))
        return {
            "state": {
                index: plain[index] | moments[index] for index in range(len(order)) if plain[index] | moments[index]
            },
            "param_groups": [
                {**told, "params": [next(places) for _ in group]}
                for told, group in zip(saved.param_groups, groups, strict=True)
            ],
        }

    def set_optimizer_state(self, path: str, content: object, optimizer: torch.optim.Optimizer) -> None:
        """Load the state of an optimizer of a whole model, which every process has.

        Args:
            path: Where it comes from.
            content: What was read there.
            optimizer: The optimizer.

        Raises:
            CheckpointError: It is no state, or does not fit.
        """
        check_optimizer(path, content)
        with fitting(path):
            self._set_optimizer_state(optimizer, cast(OptimizerState, content))
        follow_parameters(optimizer)
        check_optimizer_took_over(path, optimizer)

    @abc.abstractmethod
    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Return the state as an optimizer of a whole model has it.

        Where it is gathered, the first process gets it.
        """

    @abc.abstractmethod
    def _set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
        """Load the state of an optimizer of a whole model, which every process has."""


class PlainState(TorchState):
    """Whole weights, and an optimizer with the state of all of them."""

    can_be_copied = True

    @property
    def _uncompiled(self) -> nn.Module:
        inner = getattr(self.model, "_orig_mod", self.model)
        assert isinstance(inner, nn.Module)
        return inner

    def whole_weights(self) -> Weights:
        return self._uncompiled.state_dict()

    def write_weights(self, folder: str, write: WeightsWriter, for_checkpoint: bool) -> None:
        write(folder)  # it asks the model itself

    def write_optimizer(self, folder: str, optimizer: torch.optim.Optimizer, is_writer: bool) -> None:
        if is_writer:
            save_torch(small_ones_on_host(optimizer.state_dict()), os.path.join(folder, names.OPTIMIZER_NAME))

    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        return optimizer.state_dict()

    def set_weights(self, weights: Weights) -> LoadResult:
        model = self._uncompiled
        return model.load_state_dict(names_of(model, weights), strict=False)

    def _set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
        optimizer.load_state_dict(state)
