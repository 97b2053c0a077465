"""Which samples are whose: batches shared out over the processes of a run, as Accelerate shares them. torch only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hf_compat.data.tree import concatenate, find_batch_size, slice_nested
from hf_compat.errors import ArgumentError
from hf_compat.runtime.collectives import broadcast_object


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """How the processes of a run share out data. Mirrors the options of `accelerate.utils.DataLoaderConfiguration`.

    Args:
        rank: This process.
        world_size: Processes.
        split: A batch is for all processes together.
        even: Fill the last round up with the first samples.
        dispatch: The first process reads for all; None decides: iterable data is dispatched.
    """

    rank: int = 0
    world_size: int = 1
    split: bool = False
    even: bool = True
    dispatch: bool | None = None


class ShardedBatches:
    """A batch sampler's batches for one process: every `world_size`-th, or its part of every one.

    Args:
        batches: The batch sampler that yields what all processes train on.
        rank: This process.
        world_size: Processes.
        split: Each batch is for all processes together, and cut into equal parts.
        even: Fill the last round up with the first samples, so that every process gets as many batches of one size.

    Raises:
        ArgumentError: A batch cannot be cut into equal parts.

    Mirrors:
        `accelerate.data_loader.BatchSamplerShard`, 1.15.
    """

    def __init__(self, batches: Any, rank: int, world_size: int, split: bool = False, even: bool = True) -> None:
        self.batch_sampler = batches
        self.rank = rank
        self.world_size = world_size
        self.split = split
        self.even = even
        self.batch_size = getattr(batches, "batch_size", None)
        self.drop_last = getattr(batches, "drop_last", False)
        self.sampler = getattr(batches, "sampler", None)
        if split and (self.batch_size is None or self.batch_size % world_size):
            raise ArgumentError(
                f"`accelerator_config={{'split_batches': True}}` cuts a batch of {self.batch_size} into "
                f"{world_size} parts, which does not come out even.\n\nHint: make the batch size a multiple of it."
            )

    def set_epoch(self, epoch: int) -> None:
        """Tell the batch sampler behind, and its sampler, which epoch comes next."""
        for part in (self.batch_sampler, self.sampler):
            tell = getattr(part, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.split:
            return total
        rounds, rest = divmod(total, self.world_size)
        if rest == 0 or self.drop_last:
            return rounds
        return rounds + 1 if self.even or self.rank < rest else rounds

    def __iter__(self) -> Iterator[Any]:
        return self._parts() if self.split else self._turns()

    def _turns(self) -> Iterator[Any]:
        first: list[Any] = []
        batches = iter(self.batch_sampler)
        while turn := list(islice(batches, self.world_size)):
            first = first or turn
            if len(turn) == self.world_size and self._is_full(turn[-1]):
                yield turn[self.rank]
            else:
                yield from self._last_turn(turn, first)

    def _is_full(self, batch: Any) -> bool:
        return self.batch_size is None or len(batch) == self.batch_size

    def _last_turn(self, turn: list[Any], first: list[Any]) -> Iterator[Any]:
        if self.drop_last:
            return
        if not self.even:
            if self.rank < len(turn):
                yield turn[self.rank]
        elif self.batch_size is None:  # batches of any length are repeated whole
            yield list(islice(chain(turn, cycle(first)), self.world_size))[self.rank]
        else:
            samples = chain(chain.from_iterable(turn), cycle(chain.from_iterable(first)))
            yield list(islice(samples, self.rank * self.batch_size, (self.rank + 1) * self.batch_size))

    def _parts(self) -> Iterator[Any]:
        first: list[Any] = []
        size = self.batch_size // self.world_size  # type: ignore[operator]  # looked at when made
        mine = slice(self.rank * size, (self.rank + 1) * size)
        for batch in self.batch_sampler:
            first = first or list(batch)
            if len(batch) == self.batch_size:
                yield batch[mine]
            elif not self.drop_last:
                if self.even:
                    yield list(islice(chain(batch, cycle(first)), mine.start, mine.stop))
                elif batch[mine]:
                    yield batch[mine]


class ShardedStream(IterableDataset[Any]):
    """An iterable data set's samples for one process: its batch of every `world_size` consecutive ones.

    Args:
        dataset: What all processes read.
        batch_size: Samples of one process's batch.
        rank: This process.
        world_size: Processes.
        drop_last: Leave a last round out that is not full; else it is filled up with the first samples.

    Mirrors:
        `accelerate.data_loader.IterableDatasetShard`, 1.15.
    """

    def __init__(self, dataset: Any, batch_size: int, rank: int, world_size: int, drop_last: bool) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set which epoch comes next."""
        self.epoch = epoch
        tell = getattr(self.dataset, "set_epoch", None)
        if callable(tell):
            tell(epoch)

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.dataset), self.batch_size * self.world_size)
        return (rounds + (rest > 0 and not self.drop_last)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        first: list[Any] = []
        samples = iter(self.dataset)
        size = self.batch_size * self.world_size
        while turn := list(islice(samples, size)):
            first = first or turn
            if len(turn) < size and self.drop_last:
                return
            full = turn if len(turn) == size else list(islice(chain(turn, cycle(first)), size))
            yield from full[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]


def dispatched(
    batches: Iterable[Any] | None, rank: int, world_size: int, split: bool, drop_last: bool
) -> Iterator[Any]:
    """Yield one process's part of batches that only the first process reads: (batch, samples of all, is the last).

    Args:
        batches: The first process's batches; None on the others.
        rank: This process.
        world_size: Processes.
        split: One batch is for all processes; else `world_size` batches are.
        drop_last: Leave a last round out that is not full.

    Mirrors:
        `accelerate.data_loader.DataLoaderDispatcher`, 1.15.
    """
    source = iter(batches) if batches is not None else iter(())
    first: Any = None
    following = _next_round(source, rank, 1 if split else world_size, drop_last)
    while following is not None:
        joined = following
        following = _next_round(source, rank, 1 if split else world_size, drop_last)
        samples = find_batch_size(joined) or 0
        if first is None:
            first = slice_nested(joined, 0, world_size)
        size, rest = divmod(samples, world_size)
        if following is None and rest and not drop_last:
            joined, size = concatenate([joined, first]), size + 1
        yield slice_nested(joined, rank * size, (rank + 1) * size), samples, following is None


def _next_round(source: Iterator[Any], rank: int, count: int, drop_last: bool) -> Any:
    """Read and send the batches of one round; None at the end. An error of the reader is raised everywhere."""
    message: tuple[str, Any] = ("end", None)
    failed: BaseException | None = None
    if rank == 0:
        try:
            turn = list(islice(source, count))
            if turn and not (drop_last and len(turn) < count):
                message = ("batch", concatenate(turn) if len(turn) > 1 else turn[0])
        except Exception as error:  # whatever the user's data raises; the others wait for an answer
            failed, message = error, ("error", f"{type(error).__name__}: {error}")
    kind, content = broadcast_object(message)
    if failed is not None:
        raise failed
    if kind == "error":
        raise RuntimeError(f"Rank 0, which reads the data for all, has failed: {content}")
    return content if kind == "batch" else None
