"""Read folders of torch.distributed.checkpoint without running anything in them.

torch unpickles two kinds of things there: the index (`.metadata`) and every value that is not a tensor. Here a separate
unpickler reads the index once, and torch gets the result. Values are read with `weights_only=True`. Any failure is a
`CheckpointError` that names the file.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from hf_compat.checkpoint.files import (
    Plain,
    ReadOnce,
    first_line,
    is_plain_name,
    is_whole_zip,
    member_of,
    open_regular,
    read_small,
    reading,
    walked,
)
from hf_compat.checkpoint.reading import MANIFEST_NAME, Contents, StoredTensor, listed_as_it_is, load_plain
from hf_compat.checkpoint.verifying import RunningHash, refuse_damaged
from hf_compat.errors import CheckpointError
from hf_compat.runtime.collectives import is_distributed
from hf_compat.runtime.text import brief

logger = logging.getLogger(__name__)

METADATA_NAME = ".metadata"
INDEX_BYTES = 2**30  # an entry of a tensor's part takes about 200 bytes
_WHOLE = 0.9  # of a file's bytes: a process that reads so many reads the rest as well, and compares the hash
_ZIP_BEGINS = b"PK\x03\x04"  # torch writes each entry as a file of its own
_OPTIMIZER_PREFIXES = ("optim.", "optimizer.")
_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX_NAMES = {
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((_METADATA, name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "WindowsPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "WindowsPath")),  # Python 3.13's
}

States = dict[str, Any]  # torch's nested dicts of tensors and plain values


def dcp_tensors(folder: str) -> list[StoredTensor]:
    """List the weights of a folder, without the optimizer's tensors. The model's plain values are checked."""
    dcp = open_dcp(Contents(folder))
    entries = {k: e for k, e in dcp.index.state_dict_metadata.items() if not k.startswith(_OPTIMIZER_PREFIXES)}
    for place in dcp.index.storage_data:
        if isinstance(entries.get(place.fqn), BytesStorageMetadata):
            dcp.read_entry(place)
    return [
        StoredTensor(
            name=key,
            nbytes=entry.size.numel() * entry.properties.dtype.itemsize,
            load=functools.partial(dcp.read_tensor, key, entry),
        )
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    ]


def read_dcp(dcp: DcpFolder, state: States) -> None:
    """Read a folder into a nested state, in all processes. Tensors are filled, and plain values replaced."""
    try:
        with warnings.catch_warnings():
            # a single process reads on purpose
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
            is_alone = not is_distributed()
            load(state, storage_reader=dcp, planner=DefaultLoadPlanner(), no_dist=is_alone)
    except (Exception, CheckpointException) as error:  # torch's own error, of all processes, is not an `Exception`
        failures = getattr(error, "failures", None)
        first = next(iter(failures.values()))[0] if isinstance(failures, dict) and failures else error
        raise CheckpointError(f"{dcp.path} cannot be read: {first_line(first)}") from error


class DcpFolder(FileSystemReader):
    """A folder of torch.distributed.checkpoint, and its index, which was read and found right.

    torch reads it by this index, and never opens `.metadata`, which may be another by now. Each entry is checked when
    it is read: a process opens the files that it needs, each once, and none of those that others read. A file that it
    reads whole has its hash besides, from the same pass.

    Args:
        path: The folder.
        index: What `.metadata` says.
        need: Finds the path of a file of the folder that may be read.
        hash_of: Gives the SHA-256 of a file, if a manifest has one.
        may_be_edited: Whether a file with another hash is told of, and read. Otherwise it is refused.
    """

    def __init__(
        self,
        path: str,
        index: Metadata,
        need: Callable[[str], str],
        hash_of: Callable[[str], str | None],
        may_be_edited: bool,
    ) -> None:
        super().__init__(path)
        self.index, self._need, self._hash_of, self._may_be_edited = index, need, hash_of, may_be_edited

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self.index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert isinstance(planner, DefaultLoadPlanner)
        places = self.index.storage_data
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(places[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            path = self._need(name)
            lengths = {places[item.storage_index].offset: places[item.storage_index].length for item in items}
            with open_regular(path, buffering=0) as opened:
                expected, size = self._hash_of(name), os.fstat(opened.fileno()).st_size
                is_hashed = expected is not None and sum(lengths.values()) >= _WHOLE * size
                file = ReadOnce(opened, RunningHash() if is_hashed else None)
                for item in sorted(items, key=lambda item: places[item.storage_index].offset):
                    self._read_item(file, item, planner)
                if is_hashed and file.hexdigest() != expected:
                    if not self._may_be_edited:
                        refuse_damaged(path)
                    logger.warning("%s differs from its %s and is read as it is.", path, MANIFEST_NAME)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: ReadOnce, item: ReadItem, planner: DefaultLoadPlanner) -> None:
        """Read what a plan asks for into the planner's state."""
        key, is_value = item.dest_index.fqn, item.type == LoadItemType.BYTE_IO
        if is_value and isinstance(planner.state_dict[key], torch.Tensor):  # torch refuses the opposite
            raise CheckpointError(f"{brief(key)} has to be a tensor and is stored as a value.")
        found = self._read(file, item.storage_index)
        if is_value:
            plain = io.BytesIO()  # the planner unpickles whatever it is given, so it gets what was read
            torch.save(found, plain)
            plain.seek(0)
            planner.load_bytes(item, plain)
            return
        inside = zip(item.storage_offsets, item.lengths, strict=True)
        part = found[tuple(slice(begin, begin + length) for begin, length in inside)]
        own = planner.resolve_tensor(item).detach()
        if own.shape != part.shape:
            raise CheckpointError(f"{brief(key)} has the shape {list(part.shape)}, not {list(own.shape)}.")
        own.copy_(part)
        planner.commit_tensor(item, own)

    def read_tensor(self, key: str, entry: TensorStorageMetadata) -> torch.Tensor:
        """Read all parts of a tensor."""
        whole = torch.zeros(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            inside = zip(chunk.offsets, chunk.sizes, strict=True)
            part = tuple(slice(begin, begin + size) for begin, size in inside)
            whole[part] = self.read_entry(MetadataIndex(key, chunk.offsets))
        return whole

    def read_entry(self, place: MetadataIndex) -> Plain:
        """Read an entry. Refuse one that is not as the index says, or does not have its checksum."""
        with open_regular(self._need(self.index.storage_data[place].relative_path), buffering=0) as file:
            return self._read(ReadOnce(file), place)

    def _read(self, file: ReadOnce, place: MetadataIndex) -> Plain:
        info, expected = self.index.storage_data[place], self.index.state_dict_metadata[place.fqn]
        path = os.path.join(self.path, info.relative_path)
        end = info.offset + info.length
        if end > file.size:
            raise CheckpointError(f"{path} is cut off: it has {file.size} bytes, and an entry ends at {end}.")
        entry = file.read_at(info.offset, info.length)
        if not entry.getbuffer()[: len(_ZIP_BEGINS)] == _ZIP_BEGINS:
            raise CheckpointError(f"{path} is damaged: at {info.offset} begins no entry.")
        is_value = isinstance(expected, BytesStorageMetadata)
        if not is_whole_zip(entry):
            raise CheckpointError(f"{path} is damaged: {brief(place.fqn)} does not have its checksum.")
        entry.seek(0)
        try:
            found = load_plain(str(self.path), entry)
        except Exception as error:
            raise CheckpointError(
                f"{self.path} holds no plain value as {brief(place.fqn)}: {first_line(error)}"
            ) from error
        if isinstance(found, torch.Tensor) == is_value:
            kinds = ("a value", "a tensor") if is_value else ("a tensor", "a value")
            raise CheckpointError(f"{path} is damaged: it holds {kinds[1]} as {brief(place.fqn)}, not {kinds[0]}.")
        if isinstance(expected, BytesStorageMetadata):
            return found
        sizes = [chunk.sizes for chunk in expected.chunks if place.offset is None or chunk.offsets == place.offset]
        if found.dtype != expected.properties.dtype or found.shape not in sizes:
            raise CheckpointError(
                f"{path} is damaged: it holds another tensor as {brief(place.fqn)} than {METADATA_NAME} says."
            )
        return found


class _IndexOnly(pickle.Unpickler):
    """Reads only the types that torch writes into the index of a folder.

    A pickle can set attributes of the classes that it names. `walked` refuses one that does.
    """

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):
            return member_of
        if (module, name) in _INDEX_NAMES or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of an index of shards")


