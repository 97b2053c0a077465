"""The Trainer's data loader, which reads one batch ahead.

Accelerate's loaders do so, too, and this affects results. A collator that draws random numbers (for masking, say)
draws those of the next batch before this one is trained on.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from hf_compat.data.collators import is_raised_by_user_code, stop_iteration_error
from hf_compat.data.order import BatchSamplerSlice, IterableDatasetSlice, RankSlice, SeededRandomSampler, dispatched
from hf_compat.data.types import Batch, DataSource, PositionState
from hf_compat.errors import DataError
from hf_compat.interop.transformers_models import is_datasets_stream, knows_its_rank
from hf_compat.runtime.collectives import broadcast_object
from hf_compat.runtime.console import progress_bar
from hf_compat.runtime.device_copies import CopiesAhead
from hf_compat.runtime.inspection import call_if_there, has_length
from hf_compat.runtime.nested import copies_beside, find_batch_size, move_to_device
from hf_compat.runtime.signals import dead_among, holding_child_signals
from hf_compat.runtime.text import brief


def measure_lengths(dataset: DataSource, name: str) -> list[int]:
    """Return the length of each sample's value under a key."""
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        raise DataError(
            f"`train_sampling_strategy` by length (once `group_by_length=True`) measures samples that are mappings "
            f"with the key {brief(name)}, but the first sample is a {type(first).__name__}.\n\n"
            "Hint: add a column of lengths and name it by `length_column_name`."
        )
    return [len(sample[name]) for sample in dataset]


@dataclass(eq=False)
class SkipFirstBatches(Sampler[list[int]]):
    """A batch sampler without its first batches, whose samples are never read."""

    batches: Sampler[list[int]] | Iterable[list[int]]
    skip: int

    def __iter__(self) -> Iterator[list[int]]:
        whole = self.batches
        if type(whole) is not BatchSampler:
            return islice(iter(whole), self.skip, None)
        # Skipping single indices is much faster than building batches of them. As in torch, their pass starts, and
        # draws random numbers, when its first index is requested.
        indices = islice(chain.from_iterable((whole.sampler,)), self.skip * whole.batch_size, None)
        return iter(BatchSampler(indices, whole.batch_size, whole.drop_last))

    def __len__(self) -> int:
        return max(len(self.batches) - self.skip, 0)  # type: ignore[arg-type]  # callers know that it has a length


class OpenPasses:
    """The loaders whose passes have started and have not reached their end, the innermost last.

    Mirrors:
        `dataloader_references` of `accelerate.state.GradientState`, 1.15. A pass that is left early stays until its
        loader is deleted, and so does one whose last batch was read without asking for another.
    """

    def __init__(self) -> None:
        self.loaders: list[Callable[[], Iterable[Batch] | None]] = []  # weak references, to which a pass adds its own

    def __getstate__(self) -> dict[str, object]:
        """Leave out the passes of this process."""
        return {"loaders": []}

    def end(self, loader: Iterable[Batch]) -> None:
        """Remove a loader that was read to its end."""
        for held in tuple(self.loaders):
            if held() is loader:
                self.loaders.remove(held)

    @contextlib.contextmanager
    def reading(self, loader: Iterable[Batch]) -> Iterator[None]:
        """Make an iterable the innermost loader within the context, even if it never reports its passes."""

        def held() -> Iterable[Batch]:
            return loader

        self.loaders.append(held)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # it has ended
                self.loaders.remove(held)

    @property
    def innermost(self) -> Iterable[Batch] | None:
        """The loader that is being read, or None."""
        self.loaders = [held for held in self.loaders if held() is not None]
        return self.loaders[-1]() if self.loaders else None


# Keywords of torch's `DataLoader` that do not choose samples.
_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


def options_of(loader: DataLoader[Batch]) -> dict[str, Any]:
    """Return the options of a loader that do not choose samples, as keywords of torch's loader."""
    return {name: getattr(loader, name) for name in _OPTIONS}


