"""Generators of a pretended device: a seed and an offset, as a GPU's are, of which each operator draws anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

_STEP = 4  # by how much an operator moves the offset on


class Generators:
    """One generator a device.

    Args:
        count: Devices.
    """

    def __init__(self, count: int) -> None:
        self.states = [[67280421310721, 0] for _ in range(count)]  # torch's own seed of a new generator

    @contextlib.contextmanager
    def drawing(self, index: int) -> Iterator[None]:
        """Let what is drawn come from a device's generator, and leave the host's as it is."""
        host = torch.default_generator
        before = host.get_state()
        seed, offset = self.states[index]
        host.manual_seed(hash((seed, offset)) & 0x7FFF_FFFF_FFFF_FFFF)
        try:
            yield
        finally:
            self.states[index][1] += _STEP
            host.set_state(before)

    def seed(self, index: int, seed: int) -> None:
        self.states[index] = [int(seed), 0]

    def state(self, index: int) -> torch.Tensor:
        """16 bytes on the host, as of a GPU."""
        with _disable_current_modes():
            seed, offset = self.states[index]
            signed = seed - (1 << 64) if seed >= 1 << 63 else seed
            return torch.tensor([signed, offset], dtype=torch.int64).view(torch.uint8)

    def set_state(self, index: int, state: torch.Tensor) -> None:
        if state.device.type != "cpu" or state.dtype != torch.uint8 or state.numel() != 16:
            raise RuntimeError("RNG state must be a torch.ByteTensor of 16 bytes")
        with _disable_current_modes():
            self.states[index] = state.contiguous().view(torch.int64).tolist()
