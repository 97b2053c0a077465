"""What is written down of a run: one JSON object a line, and tensors beside it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

# Of a tensor with more values than this, evenly spaced ones are kept beside the digest of all.
KEPT_VALUES = 2**22


class Record:
    """The file of one process. Lines reach the disk at the end of each update: a killed run leaves what it did.

    Args:
        folder: Where the file goes.
        rank: Of the process.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._file = open(os.path.join(folder, f"record-{rank}.jsonl"), "w", encoding="utf-8")  # noqa: SIM115 - kept

    def write(self, kind: str, **values: object) -> None:
        """Append one line."""
        self._file.write(json.dumps({"kind": kind, **values}, default=plain) + "\n")

    def flush(self) -> None:
        """Bring what was written to the disk."""
        self._file.flush()

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> str:
        """Keep the values of tensors; returns the file's name."""
        import torch

        file = f"{name}-{self.rank}.pt"
        torch.save({key: _spaced(tensor) for key, tensor in tensors.items()}, os.path.join(self.folder, file))
        return file


def plain(value: object) -> object:
    """Return what JSON can hold in the place of a value: scalars of NumPy and torch as numbers, else its text."""
    item = getattr(value, "item", None)
    if (callable(item) and getattr(value, "size", None) in (1, None)) or getattr(value, "ndim", None) == 0:
        return item() if callable(item) else str(value)
    return str(value)


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors and arrays of nested containers, each with its place there."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, np.ndarray):
        yield from _tensors_of_array(value, path)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_in(part, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from tensors_in(part, f"{path}[{index}]")


def _tensors_of_array(value: np.ndarray, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    import numpy as np
    import torch

    if value.dtype.hasobject:
        yield from tensors_in(value.tolist(), path)
    elif value.dtype.kind in "biufc":
        yield path, torch.from_numpy(np.ascontiguousarray(value).copy())


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of the bits, the type and the shape."""
    local = local_part(tensor)
    head = f"{local.dtype} {tuple(local.shape)} "
    return head + hashlib.blake2b(_bytes(local), digest_size=12).hexdigest()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor that is spread over several."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def fingerprint(tensors: Iterable[torch.Tensor]) -> tuple[str, float]:
    """Return a checksum of the bits of all tensors, and their common norm; without copying them from their device."""
    import torch

    sums: list[torch.Tensor] = []
    squares: list[torch.Tensor] = []
    for tensor in tensors:
        local = local_part(tensor.detach())
        if local.numel() and not local.is_meta and local.is_floating_point():
            whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
            sums.append(local.contiguous().view(whole).sum(dtype=torch.int64))
            squares.append(torch.linalg.vector_norm(local, dtype=torch.float64) ** 2)
    if not sums:
        return "", 0.0
    told = json.dumps([total.tolist() for total in sums]).encode()
    return hashlib.blake2b(told, digest_size=8).hexdigest(), math.sqrt(sum(square.item() for square in squares))


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _spaced(tensor: torch.Tensor) -> torch.Tensor:
    local = local_part(tensor).detach().cpu()
    step = math.ceil(local.numel() / KEPT_VALUES)
    return local.clone() if step <= 1 else local.reshape(-1)[::step].clone()
