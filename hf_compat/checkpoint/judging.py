"""`FILES` says of each kind of file how a run reads it, and so what makes it damaged.

A folder is judged by reading its files as a resumed run would, with tensors left on the disk. A folder without a
manifest, or with files that were changed, is also judged by its bytes, by headers and checksums.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.dcp_reader import METADATA_NAME, check_values, open_dcp
from hf_compat.checkpoint.files import (
    STATE_FILE_BYTES,
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
    weight_names,
)
from hf_compat.checkpoint.reading import Allowed, Contents, read_manifest, read_torch_file, shard_names
from hf_compat.checkpoint.run_state import RUN_STATE_FILE, RunState
from hf_compat.checkpoint.zero_reader import LATEST_NAME, check_zero_files, named_zero_folder
from hf_compat.errors import CheckpointError
from hf_compat.runtime.seeding import legacy_globals

Reader = Callable[[Contents, str], object]  # reads a file by its name, and raises a `CheckpointError` if a run cannot


def _torch_file(
    problem: Callable[[object], str | None] = lambda content: None, allowed: Callable[[], Allowed] = tuple
) -> Reader:
    """Make the reader of a file of `torch.save`. `problem` judges its content, which may hold `allowed` types."""

    def read(contents: Contents, name: str) -> None:
        path = contents.need(name)
        refuse(path, problem(read_torch_file(path, allowed(), mmap=True)))

    return read


FILES: dict[re.Pattern[str], Reader] = {
    re.compile(name): read
    for name, read in {
        r"trainer_state\.json": lambda contents, name: read_trainer_state(contents.need(name)),
        r"optimizer\.pt": _torch_file(optimizer_problem),
        r"scheduler\.pt": _torch_file(schedule_problem),
        r"rng_state(_\d+)?\.pth": _torch_file(random_states_problem, legacy_globals),
        r"scaler\.pt|(pytorch|adapter)_model[^/]*\.bin": _torch_file(),
        r"(adapter_)?model[^/]*\.safetensors": lambda contents, name: weight_names(contents.need(name)),
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
}


def judge_contents(contents: Contents, unvouched: Iterable[str] = ()) -> Iterator[str]:
    """Read what a resumed run would read, and yield what is wrong.

    Of files for which no hash vouches, the bytes are checked first.
    """
    if contents.listed is not None:
        found = sorted(contents.listed)
    else:
        places = [entry.name for entry in sorted(contents.folder.iterdir()) if entry.is_dir()]
        shards = [f"{place}/{METADATA_NAME}" for place in places]
        found = [*contents.names(), *(name for name in shards if contents.find(name) is not None)]
    checks: list[tuple[Reader, str]] = [
        (_check_bytes, name) for name in unvouched if layout.is_part_of_checkpoint(name)
    ]
    # the patterns exclude each other
    checks += [(read, name) for name in found for pattern, read in FILES.items() if pattern.fullmatch(name)]
    damaged: list[str] = []
    for check, name in checks:
        try:
            check(contents, name)
        except CheckpointError as error:
            wrong = first_line(error).removesuffix(".")
            if not any(other in wrong for other in damaged):
                yield wrong
            damaged.append(os.path.basename(name))


def _check_bytes(contents: Contents, name: str) -> None:
    """Refuse a file that is cut off, or whose checksums are wrong."""
    path, is_whole = contents.folder / name, True
    if path.suffix == ".json":
        read_json(path, STATE_FILE_BYTES)
    elif path.suffix in (".pt", ".pth", ".bin"):
        with open_regular(path) as file:
            is_whole = is_whole_zip(file)
    elif path.suffix == ".safetensors":
        check_regular(path)
        with contextlib.suppress(CheckpointError):
            is_whole = False
            weight_names(str(path))
            is_whole = True
    if not is_whole:
        raise CheckpointError(f"{path.name} is cut off or damaged.")


def judge_unlisted(root: Path, may_lack_optimizer: bool = False) -> Iterator[str]:
    """Judge a folder of `transformers`, which writes `trainer_state.json` last.

    One of the optimizer's two files may have been deleted on purpose, where the user names the folder.
    """
    missing = list(_missing_parts(root))
    if missing:  # not a checkpoint, so its other files, or those behind a link, may be without end
        yield from missing
        return
    has_optimizer = os.path.lexists(root / layout.OPTIMIZER_NAME)
    if not may_lack_optimizer and has_optimizer != os.path.lexists(root / layout.SCHEDULER_NAME):
        yield f"{layout.SCHEDULER_NAME if has_optimizer else layout.OPTIMIZER_NAME} is missing"
    files = [path for path in sorted(root.rglob("*")) if path.suffix != ".json" and not path.is_dir()]
    yield from judge_contents(Contents(root), [path.relative_to(root).as_posix() for path in files])


def judge_edited(root: Path, edited: Iterable[str]) -> Iterator[str]:
    """Judge a folder whose files were changed. `Contents` knows which of them may be read."""
    yield from _missing_parts(root)
    yield from judge_contents(Contents(root), sorted(edited))


def _missing_parts(root: Path) -> Iterator[str]:
    """Yield what a run needs to continue and the folder lacks."""
    if not (root / layout.TRAINER_STATE_NAME).is_file():
        yield f"{layout.TRAINER_STATE_NAME} is missing"
    if not has_weights(root):
        yield f"{layout.SAFE_WEIGHTS_NAME} is missing"


def has_weights(root: Path) -> bool:
    """Whether a folder holds weights, whole or in shards, or an adapter's, in a file of a known name."""
    found = [root / name for name in (*layout.WHOLE_WEIGHTS, *layout.ADAPTER_WEIGHTS, LATEST_NAME)]
    for place in root.iterdir():  # adapters with a name, and shards
        if place.is_dir():
            found += [place / name for name in (*layout.ADAPTER_WEIGHTS, METADATA_NAME)]
    return any(os.path.lexists(path) and not os.path.isdir(path) for path in found)


def holds_model_alone(root: Path) -> bool:
    """Whether a folder is a saved model: not the checkpoint of a training, nor what is left of one.

    Scripts of `transformers` before 4.31 give the folder of a pretrained model to `train`.
    """
    if not root.is_dir() or layout.checkpoint_step(root) is not None or read_manifest(root).exists:
        return False
    of_training = (layout.TRAINER_STATE_NAME, layout.OPTIMIZER_NAME, layout.SCHEDULER_NAME, LATEST_NAME)
    if any(path.name in of_training or path.name.startswith(("rng_state", "run_state")) for path in root.iterdir()):
        return False
    return any((root / name).is_file() for name in (*layout.WHOLE_WEIGHTS, *layout.ADAPTER_WEIGHTS))
