"""Read a checkpoint without running any code in it. Any failure is a `CheckpointError` that names the file.

A folder with a manifest of ours is read by its list alone, so that files of two checkpoints never mix.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import pickle
import pkgutil
import re
import stat
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, BinaryIO, cast

import safetensors.torch
import torch

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.files import (
    Named,
    Plain,
    ReadOnce,
    first_line,
    is_inside,
    is_plain_name,
    open_regular,
    pinned,
    read_json,
    reading,
    refusal_behind,
    refuse_huge_content,
    walked_torch_file,
)
from hf_compat.checkpoint.verifying import READ_AT_ONCE, comparing, kept_content, running_hash
from hf_compat.errors import CheckpointError, UnreadObjects
from hf_compat.runtime.text import brief

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
MANIFEST_WRITTEN_FIRST = f".{MANIFEST_NAME}."  # the beginning of its name until it is whole
MANIFEST_KIND = "hf_compat checkpoint"
_LARGEST_TURN = 2**53
# Within this time a file may be written twice and look the same: a disk's clock advances a few milliseconds at once
_SETTLED_NS = 10**8

Listed = dict[str, object]  # by name of each file: its entry in the manifest


def is_ours_alone(path: str) -> bool:
    """Whether only this package writes such a file of a checkpoint, for all ranks or for one."""
    name = re.sub(r"_\d+(?=\.)", "", path.rpartition("/")[2])
    return name == MANIFEST_NAME or any(state.is_ours and state.name == name for state in layout.STATES)


@dataclass(frozen=True, slots=True)
class Writer:
    """Who wrote a checkpoint."""

    run: str  # id of the run, which a resumed run keeps
    turn: int  # which call of `train` in this output folder, counted from 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a folder's manifest."""

    # Whether the folder has one, readable or not. The marker of another folder, which user code copied, does not count.
    exists: bool = False
    # All that it lists, good names and bad. None if it is not readable, or until a save in place has ended.
    files: Listed | None = None
    writer: Writer | None = None  # who wrote the checkpoint, if it says so
    saving: str | None = None  # the id of the run whose save into the folder has not ended
    error: CheckpointError | None = None  # why it cannot be read, which the system may have refused

    @property
    def why_unreadable(self) -> str:
        """Why it lists no files."""
        refusal = refusal_behind(self.error)
        if refusal is not None:
            return f"{MANIFEST_NAME} cannot be read: {refusal.strerror}"
        return f"{MANIFEST_NAME} is not readable" if self.saving is None else "the save into it did not end"


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a folder. An output folder may hold thousands."""
    path = os.path.join(folder, MANIFEST_NAME)
    facts: os.stat_result | None = None
    try:
        facts = os.lstat(path)
    except (OSError, ValueError) as error:
        if refusal_behind(error) is None:
            return Manifest()
    try:
        if facts is None or time.time_ns() - facts.st_ctime_ns < _SETTLED_NS:
            return _as_manifest(path, read_json(path))
        return _settled_manifest(path, _identity_of(facts))
    except CheckpointError as error:
        return Manifest(exists=True, error=error)


@functools.lru_cache(maxsize=64)
def _settled_manifest(path: str, identity: tuple[int, ...]) -> Manifest:
    """Read a manifest, once for each identity of its file."""
    return _as_manifest(path, read_json(path))


def _identity_of(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def manifest_of(path: str, content: bytes) -> Manifest:
    """Read a manifest that came from elsewhere, and belongs at a path."""
    try:
        return _as_manifest(path, json.loads(content))
    except (ValueError, RecursionError):
        return Manifest(exists=True)


def _as_manifest(path: str, content: object) -> Manifest:
    if not isinstance(content, dict) or content.get("kind") != MANIFEST_KIND:
        return Manifest(exists=True)
    listed, saving, run, turn = content.get("files"), content.get("saving"), content.get("run"), content.get("turn")
    is_saving = isinstance(saving, str)
    writer = None
    if isinstance(run, str) and type(turn) is int and 0 < turn < _LARGEST_TURN:
        writer = Writer(run, turn)
    return Manifest(
        exists=not is_saving or content.get("name") == os.path.basename(os.path.dirname(path)),
        files=listed if isinstance(listed, dict) else None,
        writer=writer,
        saving=saving if is_saving else None,
    )


def written_by(folder: str) -> tuple[bool, Writer | None]:
    """Whether a folder's manifest lists files, and who wrote it. Only one that was replaced is read again."""
    try:
        facts = os.lstat(os.path.join(folder, MANIFEST_NAME))
    except OSError:
        return False, None
    return _read_writer(folder, _identity_of(facts))


