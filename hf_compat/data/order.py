"""The order of a loader's samples, and their division between ranks.

The order is HF's seeded shuffle. `RankSlice` divides the data as Accelerate does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from hf_compat.data.types import Batch, DataSource, Sample
from hf_compat.errors import ArgumentError
from hf_compat.runtime.collectives import scatter_object
from hf_compat.runtime.inspection import call_if_there, has_length
from hf_compat.runtime.nested import Nested, concatenate, find_batch_size, map_nested, part_of, slice_nested

Indices = list[int]
_LISTED_AT_ONCE = 2**16  # samples


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
        if self.is_permutation:
            return self._listed()
        # torch's sampler divides by the length, which may be 0 by now
        return super().__iter__() if len(self.data_source) > 0 else iter(())

    @property
    def is_permutation(self) -> bool:
        """Whether a pass has each sample once."""
        return not self.replacement and self.num_samples == len(self.data_source)

    def _listed(self) -> Iterator[int]:
        """Walk a permutation as torch's sampler does, which makes a list of all of it, with five times its memory."""
        order = self._draw()
        for start in range(0, len(order), _LISTED_AT_ONCE):
            yield from order[start : start + _LISTED_AT_ONCE].tolist()
        del order  # two of them would take twice the memory
        self._draw()  # at its end, torch's draws another one, and takes none of it

    def _draw(self) -> torch.Tensor:
        return torch.randperm(self.num_samples, generator=self.generator)

    @contextlib.contextmanager
    def order(self) -> Iterator[torch.Tensor]:
        """Draw the permutation of the next pass, which ends with the context."""
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield self._draw()
        self._draw()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlice:
    """The options that divide the data. Mirrors those of `accelerate.utils.DataLoaderConfiguration`."""

    rank: int = 0  # among those that read batches of their own
    world_size: int = 1
    sharing: int = 1  # neighbouring processes that hold parts of one model, and read the same batches
    place: int = 0  # of this process among them
    split_batches: bool = False  # divide each batch between the ranks, instead of giving each rank whole batches
    even_batches: bool = True  # fill the last round with the first samples
    dispatch_batches: bool | None = None  # rank 0 reads for all ranks. None means so for iterable data only

    def shared_by(self, processes: int) -> RankSlice:
        """The slice of this process if so many neighbours read each batch together."""
        process, count = self.rank * self.sharing + self.place, self.world_size * self.sharing
        rank, place = divmod(process, processes)
        return replace(self, rank=rank, world_size=count // processes, sharing=processes, place=place)

    @property
    def reads_for_all(self) -> bool:
        """Whether this process reads dispatched batches."""
        return self.rank == self.place == 0

    def once_each(self, gathered: Nested) -> Nested:
        """Keep of the rows that all processes have given those of one process of each model.

        Shapes:
            each tensor: [world_size · sharing · n, …] → [world_size · n, …]
        """
        if self.sharing == 1:
            return gathered
        by_rank = (self.world_size, self.sharing, -1)
        return map_nested(lambda rows: rows.reshape(*by_rank, *rows.shape[1:])[:, 0].flatten(0, 1), gathered)


def _known_order(sampler: object) -> contextlib.AbstractContextManager[range | torch.Tensor] | None:
    """The numbers of a sampler's next pass. None if it has to be walked."""
    if type(sampler) is SequentialSampler:
        return contextlib.nullcontext(range(len(sampler)))
    if type(sampler) is SeededRandomSampler and sampler.is_permutation:
        return sampler.order()
    return None


def _listed(numbers: range | torch.Tensor) -> Indices:
    return numbers.tolist() if isinstance(numbers, torch.Tensor) else list(numbers)


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

    @property
    def last_shares(self) -> list[int]:
        """Samples of each rank in a last round that is not filled up. Empty if there is none, or if it is unknown."""
        size, world_size = self.batch_size, self.ranks.world_size
        if self.ranks.even_batches or self.drop_last or size is None or not has_length(self.sampler):
            return []
        own = size // world_size if self.ranks.split_batches else size
        rest = len(self.sampler) % (own * world_size)  # type: ignore[arg-type]  # it has one
        return [min(max(rest - rank * own, 0), own) for rank in range(world_size)] if rest else []

    def __iter__(self) -> Iterator[Indices]:
        order = _known_order(self.sampler) if type(self.batch_sampler) is BatchSampler else None
        # as in torch, the pass starts, and draws random numbers, when its first batch is requested
        yield from self._of_batches() if order is None or self.batch_size is None else self._of_order(order)

    def _of_order(self, next_pass: contextlib.AbstractContextManager[range | torch.Tensor]) -> Iterator[Indices]:
        """Cut this rank's share out of an order, and build no batch of another rank."""
        rank, world_size, size = self.ranks.rank, self.ranks.world_size, self.batch_size or 1
        own = size // world_size if self.ranks.split_batches else size
        in_round = own * world_size
        with next_pass as order:
            last = len(order) // in_round * in_round
            for start in range(rank * own, last, in_round):
                yield _listed(order[start : start + own])
            share: Indices = []
            if last < len(order) and not self.drop_last:
                filling = cycle(_listed(order[:in_round])) if self.ranks.even_batches else ()
                share = list(islice(chain(_listed(order[last:]), filling), rank * own, (rank + 1) * own))
            del order  # the pass ends with another draw
        yield from [share] if share else ()

    def _of_batches(self) -> Iterator[Indices]:
        rank, world_size, size = self.ranks.rank, self.ranks.world_size, self.batch_size
        is_cut = self.ranks.split_batches
        first: list[Indices] = []
        batches = iter(self.batch_sampler)
        in_round = 1 if is_cut else world_size
        while current := list(islice(batches, in_round)):
            first = first or current
            is_full = len(current) == in_round and (size is None or len(current[-1]) == size)
            if self.drop_last and not is_full:
                continue
            if not is_cut and (is_full or not self.ranks.even_batches):
                yield from current[rank : rank + 1]
            elif size is None:  # repeat whole batches if their lengths vary
                yield list(islice(chain(current, cycle(first)), world_size))[rank]
            else:
                own = size // world_size if is_cut else size
                filling = cycle(chain.from_iterable(first)) if self.ranks.even_batches else ()
                part = list(islice(chain(*current, filling), rank * own, (rank + 1) * own))
                if part:
                    yield part


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
        call_if_there(self.dataset, "set_epoch", epoch)

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
    rounds = _rounds(batches if batches is not None else (), ranks, drop_last)
    is_last = False
    while not is_last:
        parts: list[tuple[Batch, int, bool] | str | None] | None = None
        failed: Exception | None = None
        if ranks.reads_for_all:
            try:
                parts = [*next(rounds, [None] * ranks.world_size)]
            except Exception as error:  # the user's data may raise anything, and the other ranks wait for a message
                failed, parts = error, [f"{type(error).__name__}: {error}"] * ranks.world_size
        part = scatter_object(parts and [part for part in parts for _ in range(ranks.sharing)])
        if failed is not None:
            raise failed
        if isinstance(part, str):
            raise RuntimeError(f"Rank 0, which reads the data for all ranks, has failed: {part}")
        if part is None:
            return
        is_last = part[2]
        yield part


def _rounds(batches: Iterable[Batch], ranks: RankSlice, drop_last: bool) -> Iterator[list[tuple[Batch, int, bool]]]:
    """Read a round of batches ahead, and cut each one into the parts of all ranks."""
    world_size, source = ranks.world_size, iter(batches)
    first: Batch = None
    following = _next_round(source, ranks, drop_last)
    while following is not None:
        joined = following
        following = _next_round(source, ranks, drop_last)
        samples = find_batch_size(joined) or 0
        if first is None:
            first = slice_nested(joined, 0, world_size)
        size, rest = divmod(samples, world_size)
        if following is None and rest and not drop_last:
            joined, size = concatenate([joined, first]), size + 1
        begins = [rank * size for rank in range(world_size)]
        yield [(part_of(joined, begin, begin + size), samples, following is None) for begin in begins]


def _next_round(source: Iterator[Batch], ranks: RankSlice, drop_last: bool) -> Batch | None:
    """Read and join the batches of one round. None at the end."""
    count = 1 if ranks.split_batches else ranks.world_size
    read = list(islice(source, count))
    if not read or (drop_last and len(read) < count):
        return None
    return concatenate(read) if len(read) > 1 else read[0]
