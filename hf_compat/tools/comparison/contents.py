"""The contents of two output folders, file by file, and of tensors that were kept. Files and tensors only."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from hf_compat.checkpoint.reading import read_torch_file
from hf_compat.errors import CheckpointError
from hf_compat.tools.comparison.reading import FILES, TIMED, Value, same
from hf_compat.tools.comparison.verdicts import ABSENT, Difference, Verdict

# Files of a run that only we write, and the one whose content is another by intent: headings of docs/differences.md.
_OURS = {
    re.compile(r"(.*/)?(manifest\.json|run_state(_\d+)?\.pt)"): "Two more files in a checkpoint",
    re.compile(r"(.*/)?hf_compat\.lock"): "One run saves into a folder",
    re.compile(r"(.*/)?trackers\.json"): "TensorBoard and wandb after a resume",
}
_OTHER_CONTENT = {"training_args.bin": "Two more files in a checkpoint"}
_OF_TORCH = (".pt", ".pth", ".bin")
# The log history is a quantity of its own.
_LEFT_OUT = {"trainer_state.json": ("log_history",)}


def files_under(*folders: Path) -> dict[str, Path]:
    """Return the regular files below folders, which need not exist, by their path from the folder's parent."""
    found = {}
    for folder in folders:
        for place, _, names in os.walk(folder):
            for path in (Path(place) / name for name in names):
                if path.is_file() and not path.is_symlink():
                    found[path.relative_to(folder.parent).as_posix()] = path
    return found


def verdict_on_files(theirs: Mapping[str, Path], ours: Mapping[str, Path], update: int, other_release: bool) -> Verdict:
    """Compare the files that a run has left.

    Args:
        theirs: Name → path, under transformers.
        ours: The same here.
        update: The last update of the run.
        other_release: Whether their release of transformers is not ours: then weights are compared, and names.
    """
    explained, differences, compared = [], [], 0
    for name in sorted({*theirs, *ours}):
        reason = _reason(name, name in theirs, name in ours)
        if reason:
            explained.append(reason)
            continue
        compared += 1
        left, right = theirs.get(name), ours.get(name)
        found = _first_of_file(name, left, right, other_release)
        if found is not None:
            differences.append(_difference(name, found, update))
    sizes = [one.size for one in differences if one.size is not None]
    return Verdict(
        quantity=FILES,
        compared=compared,
        differing=len(differences),
        first=differences[0] if differences else None,
        largest=max(sizes, default=None),
        explained=tuple(explained),
    )


Found = tuple[str, object, object]  # where in a file, and both values


def _difference(name: str, found: Found, update: int) -> Difference:
    where, theirs, ours = found
    size = abs(theirs - ours) if isinstance(theirs, float) and isinstance(ours, float) else None
    return Difference(
        quantity=FILES, training=1, update=update, rank=0, name=f"{name}{where}", theirs=theirs, ours=ours, size=size
    )


def _reason(name: str, is_theirs: bool, is_ours: bool) -> str:
    for pattern, heading in _OURS.items():
        if is_ours and not is_theirs and pattern.fullmatch(name):
            return f"{name} is written here only (docs/differences.md, {heading})"
    heading = _OTHER_CONTENT.get(name.rpartition("/")[2], "")
    if heading and is_theirs and is_ours:
        return f"{name} holds plain values here (docs/differences.md, {heading})"
    return ""


def _first_of_file(name: str, left: Path | None, right: Path | None, other_release: bool) -> Found | None:
    """Return the first place where two files differ; None where they do not."""
    if left is None or right is None:
        return "", _size_of(left), _size_of(right)
    if left.read_bytes() == right.read_bytes():
        return None
    try:
        if name.endswith(".safetensors"):
            return first_difference(load_file(left), load_file(right))
        if other_release:
            return None
        if name.endswith(".json"):
            pair = [_without(name, json.loads(path.read_text("utf-8"))) for path in (left, right)]
            return first_difference(pair[0], pair[1])
        if name.endswith(_OF_TORCH):
            return first_difference(read_torch_file(str(left)), read_torch_file(str(right)))
    except (CheckpointError, ValueError):  # it is no file of that kind, whatever its name: the bytes differ
        return "", _size_of(left), _size_of(right)
    return "", _size_of(left), _size_of(right)


def _size_of(path: Path | None) -> str:
    return ABSENT if path is None else f"{path.stat().st_size} bytes"


def _without(name: str, content: object) -> object:
    """Return what a file of JSON says, without durations and what is compared elsewhere."""
    left_out = _LEFT_OUT.get(name.rpartition("/")[2], ())
    if not isinstance(content, dict):
        return content
    kept = {key: value for key, value in content.items() if key not in left_out and not key.endswith(TIMED)}
    for key in ("best_model_checkpoint", "_name_or_path"):  # paths begin with each side's folder
        if isinstance(kept.get(key), str):
            kept[key] = os.path.basename(kept[key])
    return kept


def first_difference(left: object, right: object, where: str = "") -> Found | None:
    """Return the first place where two nested contents differ, and both values; None where they are equal."""
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


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float | None:
    """Return the largest difference of two tensors' values; None where their forms differ."""
    if left.dtype != right.dtype or left.shape != right.shape or not left.numel():
        return None
    return float((left.double() - right.double()).abs().max()) if not left.is_complex() else None


class KeptTensors:
    """How much kept tensors differ: reads the files of both sides, each once.

    Args:
        theirs: Folder of the records under transformers.
        ours: The same here.
    """

    def __init__(self, theirs: Path, ours: Path) -> None:
        self._folders = (theirs, ours)
        self._read: dict[Path, Mapping[str, torch.Tensor]] = {}

    def __call__(self, left: Value, right: Value) -> float | None:
        pair = [self._tensor(folder, value) for folder, value in zip(self._folders, (left, right), strict=True)]
        return None if pair[0] is None or pair[1] is None else largest_difference(pair[0], pair[1])

    def _tensor(self, folder: Path, value: Value) -> torch.Tensor | None:
        assert value.file is not None  # the caller has looked
        path = folder / value.file[0]
        if path not in self._read:
            self._read[path] = read_torch_file(str(path)) if path.exists() else {}
        return self._read[path].get(value.file[1])
