"""Orders of samples: HF's seeded shuffle, grouping by length, and skipping ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from hf_compat.data.types import DataSource
from hf_compat.errors import DataError


class SeededRandomSampler(RandomSampler):
    """Shuffle by a generator of its own that is seeded with `seed + epoch`, so each epoch's order is known.

    Args:
        base: The sampler whose data, replacement and length it takes over.
        seed: Seed of epoch 0; None takes torch's seed in force.

    Mirrors:
        `accelerate.data_loader.SeedableRandomSampler`, 1.15.
    """

    def __init__(self, base: RandomSampler, seed: int | None = None) -> None:
        super().__init__(
            base.data_source, replacement=base.replacement, num_samples=base._num_samples, generator=base.generator
        )
        self.initial_seed = torch.random.initial_seed() if seed is None else seed
        self.is_torchs_seed = seed is None
        self.epoch = 0
        self.generator = base.generator if base.generator is not None else torch.Generator()

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.epoch + self.initial_seed)
        if len(self.data_source) > 0:  # a set may have been emptied since; torch's sampler divides by its length
            yield from super().__iter__()
        self.epoch += 1

    def rest(self, skip: int) -> Iterator[int]:
        """Iterate from an index of the epoch's order on, at a cost that does not grow with it."""
        if self.replacement or self.num_samples != len(self.data_source):
            return islice(iter(self), skip, None)
        self.generator.manual_seed(self.epoch + self.initial_seed)
        order = torch.randperm(self.num_samples, generator=self.generator)
        return iter(order[skip:].tolist())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order comes next."""
        self.epoch = epoch


class LengthGroupedSampler(Sampler[int]):
    """Shuffle, then sort by length within mega-batches, the longest sample first of all (memory runs out early).

    Args:
        batch_size: Samples that should be of similar length.
        dataset: Read for lengths where `lengths` is not given.
        lengths: Length of each sample.
        model_input_name: Key whose length counts; `input_ids` by default.
        generator: Random generator; None draws from torch's global one.

    Raises:
        DataError: Lengths that cannot be found out.

    Mirrors:
        `transformers.trainer_pt_utils.LengthGroupedSampler`, 5.23.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: DataSource = None,
        lengths: Sequence[int] | torch.Tensor | None = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if dataset is None and lengths is None:
            raise DataError("One of dataset and lengths must be provided.")
        if lengths is None:
            lengths = measure_lengths(dataset, model_input_name or "input_ids")
        self.lengths: list[int] = lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
        self.batch_size = batch_size
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order: list[int] = torch.randperm(len(self.lengths), generator=self.generator).tolist()
        # At most 50 batches are sorted together, fewer where that leaves less than four groups.
        batches_together = max(min(len(self.lengths) // (self.batch_size * 4), 50), 1)
        size = batches_together * self.batch_size
        groups = [
            sorted(order[start : start + size], key=self.lengths.__getitem__, reverse=True)
            for start in range(0, len(order), size)
        ]
        if groups:
            longest = max(range(len(groups)), key=lambda index: self.lengths[groups[index][0]])
            groups[0][0], groups[longest][0] = groups[longest][0], groups[0][0]
        return (index for group in groups for index in group)


def measure_lengths(dataset: DataSource, name: str) -> list[int]:
    """Return the length of each sample's value of a name.

    Raises:
        DataError: Samples are no mappings, or have no such key.
    """
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        raise DataError(
            f"`train_sampling_strategy` by length (once `group_by_length=True`) finds lengths out for samples that "
            f"are mappings with the key {name!r}; the first sample is a {type(first).__name__}.\n\n"
            "Hint: add a column of lengths and name it by `length_column_name`."
        )
    return [len(sample[name]) for sample in dataset]


class _Rest:
    """What is left of a pass over a sampler."""

    def __init__(self, indices: Iterator[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return self.indices


def _late(sampler: Iterable[int], skip: int) -> Iterator[int]:
    """Begin a pass when its first index is asked for, as torch's batch sampler does: random numbers are drawn then."""
    yield from islice(iter(sampler), skip, None)


class SkipFirstBatches(Sampler[list[int]]):
    """A batch sampler without its first batches; their samples are never read.

    Args:
        batches: The batch sampler behind.
        skip: Batches to leave out.
    """

    def __init__(self, batches: Sampler[list[int]] | Iterable[list[int]], skip: int) -> None:
        self.batches = batches
        self.skip = skip
        self._current: Iterator[list[int]] = iter(())
        self._first: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        self._current, self._first = self._remaining(), []
        return self._left()

    def _left(self) -> Iterator[list[int]]:
        while True:
            if self._first:
                yield self._first.pop()
            else:
                try:
                    yield next(self._current)
                except StopIteration:
                    return

    def prime(self) -> None:
        """Have the order drawn now: samplers draw it from the global generator when their first index is asked for."""
        if not self._first:
            self._first = list(islice(self._current, 1))

    def _remaining(self) -> Iterator[list[int]]:
        if type(self.batches) is not BatchSampler:
            return islice(iter(self.batches), self.skip, None)
        # single indices are skipped much faster than batches of them are built
        sampler, skip = self.batches.sampler, self.skip * self.batches.batch_size
        if isinstance(sampler, SeededRandomSampler):
            indices = sampler.rest(skip)
        elif isinstance(sampler, SequentialSampler):
            indices = iter(range(skip, len(sampler)))
        else:
            indices = _late(sampler, skip)
        return iter(BatchSampler(_Rest(indices), self.batches.batch_size, self.batches.drop_last))

    def __len__(self) -> int:
        return max(len(self.batches) - self.skip, 0)  # type: ignore[arg-type]  # of whoever asks for a length
