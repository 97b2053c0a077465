"""The data loader that a Trainer hands out: torch's, one batch ahead, with epochs, devices and skipping.

HF words and torch only. Being one batch ahead is what Accelerate's loaders do, and it shows: a collator that draws
random numbers (masking, say) draws those of the next batch before this one is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Where a pass over a loader begins.

    Args:
        skip: Batches that are trained already.
        lookahead: The batch after those, where it had been read ahead.
        source: The state of an iterable data set that knows its own position.
        after_start: Called once the pass has begun, before anything is read: random states are set there.
    """

    skip: int
    lookahead: Any
    source: Any
    after_start: Callable[[], None]


def read_and_drop(batches: Iterator[Any], skip: int) -> None:
    """Read batches that are trained already, where there is no other way past them."""
    for _ in tqdm(islice(batches, skip), total=skip, desc="skipping trained batches", leave=False):
        pass


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
        self.lookahead: Any = None
        self._resume: Resume | None = None
        self._skipping: SkipFirstBatches | None = None
        self.end_of_dataloader = False
        self.remainder = -1
        self.target_device = device
        self.non_blocking = non_blocking
        super().__init__(dataset, **options)

    @property
    def _index_sampler(self) -> Any:
        # torch reads its indices from here; skipping them costs no sample.
        indices = super()._index_sampler
        if not self.skip_batches or not self._is_map_style:
            return indices
        if self._skipping is None or self._skipping.skip != self.skip_batches:
            self._skipping = SkipFirstBatches(indices, self.skip_batches)
        return self._skipping

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
        resume, self._resume = self._resume, None
        behind = super().__iter__()
        if not self._is_map_style and self.skip_batches:
            read_and_drop(behind, self.skip_batches)
        if resume is not None:
            if self._skipping is not None:
                self._skipping.prime()
            resume.after_start()
        try:
            current = next(behind) if resume is None or resume.lookahead is None else resume.lookahead
        except StopIteration:
            return
        while True:
            if self.target_device is not None:
                current = move_to_device(current, self.target_device, self.non_blocking)
            is_last = False
            try:
                self.lookahead = next(behind)
            except StopIteration:
                is_last = True
                self.lookahead = None
                self._reach_end(current)
            yield current
            if is_last:
                break
            current = self.lookahead
        self.iteration += 1

    def resume_at(self, resume: Resume) -> None:
        """Let the next pass begin after batches that are trained already."""
        self._resume = resume
        self.skip_batches = resume.skip + (resume.lookahead is not None)
        load = getattr(self.dataset, "load_state_dict", None)
        if resume.source is not None and callable(load) and not self._is_map_style:
            load(resume.source)
            self.skip_batches = 0

    def source_state(self) -> Any:
        """Return the position of an iterable data set that knows its own, else None."""
        read = getattr(self.dataset, "state_dict", None)
        return read() if callable(read) and not self._is_map_style and not self.num_workers else None

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
        read_and_drop(batches, self.skip)
        return batches
