"""Each rank's slice of the data against Accelerate's."""

import itertools

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from hf_compat.data.loader import PreparedDataLoader, last_shares
from hf_compat.data.order import BatchSamplerSlice, IterableDatasetSlice, RankSlice, SeededRandomSampler, dispatched
from hf_compat.errors import ArgumentError
from hf_compat.native.datamodule import PredictionBatches


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))

    def __len__(self):
        return self.count


class OfAnyLength:
    """A batch sampler without a batch size."""

    def __iter__(self):
        return iter([[0], [1, 2, 3], [4, 5]])

    def __len__(self):
        return 3


class Bucketed(OfAnyLength):
    """A batch sampler with a batch size, whose buckets end with a short batch."""

    batch_size = 2

    def __iter__(self):
        return iter([[0, 1], [2], [3, 4], [5, 6]])

    def __len__(self):
        return 4


SETTINGS = list(itertools.product((False, True), repeat=3))


SAMPLERS = {
    "in order": lambda count: SequentialSampler(range(count)),
    "shuffled": lambda count: SeededRandomSampler(RandomSampler(range(count)), 3),
    "any": lambda count: [*range(0, count, 2), *range(1, count, 2)],
}


@pytest.mark.parametrize("drop_last, split, even", SETTINGS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_batches_of_indices(sampler, world_size, drop_last, split, even):
    for count, rank in itertools.product(range(1, 20), range(world_size)):
        batches = BatchSampler(sampler(count), 6, drop_last)
        ours = BatchSamplerSlice(
            batches, RankSlice(rank=rank, world_size=world_size, split_batches=split, even_batches=even)
        )
        theirs = BatchSamplerShard(batches, world_size, rank, split_batches=split, even_batches=even)
        assert list(ours) == list(theirs), count
        assert len(ours) == len(theirs), count


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_of_any_length_are_repeated_whole(rank):
    ours = BatchSamplerSlice(OfAnyLength(), RankSlice(rank=rank, world_size=2))
    assert list(ours) == list(BatchSamplerShard(OfAnyLength(), 2, rank))


@pytest.mark.parametrize("split", [False, True])
def test_a_short_batch_in_the_midst_is_filled_up(split):
    """See docs/differences.md, 'A batch sampler of your own with short batches'."""
    ours, theirs = [], []
    for rank in (0, 1):
        ours.append(list(BatchSamplerSlice(Bucketed(), RankSlice(rank=rank, world_size=2, split_batches=split))))
        theirs.append(list(BatchSamplerShard(Bucketed(), 2, rank, split_batches=split)))
    seen_ours, seen_theirs = (
        {index for batches in ranks for batch in batches for index in batch} for ranks in (ours, theirs)
    )
    assert seen_ours == set(range(7)) and 2 not in seen_theirs
    assert [len(batches) for batches in ours] == ([4, 4] if split else [2, 2])
    assert {len(batch) for batches in ours for batch in batches} == {1 if split else 2}


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(ArgumentError, match="cut a batch of 5 into 2 equal parts"):
        BatchSamplerSlice(BatchSampler(range(9), 5, False), RankSlice(world_size=2, split_batches=True))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_streams(world_size, drop_last):
    for count, rank in itertools.product(range(1, 20), range(world_size)):
        ours = IterableDatasetSlice(Numbers(count), 2, RankSlice(rank=rank, world_size=world_size), drop_last)
        theirs = IterableDatasetShard(Numbers(count), 2, drop_last, world_size, rank)
        assert list(ours) == list(theirs), count
        assert len(ours) == len(theirs) == len(list(ours)), count


@pytest.mark.parametrize(
    "is_iterable, chosen, dispatches", [(True, None, True), (False, None, False), (False, True, True)]
)
def test_who_reads(is_iterable, chosen, dispatches):
    data = Numbers(4) if is_iterable else range(4)
    for world_size in (1, 2):
        loader = PreparedDataLoader(data, rank_slice=RankSlice(world_size=world_size, dispatch_batches=chosen))
        assert loader.dispatches is (dispatches and world_size > 1)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("data", [list(range(22)), Numbers(22)], ids=["samples", "stream"])
def test_rounds_that_one_rank_reads_for_all_are_skipped_once(data, split):
    ranks = RankSlice(world_size=2, dispatch_batches=True, split_batches=split)
    whole, resumed = (PreparedDataLoader(data, batch_size=4, rank_slice=ranks) for _ in range(2))
    resumed.resume_at(2)
    for skip in (2, 0):  # the next pass is a whole one
        assert [part.tolist() for part in resumed] == [part.tolist() for part in whole][skip:]


def test_an_error_of_the_reader_is_its_own():
    def broken():
        yield {"names": ["a"]}
        raise KeyError("column")

    with pytest.raises(KeyError, match="column"):
        list(dispatched(broken(), RankSlice(), drop_last=False))


def test_a_wrapper_for_the_indices_of_samples_has_no_shares():
    """Lightning finds them in a batch sampler without a length, as a native evaluation in two processes has it."""
    batches = PredictionBatches(PreparedDataLoader(list(range(5)), batch_size=2))
    assert batches.batch_sampler is not None and last_shares(batches) == []


def test_neighbours_that_hold_parts_of_one_model_read_the_same():
    slices = [RankSlice(rank=rank, world_size=6).shared_by(2) for rank in range(6)]
    assert [(one.rank, one.place) for one in slices] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert {(one.world_size, one.sharing) for one in slices} == {(3, 2)}
    assert [one.reads_for_all for one in slices] == [True, *[False] * 5]
    assert slices[4].shared_by(3) == RankSlice(rank=1, world_size=2, sharing=3, place=1)  # of process 4
    # each process gives two rows
    rows = torch.arange(12).reshape(12, 1)
    assert slices[3].once_each({"logits": rows})["logits"].flatten().tolist() == [0, 1, 4, 5, 8, 9]
    assert RankSlice(rank=1, world_size=6).once_each(rows) is rows


@pytest.mark.parametrize(
    ("count", "options", "batches"),
    [
        (10, {"world_size": 2, "dispatch_batches": True}, 3),
        (8, {"world_size": 2, "dispatch_batches": True}, 2),
        (10, {"world_size": 2, "dispatch_batches": True, "drop_last": True}, 2),
        (10, {"world_size": 2, "dispatch_batches": True, "split_batches": True}, 5),
        (10, {"world_size": 2, "dispatch_batches": False}, 3),
        (10, {}, 5),
    ],
)
def test_the_length_of_a_loader_counts_rounds(count, options, batches):
    options = dict(options)
    drops = {"drop_last": options.pop("drop_last", False)}
    assert len(PreparedDataLoader(range(count), batch_size=2, rank_slice=RankSlice(**options), **drops)) == batches


class Told(Numbers):
    """Data that note the epochs they are told."""

    def __init__(self, count):
        super().__init__(count)
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


@pytest.mark.parametrize(
    ("world_size", "split", "size", "read"),
    [
        (1, False, 2, [[0, 1], [2, 3], [4, 5], [6]]),
        (2, False, 2, [[2, 3], [6, 0]]),
        (2, True, 2, [[1], [3], [5], [0]]),
        (2, False, None, [0, 1, 2, 3, 4, 5, 6]),  # the data set makes its own batches
    ],
)
def test_a_stream_is_read_by_each_rank(world_size, split, size, read):
    slices = RankSlice(rank=world_size - 1, world_size=world_size, split_batches=split, dispatch_batches=False)
    data = Told(7)
    loader = PreparedDataLoader(data, batch_size=size, rank_slice=slices)
    assert [one.tolist() if isinstance(one, torch.Tensor) else one for one in loader] == read
    loader.set_epoch(5)
    assert data.epochs[-1] == 5


def test_a_sampler_of_batches_is_cut_for_each_rank():
    batches = BatchSampler(SequentialSampler(range(8)), 2, False)
    slices = RankSlice(rank=1, world_size=2)
    alone = PreparedDataLoader([torch.tensor(one) for one in range(8)], batch_sampler=batches, rank_slice=slices)
    assert [one.tolist() for one in alone] == [[2, 3], [6, 7]] and alone.samples_of_a_batch == 2
    assert alone.get_sampler() is batches.sampler
    any_length = PreparedDataLoader(range(8), batch_sampler=OfAnyLength(), rank_slice=slices)
    assert any_length.samples_of_a_batch is None and any_length.total_batch_size is None


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(7)])
def test_ranks_shuffle_alike_without_a_generator(generator):
    read = []
    for rank in (0, 1):
        torch.manual_seed(3)
        sampler = RandomSampler(range(8), generator=generator)
        slices = RankSlice(rank=rank, world_size=2)
        PreparedDataLoader(range(8), sampler=sampler, use_seedable_sampler=False, batch_size=2, rank_slice=slices)
        assert (sampler.generator is generator) is (generator is not None)
        read.append(list(sampler) if generator is None else 0)
    assert read[0] == read[1]
