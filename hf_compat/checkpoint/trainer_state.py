"""The one reader of `trainer_state.json`: every field has the type and range that a run needs. HF words only."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import TypeGuard

from hf_compat.checkpoint.files import STATE_FILE_BYTES, read_json, short
from hf_compat.errors import CheckpointError
from hf_compat.hf.state import TrainerState

Fits = Callable[[object], bool]
_LARGEST_COUNT = 2**63


def read_trainer_state(path: str | os.PathLike[str]) -> TrainerState:
    """Read a state that this package or `transformers` wrote.

    Raises:
        CheckpointError: The file cannot be read, or a field has a value that no run writes; the message names it.
    """
    values = read_json(path, STATE_FILE_BYTES)
    if not isinstance(values, dict):
        raise _wrong(path, "it holds no fields")
    known = {field.name for field in dataclasses.fields(TrainerState)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise _wrong(path, f"it has fields that are not known: {', '.join(map(repr, unknown))}")
    for name, value in values.items():
        expected, fits = _FIELDS[name]
        if not fits(value):
            raise _wrong(path, f"`{name}` is {short(value)}, not {expected}")
    return TrainerState(**values)


def _wrong(path: str | os.PathLike[str], what: str) -> CheckpointError:
    text = f"{os.fspath(path)} is not a readable trainer state: {what}."
    return CheckpointError(f"{text}\n\nHint: resume from another checkpoint.")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_COUNT


def _is_amount(value: object) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _is_history(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(log, dict) for log in value)


def _are_states(value: object) -> bool:
    """Return whether a value has exported states by class name: one for each class, or a list of several."""
    if not isinstance(value, dict):
        return False
    found = [state for one in value.values() for state in (one if isinstance(one, list) else [one])]
    return all(isinstance(state, dict) and _is_exported(state) for state in found)


def _is_exported(state: Mapping[str, object]) -> bool:
    return all(isinstance(state.get(part, {}), dict) for part in ("args", "attributes"))


def _or_none(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


_COUNT = ("a whole number from 0 on", _is_count)
_AMOUNT = ("a number from 0 on", _is_amount)
_FLAG = ("true or false", _is_flag)
_FIELDS: dict[str, tuple[str, Fits]] = {
    "epoch": _AMOUNT,
    "global_step": _COUNT,
    "max_steps": _COUNT,
    "logging_steps": _AMOUNT,  # 0 is right where a run does not log by updates
    "eval_steps": _AMOUNT,
    "save_steps": _AMOUNT,
    "train_batch_size": ("a whole number from 0 on, or null", _or_none(_is_count)),
    "num_train_epochs": _COUNT,
    "num_input_tokens_seen": _COUNT,
    "total_flos": _AMOUNT,
    "log_history": ("a list of logs", _or_none(_is_history)),
    "best_metric": ("a number or null", _or_none(_is_number)),
    "best_global_step": ("a whole number from 0 on, or null", _or_none(_is_count)),
    "best_model_checkpoint": ("a path or null", _or_none(_is_text)),
    "is_local_process_zero": _FLAG,
    "is_world_process_zero": _FLAG,
    "is_hyper_param_search": _FLAG,
    "trial_name": ("text or null", _or_none(_is_text)),
    "trial_params": ("a mapping or null", _or_none(_is_mapping)),
    "stateful_callbacks": ("states by class name", _or_none(_are_states)),
}
