"""A model that DeepSpeed's engine holds: ZeRO's own files beside the weights."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import distributed, nn

from hf_compat.checkpoint.contents import Contents
from hf_compat.checkpoint.model_state.base import ModelState
from hf_compat.checkpoint.model_state.whole import giving
from hf_compat.checkpoint.model_state.zero_partitions import take_states
from hf_compat.checkpoint.pickles import Plain
from hf_compat.checkpoint.reading import LoadResult, Weights, names_of, read_torch_file
from hf_compat.checkpoint.zero_reader import (
    OWN_TYPES,
    check_zero_files,
    has_partitioned_weights,
    named_zero_folder,
    optimizer_files,
)
from hf_compat.errors import CheckpointError
from hf_compat.interop.deepspeed import DeepSpeedEngine
from hf_compat.runtime.collectives import barrier


class _Compared(NamedTuple):
    """The names that a model lacked, and those that it does not know."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class DeepSpeedState(ModelState):
    """The engine has the weights and the optimizer's state, in parts from ZeRO 1 on.

    Args:
        model: The model itself.
        engine: The engine around it.
    """

    def __init__(self, model: nn.Module, engine: DeepSpeedEngine) -> None:
        super().__init__(model)
        self.engine = engine

    def whole_weights(self) -> Weights:
        engine = self.engine
        if engine.zero_optimization_partition_weights():
            return engine._zero3_consolidated_16bit_state_dict() or {}
        return engine.module.state_dict()

    def giving_whole(self) -> AbstractContextManager[None]:
        if not self.engine.zero_optimization_partition_weights():
            return contextlib.nullcontext()
        return giving(self.model, dict(_copied_whole(self.model)))

    def write_optimizer(self, folder: str, optimizer: torch.optim.Optimizer, is_writer: bool) -> None:
        if is_writer:
            os.makedirs(folder, exist_ok=True)
        barrier()
        self.engine.save_checkpoint(folder)

    def load_optimizer(self, folder: str, optimizer: torch.optim.Optimizer) -> bool:
        """Load the engine's own files, weights included; the state of another kind of optimizer is not read.

        Files of another number of processes, or of another stage of ZeRO, are read parameter by parameter.

        Raises:
            CheckpointError: They hold code, or an optimizer that offloads to a disk cannot take them.
        """
        contents = Contents(folder)
        name = named_zero_folder(contents)
        if name is None:
            return False
        if self.engine.load_universal_checkpoint():
            raise CheckpointError(
                f"{folder} is not read: DeepSpeed unpickles whatever is in a universal checkpoint.\n\n"
                "Hint: leave `load_universal` out of DeepSpeed's configuration."
            )
        check_zero_files(contents, name)  # on every rank and before any exchange: one that fails alone lets all wait
        ranks = len(optimizer_files(contents, name))  # 0 without ZeRO: the optimizer's state is with the weights
        layout = (ranks, has_partitioned_weights(contents, name))
        if ranks and layout != (distributed.get_world_size(), self.engine.zero_optimization_partition_weights()):
            take_states(folder, self.engine)
            return True
        with _plain_reads(self.engine, contents):
            self.engine.load_checkpoint(folder, tag=name, load_lr_scheduler_states=False)
        return True

    def set_weights(self, weights: Weights) -> LoadResult:
        named = names_of(self.model, weights)
        if not self.engine.zero_optimization_partition_weights():
            return self.model.load_state_dict(named, strict=False)
        for module, own in self._by_module(named):
            with _gathered(module):
                module.load_state_dict(own, strict=False)
        known = self.model.state_dict().keys()
        return _Compared([name for name in known if name not in named], [name for name in named if name not in known])

    def _by_module(self, weights: Weights) -> Iterator[tuple[nn.Module, Weights]]:
        """Yield every module with the weights that are its own: no more than one module is ever gathered."""
        owned: dict[str, Weights] = {}
        for name, tensor in weights.items():
            prefix, _, own_name = name.rpartition(".")
            owned.setdefault(prefix, {})[own_name] = tensor
        for prefix, module in self.model.named_modules():
            if prefix in owned:
                yield module, owned[prefix]


class _PlainReader:
    """Reads for DeepSpeed's engine, which would unpickle whatever it finds: tensors, plain values and its own types.

    The engine gets the very objects that were checked; there is no second read for which a file could be replaced.

    Args:
        replaced: The engine's own reader and writer, which answers everything else.
        contents: The checkpoint.
    """

    def __init__(self, replaced: object, contents: Contents) -> None:
        self._replaced = replaced
        self._contents = contents

    def load(self, path: str, map_location: object = None) -> Plain:
        """Read a file of the checkpoint.

        Raises:
            CheckpointError: It is no file of the checkpoint, damaged, or holds code.
        """
        # DeepSpeed looks for its files by a pattern, and may have found some elsewhere
        name = os.path.relpath(path, self._contents.folder).replace(os.sep, "/")
        found = [name.rpartition(".") for name in OWN_TYPES]
        return read_torch_file(
            self._contents.need(name),
            allowed=[getattr(importlib.import_module(module), name) for module, _, name in found],
        )

    def __getattr__(self, name: str) -> object:
        return getattr(self._replaced, name)


@contextlib.contextmanager
def _plain_reads(engine: DeepSpeedEngine, contents: Contents) -> Iterator[None]:
    """Let an engine read a checkpoint through `_PlainReader`."""
    own = engine.checkpoint_engine
    engine.checkpoint_engine = _PlainReader(own, contents)
    try:
        yield
    finally:
        engine.checkpoint_engine = own


def _copied_whole(model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    for module in model.modules():
        with _gathered(module):
            for parameter in module.parameters(recurse=False):
                yield parameter, parameter.detach().to("cpu", copy=True)


def _gathered(module: nn.Module) -> AbstractContextManager[None]:
    """Let a module's own parameters be whole for a while; what the first process has made of them is kept."""
    import deepspeed

    parameters = list(module.parameters(recurse=False))
    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
    return context