@functools.lru_cache(maxsize=4096)
def _read_writer(folder: str, identity: tuple[int, ...]) -> tuple[bool, Writer | None]:
    manifest = read_manifest(folder)
    return manifest.files is not None, manifest.writer


# Folders that are read as they are, whatever their manifests say: by real path the files, and which manifest it was.
_AsItIs = Mapping[str, tuple[Listed, tuple[int, int] | None]]
_AS_IT_IS: ContextVar[_AsItIs] = ContextVar("_AS_IT_IS", default=MappingProxyType({}))


@contextlib.contextmanager
def reading_as_it_is(folder: str | os.PathLike[str], files: Listed) -> Iterator[None]:
    """Let readers read these files of a folder for a while, as if its manifest listed them so, and no others.

    This ends when the manifest is replaced, since what a run saves into the folder is another checkpoint.
    """
    path = os.path.realpath(folder)
    token = _AS_IT_IS.set({**_AS_IT_IS.get(), path: (files, _identity(Path(path)))})
    try:
        yield
    finally:
        _AS_IT_IS.reset(token)


def listed_as_it_is(folder: str | os.PathLike[str]) -> Listed | None:
    """The files of a folder that is read as it is, after a warning about its differences. None for any other."""
    known = _AS_IT_IS.get()
    listed, manifest = known.get(os.path.realpath(folder), (None, None)) if known else (None, None)
    return listed if listed is not None and manifest == _identity(Path(folder)) else None


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        facts = os.lstat(folder / MANIFEST_NAME)
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


class Contents:
    """The files of a checkpoint that may be read: those that its manifest lists.

    A folder without a manifest (of `transformers`) has no list, and all its files may be read. The manifest of one that
    is read as it is (`reading_as_it_is`) does not count.

    Raises:
        CheckpointError: It has a manifest, which is not readable.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.listed = listed_as_it_is(self.folder)
        if self.listed is None:
            manifest = read_manifest(self.folder)
            self.listed = manifest.files
            if self.listed is None and manifest.exists:
                raise CheckpointError(f"{self.folder}: {manifest.why_unreadable}.") from manifest.error

    def find(self, name: str) -> str | None:
        """Find the path of a file by its name in the folder, with `/`.

        None if the folder lacks it, or, with a warning, if the manifest does not list it.
        """
        path = self.folder / name
        try:
            mode = os.lstat(path).st_mode if is_plain_name(name) else stat.S_IFDIR
        except (OSError, ValueError):
            return None
        is_link = stat.S_ISLNK(mode)
        if stat.S_ISDIR(mode) or (is_link and os.path.isdir(path)):
            return None
        # a link with a listed name may lead elsewhere
        is_own = not is_link and "/" not in name
        if self.listed is not None and not (name in self.listed and (is_own or is_inside(self.folder, name))):
            logger.warning("%s is not read: %s does not list it.", path, MANIFEST_NAME)
            return None
        return str(path)

    def need(self, name: str) -> str:
        """Find the path of a file that has to be there."""
        path = self.find(name)
        if path is None:
            raise CheckpointError(f"{self.folder} holds no {brief(name)} that may be read.")
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


# Types of optimizers' packages, which hold tensors: module, name
STATE_TYPES = (
    ("galore_torch.galore_projector", "GaLoreProjector"),
    ("apollo_torch.svd_projector", "GaLoreProjector"),
    ("apollo_torch.random_projector", "GradientProjector"),
    ("torchao.optim.subclass_4bit", "OptimState4bit"),
    ("torchao.optim.subclass_8bit", "OptimState8bit"),
)


Weights = dict[str, torch.Tensor]
Allowed = Sequence[Any]  # torch's safe globals: types and functions, also under another name
COMPILED = "_orig_mod."  # torch.compile puts it into the names of weights
LoadResult = torch.nn.modules.module._IncompatibleKeys  # its `missing_keys` and `unexpected_keys`


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint that is not in memory."""

    name: str
    nbytes: int
    load: Callable[[], torch.Tensor]


def read_torch_file(path: str, allowed: Allowed = (), mmap: bool = False, objects: bool = False) -> Plain:
    """Read a file that `torch.save` wrote, as tensors and plain containers. Types of optimizers' states may be in it.

    So may the `allowed` ones, and with `objects` any other, for whose objects a `Named` stands. With `mmap`, tensors
    stay on the disk until they are used, if torch can.
    """
    content = kept_content(path)
    if content is not None:
        with reading(path):
            return load_plain(path, io.BytesIO(content), allowed, objects=objects)
    with open_regular(path, buffering=0) as file, reading(path):
        source = ReadOnce(file, running_hash(path))
        with comparing(path, source.hexdigest):
            if source.size <= READ_AT_ONCE:
                return load_plain(path, source.read_at(0, source.size), allowed, objects=objects)
            if not mmap and zipfile.is_zipfile(cast(BinaryIO, source)):
                return load_plain(path, cast(BinaryIO, source), allowed, objects=objects)
    with pinned(path) as opened:
        return load_plain(path, opened, allowed, mmap, objects)


