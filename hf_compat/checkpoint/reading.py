"""Reading what a checkpoint holds, without ever running what is in it."""

from __future__ import annotations

import contextlib
import importlib
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
Plain = Any  # tensors and plain containers: what a file holds, its reader knows
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
            content = _load(opened, allowed, mmap)
    except CheckpointError:
        raise
    except Exception as error:  # torch and pickle raise what they like; the file is the fact
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    check_bounds(path, content)
    return content


def _load(path: str, allowed: Allowed, mmap: bool) -> Plain:
    def load(types: Allowed) -> Plain:
        with torch.serialization.safe_globals(list(types)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)

    try:
        return load(allowed)
    except pickle.UnpicklingError:
        further = state_types_in(path)
        if not further:
            raise
        return load([*allowed, *further])


# A container that is referred to twice counts twice, as for everybody who walks through the content.
_MOST_PARTS = 10**7
_DEEPEST = 100
# What tensors may need beyond their own storage, in bytes: a stride of 0 makes gigabytes of a number.
_MOST_REPEATED_BYTES = 2**26


def check_bounds(path: str, content: Plain) -> None:
    """Refuse a content that nobody can walk through or hold: bytes of it may stand for gigabytes.

    Raises:
        CheckpointError: It contains itself, is nested too deeply, shares parts without measure, or has tensors without
            data or with far more numbers than are stored.
    """
    sizes: dict[int, tuple[int, int]] = {}  # of each container: its parts, and how deeply they are nested
    around: set[int] = set()
    repeated = 0
    waiting: list[tuple[Plain, bool]] = [(content, False)]
    while waiting:
        item, is_counted = waiting.pop()
        if isinstance(item, torch.Tensor):
            repeated += _repeated_bytes(path, item)
        if not isinstance(item, (Mapping, list, tuple, set, frozenset)) or id(item) in sizes:
            continue
        parts = [*item.keys(), *item.values()] if isinstance(item, Mapping) else list(item)
        if is_counted:
            around.discard(id(item))
            found = [sizes.get(id(part), (1, 0)) for part in parts]
            sizes[id(item)] = 1 + sum(count for count, _ in found), 1 + max((depth for _, depth in found), default=0)
        elif id(item) in around:
            raise CheckpointError(f"{path} cannot be read: it holds a container that contains itself.")
        else:
            around.add(id(item))
            waiting.append((item, True))
            waiting += ((part, False) for part in parts)
    count, depth = sizes.get(id(content), (1, 0))
    if count > _MOST_PARTS or depth > _DEEPEST or repeated > _MOST_REPEATED_BYTES:
        raise CheckpointError(
            f"{path} cannot be read: its few bytes stand for {count} parts, {depth} levels deep, and for {repeated} "
            "bytes of repeated numbers."
        )


def _repeated_bytes(path: str, tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor beyond those of its storage."""
    if tensor.is_meta:
        raise CheckpointError(f"{path} cannot be read: it holds tensors without data.")
    if tensor.layout is not torch.strided:
        return 0
    return max(tensor.numel() * tensor.element_size() - tensor.untyped_storage().nbytes(), 0)


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
