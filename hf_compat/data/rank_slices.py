"""Which slice of the data a rank trains on, as Accelerate divides it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Literal

import torch
from torch.utils.data import IterableDataset, Sampler

from hf_compat.data.tree import concatenate, find_batch_size, slice_nested
from hf_compat.data.types import Batch, DataSource, Sample
from hf_compat.errors import ArgumentError
from hf_compat.runtime.collectives import broadcast_object

Indices = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlice:
    """Which part of the data a rank gets. Mirrors the options of `accelerate.utils.DataLoaderConfiguration`.

    Args:
        rank: This process.
        world_size: Processes.
        split_batches: A batch is for all ranks together; each gets its part of it.
        even_batches: Fill the last round up with the first samples.
        dispatch_batches: The first rank reads for all; None decides: iterable data is dispatched.
    """

    rank: int = 0
    world_size: int = 1
    split_batches: bool = False
    even_batches: bool = True
    dispatch_batches: bool | None = None

    def dispatches(self, is_iterable: bool) -> bool:
        """Return whether the first rank reads for all.

        Args:
            is_iterable: Whether the data set is one without indices.
        """
        chosen = is_iterable if self.dispatch_batches is None else self.dispatch_batches
        return self.world_size > 1 and chosen


def set_epoch_of(parts: Iterable[object], epoch: int) -> None:
    """Set the epoch of those samplers and data sets that have one."""
    for part in parts:
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class BatchSamplerSlice(Sampler[Indices]):
    """A batch sampler's batches for one rank: every `world_size`-th, or its part of every one.

    Args:
        batches: The batch sampler that yields what all ranks train on.
        ranks: Which slice this rank gets.

    Raises:
        ArgumentError: A batch cannot be cut into equal parts.

    Mirrors:
        `accelerate.data_loader.BatchSamplerShard`, 1.15.
    """

    def __init__(self, batches: Sampler[Indices], ranks: RankSlice) -> None:
        self.batch_sampler = batches
        self.ranks = ranks
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self.sampler = getattr(batches, "sampler", None)
        if ranks.split_batches and (self.batch_size is None or self.batch_size % ranks.world_size):
            raise ArgumentError(
                f"`accelerator_config={{'split_batches': True}}` cuts a batch of {self.batch_size} into "
                f"{ranks.world_size} parts, which does not come out even.\n\n"
                "Hint: make the batch size a multiple of it."
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the batch sampler behind, and of its sampler."""
        set_epoch_of((self.batch_sampler, self.sampler), epoch)

    def __len__(self) -> int:
        total = len(self.batch_sampler)  # type: ignore[arg-type]  # of whoever asks for a length
        if self.ranks.split_batches:
            return total
        rounds, rest = divmod(total, self.ranks.world_size)
        if rest == 0 or self.drop_last:
            return rounds
        return rounds + 1 if self.ranks.even_batches or self.ranks.rank < rest else rounds

    def __iter__(self) -> Iterator[Indices]:
        return self._parts_of_batches() if self.ranks.split_batches else self._whole_batches()

    def _whole_batches(self) -> Iterator[Indices]:
        first: list[Indices] = []
        batches = iter(self.batch_sampler)
        while current := list(islice(batches, self.ranks.world_size)):
            first = first or current
            if len(current) == self.ranks.world_size and (
                self.batch_size is None or len(current[-1]) == self.batch_size
            ):
                yield current[self.ranks.rank]
            else:
                yield from self._of_last_round(current, first)

    def _of_last_round(self, current: list[Indices], first: list[Indices]) -> Iterator[Indices]:
        rank, size = self.ranks.rank, self.batch_size
        if self.drop_last:
            return
        if not self.ranks.even_batches:
            if rank < len(current):
                yield current[rank]
        elif size is None:  # batches of any length are repeated whole
            yield list(islice(chain(current, cycle(first)), self.ranks.world_size))[rank]
        else:
            samples = chain(chain.from_iterable(current), cycle(chain.from_iterable(first)))
            yield list(islice(samples, rank * size, (rank + 1) * size))

    def _parts_of_batches(self) -> Iterator[Indices]:
        first: Indices = []
        size = self.batch_size // self.ranks.world_size  # type: ignore[operator]  # the constructor has checked it
        own = slice(self.ranks.rank * size, (self.ranks.rank + 1) * size)
        for batch in self.batch_sampler:
            first = first or list(batch)
            if len(batch) == self.batch_size:
                yield batch[own]
            elif not self.drop_last:
                if self.ranks.even_batches:
                    yield list(islice(chain(batch, cycle(first)), own.start, own.stop))
                elif batch[own]:
                    yield batch[own]


