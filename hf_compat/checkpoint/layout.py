"""Names and layout of an output folder and its `checkpoint-<updates>` folders. HF words only; reads no contents."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

PREFIX_CHECKPOINT_DIR = "checkpoint"
TRAINING_ARGS_NAME = "training_args.bin"
TRAINER_STATE_NAME = "trainer_state.json"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "rng_state.pth"


def of_rank(name: str, rank: int, world_size: int) -> str:
    """Return a file's name in a run of several processes, each of which has its own: `rng_state_1.pth`."""
    if world_size == 1:
        return name
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}_{rank}{dot}{suffix}"


WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
ADAPTER_SAFE_WEIGHTS_NAME = "adapter_model.safetensors"
ADAPTER_WEIGHTS_NAME = "adapter_model.bin"

_NUMBERED = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


def checkpoint_step(path: str | os.PathLike[str]) -> int | None:
    """Return the update count in a `checkpoint-<n>` folder's name, or None for any other name."""
    match = _NUMBERED.match(Path(path).name)
    return int(match.group(1)) if match else None


def list_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """List the checkpoint folders of an output folder, oldest step first."""
    if not os.path.isdir(folder):
        return []
    found = [entry.path for entry in os.scandir(folder) if checkpoint_step(entry.name) is not None and entry.is_dir()]
    return sorted(found, key=lambda path: checkpoint_step(path) or 0)


def checkpoints_to_delete(
    folder: str, save_total_limit: int | None, best: str | None, is_ours: Callable[[str], bool]
) -> list[str]:
    """Choose what rotation removes: the oldest by step, never the newest, never the best.

    Args:
        folder: The output folder.
        save_total_limit: Checkpoints to keep; None or 0 keeps all.
        best: Path of the best checkpoint, kept whatever its age.
        is_ours: Says whether a folder counts, and may be deleted, at all.

    Mirrors:
        `transformers.trainer_utils.rotate_checkpoints`, 5.23.

    Differs:
        Goes by step number always; upstream goes by modification time first, and deletes whatever has the name.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return []
    checkpoints = [path for path in list_checkpoints(folder) if is_ours(path)]
    protected = set(checkpoints[-1:])
    if best is not None:
        protected |= {path for path in checkpoints if os.path.abspath(path) == os.path.abspath(best)}
    surplus = len(checkpoints) - max(save_total_limit, len(protected))
    candidates = [path for path in checkpoints if path not in protected]
    return candidates[: max(surplus, 0)]
