"""What is wrong with the files of a checkpoint, going by what a resumed run would read of them.

HF words; reads, writes nothing. Each file is read by the reader that a run uses, tensors left on disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.dcp_reader import METADATA_NAME, check_values, open_dcp
from hf_compat.checkpoint.files import (
    STATE_FILE_BYTES,
    Plain,
    bounded_json,
    check_regular,
    is_whole_zip,
    open_regular,
    read_json,
)
from hf_compat.checkpoint.forms import (
    check_optimizer,
    check_random_states,
    check_schedule,
    read_trainer_state,
    weight_shapes,
)
from hf_compat.checkpoint.reading import Allowed, Contents, has_manifest, read_torch_file, shard_names
from hf_compat.checkpoint.run_state import RUN_STATE_FILE, RunState
from hf_compat.checkpoint.zero_reader import LATEST_NAME, check_zero_files, named_zero_folder
from hf_compat.errors import CheckpointError
from hf_compat.runtime.seeding import legacy_globals

_HEADER_BYTES = 10**8  # the most that safetensors reads

Judge = Callable[[Contents, str], object]
WholeJudge = Callable[[Path], bool]


def judge_contents(contents: Contents) -> Iterator[str]:
    """Read what a resumed run would read, and yield what is wrong."""
    for name in _all_names(contents):
        judge = next((judge for pattern, judge in _JUDGES if pattern.fullmatch(name)), None)
        if judge is None:
            continue
        try:
            judge(contents, name)
        except CheckpointError as error:
            yield str(error).partition("\n")[0].removesuffix(".")


def _all_names(contents: Contents) -> list[str]:
    if contents.listed is not None:
        return sorted(contents.listed)
    places = [entry.name for entry in sorted(contents.folder.iterdir()) if entry.is_dir()]
    return [
        *contents.names(),
        *[f"{place}/{METADATA_NAME}" for place in places if contents.find(f"{place}/{METADATA_NAME}") is not None],
    ]


def _judge_state(contents: Contents, name: str) -> None:
    read_trainer_state(contents.need(name))


def _judge_torch(contents: Contents, name: str) -> None:
    _read_torch(contents.need(name))


def _judge_optimizer(contents: Contents, name: str) -> None:
    path = contents.need(name)
    check_optimizer(path, _read_torch(path))


def _judge_schedule(contents: Contents, name: str) -> None:
    path = contents.need(name)
    check_schedule(path, _read_torch(path))


def _judge_rng(contents: Contents, name: str) -> None:
    path = contents.need(name)
    check_random_states(path, _read_torch(path, legacy_globals()))


def _read_torch(path: str, allowed: Allowed = ()) -> Plain:
    return read_torch_file(path, allowed, mmap=True)


def _judge_run_state(contents: Contents, name: str) -> None:
    RunState.read(contents.need(name))


def _judge_safetensors(contents: Contents, name: str) -> None:
    weight_shapes(contents.need(name))


def _judge_json(contents: Contents, name: str) -> None:
    read_json(contents.need(name))


def _judge_index(contents: Contents, name: str) -> None:
    for shard in shard_names(contents.need(name)):
        contents.need(shard)


def _judge_shards(contents: Contents, name: str) -> None:
    check_values(open_dcp(contents, name.rpartition("/")[0]))


def _judge_zero(contents: Contents, name: str) -> None:
    folder = named_zero_folder(contents)
    if folder is not None:
        check_zero_files(contents, folder)


_JUDGES: tuple[tuple[re.Pattern[str], Judge], ...] = (
    (re.compile(re.escape(names.TRAINER_STATE_NAME)), _judge_state),
    (re.compile(re.escape(names.OPTIMIZER_NAME)), _judge_optimizer),
    (re.compile(re.escape(names.SCHEDULER_NAME)), _judge_schedule),
    (re.compile(r"scaler\.pt|(pytorch|adapter)_model[^/]*\.bin"), _judge_torch),
    (re.compile(r"(adapter_)?model[^/]*\.safetensors"), _judge_safetensors),
    (re.compile(re.escape(names.ADAPTER_CONFIG_NAME)), _judge_json),
    (re.compile(r"rng_state(_\d+)?\.pth"), _judge_rng),
    (RUN_STATE_FILE, _judge_run_state),
    (re.compile(re.escape(names.SAFE_WEIGHTS_INDEX_NAME)), _judge_index),
    (re.compile(re.escape(names.WEIGHTS_INDEX_NAME)), _judge_index),
    (re.compile(rf"[^/]+/{re.escape(METADATA_NAME)}"), _judge_shards),
    (re.compile(LATEST_NAME), _judge_zero),
)


def judge_unlisted(root: Path, may_lack_optimizer: bool = False) -> Iterator[str]:
    """Judge a folder of `transformers`, which writes `trainer_state.json` last.

    Args:
        root: The folder.
        may_lack_optimizer: Whether one of the optimizer's two files may have been deleted on purpose.
    """
    missing = list(_missing_parts(root))
    if missing:  # no checkpoint: what else lies there, or behind a link of that name, may be without end
        yield from missing
        return
    has_optimizer = os.path.lexists(root / names.OPTIMIZER_NAME)
    if not may_lack_optimizer and has_optimizer != os.path.lexists(root / names.SCHEDULER_NAME):
        yield f"{names.SCHEDULER_NAME if has_optimizer else names.OPTIMIZER_NAME} is missing"
    yield from _and_contents(
        root, (path.relative_to(root).as_posix() for path in sorted(root.rglob("*"))), _OF_UNLISTED
    )


def judge_edited(root: Path, edited: Iterable[str]) -> Iterator[str]:
    """Judge a folder that somebody has changed; `Contents` knows which of its files may be read.

    Args:
        root: The folder.
        edited: The files that are not known to be as they were written.
    """
    yield from _missing_parts(root)
    yield from _and_contents(root, sorted(edited), _OF_EDITED)


def _missing_parts(root: Path) -> Iterator[str]:
    """Yield which of the things are not there without which no run goes on."""
    if not (root / names.TRAINER_STATE_NAME).is_file():
        yield f"{names.TRAINER_STATE_NAME} is missing"
    if not has_weights(root):
        yield f"{names.SAFE_WEIGHTS_NAME} is missing"


def has_weights(root: Path) -> bool:
    """Return whether a folder holds weights, whole or in shards, or an adapter's, in a file of a known name."""
    places = [root, *(path for path in root.iterdir() if path.is_dir())]  # adapters of a name of their own, shards
    found = [root / name for name in (*names.WHOLE_WEIGHTS, *names.ADAPTER_WEIGHTS, LATEST_NAME)]
    found += [place / name for place in places[1:] for name in (*names.ADAPTER_WEIGHTS, METADATA_NAME)]
    return any(os.path.lexists(path) and not os.path.isdir(path) for path in found)


