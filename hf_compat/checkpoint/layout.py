"""Names of files and folders, and the hidden folders in which checkpoints are written.

A hidden folder is ours if its name ends in the id of an owner and that owner's record lies in it. A killed process may
leave one. That of a save is deleted by the next run that has the lock, that of a conversion by the next conversion.
Reading deletes no folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from typing import NamedTuple

from hf_compat.checkpoint.files import write_new
from hf_compat.checkpoint.run_lock import ACTIVE, Owner
from hf_compat.errors import CheckpointError

PREFIX_CHECKPOINT_DIR = "checkpoint"
TRAINING_ARGS_NAME = "training_args.bin"
TRAINER_STATE_NAME = "trainer_state.json"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "rng_state.pth"
RUN_STATE_NAME = "run_state.pt"


class State(NamedTuple):
    """A file of a training's state. `STATE_FILES` in `training_run/saver.py` says what it contains.

    It is JSON if its name ends so, else in the format of `torch.save`.
    """

    name: str
    holds: str  # for docs/checkpoints.md
    of_each_rank: bool = False  # each of several processes writes its own
    is_ours: bool = False  # transformers does not write it


STATES = (
    State(OPTIMIZER_NAME, "the state of the optimizer"),
    State(SCHEDULER_NAME, "the state of the schedule"),
    State(SCALER_NAME, "the state of the gradient scaler"),
    State(RNG_STATE_NAME, "random states of Python, NumPy and torch", of_each_rank=True),
    State(
        RUN_STATE_NAME,
        "the position in the data, the loss sums, the states of Lightning callbacks",
        of_each_rank=True,
        is_ours=True,
    ),
)
SHARED_STATES = tuple(state.name for state in STATES if not state.of_each_rank)
RANK_STATES = tuple(state.name for state in STATES if state.of_each_rank)
_SHARED_STEMS = "|".join(name.partition(".")[0] for name in SHARED_STATES)
_RANK_STEMS = "|".join(name.partition(".")[0] for name in RANK_STATES)


def of_rank(name: str, rank: int, world_size: int) -> str:
    """The name of a process's own file in a run of several: `rng_state_1.pth`."""
    if world_size == 1:
        return name
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}_{rank}{dot}{suffix}"


def files_of_rank(rank: int, world_size: int, updates: int) -> list[str]:
    """The names that a process's own files may have in the checkpoint after so many updates. No other one writes them.

    The list has the same length on every rank.
    """
    shards = [f"{folder}/__{rank}_0.distcp" for folder in (MODEL_FOLDER, OPTIMIZER_FOLDER)]
    of_zero = f"global_step{updates}/{{}}zero_pp_rank_{rank}_mp_rank_00_{{}}_states.pt"
    zero = [of_zero.format(half, kind) for half in ("", "bf16_", "fp16_") for kind in ("optim", "model")]
    return [of_rank(name, rank, world_size) for name in RANK_STATES] + shards + zero


_OF_RANK = re.compile(rf"(?:__|.*zero_pp_rank_|(?:{_RANK_STEMS})_)(\d+)[_.].*")


def rank_of(name: str) -> int | None:
    """Which of several processes writes a file of that name, and reads it in a resume. None if all may read it."""
    match = _OF_RANK.fullmatch(name.rpartition("/")[2])
    return int(match[1]) if match else None


MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"  # of shards that torch writes
SHARD_SUFFIX = ".distcp"
WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
WHOLE_WEIGHTS = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
ADAPTER_SAFE_WEIGHTS_NAME = "adapter_model.safetensors"
ADAPTER_WEIGHTS_NAME = "adapter_model.bin"
ADAPTER_WEIGHTS = (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)
ADAPTER_CONFIG_NAME = "adapter_config.json"

# The files of checkpoints of ours, of `transformers`, Accelerate, PEFT, DeepSpeed and FSDP, and whole folders.
_PARTS_OF_CHECKPOINTS = re.compile(
    rf"""(
    (adapter_|pytorch_)?model(-\d+-of-\d+)?(\.\w+)?\.(safetensors|bin)(\.index(\.\w+)?\.json)?
    | (tf_model\.h5|flax_model\.msgpack)(\.index\.json)?
    | pytorch_model(_fsdp_\d+|_\d+)? | optimizer(_\d+)? | distributed_checkpoint | dist_ckpt   # folders
    | .*\.distcp | \.metadata
    | global_step[^/]* | latest(_universal)? | zero_to_fp32\.py | .*_(model|optim)_states\.pt
    | ({_SHARED_STEMS}|{_RANK_STEMS}|random_states|custom_checkpoint|sampler|dl_state_dict)
      (_\d+)*\.(pt|pth|bin|pkl|json)
    | tokenizer(_config)?\.json | (special_tokens_map|added_tokens|(pre)?processor_config|vocab)\.json | vocab\.txt
    | merges\.txt | (spiece|tokenizer|sentencepiece\.bpe)\.model | chat_template\.(jinja|json)
    | trainer_state\.json | training_args\.(bin|json) | manifest\.json
    | (adapter_|generation_)?config\.json
    )""",
    re.VERBOSE,
)
# What a resume may load itself, where all processes have the whole of it
_LOADED = re.compile(
    r"(adapter_|pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)|trainer_state\.json|training_args\.bin"
    rf"|({_SHARED_STEMS}|({_RANK_STEMS})(_\d+)?)\.(pt|pth|json)"
)
_NUMBERED = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


