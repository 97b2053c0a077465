"""Rows of different lengths in one piece of memory, padded once and in place."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence
from itertools import pairwise

import torch

_AT_ONCE = 2**20  # bytes that are moved at once
_LARGE = 2**22  # bytes from which large pages are asked for, as NumPy does


class PaddedRows:
    """Collects tensors of one type that differ in their first two dimensions, one behind the other.

    On Linux they grow without a copy, as the system moves the pages. So the peak is the size of the result.

    Args:
        first: A tensor of the form to collect, on the CPU, with two dimensions at least.
        rows: How many rows are expected.

    Shapes:
        each tensor: [samples, length, …] → [all samples, longest length, …]
    """

    def __init__(self, first: torch.Tensor, rows: int) -> None:
        self._dtype, self._rest = first.dtype, first.shape[2:]
        self._memory = _pages(rows * math.prod(first.shape[1:]) * first.itemsize)
        self._blocks: list[tuple[int, int]] = []  # rows and their length
        self._used = 0  # bytes

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the form of the others."""
        return tensor.dtype == self._dtype and tensor.is_cpu and tensor.ndim > 1 and tensor.shape[2:] == self._rest

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Append tensors that fit."""
        end = self._used + sum([tensor.nbytes for tensor in tensors])
        if end > len(self._memory):
            self._grow(end + end // 8)
        of_one_length = len({tensor.shape[1] for tensor in tensors}) == 1
        for group in [tensors] if of_one_length else [[tensor] for tensor in tensors]:
            rows, length = sum([len(tensor) for tensor in group]), group[0].shape[1]
            with torch.no_grad():  # an overridden `prediction_step` may return tensors with gradients
                torch.cat(list(group), out=self._view(self._used, rows, length))
            self._used += rows * self._row_bytes(length)
            if self._blocks and self._blocks[-1][1] == length:
                rows += self._blocks.pop()[0]
            self._blocks.append((rows, length))

    def parts(self) -> list[torch.Tensor]:
        """List the rows without padding, those of one length that came after each other together."""
        found, start = [], 0
        for rows, length in self._blocks:
            found.append(self._view(start, rows, length))
            start += found[-1].nbytes
        return found

    def padded(self, padding: int) -> torch.Tensor:
        """Pad all rows at their end to the longest one. Nothing can be added afterwards."""
        rows, longest = sum(rows for rows, _ in self._blocks), max(length for _, length in self._blocks)
        step = self._row_bytes(longest)
        if not step or all(length == longest for _, length in self._blocks):
            return self._view(0, rows, longest)
        if rows * step > len(self._memory):
            self._grow(rows * step)
        source, target = self._used, rows * step
        for count, length in reversed(self._blocks):  # from the end, so that nothing is overwritten before it is moved
            at_once = max(_AT_ONCE // step, 1)
            bounds = [*range(0, count, at_once), count]
            for begin, end in reversed(list(pairwise(bounds))):
                source -= (end - begin) * self._row_bytes(length)
                target -= (end - begin) * step
                moved = self._view(source, end - begin, length).clone()
                place = self._view(target, end - begin, longest)
                place[:, :length] = moved
                place[:, length:] = padding
        return self._view(0, rows, longest)

    def _row_bytes(self, length: int) -> int:
        return length * math.prod(self._rest) * self._dtype.itemsize

    def _view(self, start: int, rows: int, length: int) -> torch.Tensor:
        shape = (rows, length, *self._rest)
        count = math.prod(shape)
        if not count:  # torch makes no view of nothing
            return torch.empty(shape, dtype=self._dtype)
        return torch.frombuffer(self._memory, dtype=self._dtype, count=count, offset=start).view(shape)

    def _grow(self, size: int) -> None:
        if isinstance(self._memory, mmap.mmap):
            self._memory.resize(size)  # no view is alive
            return
        larger = _pages(size)
        larger[: len(self._memory)] = self._memory
        self._memory = larger


def _pages(size: int) -> mmap.mmap | bytearray:
    """Memory that takes no space until it is written to. Only Linux can resize its own in place."""
    if sys.platform != "linux":
        return bytearray(size)
    try:
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size / 2**30:,.1f} GiB for the results of an evaluation: {error}") from error
    if size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
