"""`FILES` says of each kind of file how a run reads it, and so what makes it damaged.

A folder is judged by reading its files as a resumed run would, with tensors left on the disk. A folder without a
manifest, or with files that were changed, is also judged by its bytes, by headers and checksums.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.dcp_reader import METADATA_NAME, check_values, open_dcp
from hf_compat.checkpoint.files import (
    STATE_FILE_BYTES,
    bounded_json,
    check_regular,
    first_line,
    is_whole_zip,
    open_regular,
    read_json,
)
from hf_compat.checkpoint.forms import (
    optimizer_problem,
    random_states_problem,
    read_trainer_state,
    refuse,
    schedule_problem,
    weight_shapes,
)
from hf_compat.checkpoint.reading import Allowed, Contents, read_manifest, read_torch_file, shard_names
from hf_compat.checkpoint.run_state import RUN_STATE_FILE, RunState
from hf_compat.checkpoint.zero_reader import LATEST_NAME, check_zero_files, named_zero_folder
from hf_compat.errors import CheckpointError
from hf_compat.runtime.seeding import legacy_globals

_HEADER_BYTES = 10**8  # the most that safetensors reads


class FileKind(NamedTuple):
    """A kind of file. `read` raises a `CheckpointError` if a run cannot use it."""

    name: re.Pattern[str]
    read: Callable[[Contents, str], object]


def _torch_file(
    problem: Callable[[object], str | None] = lambda content: None, allowed: Callable[[], Allowed] = tuple
) -> Callable[[Contents, str], object]:
    """Make the reader of a file of `torch.save`.

    Args:
        problem: Says what is wrong with its content.
        allowed: Lists further types that it may hold.
    """

    def read(contents: Contents, name: str) -> None:
        path = contents.need(name)
        refuse(path, problem(read_torch_file(path, allowed(), mmap=True)))

    return read


FILES = tuple(
    FileKind(re.compile(name), read)
    for name, read in {
        r"trainer_state\.json": lambda contents, name: read_trainer_state(contents.need(name)),
        r"optimizer\.pt": _torch_file(optimizer_problem),
        r"scheduler\.pt": _torch_file(schedule_problem),
        r"rng_state(_\d+)?\.pth": _torch_file(random_states_problem, legacy_globals),
        r"scaler\.pt|(pytorch|adapter)_model[^/]*\.bin": _torch_file(),
        r"(adapter_)?model[^/]*\.safetensors": lambda contents, name: weight_shapes(contents.need(name)),
        r"(model\.safetensors|pytorch_model\.bin)\.index\.json": lambda contents, name: [
            contents.need(shard) for shard in shard_names(contents.need(name))
        ],
        r"adapter_config\.json": lambda contents, name: read_json(contents.need(name)),
        RUN_STATE_FILE.pattern: lambda contents, name: RunState.read(contents.need(name)),
        rf"[^/]+/{re.escape(METADATA_NAME)}": lambda contents, name: check_values(
            open_dcp(contents, name.rpartition("/")[0])
        ),
        LATEST_NAME: lambda contents, name: check_zero_files(contents, named_zero_folder(contents) or ""),
    }.items()
)


def judge_contents(contents: Contents) -> Iterator[str]:
    """Read what a resumed run would read, and yield what is wrong."""
    if contents.listed is not None:
        found = sorted(contents.listed)
    else:
        places = [entry.name for entry in sorted(contents.folder.iterdir()) if entry.is_dir()]
        shards = [f"{place}/{METADATA_NAME}" for place in places]
        found = [*contents.names(), *(name for name in shards if contents.find(name) is not None)]
    for name in found:
        for kind in FILES:  # their patterns exclude each other
            if kind.name.fullmatch(name):
                try:
                    kind.read(contents, name)
                except CheckpointError as error:
                    yield first_line(error).removesuffix(".")


def judge_unlisted(root: Path, may_lack_optimizer: bool = False) -> Iterator[str]:
    """Judge a folder of `transformers`, which writes `trainer_state.json` last.

    Args:
        root: The folder.
        may_lack_optimizer: Whether one of the optimizer's two files may have been deleted on purpose.
    """
    missing = list(_missing_parts(root))
    if missing:  # not a checkpoint, so its other files, or those behind a link, may be without end
        yield from missing
        return
    has_optimizer = os.path.lexists(root / names.OPTIMIZER_NAME)
    if not may_lack_optimizer and has_optimizer != os.path.lexists(root / names.SCHEDULER_NAME):
        yield f"{names.SCHEDULER_NAME if has_optimizer else names.OPTIMIZER_NAME} is missing"
    files = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.suffix != ".json"]
    yield from _and_contents(root, files)


def judge_edited(root: Path, edited: Iterable[str]) -> Iterator[str]:
    """Judge a folder whose files were changed. `Contents` knows which of them may be read.

    Args:
        root: The folder.
        edited: The files that may have been changed.
    """
    yield from _missing_parts(root)
    yield from _and_contents(root, sorted(edited))


def _missing_parts(root: Path) -> Iterator[str]:
    """Yield what a run needs to continue and the folder lacks."""
    if not (root / names.TRAINER_STATE_NAME).is_file():
        yield f"{names.TRAINER_STATE_NAME} is missing"
    if not has_weights(root):
        yield f"{names.SAFE_WEIGHTS_NAME} is missing"


def has_weights(root: Path) -> bool:
    """Whether a folder holds weights, whole or in shards, or an adapter's, in a file of a known name."""
    found = [root / name for name in (*names.WHOLE_WEIGHTS, *names.ADAPTER_WEIGHTS, LATEST_NAME)]
    for place in root.iterdir():  # adapters with a name, and shards
        if place.is_dir():
            found += [place / name for name in (*names.ADAPTER_WEIGHTS, METADATA_NAME)]
    return any(os.path.lexists(path) and not os.path.isdir(path) for path in found)


