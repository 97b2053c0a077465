"""Restore Lightning callbacks to their state before a search, so that each trial starts fresh."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from enum import Enum

import lightning.pytorch as pl
import torch

_CONTAINERS = (dict, list, set)


class SavedCallbackStates:
    """A copy of Lightning callbacks' states, and the means to restore them.

    For a callback of Lightning's, or of a subclass, all attributes are restored. For any other, the content of its
    `state_dict` is. A script's list or dict that a callback shares is left alone.

    Args:
        callbacks: The callbacks.
    """

    def __init__(self, callbacks: Sequence[pl.Callback]) -> None:
        self._callbacks = list(callbacks)
        self._declared = [copy.deepcopy(callback.state_dict()) for callback in self._callbacks]
        self._attributes = [
            _attributes(callback, declared) for callback, declared in zip(self._callbacks, self._declared, strict=True)
        ]

    def restore(self) -> None:
        """Restore the state of every callback."""
        for callback, declared, attributes in zip(self._callbacks, self._declared, self._attributes, strict=True):
            if attributes:
                vars(callback).update({name: _copied(value) for name, value in attributes.items()})
            elif declared:
                callback.load_state_dict(copy.deepcopy(declared))


def _attributes(callback: pl.Callback, declared: dict[str, object]) -> dict[str, object]:
    """Copy the attributes to restore."""
    if not any(_is_lightnings(kind) for kind in type(callback).__mro__ if kind not in _BASES):
        return {}
    is_own = _is_lightnings(type(callback))
    return {
        name: _copied(value)
        for name, value in vars(callback).items()
        if is_own or name in declared or not isinstance(value, _CONTAINERS)
    }


_BASES = (pl.Callback, pl.callbacks.Checkpoint)


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def _copied(value: object) -> object:
    """Copy tensors and containers, in which a callback may count or collect. Return other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, _CONTAINERS) and not isinstance(value, Enum):
        return copy.copy(value)
    return value
