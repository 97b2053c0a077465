"""Read the logs of runs from `trainer_state.json` of this package or of transformers.

A state may be half written or have other fields, so only the fields of curves are read and checked.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_compat.checkpoint.files import STATE_FILE_BYTES, first_line, read_json, refusal_behind
from hf_compat.checkpoint.layout import TRAINER_STATE_NAME, list_checkpoints
from hf_compat.errors import ArgumentError, CheckpointError
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.text import brief

_TIMED = ("_runtime", "_per_second", "_preparation_time")
_NO_CURVES = frozenset({"epoch", "step", "total_flos", "train_loss"})
_LARGEST_COUNT = 2**63

Point = tuple[int, float, float]  # update, epoch, value
Log = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCurves:
    """The logs of a run."""

    name: str
    folder: str
    step: int
    max_steps: int
    curves: dict[str, list[Point]]
    best: dict[str, Point]
    ends_at_save: bool  # whether the run has ended, and the state is that of a save before its last evaluation


def read_run(path: str, name: str | None = None) -> RunCurves:
    """Read a run's logs from its output folder, one checkpoint, or a `trainer_state.json`.

    Raises:
        ArgumentError: The state is missing or cannot be read. The message names the file and the field.
    """
    file = _state_file(local_path("RUN", path))
    try:
        state = read_json(file, STATE_FILE_BYTES)
    except CheckpointError as error:
        raise ArgumentError(first_line(error)) from error
    if not isinstance(state, dict) or "log_history" not in state:
        raise ArgumentError(f"{file} is not a readable trainer state: it has no `log_history`.")
    curves: dict[str, list[Point]] = {}
    is_over, has_best = False, state.get("best_model_checkpoint") is not None
    history = [] if state["log_history"] is None else state["log_history"]
    if not isinstance(history, list):
        raise _wrong(file, "log_history", history, "a list of logs")
    for index, log in enumerate(history):
        where = f"log_history[{index}]"
        if not isinstance(log, dict):
            raise _wrong(file, where, log, "a log")
        step = int(_number(file, f"{where}.step", log.get("step"), is_whole=True))
        epoch = _number(file, f"{where}.epoch", log.get("epoch"))
        is_over = is_over or "train_runtime" in log
        for key, value in _values(log):
            points = curves.setdefault(key, [])
            # An evaluation after training may repeat that of its update, or the value of the best model
            is_known = any(before == step or (has_best and known == value) for before, _, known in points)
            if not (is_over and is_known):
                points.append((step, epoch, value))
    # A state has the best value and its update without the name of the value
    evaluated = {key: points for key, points in curves.items() if key.startswith("eval")}
    best = (state.get("best_global_step"), state.get("best_metric"))
    chosen = {key: one for key, points in evaluated.items() for one in points if (one[0], one[2]) == best}
    losses = {key: points for key, points in evaluated.items() if key.endswith("_loss")}
    lowest = {key: min(points, key=lambda point: point[2]) for key, points in losses.items()}
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    update = int(_number(file, "global_step", state.get("global_step"), is_whole=True))
    max_updates = int(_number(file, "max_steps", state.get("max_steps"), is_whole=True))
    return RunCurves(
        name=name or os.path.basename(os.path.abspath(folder)),
        folder=str(file.parent),
        step=update,
        max_steps=max_updates,
        ends_at_save=0 < max_updates <= update
        and not is_over
        and any(points[-1][0] < update for points in evaluated.values()),
        curves=curves,
        best=chosen or {key: point for key, point in lowest.items() if math.isfinite(point[2])},
    )


def _state_file(path: str) -> Path:
    if not os.path.lexists(path):
        raise ArgumentError(f"There is no run at {path!r}.\n\nHint: name the output folder of a run.")
    if not os.path.isdir(path):
        return Path(path)
    files, refusal = [], None
    for folder in (path, *list_checkpoints(path)):
        file = os.path.join(folder, TRAINER_STATE_NAME)
        try:
            os.lstat(file)
            files.append(file)
        except OSError as error:
            refusal = refusal_behind(error) or refusal
    if not files and refusal is not None:
        raise ArgumentError(f"{refusal.filename} cannot be read: {refusal.strerror}.\n\nHint: let this user read it.")
    if not files:
        raise ArgumentError(
            f"{path} has no {TRAINER_STATE_NAME} yet, nor has a checkpoint in it.\n\n"
            "Hint: training writes one with each checkpoint (`save_steps`), `trainer.save_state()` at its end."
        )
    return Path(max(files, key=lambda file: os.lstat(file).st_mtime_ns))


def _values(log: Log) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a log that make curves. True and false are 1 and 0, as in trackers."""
    for key, value in log.items():
        if key in _NO_CURVES or key.endswith(_TIMED) or not isinstance(value, (int, float)):
            continue
        try:
            yield key, float(value)
        except OverflowError:
            yield key, math.inf


def _number(file: Path, field: str, value: object, *, is_whole: bool = False) -> float:
    """Read an epoch or a count of updates. 0 if the state has none."""
    if value is None:
        return 0
    if is_whole and isinstance(value, float) and value.is_integer():
        value = int(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _LARGEST_COUNT
    if not isinstance(value, (int, float)) or not is_number or (is_whole and not isinstance(value, int)):
        raise _wrong(file, field, value, f"a {'whole ' if is_whole else ''}number from 0 on")
    return value


def _wrong(file: Path, field: str, value: object, expected: str) -> ArgumentError:
    return ArgumentError(f"{file} is not a readable trainer state: `{field}` is {brief(value, 60)}, not {expected}.")
