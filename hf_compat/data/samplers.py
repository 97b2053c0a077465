"""Order samples, and divide the data between ranks.

The order is HF's seeded shuffle. `RankSlice` divides the data as Accelerate does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Literal

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from hf_compat.data.types import Batch, DataSource, Sample
from hf_compat.errors import ArgumentError, DataError
from hf_compat.runtime.collectives import broadcast_object
from hf_compat.runtime.nested import concatenate, find_batch_size, slice_nested


class SeededRandomSampler(RandomSampler):
    """Shuffles with its own generator, seeded with `seed + epoch`, so that each epoch's order is reproducible.

    Args:
        base: The sampler whose data, replacement and length it uses.
        seed: Seed of epoch 0. None uses torch's current seed.

    Mirrors:
        `accelerate.data_loader.SeedableRandomSampler`, 1.15.
    """

    def __init__(self, base: RandomSampler, seed: int | None = None) -> None:
        super().__init__(
            base.data_source, replacement=base.replacement, num_samples=base._num_samples, generator=base.generator
        )
        self.initial_seed = torch.random.initial_seed() if seed is None else seed
        self.epoch = 0
        self.generator = base.generator if base.generator is not None else torch.Generator()

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.epoch + self.initial_seed)
        # torch's sampler divides by the length, which may be 0 by now
        return super().__iter__() if len(self.data_source) > 0 else iter(())

    def rest(self, skip: int) -> Iterator[int]:
        """Iterate over the epoch's order from an index on, in a time that does not depend on the index."""
        if self.replacement or self.num_samples != len(self.data_source):
            return islice(iter(self), skip, None)
        self.generator.manual_seed(self.epoch + self.initial_seed)
        order = torch.randperm(self.num_samples, generator=self.generator)
        return iter(order[skip:].tolist())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch


def measure_lengths(dataset: DataSource, name: str) -> list[int]:
    """Return the length of each sample's value under a key."""
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        raise DataError(
            f"`train_sampling_strategy` by length (once `group_by_length=True`) measures samples that are mappings "
            f"with the key {name!r}, but the first sample is a {type(first).__name__}.\n\n"
            "Hint: add a column of lengths and name it by `length_column_name`."
        )
    return [len(sample[name]) for sample in dataset]


class SkipFirstBatches(Sampler[list[int]]):
    """A batch sampler without its first batches, whose samples are never read."""

    def __init__(self, batches: Sampler[list[int]] | Iterable[list[int]], skip: int) -> None:
        self.batches = batches
        self.skip = skip
        self._pass: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        if type(self.batches) is BatchSampler:
            # skipping single indices is much faster than building batches of them
            sampler, skip = self.batches.sampler, self.skip * self.batches.batch_size
            if isinstance(sampler, SeededRandomSampler):
                indices = sampler.rest(skip)
            elif isinstance(sampler, SequentialSampler):
                indices = iter(range(skip, len(sampler)))
            else:  # its pass starts, and draws random numbers, when its first index is requested
                indices = islice(chain.from_iterable((sampler,)), skip, None)
            self._pass = iter(BatchSampler(indices, self.batches.batch_size, self.batches.drop_last))
        else:
            self._pass = islice(iter(self.batches), self.skip, None)
        return iter(lambda: next(self._pass, None), None)  # `prime` replaces the pass

    def prime(self) -> None:
        """Draw the order now. Otherwise samplers draw it from the global generator at their first index."""
        self._pass = chain(list(islice(self._pass, 1)), self._pass)

    def __len__(self) -> int:
        return max(len(self.batches) - self.skip, 0)  # type: ignore[arg-type]  # callers know that it has a length


Indices = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlice:
    """The options that divide the data. Mirrors those of `accelerate.utils.DataLoaderConfiguration`."""

    rank: int = 0
    world_size: int = 1
    split_batches: bool = False  # divide each batch between the ranks, instead of giving each rank whole batches
    even_batches: bool = True  # fill the last round with the first samples
    dispatch_batches: bool | None = None  # rank 0 reads for all ranks. None means so for iterable data only


class BatchSamplerSlice(Sampler[Indices]):
    """One rank's share of a batch sampler: every `world_size`-th batch, or a part of every batch.

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
                f"`accelerator_config={{'split_batches': True}}` cannot cut a batch of {self.batch_size} into "
                f"{ranks.world_size} equal parts.\n\n"
                "Hint: make the batch size a multiple of the number of processes."
            )

    def __len__(self) -> int:
        total = len(self.batch_sampler)  # type: ignore[arg-type]  # callers know that it has a length
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
        rank, world_size, size = self.ranks.rank, self.ranks.world_size, self.batch_size
        batches = iter(self.batch_sampler)
        while current := list(islice(batches, world_size)):
            first = first or current
            if len(current) == world_size and (size is None or len(current[-1]) == size):
                yield current[rank]
            elif self.drop_last:
                continue
            elif not self.ranks.even_batches:
                if rank < len(current):
                    yield current[rank]
            elif size is None:  # repeat whole batches if their lengths vary
                yield list(islice(chain(current, cycle(first)), world_size))[rank]
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
    """One rank's samples of an iterable data set: one of every `world_size` consecutive batches.

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
        """Set the epoch, and that of the data set."""
        self.epoch = epoch
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

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
    """Yield one rank's part of batches that only rank 0 has and reads: (batch, samples of all ranks, is the last).

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
    """Read and broadcast the batches of one round, or return None at the end. All ranks raise a reader's error."""
    message: tuple[Literal["batch", "end", "error"], Batch | str] = ("end", None)
    failed: BaseException | None = None
    if rank == 0:
        try:
            read = list(islice(source, count))
            if read and not (drop_last and len(read) < count):
                message = ("batch", concatenate(read) if len(read) > 1 else read[0])
        except Exception as error:  # the user's data may raise anything, and the other ranks wait for a message
            failed, message = error, ("error", f"{type(error).__name__}: {error}")
    kind, content = broadcast_object(message)
    if failed is not None:
        raise failed
    if kind == "error":
        raise RuntimeError(f"Rank 0, which reads the data for all ranks, has failed: {content}")
    return content if kind == "batch" else None
