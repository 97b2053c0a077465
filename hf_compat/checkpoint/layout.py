"""Names and layout of an output folder and its `checkpoint-<updates>` folders. HF words only; reads no contents."""

from __future__ import annotations

import os
import re

from hf_compat.errors import CheckpointError

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
WHOLE_WEIGHTS = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
ADAPTER_SAFE_WEIGHTS_NAME = "adapter_model.safetensors"
ADAPTER_WEIGHTS_NAME = "adapter_model.bin"
ADAPTER_WEIGHTS = (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)
ADAPTER_CONFIG_NAME = "adapter_config.json"

# What a checkpoint of ours, of `transformers`, Accelerate, PEFT, DeepSpeed or FSDP is made of: files, and folders with
# all that is in them.
_PARTS_OF_CHECKPOINTS = re.compile(
    r"""(
    (adapter_|pytorch_)?model(-\d+-of-\d+)?(\.\w+)?\.(safetensors|bin)(\.index(\.\w+)?\.json)?
    | (tf_model\.h5|flax_model\.msgpack)(\.index\.json)?
    | pytorch_model(_fsdp_\d+|_\d+)? | optimizer(_\d+)? | distributed_checkpoint | dist_ckpt   # folders
    | .*\.distcp | \.metadata
    | global_step[^/]* | latest(_universal)? | zero_to_fp32\.py | .*_(model|optim)_states\.pt
    | (optimizer|scheduler|scaler|rng_state|run_state|random_states|custom_checkpoint|sampler|dl_state_dict)
      (_\d+)*\.(pt|pth|bin|pkl)
    | tokenizer(_config)?\.json | (special_tokens_map|added_tokens|(pre)?processor_config|vocab)\.json | vocab\.txt
    | merges\.txt | (spiece|tokenizer|sentencepiece\.bpe)\.model | chat_template\.(jinja|json)
    | trainer_state\.json | training_args\.(bin|json) | manifest\.json
    | (adapter_|generation_)?config\.json
    )""",
    re.VERBOSE,
)
_NUMBERED = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


def is_part_of_checkpoint(name: str) -> bool:
    """Return whether a file, named from its folder with `/`, is of a kind that a program's checkpoints have."""
    return any(_PARTS_OF_CHECKPOINTS.fullmatch(part) for part in name.split("/"))


def checkpoint_path(folder: str, updates: int) -> str:
    """Return the folder of the checkpoint that is written after so many updates."""
    return os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{updates}")


def checkpoint_step(path: str | os.PathLike[str]) -> int | None:
    """Return the update count in a `checkpoint-<n>` folder's name, or None for any other name."""
    match = _NUMBERED.match(os.path.basename(os.path.normpath(path)))
    return int(match.group(1)) if match else None


def list_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """List the checkpoint folders of an output folder, oldest step first.

    Raises:
        CheckpointError: The output folder cannot be listed.
    """
    if not os.path.isdir(folder):
        return []
    try:
        inside = [entry.path for entry in os.scandir(folder) if _NUMBERED.match(entry.name)]
    except OSError as error:
        raise CheckpointError(f"{os.fspath(folder)} cannot be listed: {error.strerror}.") from error
    return sorted(filter(os.path.isdir, inside), key=lambda path: checkpoint_step(path) or 0)
