"""Check files for which no manifest's hash vouches: those of `transformers`, and those that were changed.

They have to be whole by headers and checksums. Whether a run can use their contents shows when it loads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.dcp_reader import METADATA_NAME
from hf_compat.checkpoint.files import STATE_FILE_BYTES, is_whole_zip, open_regular, read_json
from hf_compat.checkpoint.forms import read_trainer_state, weight_names
from hf_compat.checkpoint.reading import Contents, read_manifest, weight_files
from hf_compat.checkpoint.zero_reader import LATEST_NAME
from hf_compat.errors import CheckpointError


def check_unlisted(root: Path, may_lack_optimizer: bool = False) -> None:
    """Check a folder of `transformers`, which writes `trainer_state.json` last.

    One of the optimizer's two files may have been deleted on purpose, where the user names the folder.
    """
    has_optimizer = os.path.lexists(root / layout.OPTIMIZER_NAME)
    if not may_lack_optimizer and has_optimizer != os.path.lexists(root / layout.SCHEDULER_NAME):
        raise CheckpointError(f"{layout.SCHEDULER_NAME if has_optimizer else layout.OPTIMIZER_NAME} is missing.")
    paths = (path for path in root.rglob("*") if path.name == layout.TRAINER_STATE_NAME or path.suffix != ".json")
    check_files(root, (path.relative_to(root).as_posix() for path in paths if not path.is_dir()))


def check_files(root: Path, names: Iterable[str]) -> None:
    """Refuse files that are cut off, or whose checksums are wrong, and a folder that lacks what every run needs.

    If it is not a checkpoint, its other files, or those behind a link, may be without end, so it is refused first.
    """
    if not (root / layout.TRAINER_STATE_NAME).is_file():
        raise CheckpointError(f"{layout.TRAINER_STATE_NAME} is missing.")
    if not has_weights(root):
        raise CheckpointError(f"{layout.SAFE_WEIGHTS_NAME} is missing.")
    contents = Contents(root)
    for name in weight_files(contents):
        contents.need(name)
    for name in filter(layout.is_part_of_checkpoint, names):
        if name == layout.TRAINER_STATE_NAME:
            read_trainer_state(root / name)
        elif not _is_whole(root / name):
            raise CheckpointError(f"{name} is cut off or damaged.")


def _is_whole(path: Path) -> bool:
    """Whether a file fills its header's size, or has its checksums."""
    if path.suffix == ".json":
        read_json(path, STATE_FILE_BYTES)
    elif path.suffix in (".pt", ".pth", ".bin"):
        with open_regular(path) as file:
            return is_whole_zip(file)
    elif path.suffix == ".safetensors":
        try:
            weight_names(str(path))
        except CheckpointError:
            return False
    return True


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