def is_part_of_checkpoint(name: str) -> bool:
    """Whether a file, named from its folder with `/`, is of a kind that checkpoints of any program have."""
    return any(_PARTS_OF_CHECKPOINTS.fullmatch(part) for part in name.split("/"))


def is_loaded(name: str) -> bool:
    """Whether a resume loads a file of that name, or may."""
    return _LOADED.fullmatch(name) is not None


def checkpoint_path(folder: str, updates: int) -> str:
    """The folder of the checkpoint after so many updates."""
    return os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{updates}")


def checkpoint_step(path: str | os.PathLike[str]) -> int | None:
    """The update count in a `checkpoint-<n>` folder's name. None for any other name."""
    match = _NUMBERED.match(os.path.basename(os.path.normpath(path)))
    return int(match.group(1)) if match else None


def list_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """List the checkpoint folders of an output folder, oldest step first."""
    updates = {}
    for name in _names_in(folder):
        match, path = _NUMBERED.match(name), os.path.join(folder, name)
        if match is not None and os.path.isdir(path):
            updates[path] = int(match.group(1))
    return sorted(updates, key=updates.__getitem__)


def _names_in(folder: str | os.PathLike[str]) -> list[str]:
    """List the names in an output folder. It may hold thousands of files."""
    try:
        return os.listdir(folder) if os.path.isdir(folder) else []
    except OSError as error:
        raise CheckpointError(f"{os.fspath(folder)} cannot be listed: {error.strerror}.") from error


SAVING = ".saving-"  # a save, a removal, a manifest
CONVERTING = ".converting-"  # needs no lock: only its own process knows whether it has ended
OWN_PREFIX = ".hf_compat"
RECORD = OWN_PREFIX
# Folders in a hidden one. What a new checkpoint replaces may be all that a killed save has left of its name.
REPLACED = f"{OWN_PREFIX}.replaced"
DELETED = f"{OWN_PREFIX}.deleted"


def make_hidden(folder: str, prefix: str, owner: Owner) -> str:
    """Make an owner's hidden folder, its record first."""
    path = os.path.join(folder, prefix + owner.id)
    os.mkdir(path)
    write_new(os.path.join(path, RECORD), owner.id.encode())
    return path


def hidden_folders(folder: str, prefix: str) -> list[tuple[str, Owner]]:
    """List the hidden folders that runs have made, each with its owner. A link is never one of them."""
    found = []
    for name in _names_in(folder):
        owner = Owner.of_id(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if owner is None:
            continue
        path = os.path.join(folder, name)
        if has_record(path):
            found.append((path, owner))
    return sorted(found)


def has_record(path: str) -> bool:
    """Whether a folder of a hidden one's name is ours. A power cut may leave the record empty, so that may be."""
    if not os.path.isdir(path) or os.path.islink(path):
        return False
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.lstat(os.path.join(path, RECORD)).st_mode)
    return False


def remove_ended(folder: str, prefix: str) -> None:
    """Remove the hidden folders that other processes have left."""
    for path, owner in hidden_folders(folder, prefix):
        if owner.is_alive() is False and not owner.is_of_this_process:
            remove_hidden(path)


@contextlib.contextmanager
def hidden_folder(folder: str, prefix: str) -> Iterator[str]:
    """Give a hidden folder for a short piece of work, and remove it afterwards."""
    owner = Owner()
    with contextlib.ExitStack() as stack:
        ACTIVE.add(owner.id)
        stack.callback(ACTIVE.discard, owner.id)
        stack.callback(remove_hidden, os.path.join(folder, prefix + owner.id))
        yield make_hidden(folder, prefix, owner)


def remove_hidden(path: str) -> None:
    """Remove a hidden folder as far as possible. The record goes last, as it marks the rest as ours."""
    if not os.path.isdir(path):
        return
    with contextlib.suppress(OSError):  # something cannot be deleted: the next run tries again
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != RECORD:
                os.unlink(entry.path)
        with contextlib.suppress(FileNotFoundError):  # a run that lost its folder made this one anew
            os.unlink(os.path.join(path, RECORD))
        os.rmdir(path)


def remove_hidden_of_others(path: str) -> None:
    """Remove the hidden folder of a run that has ended, or has lost the output folder.

    One that still goes on gives and takes names through its hidden folder alone. It is renamed first, so from then on
    that run finds no folder there, and changes nothing beside it.
    """
    taken = os.path.join(os.path.dirname(path), SAVING + Owner().id)
    try:
        os.replace(path, taken)
    except OSError:  # the disk renames no folders
        taken = path
    remove_hidden(taken)