def open_dcp(contents: Contents, subfolder: str = "") -> DcpFolder:
    """Read the index of a checkpoint, or of a subfolder. Refuse one that torch would not have written."""
    before = f"{subfolder}/" if subfolder else ""
    path = contents.need(before + METADATA_NAME)
    content = read_small(path, INDEX_BYTES)
    with reading(path):
        walked(path, io.BytesIO(content), len(content))
        index = _IndexOnly(io.BytesIO(content)).load()
        wrong = _problem(index)
    if wrong is not None:
        raise CheckpointError(f"{path} cannot be read: {wrong}.")
    assert isinstance(index, Metadata)
    for info in index.storage_data.values():
        if not is_plain_name(info.relative_path):
            raise CheckpointError(f"{path} names {brief(info.relative_path)}, which is outside the checkpoint.")

    as_it_is = listed_as_it_is(contents.folder) is not None

    def hash_of(name: str) -> str | None:
        facts = (contents.listed or {}).get(before + name)
        return facts.get("sha256") if isinstance(facts, dict) else None

    return DcpFolder(os.path.dirname(path), index, lambda name: contents.need(before + name), hash_of, as_it_is)


def _problem(index: object) -> str | None:
    """Say what is wrong with an index. The unpickler sets any attribute to any value, so each one is checked."""
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        return "it is not an index of shards"
    for place, info in index.storage_data.items():
        spans = isinstance(info.offset, int) and isinstance(info.length, int) and info.offset >= 0 < info.length
        if not isinstance(place, MetadataIndex) or not isinstance(info.relative_path, str) or not spans:
            return "it is not an index of shards"
    if {place.fqn for place in index.storage_data} != set(index.state_dict_metadata):
        return "it does not say of each entry where it is"
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(entry, (TensorStorageMetadata, BytesStorageMetadata)):
            return f"it does not say what {brief(key)} is"
        if isinstance(entry, BytesStorageMetadata):
            continue
        of_torch = isinstance(entry.properties, TensorProperties) and isinstance(entry.properties.dtype, torch.dtype)
        inside = all(
            offset >= 0 and size >= 0 and offset + size <= whole
            for chunk in entry.chunks
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        )
        # torch would make up missing parts
        if not of_torch or not inside or sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            return f"it does not say where all of {brief(key)} is stored"
    return None
