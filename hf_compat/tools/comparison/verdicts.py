"""Compare the values and files of two sides: equal, explained, or the first difference and its size."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from hf_compat.checkpoint.reading import is_ours_alone, read_torch_file
from hf_compat.errors import CheckpointError
from hf_compat.tools.comparison.reading import (
    AT_RESUME,
    FILES,
    LOGS,
    QUANTITIES,
    RETURNED,
    TIMED,
    Findings,
    Place,
    Value,
    same,
)

ABSENT = "<absent>"
# The largest difference between two kept contents. None if it has no size.
Measure = Callable[[Value, Value], float | None]
Found = tuple[str, object, object]  # the place in a file, and both values
_LOGGED_HERE_ONLY = "nonfinite_steps"
# Losses that a resumed run reports differently.
_RESUMED = {LOGS: ("loss", "train_loss"), RETURNED: ("train_loss",)}
# Files that only this package writes, and those with other content by intent: headings of docs/differences.md.
_OF_CHECKPOINTS = "More files in a checkpoint"
_BESIDE_CHECKPOINTS = {
    re.compile(r"(.*/)?hf_compat\.lock"): "One run saves into a folder",
    re.compile(r"(.*/)?trackers\.json"): "TensorBoard and wandb after a resume",
}
_OTHER_CONTENT = {"training_args.bin": _OF_CHECKPOINTS}
_OF_TORCH = (".pt", ".pth", ".bin")
# The log history is a quantity of its own.
_LEFT_OUT = {"trainer_state.json": ("log_history",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A difference between the sides."""

    quantity: str
    training: int
    update: int
    rank: int
    name: str
    theirs: object
    ours: object
    size: float | None = None

    @staticmethod
    def of(quantity: str, place: Place, left: Value | None, right: Value | None, measure: Measure) -> Difference:
        """Make the difference of two recorded values of a place. One of them may be missing."""
        at = left or right
        assert at is not None  # one side has it
        size, ours = None, _shown(right)
        if left is not None and right is not None:
            pair = (left.value, right.value) if left.size is None else (left.size, right.size)
            if left.file is not None:
                size = measure(left, right)
            elif all(isinstance(one, (int, float)) for one in pair):
                size = abs(float(str(pair[0])) - float(str(pair[1])))
            if left.update != right.update:
                ours = f"{ours} at update {right.update}"
        return Difference(
            quantity=quantity, training=place.training, update=at.update, rank=place.rank, name=place.name,
            theirs=_shown(left), ours=ours, size=size,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result for one quantity."""

    quantity: str
    compared: int
    differing: int = 0
    first: Difference | None = None
    largest: float | None = None
    explained: tuple[str, ...] = ()  # documented differences, each with its reason

    @property
    def is_equal(self) -> bool:
        """Whether all differences are explained."""
        return not self.differing


def verdicts_of(theirs: Findings, ours: Findings, measure: Measure, are_whole: bool = True) -> list[Verdict]:
    """Compare everything that was recorded except files. If not both sides are whole, a missing value is allowed."""
    resumed = theirs.resumed & ours.resumed
    found = []
    for quantity in QUANTITIES[: QUANTITIES.index(FILES)]:
        left, right = theirs.values[quantity], ours.values[quantity]
        places = [place for place in {**left, **right} if are_whole or (place in left and place in right)]
        differences: list[Difference] = []
        explained: list[str] = []
        for place in places:
            one, other = left.get(place), right.get(place)
            if one is not None and other is not None and one.update == other.update and same(one.value, other.value):
                continue
            if reason := _reason(quantity, place, one, other, resumed):
                explained.append(reason)
            else:
                differences.append(Difference.of(quantity, place, one, other, measure))
        found.append(_verdict(quantity, len(places) - len(explained), differences, tuple(dict.fromkeys(explained))))
    return found


def _verdict(quantity: str, compared: int, differences: list[Difference], explained: tuple[str, ...]) -> Verdict:
    sizes = [one.size for one in differences if one.size is not None]
    return Verdict(
        quantity=quantity,
        compared=compared,
        differing=len(differences),
        first=min(differences, key=lambda one: (one.training, one.update), default=None),
        largest=max(sizes, key=lambda size: math.inf if size != size else size, default=None),
        explained=explained,
    )


def first_of(verdicts: Iterable[Verdict]) -> Difference | None:
    """The difference that arose first. Within one update the order of the quantities decides."""
    found = [verdict.first for verdict in verdicts if verdict.first is not None]
    return min(found, key=lambda one: (one.training, one.update, QUANTITIES.index(one.quantity)), default=None)


def _shown(value: Value | None) -> object:
    if value is None:
        return ABSENT
    return value.value if value.size is None else f"{value.size!r} ({value.value})"


def _reason(quantity: str, place: Place, left: Value | None, right: Value | None, resumed: set[int]) -> str:
    """The documented reason of a difference. Empty if there is none."""
    if place.name == _LOGGED_HERE_ONLY and left is None and quantity in (LOGS, RETURNED):
        return f"`{_LOGGED_HERE_ONLY}` is logged here only (docs/differences.md, Losses that are not finite)"
    if place.name.endswith(AT_RESUME) and left is None:
        return (
            f"training {place.training} ends the epoch that it resumed here only (docs/differences.md, The loss that a "
            "resumed run reports)"
        )
    is_first = place.name == "train_loss" or place.occurrence == 1
    if place.training in resumed and place.name in _RESUMED.get(quantity, ()) and is_first:
        return (
            f"`{place.name}` of training {place.training}, which was resumed: transformers {_shown(left)}, here "
            f"{_shown(right)} (docs/differences.md, The loss that a resumed run reports)"
        )
    return ""


def files_under(*folders: Path) -> dict[str, Path]:
    """The regular files below folders by their path from the folder's parent. A folder may be missing."""
    places = ((folder, place, names) for folder in folders for place, _, names in os.walk(folder))
    paths = ((folder, Path(place) / name) for folder, place, names in places for name in names)
    return {
        path.relative_to(folder.parent).as_posix(): path
        for folder, path in paths
        if path.is_file() and not path.is_symlink()
    }


def verdict_on_files(theirs: Mapping[str, Path], ours: Mapping[str, Path], update: int, other_release: bool) -> Verdict:
    """Compare the files that a run has left. Between releases of transformers only weights and names are compared."""
    explained: list[str] = []
    differences: list[Difference] = []
    names = sorted({*theirs, *ours})
    for name in names:
        left, right = theirs.get(name), ours.get(name)
        headings = [_OF_CHECKPOINTS] if is_ours_alone(name) else []
        headings += [heading for pattern, heading in _BESIDE_CHECKPOINTS.items() if pattern.fullmatch(name)]
        heading = _OTHER_CONTENT.get(name.rpartition("/")[2], "")
        if headings and left is None:
            explained.append(f"{name} is written here only (docs/differences.md, {headings[0]})")
        elif heading and left is not None and right is not None:
            explained.append(f"{name} holds plain values here (docs/differences.md, {heading})")
        elif (found := _first_of_file(name, left, right, other_release)) is not None:
            where, value, other = found
            size = abs(value - other) if isinstance(value, float) and isinstance(other, float) else None
            differences.append(
                Difference(
                    quantity=FILES, training=1, update=update, rank=0, name=f"{name}{where}", theirs=value, ours=other,
                    size=size,
                )
            )  # fmt: skip
    return _verdict(FILES, len(names) - len(explained), differences, tuple(explained))


def _first_of_file(name: str, left: Path | None, right: Path | None, other_release: bool) -> Found | None:
    sizes = [ABSENT if path is None else f"{path.stat().st_size} bytes" for path in (left, right)]
    if left is None or right is None:
        return "", sizes[0], sizes[1]
    if left.read_bytes() == right.read_bytes():
        return None
    try:
        if name.endswith(".safetensors"):
            return first_difference(load_file(left), load_file(right))
        if other_release:
            return None
        if name.endswith((".json", ".jsonl")):
            pair = [_content_of_json(name, path.read_text("utf-8")) for path in (left, right)]
            return first_difference(pair[0], pair[1])
        if name.endswith(_OF_TORCH):
            return first_difference(read_torch_file(str(left)), read_torch_file(str(right)))
    except (CheckpointError, ValueError):  # not a file of that kind, whatever its name
        return "", sizes[0], sizes[1]
    return "", sizes[0], sizes[1]


def _content_of_json(name: str, text: str) -> object:
    if name.endswith(".jsonl"):  # a value on each line
        return [_without(name, json.loads(line)) for line in text.splitlines() if line.strip()]
    return _without(name, json.loads(text))


def _without(name: str, content: object) -> object:
    """The content of a JSON file without durations and values that are compared elsewhere."""
    left_out = _LEFT_OUT.get(name.rpartition("/")[2], ())
    if not isinstance(content, dict):
        return content
    left_out = (*left_out, _LOGGED_HERE_ONLY)
    kept = {key: value for key, value in content.items() if key not in left_out and not key.endswith(TIMED)}
    for key in ("best_model_checkpoint", "_name_or_path"):  # paths begin with each side's folder
        if isinstance(kept.get(key), str):
            kept[key] = os.path.basename(kept[key])
    return kept


def first_difference(left: object, right: object, where: str = "") -> Found | None:
    """The first place where two nested contents differ, with both values. None if they are equal."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return where, f"{left.dtype} {tuple(left.shape)}", f"{right.dtype} {tuple(right.shape)}"
        bits = [side.detach().contiguous().reshape(-1).view(torch.uint8) for side in (left, right)]
        differing = bits[0] != bits[1]
        if not differing.any():
            return None
        index = int(differing.nonzero()[0]) // left.element_size()
        return f"{where}[{index}]", left.reshape(-1)[index].item(), right.reshape(-1)[index].item()
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return next(_differing([*left, *right], left, right, where), None)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        longer = range(max(len(left), len(right)))
        return next(_differing(longer, dict(enumerate(left)), dict(enumerate(right)), where), None)
    return None if same(left, right) else (where, left, right)


def _differing(
    keys: Iterable[object], left: Mapping[object, object], right: Mapping[object, object], where: str
) -> Iterator[Found]:
    for key in dict.fromkeys(keys):
        found = first_difference(left.get(key, ABSENT), right.get(key, ABSENT), f"{where}[{key!r}]")
        if found is not None:
            yield found


class KeptTensors:
    """Measures the largest difference of two kept tensors. It reads each file of both sides once."""

    def __init__(self, theirs: Path, ours: Path) -> None:
        self._folders = (theirs, ours)
        self._read: dict[Path, Mapping[str, torch.Tensor]] = {}

    def __call__(self, left: Value, right: Value) -> float | None:
        found: list[torch.Tensor] = []
        for folder, value in zip(self._folders, (left, right), strict=True):
            assert value.file is not None  # the caller has checked it
            path = folder / value.file[0]
            if path not in self._read:
                self._read[path] = read_torch_file(str(path)) if path.exists() else {}
            if value.file[1] in self._read[path]:
                found.append(self._read[path][value.file[1]])
        if len(found) < 2 or found[0].dtype != found[1].dtype or found[0].shape != found[1].shape:
            return None
        if not found[0].numel() or found[0].is_complex():
            return None
        return float((found[0].double() - found[1].double()).abs().max())
