"""The data loader that a Trainer hands out: torch's, one batch ahead, with epochs, devices and skipping.

HF words and torch only. Being one batch ahead is what Accelerate's loaders do, and it shows: a collator that draws
random numbers (masking, say) draws those of the next batch before this one is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from tqdm.auto import tqdm

from hf_compat.hf.data import find_batch_size
from hf_compat.recipe.samplers import SeededRandomSampler, SkipFirstBatches


def move_to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move the tensors of a nested batch; what is no tensor, mapping, list or tuple stays as it is."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if isinstance(data, Mapping):
        moved = {key: move_to_device(value, device, non_blocking) for key, value in data.items()}
        return type(data)(moved)  # type: ignore[call-arg]  # BatchEncoding and the like are built from a dict
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_to_device(value, device, non_blocking) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(move_to_device(value, device, non_blocking) for value in data)
    return data


class PreparedDataLoader(DataLoader[Any]):
    """A torch `DataLoader` that reads one batch ahead, puts batches on the device and knows its epoch and its end.

    Args:
        dataset: Map-style or iterable.
        device: Where batches go; None leaves them.
        non_blocking: Copy without waiting.
        seed: Seed of shuffling; None takes torch's seed in force.
        use_seedable_sampler: Give a random sampler a generator of its own.
        options: Keywords of `torch.utils.data.DataLoader`.

    Mirrors:
        `accelerate.data_loader.DataLoaderShard` in one process, 1.15.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | None = None,
        non_blocking: bool = False,
        seed: int | None = None,
        use_seedable_sampler: bool = True,
        **options: Any,
    ) -> None:
        sampler = options.get("sampler")
        if use_seedable_sampler and type(sampler) is RandomSampler:
            options["sampler"] = SeededRandomSampler(sampler, seed)
        self.skip_batches = 0
        self.iteration = 0
        self.end_of_dataloader = False
        self.remainder = -1
        self.target_device = device
        self.non_blocking = non_blocking
        super().__init__(dataset, **options)

    @property
    def _index_sampler(self) -> Any:
        # torch reads its indices from here; skipping them costs no sample.
        indices = super()._index_sampler
        return SkipFirstBatches(indices, self.skip_batches) if self.skip_batches and self._is_map_style else indices

    @property
    def _is_map_style(self) -> bool:
        return not isinstance(self.dataset, IterableDataset)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, and a data set that wants to know, which epoch comes next."""
        self.iteration = epoch
        for part in (self.batch_sampler, self.sampler, self.dataset):
            tell = getattr(part, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator instead of torch's iterator class
        self.end_of_dataloader = False
        self.remainder = self._remainder()
        self.set_epoch(self.iteration)
        behind = super().__iter__()
        to_skip = 0 if self._is_map_style else self.skip_batches
        try:
            current = next(behind)
        except StopIteration:
            return
        for index in count():
            if self.target_device is not None:
                current = move_to_device(current, self.target_device, self.non_blocking)
            following, is_last = None, False
            try:
                following = next(behind)
            except StopIteration:
                is_last = True
                self._reach_end(current)
            if index >= to_skip:
                yield current
            if is_last:
                break
            current = following
        self.iteration += 1

    def _remainder(self) -> int:
        """Samples of the last batch, or -1 where that is not known (0 where it is full)."""
        if self.drop_last or not self._is_map_style or self.batch_size is None:
            return -1
        return len(self.dataset) % self.batch_size  # type: ignore[arg-type]  # map-style data has a length

    def _reach_end(self, last_batch: Any) -> None:
        self.end_of_dataloader = True
        if not self._is_map_style:
            self.remainder = find_batch_size(last_batch) or -1


def skip_first_batches(loader: Any, skip: int) -> Any:
    """Return a loader that starts after `skip` batches, without reading their samples where that is possible.

    Args:
        loader: A `PreparedDataLoader`, a torch `DataLoader`, or any iterable of batches.
        skip: Batches to leave out.
    """
    if isinstance(loader, PreparedDataLoader):
        loader.skip_batches = skip
        return loader
    if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler:
        return DataLoader(
            loader.dataset,
            batch_sampler=SkipFirstBatches(loader.batch_sampler, skip),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
    return _ReadAndDrop(loader, skip)


class _ReadAndDrop:
    """Any iterable of batches without its first ones: they are read and thrown away."""

    def __init__(self, loader: Any, skip: int) -> None:
        self.loader = loader
        self.skip = skip

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        skipped = islice(batches, self.skip)
        for _ in tqdm(skipped, total=self.skip, desc="skipping trained batches", leave=False):
            pass
        return batches
