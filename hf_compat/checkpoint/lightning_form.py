"""What a Lightning checkpoint looks like: the fields, types and ranges that Lightning takes for granted."""

from __future__ import annotations

import re
from typing import Any

import hf_compat.upstream  # noqa: F401 - loads Lightning

# isort: split
import lightning
import torch

from hf_compat.checkpoint.files import naming, short
from hf_compat.checkpoint.forms import check_optimizer, check_schedule, is_count
from hf_compat.checkpoint.run_state import DataPosition
from hf_compat.errors import CheckpointError

LightningCheckpoint = dict[str, Any]  # what Lightning saves: its own keys, and what callbacks and modules add

OWN_KEY = "hf_compat"


def check_lightning(path: str, checkpoint: object) -> None:
    """Refuse what Lightning would take apart as a checkpoint and is none.

    Args:
        path: The file, for messages.
        checkpoint: What it holds.

    Raises:
        CheckpointError: A field is missing, or holds what Lightning does not write.
    """
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path} cannot be read: it holds {short(checkpoint)}, not a checkpoint.")
    weights = checkpoint.get("state_dict")
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} cannot be read: its `state_dict` holds something else than weights by name.")
    for name, check in (("optimizer_states", check_optimizer), ("lr_schedulers", check_schedule)):
        states = checkpoint.get(name, [])
        if not isinstance(states, list):
            raise CheckpointError(f"{path} cannot be read: `{name}` is {short(states)}, not a list.")
        for index, state in enumerate(states):
            check(f"{path}: `{name}[{index}]`", state)
    wrong = _wrong_field(checkpoint)
    if wrong is not None:
        raise CheckpointError(f"{path} cannot be read: `{wrong}` is not what Lightning writes.")
    missing = [name for name in ("optimizer_states", "lr_schedulers") if name not in checkpoint]
    if len(missing) == 1:
        raise CheckpointError(f"{path} cannot be read: `{missing[0]}` is missing.")
    own = checkpoint.get(OWN_KEY)
    if own is None:
        return
    with naming(f"{path}: `{OWN_KEY}`"):
        if not isinstance(own, dict) or not is_count(own.get("updates", 0)):
            raise CheckpointError(f"It is {short(own)}, without a number of updates.")
        DataPosition.read(own.get("windows"))


def _wrong_field(checkpoint: LightningCheckpoint) -> str | None:
    """Return which of Lightning's own fields has another type than Lightning gives it."""
    for name in ("epoch", "global_step"):
        if not isinstance(checkpoint.get(name), int) or not -1 <= checkpoint[name] < 2**63:
            return name
    version = checkpoint.get("pytorch-lightning_version", lightning.__version__)
    if not isinstance(version, str) or not re.fullmatch(r"\d[\w.+!-]{0,59}", version):
        return "pytorch-lightning_version"
    if not isinstance(checkpoint.get("callbacks", {}), dict):
        return "callbacks"
    return _wrong_loop("loops", checkpoint.get("loops", {}))


# each counts in all, and since the last start
_PROGRESS = ("epoch_progress", "batch_progress", "scheduler_progress", "optim_step_progress")


def _wrong_loop(where: str, state: object) -> str | None:
    """Look at the states of loops: mappings, and whole numbers in those of their progress."""
    if not isinstance(state, dict):
        return where
    for name, value in state.items():
        inner = f"{where}.{name}"
        kind = str(name).rpartition(".")[2]
        if (kind in _PROGRESS and not _counts(value)) or (kind == "optim_progress" and not _counts_steps(value)):
            return inner
        if where == "loops" or str(name).endswith("progress") or name in ("total", "current"):
            wrong = _wrong_loop(inner, value)
        elif str(name).endswith("state_dict"):
            wrong = None if isinstance(value, dict) else inner
        else:
            is_progress = where.endswith((".total", ".current"))
            wrong = inner if is_progress and not (isinstance(value, int) and 0 <= value < 2**63) else None
        if wrong is not None:
            return wrong
    return None


def _counts(progress: object) -> bool:
    return isinstance(progress, dict) and {"total", "current"} <= progress.keys()


def _counts_steps(progress: object) -> bool:
    """Return whether the progress of automatic optimization has its two counters."""
    optimizer = progress.get("optimizer") if isinstance(progress, dict) else None
    return isinstance(optimizer, dict) and _counts(optimizer.get("step")) and _counts(optimizer.get("zero_grad"))
