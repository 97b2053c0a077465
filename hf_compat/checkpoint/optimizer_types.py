"""Objects that optimizers of other packages keep in their state: the few types that a checkpoint may hold of them.

GaLore and APOLLO keep an object with the projection of each weight, torchao keeps tensors of types of its own. Nothing
else is built when a file is read, and a type only from the package of this name.
"""

from __future__ import annotations

import contextlib
import importlib
import zipfile
from collections.abc import Iterator

import torch

# module → types
_STATE_TYPES = {
    "galore_torch.galore_projector": ("GaLoreProjector",),
    "apollo_torch.svd_projector": ("GaLoreProjector",),
    "apollo_torch.random_projector": ("GradientProjector",),
    "torchao.optim.subclass_4bit": ("OptimState4bit",),
    "torchao.optim.subclass_8bit": ("OptimState8bit",),
}


def state_types_in(path: str) -> list[type]:
    """Return the types of optimizers' packages that a file of `torch.save` names, where their package is installed."""
    if not zipfile.is_zipfile(path):
        return []
    named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return list(_known(named))


def _known(named: list[str]) -> Iterator[type]:
    for module, types in _STATE_TYPES.items():
        for name in types:
            if f"{module}.{name}" in named:
                with contextlib.suppress(ImportError):  # reading says which type it does not know
                    yield getattr(importlib.import_module(module), name)


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move the tensors within such objects to the devices of their parameters, as torch moves plain tensors."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if type(value).__name__ in _STATE_TYPES.get(type(value).__module__, ()) and hasattr(value, "__dict__"):
                vars(value).update({name: _moved(held, parameter.device) for name, held in vars(value).items()})


def _moved(held: object, device: torch.device) -> object:
    if isinstance(held, torch.Tensor):
        return held.to(device)
    return [_moved(item, device) for item in held] if isinstance(held, list) else held
