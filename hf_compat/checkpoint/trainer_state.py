"""The one reader of `trainer_state.json`: every field has the type and range that a run needs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from hf_compat.checkpoint.files import STATE_FILE_BYTES, read_json
from hf_compat.checkpoint.forms import AMOUNT, COUNT, FLAG, MAPPING, NUMBER, TEXT, Kind, or_none, wrong_field
from hf_compat.errors import CheckpointError
from hf_compat.hf.state import TrainerState


def read_trainer_state(path: str | os.PathLike[str], where_missing: Mapping[str, float] | None = None) -> TrainerState:
    """Read a state that this package or `transformers` wrote.

    Args:
        path: The file.
        where_missing: Values of fields that the file may leave open, as one that was made of a `.ckpt` does.

    Raises:
        CheckpointError: The file cannot be read, or a field has a value that no run writes, or is missing; the message
            names it.
    """
    values = read_json(path, STATE_FILE_BYTES)
    if not isinstance(values, dict):
        raise _wrong(path, "it holds no fields")
    known = {field.name for field in dataclasses.fields(TrainerState)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise _wrong(path, f"it has fields that are not known: {', '.join(map(repr, unknown))}")
    missing = [f"`{name}` is missing" for name in _NEEDED if name not in values]
    wrong = wrong_field(values, _KINDS) or next(iter(missing), None)
    if wrong is not None:
        raise _wrong(path, wrong)
    return TrainerState(**{**(where_missing or {}), **values})


def _wrong(path: str | os.PathLike[str], what: str) -> CheckpointError:
    text = f"{os.fspath(path)} is not a readable trainer state: {what}."
    return CheckpointError(f"{text}\n\nHint: resume from another checkpoint.")


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


_KINDS: dict[str, Kind] = {
    "epoch": AMOUNT,
    "global_step": COUNT,
    "max_steps": COUNT,
    "logging_steps": AMOUNT,  # 0 is right where a run does not log by updates
    "eval_steps": AMOUNT,
    "save_steps": AMOUNT,
    "train_batch_size": or_none(COUNT),
    "num_train_epochs": COUNT,
    "num_input_tokens_seen": COUNT,
    "total_flos": AMOUNT,
    "log_history": or_none(("a list of logs", _is_history)),
    "best_metric": or_none(NUMBER),
    "best_global_step": or_none(COUNT),
    "best_model_checkpoint": or_none(("a path", TEXT[1])),
    "is_local_process_zero": FLAG,
    "is_world_process_zero": FLAG,
    "is_hyper_param_search": FLAG,
    "trial_name": or_none(TEXT),
    "trial_params": or_none(MAPPING),
    "stateful_callbacks": or_none(("states by class name", _are_states)),
}
_NEEDED = ("global_step",)  # what every release writes, and nothing can be worked out without
