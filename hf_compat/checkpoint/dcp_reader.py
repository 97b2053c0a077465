"""Tensors out of torch.distributed.checkpoint's folders, one at a time, by one process. torch only."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from collections.abc import Callable, Iterator

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from hf_compat.checkpoint.reading import StoredTensor, first_line
from hf_compat.errors import CheckpointError

METADATA_NAME = ".metadata"
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


def is_dcp_folder(folder: str) -> bool:
    """Return whether a folder was written by torch.distributed.checkpoint."""
    return os.path.isfile(os.path.join(folder, METADATA_NAME))


def dcp_tensors(folder: str) -> list[StoredTensor]:
    """List the weights of a folder; the optimizer's tensors are left out.

    Raises:
        CheckpointError: The folder's index is damaged, or holds what does not belong there.
    """
    check_dcp_index(folder)
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return [
        StoredTensor(
            name=key,
            nbytes=entry.size.numel() * entry.properties.dtype.itemsize,
            load=_reader_of(folder, key, entry),
        )
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(_OPTIMIZER_PREFIXES)
    ]


def _reader_of(folder: str, key: str, entry: TensorStorageMetadata) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        with one_process_reads():
            load(state, checkpoint_id=folder, no_dist=True)
        return state[key]

    return read


class _IndexOnly(pickle.Unpickler):
    """Reads what torch writes into the index of a folder, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _INDEX_NAMES or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(f"The index of the shards names {module}.{name}, which does not belong there.")


def check_dcp_index(folder: str) -> None:
    """Refuse an index that holds more than torch writes or names files elsewhere.

    torch writes the index as a pickle of its own classes, and unpickles whatever it finds there: this comes first.

    Raises:
        CheckpointError: It does, or it cannot be read.
    """
    path = os.path.join(folder, METADATA_NAME)
    for file in _files_of_index(path):
        if os.path.isabs(file) or ".." in file.replace("\\", "/").split("/"):
            raise CheckpointError(f"{path} names {file!r}, which is outside the checkpoint.")


def _files_of_index(path: str) -> set[str]:
    try:
        with open(path, "rb") as file:
            return {info.relative_path for info in (_IndexOnly(file).load().storage_data or {}).values()}
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle raises
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


@contextlib.contextmanager
def one_process_reads() -> Iterator[None]:
    """Leave out torch's warning that a single process reads: it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
        yield
