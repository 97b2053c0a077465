"""What users' callbacks and modules put into checkpoints, as values that can be read back without running anything."""

from __future__ import annotations

import contextlib
import enum
import io
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from hf_compat.checkpoint.pickles import check_bounds
from hf_compat.errors import CallbackError, CheckpointError, warn_once
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.runtime.rng import legacy_globals

State = TypeVar("State")
Value = Any  # of the user's own kind
Global = Any  # what torch's allow-list takes: a class, a function, or one with a name

# Weights and moments are tensors, and large: they are not walked through.
_TENSORS = frozenset({"state_dict", "optimizer_states"})
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_PLAIN = (bool, int, float, complex, str, bytes, torch.Tensor, type(None))


class _Unreadable(Exception):
    """A value that the reader of checkpoints refuses.

    Args:
        where: Keys and indices that lead to it.
        value: The value.
    """

    def __init__(self, where: str, value: object) -> None:
        super().__init__(where)
        self.where = where
        self.value = value


def readable_checkpoint(checkpoint: dict[str, State]) -> dict[str, State]:
    """Return a Lightning checkpoint whose every entry can be read back; NumPy's scalars become plain numbers.

    Arguments among hyperparameters become dicts; what else of them cannot be read back is left out, with a warning.

    Raises:
        CallbackError: The state of a callback, or what a hook has added, cannot be read back; the message names it.
    """
    readable = dict(checkpoint)
    for key, value in checkpoint.items():
        if key in _HYPERPARAMETERS and isinstance(value, Mapping):
            readable[key] = _readable_hyperparameters(value)  # type: ignore[assignment]  # a mapping of the same names
        elif key == "callbacks" and isinstance(value, Mapping):
            readable[key] = readable_states(value)  # type: ignore[assignment]
        elif key not in _TENSORS:
            readable[key] = readable_state(value, f"The entry {key!r} of the checkpoint")
    return readable


def readable_states(states: Mapping[str, object]) -> dict[str, object]:
    """Return the states of callbacks, by their keys, as `readable_state` does."""
    return {key: readable_state(state, f"The state of the callback {key}") for key, state in states.items()}


def readable_state(state: State, whose: str) -> State:
    """Return a state with plain numbers in place of NumPy's scalars.

    Args:
        state: Containers, numbers, texts, tensors and arrays.
        whose: Begin of the error's sentence.

    Raises:
        CallbackError: It holds something, or is nested or shared so, that the whole checkpoint would be unreadable.
    """
    try:
        check_bounds(whose, state)
        plain: State = _readable(state, "")
        return plain
    except CheckpointError as error:
        raise CallbackError(f"{error}\n\nHint: return what is nested less, and shares less.") from None
    except _Unreadable as found:
        raise CallbackError(
            f"{whose} cannot be read back from a checkpoint: it holds a {type(found.value).__name__}"
            f"{found.where and f' at {found.where}'}.\n\n"
            "Hint: return numbers, texts, tensors, NumPy arrays, and lists or dicts of these."
        ) from None


def _readable_hyperparameters(held: Mapping[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, value in held.items():
        plain = value.to_dict() if isinstance(value, TrainingArguments) else value
        plain = vars(plain) if isinstance(plain, Namespace) else plain
        plain = plain.value if isinstance(plain, enum.Enum) else str(plain) if isinstance(plain, PurePath) else plain
        try:
            kept[name] = _readable(plain, name)
        except _Unreadable as found:
            if not isinstance(found.value, nn.Module):  # its weights are in the checkpoint
                warn_once(
                    f"The hyperparameter {found.where} is a {type(found.value).__name__}, which cannot be read back "
                    "from a checkpoint, and is left out of it."
                )
    return kept


def _readable(value: Value, where: str) -> Value:
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        return value.item()
    if type(value) in _CONTAINERS:
        return _CONTAINERS[type(value)](value, where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return value
    if not _is_read_back(value):
        raise _Unreadable(where, value)
    return value


def _readable_mapping(value: Mapping[object, object], where: str) -> object:
    return type(value)((_readable(key, where), _readable(item, f"{where}[{key!r}]")) for key, item in value.items())  # type: ignore[call-arg]  # dict or OrderedDict


def _readable_sequence(value: list[object], where: str) -> object:
    return type(value)(_readable(item, f"{where}[{index}]") for index, item in enumerate(value))


_CONTAINERS: dict[type, Callable[..., object]] = {
    dict: _readable_mapping,
    OrderedDict: _readable_mapping,
    list: _readable_sequence,
    tuple: _readable_sequence,
    set: _readable_sequence,
}


def _is_read_back(value: object) -> bool:
    """Return whether torch reads a value back that it has written, without running anything in it."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        with reading_arrays():
            torch.load(file, weights_only=True)
    except Exception:
        return False
    return True


def array_globals() -> list[Global]:
    """List what NumPy's arrays of numbers and texts consist of, for torch's allow-list."""
    return [*legacy_globals(), *{type(np.dtype(kind)) for kind in "?bhilqBHILQefdFDSU"}]


def reading_arrays() -> contextlib.AbstractContextManager[None]:
    """Let torch read NumPy's arrays back, as it reads tensors: nothing in them is run."""
    return torch.serialization.safe_globals(array_globals())