def load_plain(
    path: str, source: str | BinaryIO, allowed: Allowed = (), mmap: bool = False, objects: bool = False
) -> Plain:
    """Load what `torch.save` wrote, from a file or bytes, after a walk through its pickle. Raises torch's errors."""
    with open(source, "rb") if isinstance(source, str) else contextlib.nullcontext(source) as file:
        walked_torch_file(path, file)
        file.seek(0)
    with knowing_types(source, allowed, objects) as is_zip:
        may_map = mmap and is_zip and isinstance(source, str)
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=may_map)
    refuse_huge_content(path, content)
    return content


@contextlib.contextmanager
def knowing_types(source: str | IO[bytes], allowed: Allowed = (), objects: bool = False) -> Iterator[bool]:
    """Let torch read the types of optimizers' states, and the `allowed` ones, in a file that `torch.save` wrote.

    The context's value is whether the file is a zip file.

    With `objects`, a `Named` stands for any other object. No code of its class runs.
    """
    types, is_zip = list(allowed), zipfile.is_zipfile(source)  # torch before 1.6 wrote none
    if not isinstance(source, str):
        source.seek(0)  # the look for a zip file's end has left it there

    def unknown() -> list[str]:
        if not is_zip:
            return []
        if isinstance(source, str):
            return torch.serialization.get_unsafe_globals_in_checkpoint(source)
        found = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        source.seek(0)
        return found

    named = unknown()
    for module, name in STATE_TYPES:
        if f"{module}.{name}" in named:
            with contextlib.suppress(ImportError):  # reading says which type it does not know
                types.append(pkgutil.resolve_name(f"{module}:{name}"))
    with torch.serialization.safe_globals(types):
        for full in unknown() if objects else ():
            module, _, name = full.rpartition(".")
            types.append((type(name, (Named,), {"module": module, "name": name}), full))
    try:
        with torch.serialization.safe_globals(types):
            yield is_zip
    except pickle.UnpicklingError as error:
        if not objects:
            raise
        raise UnreadObjects("It holds objects, and reading them runs their code.") from error


def weight_files(contents: Contents, adapter: str | None = None) -> list[str]:
    """Name the files of a folder's weights, or of an adapter's in a subfolder (`""`: in the folder itself).

    They are one file, or the shards of an index. Empty if there are none.
    """
    if adapter is not None:
        single = [f"{adapter}/{name}" if adapter else name for name in layout.ADAPTER_WEIGHTS]
        return [name for name in single if contents.find(name) is not None][:1]
    for name in layout.WHOLE_WEIGHTS:
        path = contents.find(name)
        if path is not None:
            return shard_names(path) if name.endswith(".json") else [name]
    return []


def read_weights(folder: str, contents: Contents | None = None) -> Weights:
    """Read a folder's weights, under the names of an uncompiled model."""
    contents = Contents(folder) if contents is None else contents
    files = weight_files(contents)
    if not files and weight_files(contents, ""):
        raise CheckpointError(f"{folder} holds an adapter, and the model has none.\n\nHint: pass `get_peft_model(…)`.")
    if not files:
        raise CheckpointError(
            f"Can't find a valid checkpoint at {folder}: it has no {layout.SAFE_WEIGHTS_NAME}.\n\n"
            "Hint: name a checkpoint-<updates> folder."
        )
    weights: Weights = {}
    for file in files:
        for name, tensor in read_weights_file(contents.need(file)).items():
            weights[name.replace(COMPILED, "")] = tensor
    return weights


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
            raise CheckpointError(f"{index} names the file {brief(shard)}, which is outside the checkpoint.")
    return shards


def read_weights_file(path: str) -> Weights:
    """Read weights from one file, of safetensors or of torch."""
    if path.endswith(".safetensors"):
        with pinned(path) as opened:
            return safetensors.torch.load_file(opened, device="cpu")
    weights = read_torch_file(path)
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in weights.items()
    ):
        raise CheckpointError(f"{path} cannot be read: it holds something else than weights by name.")
    return weights


@contextlib.contextmanager
def naming_misfit(what: str) -> Iterator[None]:
    """Name the state in errors of an owner that expects another form."""
    try:
        yield
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{what} does not fit: {cause}\n\nHint: resume from another checkpoint.") from error
