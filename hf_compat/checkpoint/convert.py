"""Convert checkpoints between HF folders, Lightning's `.ckpt` and shards.

    Lightning's key             HF's file
    state_dict["model.*"]       model.safetensors
    optimizer_states[0]         optimizer.pt
    lr_schedulers[0]            scheduler.pt
    global_step, epoch          trainer_state.json
    callbacks, hf_compat        run_state.pt (rng_state.pth where a folder has no more)

Fields of a Lightning checkpoint are checked for the types and ranges that Lightning expects. A conversion checks both
paths before it reads anything, and overwrites nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import safetensors.torch
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from safetensors import SafetensorError

import hf_compat.upstream  # noqa: F401 - loads Lightning
from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.adapters import holds_adapters
from hf_compat.checkpoint.dcp_reader import METADATA_NAME, dcp_tensors
from hf_compat.checkpoint.files import first_line, naming, open_regular, reading, walked_torch_file
from hf_compat.checkpoint.hints import no_checkpoint, no_file
from hf_compat.checkpoint.moving import move
from hf_compat.checkpoint.reading import (
    COMPILED,
    Contents,
    StoredTensor,
    Weights,
    knowing_types,
    naming_misfit,
    read_torch_file,
    read_weights,
)
from hf_compat.checkpoint.run_state import (
    ARRAY_GLOBALS,
    DataPosition,
    RunState,
    SavedAt,
    plain_checkpoint,
    read_random_states,
    reading_arrays,
)
from hf_compat.checkpoint.unlisted_checkpoints import holds_model_alone, reading_named_folder
from hf_compat.checkpoint.validation import COUNT, MAPPING, FieldSpec, read_trainer_state, wrong_field
from hf_compat.checkpoint.zero_reader import OPTIMIZERS, named_zero_folder, rank_files, zero_tensors
from hf_compat.errors import ArgumentError, CheckpointError, CheckpointWriteError, HfCompatError, warn_user
from hf_compat.hf.state import INTERVALS, TrainerControl, TrainerState
from hf_compat.runtime.console import progress_bar
from hf_compat.runtime.nested import leaves
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.seeding import unpack_rng
from hf_compat.runtime.text import brief

LightningCheckpoint = dict[str, Any]  # Lightning's own keys, and those of callbacks and modules

OWN_KEY = "hf_compat"
SHARD_BYTES = 5 * 10**9
_TORCH_BEGINS = (b"PK\x03\x04", b"\x80")  # a zip file; before 1.6 a pickle
# Wrappers put these before a weight's name. One that every name has is removed.
WRAPPER_PREFIXES = ("app.", "state_dict.", "_forward_module.", "module.", "model.")

# Lightning's own fields, and those of the states of its loops, by the ends of their names
_COUNTS = FieldSpec("counts", dict, items=COUNT)
_PROGRESS = FieldSpec("counts in all, and since the last start", dict, needed={"total": _COUNTS, "current": _COUNTS})
_FIELDS = {
    "state_dict": FieldSpec("weights by name", dict, items=FieldSpec("a tensor", torch.Tensor)),
    **dict.fromkeys(("optimizer_states", "lr_schedulers"), FieldSpec("a list", list)),
    **dict.fromkeys(("epoch", "global_step"), FieldSpec("a whole number", int, (-1, 2**63))),
    "pytorch-lightning_version": FieldSpec("a version", str, fits=re.compile(r"\d[\w.+!-]{0,59}").fullmatch),
    "callbacks": MAPPING,
    "loops": FieldSpec("states of loops", dict, items=MAPPING),
}
_OF_LOOPS = {
    **dict.fromkeys(("epoch_progress", "batch_progress", "scheduler_progress", "optim_step_progress"), _PROGRESS),
    "optim_progress": FieldSpec(
        "the progress of an optimizer",
        dict,
        needed={"optimizer": FieldSpec("its steps", dict, needed=dict.fromkeys(("step", "zero_grad"), _PROGRESS))},
    ),
    "state_dict": MAPPING,
}


def check_lightning(path: str, checkpoint: object) -> None:
    """Refuse content that is not a checkpoint, which Lightning would take for one."""
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path} cannot be read: it holds {brief(checkpoint, 60)}, not a checkpoint.")
    wrong = wrong_field({**dict.fromkeys(("state_dict", "epoch", "global_step")), **checkpoint}, _FIELDS)
    for loop, state in checkpoint.get("loops", {}).items() if wrong is None else ():
        kinds = {name: _OF_LOOPS[kind] for name in state if (kind := str(name).rpartition(".")[2]) in _OF_LOOPS}
        wrong = wrong or wrong_field(state, kinds, f"loops.{loop}.")
    if wrong is not None:
        raise CheckpointError(f"{path} cannot be read: {wrong}.")
    missing = [name for name in ("optimizer_states", "lr_schedulers") if name not in checkpoint]
    if len(missing) == 1:
        raise CheckpointError(f"{path} cannot be read: `{missing[0]}` is missing.")
    own = checkpoint.get(OWN_KEY)
    if own is None:
        return
    with naming(f"{path}: `{OWN_KEY}`"):
        if not isinstance(own, dict) or not COUNT.holds(own.get("updates", 0)):
            raise CheckpointError(f"It is {brief(own, 60)}, without a number of updates.")
        DataPosition.read(own.get("windows"))


def checked_paths(source: object, target: object) -> tuple[str, str]:
    """Check the paths of a conversion.

    Raises:
        ArgumentError: A value is not a path of this machine, the source is missing, or the target cannot be made.
    """
    paths = []
    for name, given in (("source", source), ("target", target)):
        path = os.fspath(given) if isinstance(given, os.PathLike) else given
        if not isinstance(path, str) or not path.strip() or "\0" in path:
            raise ArgumentError(f"`{name}` is {brief(given, 60)}, not a path.\n\nHint: name a file or a folder.")
        paths.append(local_path(name, path).rstrip(os.sep) or os.sep)
    from_path, to_path = paths
    if not os.path.lexists(from_path):
        raise ArgumentError(
            f"There is nothing to convert: {brief(from_path)} does not exist.\n\nHint: name a checkpoint."
        )
    try:
        os.lstat(to_path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ArgumentError(f"{to_path} cannot be written: {error.strerror}.\n\nHint: name another path.") from error
    else:
        raise ArgumentError(f"{to_path} exists and is not overwritten.\n\nHint: name a new path.")
    parent = os.path.dirname(os.path.abspath(to_path))
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        raise ArgumentError(f"{to_path} cannot be written: you may not write to the folder {parent}.")
    inside = os.path.realpath(from_path)
    if os.path.commonpath([inside, os.path.realpath(to_path)]) == inside:
        raise ArgumentError(
            f"The target {to_path} is inside the source {from_path}, which stays as it is.\n\n"
            "Hint: name a path beside it."
        )
    return from_path, to_path


@contextlib.contextmanager
def writing(target: str) -> Iterator[str]:
    """Give a path in a hidden folder beside the target. The file or folder that is written there then gets its name.

    Raises:
        ArgumentError: Something has the target's name, or the target is not a local path.
        CheckpointWriteError: Something could not be written. The message names the target and the cause.
    """
    beside, name = os.path.split(os.path.abspath(local_path("target", target)))
    try:
        os.makedirs(beside, exist_ok=True)
        layout.remove_ended(beside, layout.CONVERTING)
        with layout.hidden_folder(beside, layout.CONVERTING) as hidden:
            place = os.path.join(hidden, name)
            yield place
            if os.path.lexists(target):
                raise ArgumentError(f"{target} exists and is not overwritten.\n\nHint: name a new path.")
            move(place, target)
    except HfCompatError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise CheckpointWriteError(
            f"{target} could not be written: {cause}.\n\nHint: make room, or name another path."
        ) from error


def convert(source: str, target: str, shard_bytes: int = SHARD_BYTES, keep_names: bool = False) -> str:
    """Convert a checkpoint. The form and the name of each path say what kind of checkpoint it is.

    Args:
        source: A Lightning `.ckpt` of an `HFModule`, an HF folder, or a folder of shards: DeepSpeed's ZeRO 1 to 3, or
            torch.distributed.checkpoint's (FSDP).
        target: A path that ends in `.ckpt`, or a folder; it must not exist.
        shard_bytes: Size of the weight files that shards become, in bytes; one at a time is held in memory.
        keep_names: Keep the weights' names as the shards have them.

    Returns:
        What was done, in words.

    Raises:
        ArgumentError: The target exists or cannot be made, or there is nothing to convert between these two.
        CheckpointError: The source is not whole, or not readable.
        CheckpointWriteError: The target could not be written.
    """
    source, target = checked_paths(source, target)
    if not COUNT.holds(shard_bytes) or not shard_bytes:
        raise ArgumentError(
            f"`shard_bytes` is {brief(shard_bytes, 60)}, not a number of bytes.\n\nHint: 5_000_000_000, say."
        )
    with naming(source):
        to_lightning = target.endswith(".ckpt")
        stored: list[StoredTensor] | None = None
        if os.path.isdir(source) and not to_lightning:
            if os.path.lexists(os.path.join(source, METADATA_NAME)):
                stored = dcp_tensors(source)
            else:
                contents = Contents(source)
                if rank_files(contents, named_zero_folder(contents) or "", OPTIMIZERS):
                    stored = zero_tensors(source)
        if stored is not None:
            # safetensors with an index, one file's worth of tensors in memory at a time
            if not stored:
                raise CheckpointError("The shards hold no weights.")
            with writing(target) as place:
                os.mkdir(place)
                count = _write_shards(stored, place, shard_bytes, keep_names)
            return f"{count} tensors of the shards in {source} are weights in {target}"
        if os.path.isdir(source) and to_lightning:
            with reading_named_folder(source):
                checkpoint = {**_state_of(source), "state_dict": _weights_of(source)}
            with writing(target) as place:
                torch.save(checkpoint, place)
            return f"the HF folder {source} is the Lightning checkpoint {target}"
        if os.path.isfile(source) and not to_lightning:
            # Its own error would speak of something else
            with open_regular(source) as file:
                if not file.read(4).startswith(_TORCH_BEGINS):
                    raise CheckpointError(
                        f"{source} is not a Lightning checkpoint, since it is not a file of `torch.save`."
                    )
            checkpoint = read_lightning(source)
            to_hf(checkpoint, target)
            warn_of_left_out(source, checkpoint)
            return f"the Lightning checkpoint {source} is the HF folder {target}"
        raise ArgumentError(
            f"There is nothing to convert from {source} to {target}.\n\n"
            "Hint: name a .ckpt file and a folder, in either order, or a folder of shards and a folder."
        )


def _write_shards(stored: list[StoredTensor], partial: str, shard_bytes: int, keep_names: bool) -> int:
    # The wrappers' prefixes that every name begins with, each once and in any order
    prefix, left = "", [] if keep_names else list(WRAPPER_PREFIXES)
    while found := next((p for p in left if all(tensor.name.startswith(prefix + p) for tensor in stored)), None):
        left.remove(found)
        prefix += found
    groups: list[list[StoredTensor]] = []
    filled = 0
    for tensor in stored:
        if not groups or filled + tensor.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    file_of: dict[str, str] = {}
    total_bytes = 0
    for number, group in enumerate(progress_bar(groups, desc="weight files"), start=1):
        weights = {}
        for tensor in group:
            with reading(f"The stored tensor {brief(tensor.name)}"):
                weights[tensor.name.removeprefix(prefix)] = tensor.load()
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_weights(weights, os.path.join(partial, file))
        file_of |= dict.fromkeys(weights, file)
        total_bytes += sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    with open(os.path.join(partial, layout.SAFE_WEIGHTS_INDEX_NAME), "w", encoding="utf-8") as text:
        json.dump(index, text, indent=2)
    return len(file_of)


PREFIX = "model."
FOLDER_KEY = "hf_compat_folder"  # of a checkpoint in memory: the HF folder that it was read from
_BEGINNING: LightningCheckpoint = {"pytorch-lightning_version": lightning.__version__, "global_step": 0, "epoch": 0}
_NO_OPTIMIZER: LightningCheckpoint = {"optimizer_states": [], "lr_schedulers": []}  # both start anew


def read_folder(folder: str) -> LightningCheckpoint:
    """Read a folder that the `ckpt_path` of a Lightning trainer names: a checkpoint, or a saved model.

    Its name is under `FOLDER_KEY`. PEFT reads adapters itself.
    """
    is_alone = holds_model_alone(Path(folder))
    with contextlib.nullcontext() if is_alone else reading_named_folder(folder):
        state = {**_BEGINNING, "callbacks": {}} if is_alone else _state_of(folder)
        weights = {} if holds_adapters(folder) else _weights_of(folder)
        return {**_NO_OPTIMIZER, **state, "state_dict": weights, FOLDER_KEY: folder}


def _weights_of(folder: str) -> Weights:
    return {PREFIX + name: tensor for name, tensor in read_weights(folder).items()}


def _state_of(folder: str) -> LightningCheckpoint:
    """Read the parts of a checkpoint other than its weights."""
    contents = Contents(folder)
    state = read_trainer_state(contents.need(layout.TRAINER_STATE_NAME))
    checkpoint = {
        **_BEGINNING,
        "global_step": state.global_step,
        "epoch": int(state.epoch),
        "callbacks": {},
        OWN_KEY: {"updates": state.global_step},
    }
    optimizer = contents.find(layout.OPTIMIZER_NAME)
    schedule = contents.find(layout.SCHEDULER_NAME)
    if optimizer is not None and schedule is not None:
        checkpoint["optimizer_states"] = [read_torch_file(optimizer)]
        checkpoint["lr_schedulers"] = [read_torch_file(schedule)]
    own = contents.find(layout.RUN_STATE_NAME)  # of one process: each of several has a position of its own
    if own is not None:
        run_state = RunState.read_file(own, read_random_states(folder))
        checkpoint["callbacks"] = run_state.callbacks
        data = run_state.data
    else:  # work out the position from the updates and random states that `transformers` writes
        updates_per_epoch = round(state.global_step / state.epoch) if state.epoch else max(state.global_step, 1)
        epoch, updates = divmod(state.global_step, updates_per_epoch)
        data = DataPosition(epoch=epoch, updates_done=updates, rng=read_random_states(folder))
    checkpoint[OWN_KEY]["windows"] = data.to_plain()
    return checkpoint


def read_lightning(path: str) -> LightningCheckpoint:
    """Read a Lightning checkpoint file: tensors and plain containers, in the form that Lightning gives them."""
    checkpoint: LightningCheckpoint = read_torch_file(path, ARRAY_GLOBALS, objects=True)
    check_lightning(path, checkpoint)
    return plain_checkpoint(path, checkpoint)


def to_hf(checkpoint: LightningCheckpoint, folder: str) -> None:
    """Write a Lightning checkpoint of an `HFModule` as an HF folder, which is new and sealed.

    Raises:
        ArgumentError: The folder exists.
        CheckpointError: The checkpoint is of another module.
    """
    held = checkpoint.get("state_dict", {})
    weights = {name.removeprefix(PREFIX): value for name, value in held.items() if name.startswith(PREFIX)}
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError("The checkpoint has no weights under `state_dict['model.*']`: it is of no HFModule.")
    with writing(folder) as partial:
        os.mkdir(partial)
        with naming_misfit("The Lightning checkpoint"):
            write_weights(weights, os.path.join(partial, layout.SAFE_WEIGHTS_NAME))
            for key, name in (("optimizer_states", layout.OPTIMIZER_NAME), ("lr_schedulers", layout.SCHEDULER_NAME)):
                if checkpoint.get(key):
                    torch.save(checkpoint[key][0], os.path.join(partial, name))
            # The position in the data, as we saved it, or from the loader's state that Lightning saved
            own = checkpoint.get(OWN_KEY, {}).get("windows")
            if own is None:
                loops = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
                own = next((loader for loader in (loops.get("combined_loader") or [])[:1] if "epoch" in loader), None)
            data = None if own is None else DataPosition.read(own)
            epoch = float(checkpoint["epoch"] if data is None else data.epoch)
            if data is not None and data.is_open and data.micro_batches_per_epoch:
                epoch = data.epoch + data.micro_batches_done / data.micro_batches_per_epoch
            state = TrainerState(
                global_step=int(checkpoint["global_step"]),
                epoch=epoch,
                # transformers compares it with its own and takes no None
                train_batch_size=(data.micro_batch_size if data is not None else None) or 0,
                stateful_callbacks=[TrainerControl()],
            )
            # The arguments of the resumed run count
            stated = {name: value for name, value in dataclasses.asdict(state).items() if name not in INTERVALS}
            with open(os.path.join(partial, layout.TRAINER_STATE_NAME), "w", encoding="utf-8") as file:
                file.write(json.dumps(stated, indent=2, sort_keys=True) + "\n")
            if data is not None:
                step = int(checkpoint["global_step"])
                resumed = RunState(
                    data=data,
                    moment=SavedAt.UPDATE if data.is_open else SavedAt.EPOCH_END,
                    losses={"tr_loss": 0.0, "total_loss": 0.0, "last_logged": step, "first_update": step},
                    callbacks=checkpoint.get("callbacks", {}),
                )
                torch.save(resumed.to_plain(), os.path.join(partial, layout.RUN_STATE_NAME))
                if data.rng is not None:
                    torch.save(unpack_rng(data.rng), os.path.join(partial, layout.RNG_STATE_NAME))
        manifest.seal(partial)


# Keys of a Lightning checkpoint that become files of the folder, or hold no further weights.
_KNOWN = {"state_dict", "optimizer_states", "lr_schedulers", "callbacks", "loops", "MixedPrecision", "hyper_parameters"}


def warn_of_left_out(source: str, checkpoint: LightningCheckpoint) -> None:
    """Name the tensors that an HF folder has no place for, of other parts, metrics, averages …"""
    left_out = [name for name in checkpoint["state_dict"] if not name.startswith(PREFIX)]
    for key, held in checkpoint.items():
        if key not in (*_KNOWN, OWN_KEY) and any(isinstance(part, torch.Tensor) for part in leaves(held)):
            left_out.append(key)
    if left_out:
        shown = ", ".join(left_out[:5]) + (" …" if left_out[5:] else "")
        warn_user(
            f"{source} holds {len(left_out)} entries with weights that are not the model's, and an HF folder has no "
            f"place for: {shown}. They are left out.\n\nHint: keep, or save, a .ckpt."
        )


def write_weights(weights: dict[str, torch.Tensor], path: str) -> None:
    """Write weights. A tensor with several names is written once, with its other names in the metadata."""
    written: dict[str, torch.Tensor] = {}
    places: dict[tuple[Any, ...], str] = {}
    metadata = {"format": "pt"}
    for name, tensor in weights.items():
        plain_name = name.replace(COMPILED, "")
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in places:
            metadata[plain_name] = places[place]
        else:
            places[place] = plain_name
            written[plain_name] = tensor.detach().contiguous()
    safetensors.torch.save_file(written, path, metadata=metadata)


class HFCheckpointIO(CheckpointIO):
    """Let Lightning read HF folders, and files without running the code of objects in them.

    `HFModule` puts it before the plugin of its trainer while that runs, so `fit(module, ckpt_path="…/checkpoint-8")`
    works. That plugin does everything else.
    """

    def __init__(self, behind: CheckpointIO | None = None) -> None:
        self.behind = behind if behind is not None else TorchCheckpointIO()

    def __getattr__(self, name: str) -> object:
        """Look up what a hook asks of the trainer's plugin, as `checkpoint_io` of one that wraps another."""
        if name == "behind":  # before `__init__`, as in a copy
            raise AttributeError(name)
        return getattr(self.behind, name)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.behind.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def teardown(self) -> None:
        """Let the other plugin finish. One that writes in the background waits for its threads."""
        self.behind.teardown()

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        if os.path.isdir(path):
            return read_folder(str(path))
        is_here = os.path.lexists(path)
        if not is_here and "://" not in str(path):  # else a place elsewhere, which Lightning knows how to reach
            raise no_file(str(path))
        is_plain = weights_only is not False  # the caller asks for unpickling in so many words
        try:
            with reading(path), naming(path), contextlib.ExitStack() as stack:
                stack.enter_context(reading_arrays())
                if is_here:
                    file = stack.enter_context(open_regular(path))
                    if is_plain:
                        walked_torch_file(str(path), file)
                        stack.enter_context(knowing_types(file, objects=True))
                checkpoint = self.behind.load_checkpoint(path, map_location, weights_only=is_plain)
            check_lightning(str(path), checkpoint)
            if is_plain and is_here:
                checkpoint = plain_checkpoint(str(path), checkpoint)
        except CheckpointError as error:
            raise (no_checkpoint(str(path), error) if is_here else error) from error
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        self.behind.remove_checkpoint(path)