def read_and_drop(batches: Iterator[Batch], skip: int) -> None:
    """Read and drop batches that were trained on, if they cannot be skipped."""
    for _ in progress_bar(islice(batches, skip), total=skip, desc="skipping trained batches", leave=False):
        pass


def draw_order(batches: Iterator[Batch]) -> None:
    """Let an iterator of torch's loader draw the order of samples, which it does at its first index, now."""
    indices = getattr(batches, "_sampler_iter", None)  # torch has no public name for it
    if indices is not None:
        batches._sampler_iter = chain(list(islice(indices, 1)), indices)  # type: ignore[attr-defined]  # torch's


_END = object()  # the value after the last batch of a pass


class PreparedDataLoader(DataLoader[Batch]):
    """A torch `DataLoader` that reads one batch ahead, moves batches to the device, and knows its epoch and its end.

    Args:
        dataset: A map-style or iterable data set.
        device: The device for batches. None leaves them where they are.
        non_blocking: Copy without waiting.
        seed: Seed for shuffling. None uses torch's current seed.
        use_seedable_sampler: Give a random sampler its own generator.
        rank_slice: The options that choose this rank's data. None uses all of it.
        passes: Records the start of a pass, and its end.
        options: Keywords of `torch.utils.data.DataLoader`.

    Mirrors:
        `accelerate.data_loader.DataLoaderShard` and `DataLoaderDispatcher`, 1.15.
    """

    def __init__(
        self,
        dataset: DataSource,
        *,
        device: torch.device | None = None,
        non_blocking: bool = False,
        seed: int | None = None,
        use_seedable_sampler: bool = True,
        rank_slice: RankSlice | None = None,
        passes: OpenPasses | None = None,
        **options: Any,
    ) -> None:
        self.passes = passes or OpenPasses()
        shuffler = _seed_shuffling(options, seed) if use_seedable_sampler else None
        # shuffles with torch's seed of the run, which a resumed run needs again. None if a seed was given
        self.shuffler = shuffler if seed is None else None
        self.rank_slice = rank_slice or RankSlice()
        self._is_map_style = not isinstance(dataset, IterableDataset)
        dispatches = self.rank_slice.dispatch_batches
        # whether rank 0 reads for all ranks
        self.dispatches = self.rank_slice.world_size > 1 and (
            not self._is_map_style if dispatches is None else dispatches
        )
        self.samples_of_a_batch: int | None = options.get("batch_size", 1)
        self.drops_last = bool(options.get("drop_last", False))
        if self.rank_slice.world_size > 1 and not self.dispatches:
            dataset, options = self._sliced(dataset, options)
        size, ranks = self.samples_of_a_batch, self.rank_slice
        # samples that all ranks together get at a time, or None if batch sizes vary. Accelerate's name
        self.total_batch_size = size if size is None or ranks.split_batches else size * ranks.world_size
        self.device = device
        self.non_blocking = non_blocking
        self.skip_batches = 0
        self.iteration = 0
        self.lookahead: Batch | None = None
        # how a resumed pass starts: what runs before it reads, the batch that was read ahead, whether it waits then
        self._resume: tuple[Callable[[], None] | None, Batch | None, bool] | None = None
        # The interrupted run already had persistent workers, so new ones must start as if they were those
        self.replaces_workers = False
        self.end_of_dataloader = False
        self.remainder = -1
        super().__init__(dataset, **options)
        is_read_here = not self._is_map_style and not self.num_workers and ranks.world_size == 1
        # an iterable data set whose `state_dict` tells the position in it
        has_state = is_read_here and callable(getattr(self.dataset, "state_dict", None))
        self.source: DataSource | None = self.dataset if has_state else None

    def _sliced(self, dataset: DataSource, options: dict[str, Any]) -> tuple[DataSource, dict[str, Any]]:
        """Return data and options for torch's loader of this rank's slice."""
        if isinstance(dataset, IterableDataset):
            ranks, size = self.rank_slice, self.samples_of_a_batch
            if size is None:  # the data set makes its own batches
                return dataset, options
            if is_datasets_stream(dataset) and not ranks.split_batches and dataset.num_shards >= ranks.world_size:  # type: ignore[attr-defined]  # theirs
                return dataset.shard(num_shards=ranks.world_size, index=ranks.rank), options  # type: ignore[attr-defined]  # theirs
            own_size = size // ranks.world_size if ranks.split_batches else size
            stream = IterableDatasetSlice(dataset, own_size, ranks, drop_last=self.drops_last)
            return stream, {**options, "batch_size": own_size}
        if knows_its_rank(options.get("batch_sampler")):
            self.samples_of_a_batch = None
            return dataset, options
        kept = {k: v for k, v in options.items() if k not in ("batch_size", "sampler", "drop_last", "batch_sampler")}
        sampler = options.get("sampler")
        asks_for_batches = isinstance(sampler, BatchSampler)  # the data set gives a whole batch for its indices
        batches: Sampler[list[int]] | None = sampler if asks_for_batches else options.get("batch_sampler")
        if batches is not None:
            self.samples_of_a_batch = getattr(batches, "batch_size", None)
        else:
            if isinstance(sampler, RandomSampler) and sampler.generator is None:  # the same order on every rank
                seed = int(torch.empty((), dtype=torch.int64).random_().item())  # as Accelerate draws it
                sampler.generator = torch.Generator().manual_seed(broadcast_object(seed))
            order = SequentialSampler(dataset) if sampler is None else sampler
            batches = BatchSampler(order, self.samples_of_a_batch, self.drops_last)  # type: ignore[arg-type]  # torch checks it
        slices = BatchSamplerSlice(batches, self.rank_slice)
        share = {"batch_size": None, "sampler": slices} if asks_for_batches else {"batch_sampler": slices}
        return dataset, {**kept, **share}

    # Accelerate's names, for scripts that read them from a prepared loader
    @property
    def total_dataset_length(self) -> int:
        """Number of samples of all ranks."""
        whole: DataSource = self.dataset.dataset if isinstance(self.dataset, IterableDatasetSlice) else self.dataset
        return len(whole)

    @property
    def base_dataloader(self) -> DataLoader[Batch]:
        """Torch's loader, which is this object itself."""
        return self

    def get_sampler(self) -> Sampler[int] | None:
        """Return the sampler of single samples."""
        found: Sampler[int] | None = getattr(self.batch_sampler or self.sampler, "sampler", None)
        return found

    def __len__(self) -> int:
        if not self.dispatches or self.rank_slice.split_batches:
            return super().__len__()
        rounds, rest = divmod(super().__len__(), self.rank_slice.world_size)
        return rounds + (rest > 0 and not self.drops_last)

    @property
    def _index_sampler(self) -> Any:  # torch's property, whose type depends on the data set
        # torch reads its indices from here, so skipped batches cost nothing
        indices = super()._index_sampler
        is_skipped_here = self.skip_batches and self._is_map_style and not self.dispatches
        return SkipFirstBatches(indices, self.skip_batches) if is_skipped_here else indices

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, and of samplers and data sets that have epochs."""
        self.iteration = epoch
        order = self.sampler if self.batch_sampler is None else self.batch_sampler
        whole = getattr(order, "batch_sampler", None)  # of which the order is one rank's share
        single = getattr(order if whole is None else whole, "sampler", None)
        for part in (order, whole, single, self.sampler, self.dataset):
            setter = getattr(part, "set_epoch", None)
            if callable(setter):
                setter(epoch)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # a generator instead of torch's iterator class
        self.end_of_dataloader = False
        # samples in the last batch, 0 if it is full, -1 if it is unknown
        self.remainder, size = -1, self.total_batch_size
        is_counted = self._is_map_style or self.rank_slice.world_size > 1
        if is_counted and size is not None and not self.drops_last and has_length(self.dataset):
            self.remainder = self.total_dataset_length % size
        self.passes.loaders.append(weakref.ref(self))
        self.set_epoch(self.iteration)
        if self._iterator is not None:  # the iterator of persistent workers holds its first pass's indices
            self._iterator._index_sampler = self._index_sampler
        held = holding_child_signals() if self.num_workers else contextlib.nullcontext()
        with held as deliver:  # the pass starts on every rank, as torch draws a seed here
            replaces = self.replaces_workers and self.persistent_workers and self._iterator is None
            batches = self._with_replaced_workers() if replaces else super().__iter__()
        # this is a generator, so as in Accelerate nothing above runs before the first batch is requested
        try:
            if deliver is not None:
                deliver()
            resumed, self._resume = self._resume, None
            own = batches if self.rank_slice.reads_for_all else None
            rounds = dispatched(own, self.rank_slice, self.drops_last) if self.dispatches else batches
            if self.skip_batches and (self.dispatches or not self._is_map_style):
                read_and_drop(rounds, self.skip_batches)
            after_start, lookahead, waits = resumed or (None, None, False)
            if resumed is not None:
                self.skip_batches = 0
            if after_start is not None:
                draw_order(batches)
                after_start()
            yield from [None] * waits
            yield from self._dispatched(rounds) if self.dispatches else self._read_ahead(batches, lookahead)
            self.passes.end(self)
        except BaseException as error:
            # End the workers of a pass that is left early, as an error's traceback would keep them alive
            if not (self.persistent_workers and isinstance(error, GeneratorExit)):
                self._iterator = None
                call_if_there(batches, "_shutdown_workers")  # torch has no public name for it
            raise

    def _with_replaced_workers(self) -> Iterator[Batch]:
        """Start replaced persistent workers as the first ones: no seed is drawn, and the data is in epoch 0."""
        # runs with other seeds, and later epochs, do not repeat what is drawn within the workers
        seeded = torch.Generator().manual_seed((torch.initial_seed() + self.iteration) % 2**63)
        drawn_from, self.generator = self.generator, seeded
        call_if_there(self.dataset, "set_epoch", 0)
        try:
            return super().__iter__()
        finally:
            self.generator = drawn_from
            call_if_there(self.dataset, "set_epoch", self.iteration)

    def _read_ahead(self, batches: Iterator[Batch], lookahead: Batch | None) -> Iterator[Batch]:
        """Yield this rank's batches, each after the next one has been read."""
        read, device = self._reader(batches), self.device
        current = read() if lookahead is None else lookahead
        if current is _END:
            return
        # whether the next batch is copied while the current one is trained on
        is_beside = device is not None and self.non_blocking and self.pin_memory and copies_beside(device)
        ahead = CopiesAhead(device) if device is not None and is_beside else None
        current = move_to_device(current, device, self.non_blocking)
        fields = self.__dict__  # torch's `__setattr__` checks each attribute, which is slow for every batch
        while (following := read()) is not _END:
            fields["lookahead"] = following
            coming = following if ahead is None else ahead.start(following)
            yield current
            current = move_to_device(coming, device, self.non_blocking) if ahead is None else ahead.take(coming)
        fields["lookahead"] = None
        self.end_of_dataloader = True
        self.iteration += 1  # here, as Lightning counts batches and never requests one after the last
        if not self._is_map_style and self.rank_slice.world_size == 1:
            self.remainder = find_batch_size(current) or -1
        yield current

    def _reader(self, batches: Iterator[Batch]) -> Callable[[], Batch]:
        """Return a function that reads the next batch of a pass over torch's loader, or returns `_END`.

        Torch marks each read for its profiler, whether one runs or not, which takes as long as a small collator. A
        map-style pass without a profiler is read without the mark.
        """
        data = getattr(batches, "_next_data", None)
        is_profiled = getattr(torch.autograd, "_profiler_enabled", None)
        is_torchs = getattr(type(batches).__next__, "__module__", None) == "torch.utils.data.dataloader"
        is_fast = (
            self._is_map_style and is_torchs and None not in (data, is_profiled) and hasattr(batches, "_num_yielded")
        )

        def read() -> Batch:
            try:
                if not is_fast or is_profiled() or batches._sampler_iter is None:  # type: ignore[attr-defined, misc]  # torch's
                    return next(batches)
                batch = data()  # type: ignore[misc]  # as `is_fast` says
                batches._num_yielded += 1  # type: ignore[attr-defined]  # torch's
                return batch
            except StopIteration as error:
                if is_raised_by_user_code(error, self._is_map_style, self._auto_collation):
                    raise stop_iteration_error() from error
                return _END
            except (FileNotFoundError, ConnectionError, EOFError) as error:
                if not self.num_workers or "in DataLoader worker process" in str(error):  # user code's in a worker
                    raise
                # A dead worker's unfinished batch shows up as a lost connection
                dead = dead_among(getattr(batches, "_workers", ()))  # torch has no public name for it
                if dead:
                    pids = ", ".join(str(worker.pid) for worker in dead)
                    raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly") from error
                raise

        return read

    def _dispatched(self, rounds: Iterator[tuple[Batch, int, bool]]) -> Iterator[Batch]:
        """Yield this rank's part of the batches that rank 0 reads."""
        for batch, samples, is_last in rounds:
            if is_last:
                self.end_of_dataloader, self.remainder = True, samples
                self.iteration += 1
            yield move_to_device(batch, self.device, self.non_blocking)

    def resume_at(
        self,
        skip: int,
        lookahead: Batch | None = None,
        source: PositionState | None = None,
        after_start: Callable[[], None] | None = None,
        waits: bool = False,
    ) -> None:
        """Start the next pass after batches that were trained on already.

        Args:
            skip: The number of these batches.
            lookahead: The next batch, if it had been read ahead.
            source: The state of a stateful iterable data set.
            after_start: Restores random states, after the pass has started and before it reads.
            waits: Yield None once the pass has started, before it reads.
        """
        self._resume = after_start, lookahead, waits
        self.skip_batches = skip + (lookahead is not None)
        load = getattr(self.dataset, "load_state_dict", None)
        if source is not None and callable(load) and not self._is_map_style:
            load(source)
            self.skip_batches = 0