def holds_model_alone(root: Path) -> bool:
    """Whether a folder is a saved model: not the checkpoint of a training, nor what is left of one.

    Scripts of `transformers` before 4.31 give the folder of a pretrained model to `train`.
    """
    if not root.is_dir() or names.checkpoint_step(root) is not None or read_manifest(root).exists:
        return False
    of_training = (names.TRAINER_STATE_NAME, names.OPTIMIZER_NAME, names.SCHEDULER_NAME, LATEST_NAME)
    if any(path.name in of_training or path.name.startswith(("rng_state", "run_state")) for path in root.iterdir()):
        return False
    return any((root / name).is_file() for name in (*names.WHOLE_WEIGHTS, *names.ADAPTER_WEIGHTS))


def _and_contents(root: Path, files: Iterable[str]) -> Iterator[str]:
    """Judge the bytes of a checkpoint's files, then what a run would read of them."""
    seen = set()
    for name in files:
        path = root / name
        is_whole = _IS_WHOLE.get(path.suffix)
        if is_whole is None or not names.is_part_of_checkpoint(name) or os.path.isdir(path):
            continue
        wrong = None
        try:
            check_regular(path)
            wrong = None if is_whole(path) else f"{path.name} is cut off or damaged"
        except CheckpointError as error:
            wrong = f"{path.name}: {error}"
        except OSError as error:
            wrong = f"{path.name} cannot be read: {error.strerror}"
        if wrong is not None:
            yield wrong
            seen.add(path.name)
    for wrong in judge_contents(Contents(root)):
        if not any(name in wrong for name in seen):
            yield wrong


def _is_whole_safetensors(path: Path) -> bool:
    """Whether a file has the size that its header says. The header's length comes first, then each tensor's end."""
    try:
        with open_regular(path) as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes < min(path.stat().st_size, _HEADER_BYTES):
                return False
            header: object = bounded_json(file.read(header_bytes).decode())
        if not isinstance(header, dict):
            return False
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return (8 + header_bytes + int(max(ends, default=0))) == path.stat().st_size
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, MemoryError, OverflowError, RecursionError):
        return False


def _is_whole_torch_file(path: Path) -> bool:
    with open_regular(path) as file:
        return is_whole_zip(file)


def _is_whole_json(path: Path) -> bool:
    read_json(path, STATE_FILE_BYTES)
    return True


_IS_WHOLE: dict[str, Callable[[Path], bool]] = {
    ".safetensors": _is_whole_safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin"), _is_whole_torch_file),
    ".json": _is_whole_json,
}