def holds_model_alone(root: Path) -> bool:
    """Return whether a folder is a model that somebody has saved: no checkpoint of a training, nor what is left of one.

    Scripts of `transformers` before 4.31 hand the folder of a pretrained model to `train`.
    """
    if not root.is_dir() or names.checkpoint_step(root) is not None:
        return False
    of_training = (names.TRAINER_STATE_NAME, names.OPTIMIZER_NAME, names.SCHEDULER_NAME, LATEST_NAME)
    if has_manifest(root) or any(
        path.name in of_training or path.name.startswith(("rng_state", "run_state")) for path in root.iterdir()
    ):
        return False
    return any((root / name).is_file() for name in (*names.WHOLE_WEIGHTS, *names.ADAPTER_WEIGHTS))


def _and_contents(root: Path, files: Iterable[str], judges: Mapping[str, WholeJudge]) -> Iterator[str]:
    """Judge the bytes of a checkpoint's files, then what a run would read of them."""
    parts = [root / name for name in files if names.is_part_of_checkpoint(name) and not os.path.isdir(root / name)]
    damaged = [wrong for path in parts if (wrong := _judge_bytes(path, judges)) is not None]
    yield from damaged
    seen = {wrong.partition(" ")[0] for wrong in damaged}
    for wrong in judge_contents(Contents(root)):
        if not any(name in wrong for name in seen):
            yield wrong


def _judge_bytes(path: Path, judges: Mapping[str, WholeJudge]) -> str | None:
    """Return what is wrong with a file whose form shows whether all of it is there."""
    is_whole = judges.get(path.suffix)
    if is_whole is None:
        return None
    try:
        check_regular(path)
        whole = is_whole(path)
    except CheckpointError as error:
        return f"{path.name}: {error}"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None if whole else f"{path.name} is cut off or damaged"


def _is_whole_safetensors(path: Path) -> bool:
    try:
        # The size that a file's header says it has: its own length comes first, then where each tensor ends
        with open_regular(path) as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes < min(path.stat().st_size, _HEADER_BYTES):
                raise ValueError("the header does not fit into the file")
            header = bounded_json(file.read(header_bytes).decode())
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


_OF_UNLISTED: Mapping[str, WholeJudge] = {
    ".safetensors": _is_whole_safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin"), _is_whole_torch_file),
}
_OF_EDITED: Mapping[str, WholeJudge] = {**_OF_UNLISTED, ".json": _is_whole_json}
