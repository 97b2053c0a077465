"""How the processes of a run divide the files of a checkpoint, and what they tell each other of them."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.reading import Listed
from hf_compat.checkpoint.verifying import Unread


class Share(NamedTuple):
    """Which files a process verifies, where all processes see the same folder."""

    rank: int = 0
    world_size: int = 1
    unread: Unread | None = None  # takes the files that this process loads later

    def leaves_to_readers(self, name: str) -> bool:
        """Whether a file is a shard. Its reader checks each entry, and compares the hash if it reads the whole."""
        return self.unread is not None and self.unread.defers and name.endswith(layout.SHARD_SUFFIX)

    def of(self, listed: Mapping[str, object]) -> list[str]:
        """Name the files that this rank reads itself, and a part of the others: of each rank about as many bytes."""
        if self.world_size == 1:
            return list(listed)
        sizes: dict[str, int] = {}
        for name, facts in listed.items():
            size = facts.get("bytes") if isinstance(facts, dict) else 0
            sizes[name] = size if isinstance(size, int) else 0
        # Of what the first process alone may load: a whole optimizer under FSDP 2, the arguments for a warning
        of_first = (layout.OPTIMIZER_NAME, layout.TRAINING_ARGS_NAME)
        owners = {name: 0 if name in of_first else layout.rank_of(name) for name in listed}
        loads = [0] * self.world_size
        for name, owner in owners.items():
            if owner is not None:
                loads[owner % self.world_size] += sizes[name]
        least = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(least)
        for name in sorted((name for name in listed if owners[name] is None), key=lambda name: (-sizes[name], name)):
            load, rank = least[0]
            owners[name] = rank
            heapq.heapreplace(least, (load + sizes[name], rank))
        return [name for name, owner in owners.items() if owner is not None and owner % self.world_size == self.rank]


ALONE = Share()


# A file's entry as numbers, for ranks to exchange: whether there is one, its bytes, and seven bytes of the hash in each
_ROW, _PART = 7, 7


def as_rows(names: Sequence[str], listed: Mapping[str, object]) -> list[int]:
    """Write the entries of flushed files as numbers. A file without an entry gives zeros."""
    return [number for name in names for number in _as_row(listed.get(name))]


def _as_row(facts: object) -> list[int]:
    if not isinstance(facts, dict):
        return [0] * _ROW
    digest = bytes.fromhex(facts["sha256"]).ljust((_ROW - 2) * _PART, b"\0")
    return [1, facts["bytes"], *(int.from_bytes(digest[at : at + _PART], "big") for at in range(0, len(digest), _PART))]


def of_rows(names: Sequence[str], numbers: Sequence[int]) -> Listed:
    """Read the entries of files back."""
    listed: Listed = {}
    for place, name in enumerate(names):
        is_there, size, *parts = numbers[place * _ROW : (place + 1) * _ROW]
        if is_there:
            digest = b"".join(part.to_bytes(_PART, "big") for part in parts)
            listed[name] = {"bytes": size, "sha256": digest[: hashlib.sha256().digest_size].hex()}
    return listed
