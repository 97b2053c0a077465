"""Orders of samples: HF's seeded shuffle, grouping by length, and skipping of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from hf_compat.data.types import DataSource
from hf_compat.errors import DataError


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
        self.is_torchs_seed = seed is None
        self.epoch = 0
        self.generator = base.generator if base.generator is not None else torch.Generator()

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.epoch + self.initial_seed)
        if len(self.data_source) > 0:  # torch's sampler divides by the length, which may be 0 by now
            yield from super().__iter__()
        self.epoch += 1

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


class LengthGroupedSampler(Sampler[int]):
    """Shuffles, then sorts by length within mega-batches. The longest sample comes first, to run out of memory early.

    Args:
        batch_size: Number of samples that should have similar length.
        dataset: Read for lengths if `lengths` is None.
        lengths: Length of each sample.
        model_input_name: Key whose length counts. `input_ids` by default.
        generator: Random generator. None uses torch's global one.

    Raises:
        DataError: The lengths are not given and cannot be measured.

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
        # At most 50 batches are sorted together, fewer if that would leave less than four groups.
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
    """Return the length of each sample's value under a key.

    Raises:
        DataError: Samples are not mappings, or lack the key.
    """
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        raise DataError(
            f"`train_sampling_strategy` by length (once `group_by_length=True`) measures samples that are mappings "
            f"with the key {name!r}, but the first sample is a {type(first).__name__}.\n\n"
            "Hint: add a column of lengths and name it by `length_column_name`."
        )
    return [len(sample[name]) for sample in dataset]


class _Rest:
    """The rest of a pass over a sampler."""

    def __init__(self, indices: Iterator[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return self.indices


def _started_late(sampler: Iterable[int], skip: int) -> Iterator[int]:
    """Start a pass when its first index is requested. Random numbers are drawn then, as in torch's batch sampler."""
    yield from islice(iter(sampler), skip, None)


class SkipFirstBatches(Sampler[list[int]]):
    """A batch sampler without its first batches, whose samples are never read.

    Args:
        batches: The batch sampler to wrap.
        skip: Number of batches to skip.
    """

    def __init__(self, batches: Sampler[list[int]] | Iterable[list[int]], skip: int) -> None:
        self.batches = batches
        self.skip = skip
        self._current: Iterator[list[int]] = iter(())
        self._first: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        self._current, self._first = self._remaining(), []
        return self._batches_left()

    def _batches_left(self) -> Iterator[list[int]]:
        while True:
            if self._first:
                yield self._first.pop()
            else:
                try:
                    yield next(self._current)
                except StopIteration:
                    return

    def prime(self) -> None:
        """Draw the order now. Otherwise samplers draw it from the global generator at their first index."""
        if not self._first:
            self._first = list(islice(self._current, 1))

    def _remaining(self) -> Iterator[list[int]]:
        if type(self.batches) is not BatchSampler:
            return islice(iter(self.batches), self.skip, None)
        # skipping single indices is much faster than building batches of them
        sampler, skip = self.batches.sampler, self.skip * self.batches.batch_size
        if isinstance(sampler, SeededRandomSampler):
            indices = sampler.rest(skip)
        elif isinstance(sampler, SequentialSampler):
            indices = iter(range(skip, len(sampler)))
        else:
            indices = _started_late(sampler, skip)
        return iter(BatchSampler(_Rest(indices), self.batches.batch_size, self.batches.drop_last))

    def __len__(self) -> int:
        return max(len(self.batches) - self.skip, 0)  # type: ignore[arg-type]  # callers know that it has a length
