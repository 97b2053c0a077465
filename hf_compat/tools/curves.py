"""What runs have logged, read from `trainer_state.json` whoever wrote it. HF words; draws nothing.

A state may be half written, or of a release that writes other fields: only what curves need is read and checked.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_compat.checkpoint.files import STATE_FILE_BYTES, first_line, read_json
from hf_compat.checkpoint.layout import TRAINER_STATE_NAME, list_checkpoints
from hf_compat.errors import ArgumentError, CheckpointError
from hf_compat.runtime.text import brief

_TIMED = ("_runtime", "_per_second", "_preparation_time")
_NO_CURVES = frozenset({"epoch", "step", "total_flos", "train_loss"})
_LARGEST_COUNT = 2**63

Point = tuple[int, float, float]  # update, epoch, value
Log = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCurves:
    """What a run has logged.

    Args:
        name: How the run is called in legends.
        folder: Where its state was read.
        step: Updates done.
        max_steps: Updates planned; 0 where the state does not say.
        curves: Name of a value → points (update, epoch, value).
        best: Value → its best point, of the value that `metric_for_best_model` names, else of evaluation losses.
    """

    name: str
    folder: str
    step: int
    max_steps: int
    curves: dict[str, list[Point]]
    best: dict[str, Point]


def read_run(path: str, name: str | None = None) -> RunCurves:
    """Read a run's logs: of its output folder, finished or not, of one checkpoint, or of a `trainer_state.json`.

    Raises:
        ArgumentError: There is no state, or it cannot be read; the message names the file and the field.
    """
    file = _state_file(path)
    try:
        state = read_json(file, STATE_FILE_BYTES)
    except CheckpointError as error:
        raise ArgumentError(first_line(error)) from error
    if not isinstance(state, dict) or "log_history" not in state:
        raise ArgumentError(f"{file} is no readable trainer state: it has no `log_history`.")
    curves: dict[str, list[Point]] = {}
    is_over, has_best = False, state.get("best_model_checkpoint") is not None
    for index, log in enumerate(_history(file, state)):
        where = f"log_history[{index}]"
        step = _count(file, f"{where}.step", log.get("step"))
        epoch = _epoch(file, f"{where}.epoch", log.get("epoch"))
        is_over = is_over or "train_runtime" in log
        for key, value in _values(log):
            points = curves.setdefault(key, [])
            if not (is_over and _repeats(points, step, value, has_best)):
                points.append((step, epoch, value))
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    return RunCurves(
        name=name or os.path.basename(os.path.abspath(folder)),
        folder=str(file.parent),
        step=_count(file, "global_step", state.get("global_step")),
        max_steps=_count(file, "max_steps", state.get("max_steps")),
        curves=curves,
        best=_best(state.get("best_metric"), state.get("best_global_step"), curves),
    )


def _best(metric: object, step: object, curves: dict[str, list[Point]]) -> dict[str, Point]:
    """Find the points to mark: a state has the best value and its update, without the name of the value."""
    chosen = {
        name: point
        for name, points in curves.items()
        for point in points
        if name.startswith("eval") and (point[0], point[2]) == (step, metric)
    }
    losses = {name: points for name, points in curves.items() if name.startswith("eval") and name.endswith("_loss")}
    lowest = {name: min(points, key=lambda point: point[2]) for name, points in losses.items()}
    return chosen or {name: point for name, point in lowest.items() if math.isfinite(point[2])}


def _state_file(path: str) -> Path:
    """Return the newest state of a run: a finished one's own, else its last checkpoint's."""
    if not os.path.lexists(path):
        raise ArgumentError(f"There is no run at {path!r}.\n\nHint: name the output folder of a run.")
    if not os.path.isdir(path):
        return Path(path)
    folders = [path, *list_checkpoints(path)]
    files = [file for folder in folders if os.path.lexists(file := os.path.join(folder, TRAINER_STATE_NAME))]
    if not files:
        raise ArgumentError(
            f"{path} has no {TRAINER_STATE_NAME} yet, nor has a checkpoint in it.\n\n"
            "Hint: training writes one with each checkpoint (`save_steps`), `trainer.save_state()` at its end."
        )
    return Path(max(files, key=lambda file: os.lstat(file).st_mtime_ns))


def _history(file: Path, state: Log) -> list[Log]:
    history = state["log_history"]
    if history is None:
        return []
    if not isinstance(history, list):
        raise _wrong(file, "log_history", history, "a list of logs")
    for index, log in enumerate(history):
        if not isinstance(log, dict):
            raise _wrong(file, f"log_history[{index}]", log, "a log")
    return history


def _values(log: Log) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a log that make curves; true and false are 1 and 0, as trackers show them."""
    for key, value in log.items():
        if key in _NO_CURVES or key.endswith(_TIMED) or not isinstance(value, (int, float)):
            continue
        try:
            yield key, float(value)
        except OverflowError:
            yield key, math.inf


def _repeats(points: list[Point], step: int, value: float, has_best: bool) -> bool:
    """Return whether what is evaluated after training says nothing about its last update.

    Either that was evaluated before, and the best model's value would stand above it; or the value is the best model's,
    whose own update has it.
    """
    return any(before == step or (has_best and known == value) for before, _, known in points)


def _count(file: Path, field: str, value: object) -> int:
    """Return a count of updates; 0 where the state has none."""
    if value is None:
        return 0
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST_COUNT:
        raise _wrong(file, field, value, "a whole number from 0 on")
    return value


def _epoch(file: Path, field: str, value: object) -> float:
    if value is None:
        return 0.0
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < _LARGEST_COUNT:
        raise _wrong(file, field, value, "a number from 0 on")
    return float(value)


def _wrong(file: Path, field: str, value: object, expected: str) -> ArgumentError:
    return ArgumentError(f"{file} is no readable trainer state: `{field}` is {brief(value, 60)}, not {expected}.")
