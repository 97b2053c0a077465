"""Reading what a checkpoint holds, without ever running what is in it."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import safetensors.torch
import torch

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.contents import Contents
from hf_compat.checkpoint.files import first_line, is_plain_name, pinned, read_json
from hf_compat.checkpoint.pickles import Plain, check_bounds, walked_torch_file
from hf_compat.errors import CheckpointError

# module → types
_STATE_TYPES = {
    "galore_torch.galore_projector": ("GaLoreProjector",),
    "apollo_torch.svd_projector": ("GaLoreProjector",),
    "apollo_torch.random_projector": ("GradientProjector",),
    "torchao.optim.subclass_4bit": ("OptimState4bit",),
    "torchao.optim.subclass_8bit": ("OptimState8bit",),
}


def state_types_in(path: str) -> list[type]:
    """Return the types of optimizers' packages that a file of `torch.save` names, where their package is installed."""
    if not zipfile.is_zipfile(path):
        return []
    named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return list(_known(named))


def _known(named: list[str]) -> Iterator[type]:
    for module, types in _STATE_TYPES.items():
        for name in types:
            if f"{module}.{name}" in named:
                with contextlib.suppress(ImportError):  # reading says which type it does not know
                    yield getattr(importlib.import_module(module), name)


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move the tensors within such objects to the devices of their parameters, as torch moves plain tensors."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if type(value).__name__ in _STATE_TYPES.get(type(value).__module__, ()) and hasattr(value, "__dict__"):
                vars(value).update({name: _moved(held, parameter.device) for name, held in vars(value).items()})


def _moved(held: object, device: torch.device) -> object:
    if isinstance(held, torch.Tensor):
        return held.to(device)
    return [_moved(item, device) for item in held] if isinstance(held, list) else held


Weights = dict[str, torch.Tensor]
Allowed = Sequence[Any]  # as torch lists safe globals: types and functions, or one of these with another name
COMPILED = "_orig_mod."  # what torch.compile puts into the names of weights


class LoadResult(Protocol):
    """What torch answers when weights were loaded."""

    @property
    def missing_keys(self) -> list[str]: ...

    @property
    def unexpected_keys(self) -> list[str]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint that is not in memory.

    Args:
        name: Its name.
        nbytes: Its size, bytes.
        load: Reads it.
    """

    name: str
    nbytes: int
    load: Callable[[], torch.Tensor]


def read_torch_file(path: str, allowed: Allowed = (), mmap: bool = False) -> Plain:
    """Read a file that `torch.save` wrote, as tensors and plain containers; types of optimizers' states may be in it.

    Args:
        path: The file.
        allowed: Further types that may be in it.
        mmap: Leave tensors on disk until they are used.

    Raises:
        CheckpointError: It is damaged, or holds anything else; nothing of it is run. Tensors without data are damage.
    """
    try:
        with pinned(path) as opened:
            return load_plain(path, opened, allowed, mmap)
    except CheckpointError:
        raise
    except Exception as error:  # torch and pickle raise what they like; the file is the fact
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def load_plain(path: str, source: str | io.BytesIO, allowed: Allowed = (), mmap: bool = False) -> Plain:
    """Load what `torch.save` wrote, after a walk through its pickle; raises what torch raises, too.

    Args:
        path: The file, for messages.
        source: What is opened.
        allowed: Types that may be in it.
        mmap: Leave tensors on disk until they are used, where torch can.

    Raises:
        CheckpointError: Following it would take without measure.
    """
    check_torch_file(path, source)

    def load(types: Allowed) -> Plain:
        with torch.serialization.safe_globals(list(types)):
            is_mapped = mmap and zipfile.is_zipfile(source)  # torch before 1.6 wrote none
            return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)

    try:
        content = load(allowed)
    except pickle.UnpicklingError:
        further = state_types_in(source) if isinstance(source, str) else []
        if not further:
            raise
        content = load([*allowed, *further])
    check_bounds(path, content)
    return content


def check_torch_file(path: str, source: str | io.BytesIO) -> None:
    """Refuse a file of `torch.save` that no loader should follow.

    Raises:
        CheckpointError: It is damaged, or following it would take without measure.
    """
    with open(source, "rb") if isinstance(source, str) else contextlib.nullcontext(source) as file:
        walked_torch_file(path, file)
        file.seek(0)


def read_safetensors(path: str) -> Weights:
    """Read weights from a safetensors file.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        with pinned(path) as opened:
            return safetensors.torch.load_file(opened, device="cpu")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def read_weights(folder: str) -> Weights:
    """Read a folder's weights: one file, or the shards of an index.

    Raises:
        CheckpointError: There are none, one is damaged, or an index names a file outside the folder.
    """
    contents = Contents(folder)
    for name in (names.SAFE_WEIGHTS_NAME, names.WEIGHTS_NAME):
        if (path := contents.find(name)) is not None:
            return plain_names(read_weights_file(path))
    for name in (names.SAFE_WEIGHTS_INDEX_NAME, names.WEIGHTS_INDEX_NAME):
        if (path := contents.find(name)) is not None:
            weights: Weights = {}
            for shard in shard_names(path):
                weights |= read_weights_file(contents.need(shard))
            return plain_names(weights)
    raise CheckpointError(
        f"Can't find a valid checkpoint at {folder}: it has no {names.SAFE_WEIGHTS_NAME}.\n\n"
        "Hint: name a checkpoint-<updates> folder."
    )


def plain_names(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Take out of names what `torch.compile` puts into them, so that a model reads them compiled or not."""
    return {name.replace(COMPILED, ""): tensor for name, tensor in weights.items()}


def names_of(model: torch.nn.Module, weights: Weights) -> Weights:
    """Name weights as a model does; parts of it may be compiled."""
    own = {name.replace(COMPILED, ""): name for name in model.state_dict() if COMPILED in name}
    return {own.get(name, name): tensor for name, tensor in weights.items()} if own else weights


def shard_names(index: str) -> list[str]:
    """List the files that an index names.

    Raises:
        CheckpointError: It is no index, or names a file outside its folder.
    """
    try:
        read = read_json(index)
    except CheckpointError as error:
        raise CheckpointError(f"{index} is no readable index: {first_line(error)}") from error
    weight_map = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} is no readable index: it has no map of weights to files.")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if os.path.basename(shard) != shard or not is_plain_name(shard):
            raise CheckpointError(f"{index} names the file {shard!r}, which is outside the checkpoint.")
    return shards


def read_weights_file(path: str) -> Weights:
    """Read weights from one file, of safetensors or of torch.

    Raises:
        CheckpointError: It is damaged, or holds something else.
    """
    if path.endswith(".safetensors"):
        return read_safetensors(path)
    weights = read_torch_file(path)
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in weights.items()
    ):
        raise CheckpointError(f"{path} cannot be read: it holds something else than weights by name.")
    return weights


@contextlib.contextmanager
def fitting(what: str) -> Iterator[None]:
    """Turn what is raised where a state has another form than its owner expects into an error that names the state.

    Raises:
        CheckpointError: It does not fit.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{what} does not fit: {cause}\n\nHint: resume from another checkpoint.") from error