def _seed_shuffling(options: dict[str, object], seed: int | None) -> SeededRandomSampler | None:
    """Give a random sampler, possibly within a batch sampler, its own generator, seeded in each epoch. Return it."""
    sampler = options.get("sampler")
    if type(sampler) is RandomSampler:
        options["sampler"] = shuffler = SeededRandomSampler(sampler, seed)
        return shuffler
    for batches in (options.get("sampler"), options.get("batch_sampler")):
        behind = getattr(batches, "sampler", None)
        if type(behind) is RandomSampler:
            shuffler = SeededRandomSampler(behind, seed)
            batches.sampler = shuffler  # type: ignore[attr-defined]  # it has one
            return shuffler
    return None


def last_shares(loader: object) -> list[int]:
    """Samples of each rank in the last round of a loader, if they differ. See `BatchSamplerSlice.last_shares`."""
    loader = getattr(loader, "loader", loader)  # of `EvaluationBatches`
    orders = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    return next((order.last_shares for order in orders if isinstance(order, BatchSamplerSlice)), [])


def skip_first_batches(loader: DataLoader[Batch], skip: int) -> DataLoader[Batch]:
    """Return a plain loader of torch's that starts after `skip` batches, without reading their samples."""
    batches = SkipFirstBatches(loader.batch_sampler, skip)  # type: ignore[arg-type]  # callers know that it has one
    return DataLoader(loader.dataset, batch_sampler=batches, **options_of(loader))
