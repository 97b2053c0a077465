"""Read a checkpoint without running any code in it. Any failure is a `CheckpointError` that names the file.

A folder with a manifest of ours is read by its list alone, so that files of two checkpoints never mix.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import safetensors.torch
import torch

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.files import (
    Plain,
    check_bounds,
    check_regular,
    first_line,
    is_inside,
    is_plain_name,
    pinned,
    read_json,
    walked_torch_file,
)
from hf_compat.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
MANIFEST_KIND = "hf_compat checkpoint"
_LARGEST_TURN = 2**53

Listed = dict[str, object]  # by name of each file: its entry in the manifest


@dataclass(frozen=True, slots=True)
class Writer:
    """Who wrote a checkpoint.

    Args:
        run: Id of the run. A resumed run keeps it.
        turn: Which call of `train` in this output folder, counted from 1.
    """

    run: str
    turn: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a folder's manifest.

    Args:
        exists: Whether the folder has one, readable or not. The marker of another folder, which user code has copied
            while it was written, does not count.
        files: All that it lists, good names and bad. None if it is not readable, or until a save in place has ended.
        writer: Who wrote the checkpoint, if it says so.
        saving: The id of the run whose save into the folder has not ended.
    """

    exists: bool = False
    files: Listed | None = None
    writer: Writer | None = None
    saving: str | None = None

    @property
    def why_unreadable(self) -> str:
        """Why it lists no files."""
        return f"{MANIFEST_NAME} is not readable" if self.saving is None else "the save into it did not end"

    def files_inside(self, folder: Path) -> Listed | None:
        """The files that it lists inside its folder.

        A name that is absolute, has `..`, or leads elsewhere over a link is left out. No file is read or deleted by it.
        """
        return self.files and {name: facts for name, facts in self.files.items() if is_inside(folder, name)}


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a folder. An output folder may hold thousands."""
    path = os.path.join(folder, MANIFEST_NAME)
    if not os.path.lexists(path):  # much faster than an error
        return Manifest()
    try:
        content = read_json(path)
    except CheckpointError:
        content = None
    if not isinstance(content, dict) or content.get("kind") != MANIFEST_KIND:
        return Manifest(exists=True)
    listed, run, turn, saving = (content.get(key) for key in ("files", "run", "turn", "saving"))
    is_saving = isinstance(saving, str)
    writer = None
    if isinstance(run, str) and type(turn) is int and 0 < turn < _LARGEST_TURN:
        writer = Writer(run, turn)
    return Manifest(
        exists=not is_saving or content.get("name") == Path(folder).name,
        files=listed if isinstance(listed, dict) else None,
        writer=writer,
        saving=saving if is_saving else None,
    )


# Folders that are read as they are, whatever their manifests say: by real path the files, and which manifest it was.
_AsItIs = Mapping[str, tuple[Listed, tuple[int, int] | None]]
_AS_IT_IS: ContextVar[_AsItIs] = ContextVar("_AS_IT_IS", default=MappingProxyType({}))


@contextlib.contextmanager
def reading_as_it_is(folder: str | os.PathLike[str], files: Iterable[str]) -> Iterator[None]:
    """Let readers read these files of a folder for a while, as if its manifest listed them and no others.

    This ends when the manifest is replaced, since what a run saves into the folder is another checkpoint.
    """
    path = os.path.realpath(folder)
    listed: Listed = {name: {} for name in files}
    token = _AS_IT_IS.set({**_AS_IT_IS.get(), path: (listed, _identity(Path(path)))})
    try:
        yield
    finally:
        _AS_IT_IS.reset(token)


def is_read_as_it_is(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is read by its own files, after a warning about its differences."""
    return _listed_as_it_is(Path(folder)) is not None


def _listed_as_it_is(folder: Path) -> Listed | None:
    listed, manifest = _AS_IT_IS.get().get(os.path.realpath(folder), (None, None))
    return listed if listed is not None and manifest == _identity(folder) else None


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        facts = os.lstat(folder / MANIFEST_NAME)
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