class IterableDatasetSlice(IterableDataset[Sample]):
    """An iterable data set's samples for one rank: its batch of every `world_size` consecutive ones.

    Args:
        dataset: What all ranks read.
        batch_size: Samples of one rank's batch.
        ranks: Which slice this rank gets.
        drop_last: Leave a last round out that is not full; else it is filled up with the first samples.

    Mirrors:
        `accelerate.data_loader.IterableDatasetShard`, 1.15.
    """

    def __init__(self, dataset: DataSource, batch_size: int, ranks: RankSlice, drop_last: bool) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of the data set."""
        self.epoch = epoch
        set_epoch_of((self.dataset,), epoch)

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.dataset), self.batch_size * self.world_size)
        return (rounds + (rest > 0 and not self.drop_last)) * self.batch_size

    def __iter__(self) -> Iterator[Sample]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        first: list[Sample] = []
        samples = iter(self.dataset)
        size = self.batch_size * self.world_size
        while current := list(islice(samples, size)):
            first = first or current
            if len(current) < size and self.drop_last:
                return
            full = current if len(current) == size else list(islice(chain(current, cycle(first)), size))
            yield from full[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]


def dispatched(batches: Iterable[Batch] | None, ranks: RankSlice, drop_last: bool) -> Iterator[tuple[Batch, int, bool]]:
    """Yield one rank's part of batches that only the first rank reads: (batch, samples of all, is the last).

    Args:
        batches: The first rank's batches; None on the others.
        ranks: Which part this rank gets: of each batch with `split_batches`, else of `world_size` joined batches.
        drop_last: Leave a last round out that is not full.

    Mirrors:
        `accelerate.data_loader.DataLoaderDispatcher`, 1.15.
    """
    rank, world_size = ranks.rank, ranks.world_size
    batches_of_a_round = 1 if ranks.split_batches else world_size
    source = iter(batches) if batches is not None else iter(())
    first: Batch = None
    following = _next_round(source, rank, batches_of_a_round, drop_last)
    while following is not None:
        joined = following
        following = _next_round(source, rank, batches_of_a_round, drop_last)
        samples = find_batch_size(joined) or 0
        if first is None:
            first = slice_nested(joined, 0, world_size)
        size, rest = divmod(samples, world_size)
        if following is None and rest and not drop_last:
            joined, size = concatenate([joined, first]), size + 1
        yield slice_nested(joined, rank * size, (rank + 1) * size), samples, following is None


def _next_round(source: Iterator[Batch], rank: int, count: int, drop_last: bool) -> Batch | None:
    """Read and send the batches of one round; None at the end. An error of the reader is raised on every rank."""
    message: tuple[Literal["batch", "end", "error"], Batch | str] = ("end", None)
    failed: BaseException | None = None
    if rank == 0:
        try:
            read = list(islice(source, count))
            if read and not (drop_last and len(read) < count):
                message = ("batch", concatenate(read) if len(read) > 1 else read[0])
        except Exception as error:  # whatever the user's data raises; the others wait for an answer
            failed, message = error, ("error", f"{type(error).__name__}: {error}")
    kind, content = broadcast_object(message)
    if failed is not None:
        raise failed
    if kind == "error":
        raise RuntimeError(f"Rank 0, which reads the data for all, has failed: {content}")
    return content if kind == "batch" else None
