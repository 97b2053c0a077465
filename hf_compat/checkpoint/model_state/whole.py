"""Whole tensors out of `state_dict` and into `load_state_dict` of a model with spread parameters.

An override of `Trainer._save` may ask the model itself for its weights (`self.model.save_pretrained(folder)`), and one
of `_load_from_checkpoint` may load whole ones. The hooks here are on the model for such a call, and gone after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

Tensors = dict[str, torch.Tensor]


class Handle(Protocol):
    """What torch returns for a hook."""

    def remove(self) -> None: ...


@contextlib.contextmanager
def in_own_class(model: nn.Module) -> Iterator[None]:
    """Give the parts of a model, which `fully_shard` has put into classes of torch, their own classes for a while.

    `type(model).from_pretrained(folder)` fails with torch's class, and a model card says `FSDPMyModel`.
    """
    changed = {module: type(module) for module in model.modules() if isinstance(module, FSDPModule)}
    for module, kind in changed.items():
        module.__class__ = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
    try:
        yield
    finally:
        for module, kind in changed.items():
            module.__class__ = kind


@contextlib.contextmanager
def giving(model: nn.Module, whole: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Let `state_dict` of a model and of its parts hold these tensors in the place of the parameters."""

    def put(module: nn.Module, state: Tensors, prefix: str, metadata: object) -> None:
        for name, parameter in _own(module):
            if prefix + name in state and parameter in whole:
                state[prefix + name] = whole[parameter]

    handles = [m.register_state_dict_post_hook(put) for m in model.modules()]  # type: ignore[no-untyped-call]  # torch's
    with in_own_class(model), _removed_after(handles):
        yield


@contextlib.contextmanager
def taking(model: nn.Module, fit: Callable[[nn.Parameter, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let `load_state_dict` of a model and of its parts take whole tensors: `fit` makes a parameter's value of each."""

    def put(module: nn.Module, state: Tensors, prefix: str, *_: object) -> None:
        for name, parameter in _own(module):
            if prefix + name in state:
                state[prefix + name] = fit(parameter, state[prefix + name])

    handles = [m.register_load_state_dict_pre_hook(put) for m in model.modules()]  # type: ignore[no-untyped-call]
    with in_own_class(model), _removed_after(handles):
        yield


def gathered(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter whole, in memory of the CPU, where it is a shard: all processes exchange their parts."""
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    on_mesh = tensor.to(tensor.device_mesh.device_type)  # shards may wait on the CPU
    assert isinstance(on_mesh, DTensor)
    return on_mesh.full_tensor().cpu()


def shard_of(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return a process's own part of a tensor that every process has whole; nothing is exchanged."""
    if not isinstance(parameter, DTensor) or isinstance(whole, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


@contextlib.contextmanager
def _removed_after(handles: Iterable[Handle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