class Contents:
    """The files of a checkpoint that may be read.

    Args:
        folder: The checkpoint. One without a manifest (of `transformers`) has no list: all its files may be read. The
            manifest of one that is read as it is (`reading_as_it_is`) does not count.

    Raises:
        CheckpointError: It has a manifest, which is not readable.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.listed = _listed_as_it_is(self.folder)
        if self.listed is None:
            manifest = read_manifest(self.folder)
            self.listed = manifest.files_inside(self.folder)
            if self.listed is None and manifest.exists:
                raise CheckpointError(f"{self.folder}: {manifest.why_unreadable}.")

    def find(self, name: str) -> str | None:
        """Find a file's path. None if the folder lacks it, or, with a warning, if the manifest does not list it.

        Args:
            name: Its name relative to the folder, with `/`.
        """
        path = self.folder / name
        if not is_plain_name(name) or not os.path.lexists(path) or os.path.isdir(path):
            return None
        if self.listed is not None and name not in self.listed:
            logger.warning("%s is not read: %s does not list it.", path, MANIFEST_NAME)
            return None
        check_regular(path)
        return str(path)

    def need(self, name: str) -> str:
        """Find the path of a file that has to be there."""
        path = self.find(name)
        if path is None:
            raise CheckpointError(f"{self.folder} holds no {name!r} that may be read.")
        return path

    def names(self, subfolder: str = "") -> list[str]:
        """List the names of the files of the folder, or of a subfolder, that may be read."""
        try:
            found = sorted(os.listdir(self.folder / subfolder))
        except OSError as error:
            raise CheckpointError(f"{self.folder / subfolder} cannot be listed: {error.strerror}.") from error
        names = []
        for entry in found:
            name = f"{subfolder}/{entry}" if subfolder else entry
            is_listed = entry != MANIFEST_NAME and (self.listed is None or name in self.listed)
            if is_listed and os.path.isfile(self.folder / name):
                names.append(name)
        return names


# module → types
_STATE_TYPES = {
    "galore_torch.galore_projector": ("GaLoreProjector",),
    "apollo_torch.svd_projector": ("GaLoreProjector",),
    "apollo_torch.random_projector": ("GradientProjector",),
    "torchao.optim.subclass_4bit": ("OptimState4bit",),
    "torchao.optim.subclass_8bit": ("OptimState8bit",),
}


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move the tensors within such objects to the devices of their parameters, as torch moves plain tensors."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if type(value).__name__ not in _STATE_TYPES.get(type(value).__module__, ()) or not hasattr(
                value, "__dict__"
            ):
                continue
            for name, held in vars(value).items():
                parts = held if isinstance(held, list) else [held]
                moved = [part.to(parameter.device) if isinstance(part, torch.Tensor) else part for part in parts]
                vars(value)[name] = moved if isinstance(held, list) else moved[0]


Weights = dict[str, torch.Tensor]
Allowed = Sequence[Any]  # torch's safe globals: types and functions, also under another name
COMPILED = "_orig_mod."  # torch.compile puts it into the names of weights


class LoadResult(Protocol):
    """torch's result of loading weights."""

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
    """Read a file that `torch.save` wrote, as tensors and plain containers. Types of optimizers' states may be in it.

    Args:
        path: The file.
        allowed: Further types that may be in it.
        mmap: Leave tensors on disk until they are used.
    """
    try:
        with pinned(path) as opened:
            return load_plain(path, opened, allowed, mmap)
    except CheckpointError:
        raise
    except Exception as error:  # torch and pickle raise what they like; the file is the fact
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def load_plain(path: str, source: str | io.BytesIO, allowed: Allowed = (), mmap: bool = False) -> Plain:
    """Load what `torch.save` wrote, after a walk through its pickle. Raises what torch raises, too.

    Args:
        path: The file, for messages.
        source: The file or bytes to open.
        allowed: Types that may be in it.
        mmap: Leave tensors on disk until they are used, if torch can.
    """
    check_torch_file(path, source)

    def load(types: Allowed) -> Plain:
        with torch.serialization.safe_globals(list(types)):
            is_mapped = mmap and zipfile.is_zipfile(source)  # torch before 1.6 wrote none
            return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)

    try:
        content = load(allowed)
    except pickle.UnpicklingError:
        # Types of optimizers' packages that the file names, if their package is installed
        is_zip = isinstance(source, str) and zipfile.is_zipfile(source)
        named = torch.serialization.get_unsafe_globals_in_checkpoint(source) if is_zip else []
        known = [(module, name) for module, types in _STATE_TYPES.items() for name in types]
        further = []
        for module, name in known:
            if f"{module}.{name}" in named:
                with contextlib.suppress(ImportError):  # reading says which type it does not know
                    further.append(getattr(importlib.import_module(module), name))
        if not further:
            raise
        content = load([*allowed, *further])
    check_bounds(path, content)
    return content


def check_torch_file(path: str, source: str | io.BytesIO) -> None:
    """Refuse a file of `torch.save` that no loader should follow."""
    with open(source, "rb") if isinstance(source, str) else contextlib.nullcontext(source) as file:
        walked_torch_file(path, file)
        file.seek(0)


def read_safetensors(path: str) -> Weights:
    """Read weights from a safetensors file."""
    try:
        with pinned(path) as opened:
            return safetensors.torch.load_file(opened, device="cpu")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def read_weights(folder: str) -> Weights:
    """Read a folder's weights: one file, or the shards of an index."""
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
    """Name weights as an uncompiled model does."""
    return {name.replace(COMPILED, ""): tensor for name, tensor in weights.items()}


def names_of(model: torch.nn.Module, weights: Weights) -> Weights:
    """Name weights as a model does, whose parts may be compiled."""
    own = {name.replace(COMPILED, ""): name for name in model.state_dict() if COMPILED in name}
    return {own.get(name, name): tensor for name, tensor in weights.items()} if own else weights


def shard_names(index: str) -> list[str]:
    """List the files that an index names."""
    try:
        read = read_json(index)
    except CheckpointError as error:
        raise CheckpointError(f"{index} is not a readable index: {first_line(error)}") from error
    weight_map = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} is not a readable index: it has no map of weights to files.")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if os.path.basename(shard) != shard or not is_plain_name(shard):
            raise CheckpointError(f"{index} names the file {shard!r}, which is outside the checkpoint.")
    return shards


def read_weights_file(path: str) -> Weights:
    """Read weights from one file, of safetensors or of torch."""
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
    """Name the state in errors of an owner that expects another form."""
    try:
        yield
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{what} does not fit: {cause}\n\nHint: resume from another checkpoint.") from error
