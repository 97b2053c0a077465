"""Write the record of a run: one JSON object a line, and tensors in files."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# A tensor with more values than this keeps evenly spaced ones, beside the digest of all.
KEPT_VALUES = 2**22


class Record:
    """The file of one process. Lines reach the disk at the end of each update, so a killed run leaves its record."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._file = open(os.path.join(folder, f"record-{rank}.jsonl"), "w", encoding="utf-8")  # noqa: SIM115 - kept

    def write(self, kind: str, **values: object) -> None:
        self._file.write(json.dumps({"kind": kind, **values}, default=_plain) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> str:
        """Keep the values of tensors in a file, and give its name."""
        import torch

        kept: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            local = _local_part(tensor).detach().cpu()
            step = math.ceil(local.numel() / KEPT_VALUES)
            kept[key] = local.clone() if step <= 1 else local.reshape(-1)[::step].clone()
        file = f"{name}-{self.rank}.pt"
        torch.save(kept, os.path.join(self.folder, file))
        return file


def _plain(value: object) -> object:
    """Turn scalars of NumPy and torch into numbers, and other values into text, for JSON."""
    item = getattr(value, "item", None)
    if (callable(item) and getattr(value, "size", None) in (1, None)) or getattr(value, "ndim", None) == 0:
        return item() if callable(item) else str(value)
    return str(value)


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors and arrays in nested containers with their paths."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        yield from tensors_in(value.tolist(), path)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield path, torch.from_numpy(np.ascontiguousarray(value).copy())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_in(part, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from tensors_in(part, f"{path}[{index}]")


def digest(tensor: torch.Tensor) -> str:
    """Write the type and the shape of a tensor, and a digest of its bits."""
    import torch

    local = _local_part(tensor)
    content = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{local.dtype} {tuple(local.shape)} {hashlib.blake2b(content, digest_size=12).hexdigest()}"


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor that is spread over several."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def fingerprint(tensors: Iterable[torch.Tensor]) -> tuple[str, float]:
    """A checksum of the bits of all tensors and their common norm, computed on their device."""
    import torch

    sums: list[torch.Tensor] = []
    squares: list[torch.Tensor] = []
    for tensor in tensors:
        local = _local_part(tensor.detach())
        if local.numel() and not local.is_meta and local.is_floating_point():
            whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
            sums.append(local.contiguous().view(whole).sum(dtype=torch.int64))
            squares.append(torch.linalg.vector_norm(local, dtype=torch.float64) ** 2)
    if not sums:
        return "", 0.0
    told = json.dumps([total.tolist() for total in sums]).encode()
    return hashlib.blake2b(told, digest_size=8).hexdigest(), math.sqrt(sum(square.item() for square in squares))
