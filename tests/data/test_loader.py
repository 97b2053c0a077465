"""The options that a loader keeps when it is rebuilt for one rank, or for a later start."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.data import loader as loader_module
from hf_compat.data.loader import PreparedDataLoader, last_shares, options_of, skip_first_batches
from hf_compat.data.order import BatchSamplerSlice, IterableDatasetSlice, RankSlice
from hf_compat.native.datamodule import PredictionBatches
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade


class Rows(list):
    """A list that takes attributes."""


def test_what_is_skipped_leaves_every_option_as_it_was():
    options = {
        "collate_fn": list,
        "num_workers": 1,
        "timeout": 5,
        "worker_init_fn": print,
        "generator": torch.Generator(),
        "prefetch_factor": 3,
        "in_order": False,
        "multiprocessing_context": "spawn",
    }
    loader = DataLoader(range(8), batch_size=2, **options)
    assert options_of(skip_first_batches(loader, 2)) == options_of(loader)
    assert options_of(loader)["in_order"] is False


@pytest.mark.parametrize("in_order", [True, False])
def test_the_trainers_loaders_have_the_arguments_options(make_args, in_order):
    args = make_args(dataloader_in_order=in_order, dataloader_num_workers=1, dataloader_prefetch_factor=4)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8), eval_dataset=toy.rows(8))
    training, evaluation = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    for loader in (training, evaluation):
        found = options_of(loader)
        assert (found["in_order"], found["num_workers"], found["prefetch_factor"]) == (in_order, 1, 4)
    assert training.worker_init_fn is not None and evaluation.worker_init_fn is None
    own = DataLoader(toy.rows(8), batch_size=2, num_workers=1, in_order=in_order)
    assert trainer.accelerator.prepare(own).in_order is in_order


class Numbers(Dataset):
    """Returns the requested numbers, one or a batch of them."""

    def __getitem__(self, index):
        return torch.tensor(index)

    def __len__(self):
        return 11


class BatchesOfALibrary(BatchSampler):
    """A batch sampler with its own epochs, as in sentence-transformers."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


def of_a_library():
    shuffled = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(5))
    return DataLoader(Numbers(), batch_sampler=BatchesOfALibrary(shuffled, 2, False))


def a_batch_at_a_time():
    return DataLoader(Numbers(), batch_size=None, sampler=BatchSampler(RandomSampler(Numbers()), 2, False))


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_what_is_in_a_batch_sampler_is_shuffled_as_accelerate_does(make_args, rank, ranks):
    args = make_args(data_seed=7)
    torch.manual_seed(1)
    theirs = prepare_data_loader(
        of_a_library(), num_processes=ranks, process_index=rank, use_seedable_sampler=True, data_seed=7
    )
    accelerator = AcceleratorFacade(args)
    accelerator.rank_slice = RankSlice(rank=rank, world_size=ranks)
    ours = accelerator.prepare(of_a_library())
    orders = []
    for loader in (theirs, ours):
        orders.append([])
        for epoch in (0, 1, 2):
            loader.set_epoch(epoch)
            orders[-1].append([batch.tolist() for batch in loader])
    assert orders[0] == orders[1] and orders[0][0] != orders[0][1]
    assert sum(len(batch) for batch in orders[0][0]) == (11 if ranks == 1 else 6)


def test_workers_get_accelerates_seeds_from_a_generator_that_shuffles_too(make_args, monkeypatch):
    """torch draws the seed of workers when a pass begins, before it asks for the first batch."""
    seeds, begin = [], DataLoader._get_iterator

    def note(loader):
        found = begin(loader)
        seeds.append(found._base_seed)
        return found

    monkeypatch.setattr(DataLoader, "_get_iterator", note)
    accelerator = AcceleratorFacade(make_args(data_seed=7))
    accelerator.rank_slice = RankSlice(rank=1, world_size=2)
    options = {"num_processes": 2, "process_index": 1, "use_seedable_sampler": True, "data_seed": 7}
    for prepare in (lambda loader: prepare_data_loader(loader, **options), accelerator.prepare):
        loader = prepare(DataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator().manual_seed(5)))
        for _ in range(3):
            seeds += [batch.tolist() for batch in loader]
    assert seeds[: len(seeds) // 2] == seeds[len(seeds) // 2 :] and len(seeds) == 2 * (3 + 3 * 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_data_set_is_asked_for_a_batch_at_a_time(make_args, ranks):
    """Accelerate 1.15 fails with this loader in one process, and shuffles each rank separately in several."""
    passes = []
    for rank in range(ranks):
        accelerator = AcceleratorFacade(make_args(data_seed=7))
        accelerator.rank_slice = RankSlice(rank=rank, world_size=ranks)
        loader = accelerator.prepare(a_batch_at_a_time())
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            passes.append([batch.tolist() for batch in loader])
    first = [number for batches in passes[::2] for batch in batches for number in batch]
    assert set(first) == set(range(11)) and passes[0] != passes[1]


def test_a_library_shuffles_the_same_after_resuming(make_args, tmp_path):
    class OwnLoader(Trainer):
        def get_train_dataloader(self):
            shuffled = RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(5))
            batches = BatchesOfALibrary(shuffled, 4, False)
            return self.accelerator.prepare(
                DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
            )

    def weights(folder, checkpoint=None):
        args = make_args(output_dir=str(tmp_path / folder), save_strategy="steps", save_steps=5, num_train_epochs=3)
        trainer = OwnLoader(toy.Classifier(), args, train_dataset=toy.rows(12))
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.model.state_dict()

    whole = weights("whole")
    resumed = weights("resumed", str(tmp_path / "whole" / "checkpoint-5"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_kept_workers_read_whole_epochs_after_a_resume(tmp_path):
    """Torch's iterator of persistent workers holds the indices of its first pass, which is less than an epoch."""
    values = {"num_train_epochs": 3, "save_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 2}
    values |= {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}

    def trained(resume):
        torch.manual_seed(0)
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, **values)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(10))
        trainer.train(resume_from_checkpoint=resume)
        logs = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return logs, trainer.model.state_dict()

    (logs, weights), (resumed_logs, resumed) = (trained(one) for one in (None, str(tmp_path / "checkpoint-3")))
    assert len(logs) == 15 and resumed_logs == logs
    assert all(resumed[name].equal(weights[name]) for name in weights)


@pytest.mark.parametrize(("size", "drops"), [(4, False), (4, True), (3, False)])
def test_a_prepared_loader_is_asked_by_accelerates_names(make_args, size, drops):
    args = make_args(per_device_train_batch_size=size, dataloader_drop_last=drops)
    ours = Trainer(toy.Classifier(), args, train_dataset=toy.rows(10)).get_train_dataloader()
    theirs = prepare_data_loader(DataLoader(toy.rows(10), batch_size=size, drop_last=drops), put_on_device=False)
    for name in ("total_batch_size", "total_dataset_length"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours.base_dataloader) == len(theirs.base_dataloader) and ours.device == args.device
    assert len(ours.get_sampler()) == len(theirs.get_sampler()) == 10


@pytest.mark.parametrize("split", [False, True])
def test_the_batch_of_all_ranks_is_counted(split):
    ranks = RankSlice(world_size=2, rank=1, split_batches=split)
    loader = PreparedDataLoader(toy.rows(10), batch_size=4, rank_slice=ranks)
    theirs = prepare_data_loader(
        DataLoader(toy.rows(10), batch_size=4), num_processes=2, process_index=1, split_batches=split
    )
    assert loader.total_batch_size == theirs.total_batch_size == (4 if split else 8)


class Endless(BatchSampler):
    def __len__(self):
        raise TypeError("it has no length")


def test_shares_of_the_last_round_are_found_behind_an_evaluations_batches():
    ranks = RankSlice(rank=0, world_size=2, even_batches=False)
    slices = BatchSamplerSlice(BatchSampler(range(5), 2, drop_last=False), ranks)
    loader = DataLoader(range(5), batch_sampler=slices)
    assert last_shares(loader) == last_shares(PredictionBatches(loader)) == [1, 0]
    endless = DataLoader(range(5), batch_sampler=Endless(range(5), 2, drop_last=False))
    assert last_shares(endless) == last_shares(PredictionBatches(endless)) == []


@pytest.mark.parametrize(
    ("dataset", "options", "ranks", "found"),
    [
        (range(5), {}, 1, 1),
        (range(4), {}, 1, 0),  # the last batch is full
        (range(5), {"drop_last": True}, 1, -1),
        (range(5), {"batch_size": None}, 1, -1),
        (toy.Stream(range(5)), {}, 1, 1),
        (toy.Stream(range(4)), {}, 1, 2),  # as Accelerate counts the last batch of a stream
        (toy.SizedStream(range(4)), {}, 1, 2),
        (toy.SizedStream(range(6)), {}, 2, 2),
        (toy.Stream(range(6)), {}, 2, -1),
        (range(6), {}, 2, 2),
    ],
)
def test_the_samples_of_a_last_batch_are_counted(dataset, options, ranks, found):
    slices = RankSlice(world_size=ranks, dispatch_batches=False)
    loader = PreparedDataLoader(dataset, rank_slice=slices, **({"batch_size": 2} | options))
    assert loader.remainder == -1 and list(loader) and loader.remainder == found
    assert loader.end_of_dataloader and loader.iteration == 1


@pytest.mark.parametrize(
    ("dataset", "options", "source"),
    [
        (toy.Stream, {}, True),
        (toy.Stream, {"num_workers": 1}, False),
        (toy.Stream, {"rank_slice": RankSlice(world_size=2, dispatch_batches=False)}, False),
        (lambda samples: samples, {}, False),
    ],
)
def test_a_streams_state_is_read_where_this_process_reads_it(dataset, options, source):
    data = dataset(Rows(range(4)))
    data.state_dict = dict
    loader = PreparedDataLoader(data, batch_size=2, **options)
    assert (loader.source is data) is source
    del data.state_dict
    assert PreparedDataLoader(data, batch_size=2, **options).source is None


@pytest.mark.parametrize(
    ("seed", "seedable", "options", "has_own"),
    [
        (None, True, {"sampler": RandomSampler(range(8))}, True),
        (None, True, {"batch_sampler": BatchSampler(RandomSampler(range(8)), 2, False)}, True),
        (None, True, {"sampler": BatchSampler(RandomSampler(range(8)), 2, False), "batch_size": None}, True),
        (None, True, {"sampler": SequentialSampler(range(8))}, False),
        (1, True, {"sampler": RandomSampler(range(8))}, False),
        (None, False, {"sampler": RandomSampler(range(8))}, False),
    ],
)
def test_a_shuffler_is_kept_where_it_follows_the_runs_seed(seed, seedable, options, has_own):
    loader = PreparedDataLoader(range(8), seed=seed, use_seedable_sampler=seedable, **options)
    assert (loader.shuffler is not None) is has_own


@pytest.mark.parametrize(
    ("dataset", "ranks", "dispatches", "read"),
    [
        (range(8), 1, None, [2, 3]),
        (toy.Stream(range(8)), 1, None, [2, 3]),
        (toy.Stream(range(8)), 2, False, [3]),
        (range(8), 2, False, [3]),
    ],
)
def test_skipped_batches_are_not_given(dataset, ranks, dispatches, read):
    slices = RankSlice(rank=ranks - 1, world_size=ranks, dispatch_batches=dispatches)
    loader = PreparedDataLoader(dataset, batch_size=2, rank_slice=slices)
    loader.skip_batches = 2 if ranks == 1 else 1
    assert [int(batch[0]) // 2 for batch in loader] == read


class Positioned(toy.Stream):
    """A stream that tells and takes its position."""

    def __init__(self, samples):
        super().__init__(samples)
        self.loaded = None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.loaded = state


@pytest.mark.parametrize(
    ("dataset", "lookahead", "source", "skipped", "loaded"),
    [
        (Positioned, None, None, 3, False),
        (Positioned, {"x": 1}, None, 4, False),
        (Positioned, None, {"a": 1}, 0, True),
        (toy.Stream, None, {"a": 1}, 3, False),
        (type("OfRows", (Rows,), {"load_state_dict": Positioned.load_state_dict}), None, {"a": 1}, 3, False),
    ],
)
def test_a_pass_is_resumed_at_its_position(dataset, lookahead, source, skipped, loaded):
    data = dataset(range(8))
    loader = PreparedDataLoader(data, batch_size=2)
    loader.resume_at(3, lookahead, source)
    assert loader.skip_batches == skipped and (getattr(data, "loaded", None) is not None) is loaded


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("lookahead", [None, torch.tensor([0, 1])])
def test_a_resumed_pass_starts_before_it_reads(lookahead, waits):
    seen, loader = [], PreparedDataLoader(range(8), batch_size=2)
    loader.resume_at(1, lookahead, after_start=lambda: seen.append("started"), waits=waits)
    batches = iter(loader)
    first = next(batches)
    assert seen == ["started"] and (first is None) is waits
    read = [one.tolist() for one in ([] if waits else [first]) + list(batches)]
    assert read == ([[2, 3]] if lookahead is None else [[0, 1]]) + [[4, 5], [6, 7]]
    assert loader.skip_batches == 0 and [one.tolist() for one in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert seen == ["started"] and loader.iteration == 2


@pytest.mark.parametrize(("ends", "state"), [(True, (True, 3, 1)), (False, (False, -1, 0))])
def test_the_last_round_of_dispatched_batches_is_noted(ends, state):
    loader = PreparedDataLoader(range(8), batch_size=2)
    assert list(loader._dispatched(iter([(1, 4, False), (2, 3, ends)]))) == [1, 2]
    assert (loader.end_of_dataloader, loader.remainder, loader.iteration) == state


@pytest.mark.parametrize("error", [GeneratorExit, ValueError])
@pytest.mark.parametrize("persists", [False, True])
def test_workers_of_a_pass_that_is_left_end_unless_they_are_kept(monkeypatch, error, persists):
    seen, loader = [], PreparedDataLoader(range(8), batch_size=2)
    inner = DataLoader.__iter__(DataLoader(range(8), batch_size=2))
    inner._shutdown_workers = lambda: seen.append("ended")
    monkeypatch.setattr(DataLoader, "__iter__", lambda loader: inner)
    batches = iter(loader)
    next(batches)
    loader.__dict__["persistent_workers"], loader.__dict__["_iterator"] = persists, inner
    if error is GeneratorExit:
        batches.close()
    else:
        with pytest.raises(ValueError):
            batches.throw(ValueError())
    keeps = persists and error is GeneratorExit
    assert seen == ["ended"] * (not keeps) and (loader._iterator is inner) is keeps


class Shards:
    """A stream of the library datasets, as far as a loader looks at it."""

    def __init__(self, count):
        self.num_shards = count

    def shard(self, num_shards, index):
        return ("shard", num_shards, index)


class OfDatasets(Shards, IterableDataset):
    def __iter__(self):
        return iter(range(8))


RANKS = RankSlice(rank=1, world_size=2)
SPLIT = RankSlice(rank=1, world_size=2, split_batches=True)


@pytest.mark.parametrize(
    ("dataset", "ranks", "size", "outcome"),
    [
        (OfDatasets(2), RANKS, 4, "shard"),
        (OfDatasets(4), RANKS, 4, "shard"),
        (OfDatasets(1), RANKS, 4, 4),
        (OfDatasets(2), SPLIT, 4, 2),
        (OfDatasets(2), RANKS, None, "whole"),
        (toy.Stream(8), RANKS, 4, 4),
        (toy.Stream(8), SPLIT, 4, 2),
        (toy.Stream(8), SPLIT, None, "whole"),
    ],
)
def test_a_streams_share_of_a_rank(dataset, ranks, size, outcome, monkeypatch):
    monkeypatch.setattr(loader_module, "is_datasets_stream", lambda one: isinstance(one, Shards))
    own = SimpleNamespace(rank_slice=ranks, samples_of_a_batch=size, drops_last=True)
    options = {"batch_size": size, "num_workers": 3}
    found, given = PreparedDataLoader._sliced(own, dataset, options)
    if outcome == "shard":
        assert found == ("shard", 2, 1) and given is options
    elif outcome == "whole":
        assert found is dataset and given is options
    else:
        assert type(found) is IterableDatasetSlice and given == {"batch_size": outcome, "num_workers": 3}
        assert (found.dataset, found.batch_size, found.rank, found.drop_last) == (dataset, outcome, 1, True)


def of_batches(size=3):
    return BatchSampler(SequentialSampler(range(7)), size, False)


def seeded():
    return RandomSampler(range(7), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("options", "knows", "kind", "size", "key"),
    [
        ({"batch_size": 2}, False, SequentialSampler, 2, "batch_sampler"),
        ({"batch_size": 2, "sampler": SequentialSampler(range(7))}, False, SequentialSampler, 2, "batch_sampler"),
        ({"batch_size": 2, "sampler": RandomSampler(range(7))}, False, RandomSampler, 2, "batch_sampler"),
        ({"batch_size": 2, "sampler": seeded()}, False, RandomSampler, 2, "batch_sampler"),
        ({"batch_sampler": of_batches()}, False, None, 3, "batch_sampler"),
        ({"batch_sampler": [[0, 1], [2]]}, False, None, None, "batch_sampler"),
        ({"batch_size": None, "sampler": of_batches()}, False, None, 3, "sampler"),
        ({"batch_sampler": of_batches()}, True, None, None, "as given"),
    ],
)
def test_a_ranks_share_of_samples(options, knows, kind, size, key, monkeypatch):
    monkeypatch.setattr(loader_module, "knows_its_rank", lambda sampler: knows)
    monkeypatch.setattr(loader_module, "broadcast_object", lambda seed: 11)
    own = SimpleNamespace(rank_slice=RANKS, samples_of_a_batch=options.get("batch_size"), drops_last=False)
    given = {**options, "num_workers": 0, "drop_last": False}
    data = range(7)
    had_generator = getattr(options.get("sampler"), "generator", None)
    found, left = PreparedDataLoader._sliced(own, data, given)
    assert found is data and own.samples_of_a_batch == size
    if key == "as given":
        assert left is given
        return
    slices = left[key]
    assert type(slices) is BatchSamplerSlice and slices.ranks is RANKS
    assert left == {"num_workers": 0, key: slices, **({"batch_size": None} if key == "sampler" else {})}
    if kind is not None:
        assert type(slices.batch_sampler.sampler) is kind
    if kind is RandomSampler:
        assert slices.batch_sampler.sampler.generator.initial_seed() == (11 if had_generator is None else 5)


@pytest.mark.parametrize(
    ("dataset", "ranks", "dispatch", "dispatches", "total", "has_source"),
    [
        (range(8), 1, None, False, 2, False),
        (range(8), 2, None, False, 4, False),
        (range(8), 2, True, True, 4, False),
        (range(8), 1, True, False, 2, False),
        (Positioned(range(8)), 1, None, False, 2, True),
        (Positioned(range(8)), 2, None, True, 4, False),
        (Positioned(range(8)), 2, False, False, 4, False),
        (toy.Stream(8), 1, None, False, 2, False),
    ],
)
def test_who_reads_and_how_much(dataset, ranks, dispatch, dispatches, total, has_source):
    loader = PreparedDataLoader(
        dataset, batch_size=2, rank_slice=RankSlice(world_size=ranks, dispatch_batches=dispatch)
    )
    assert (loader.dispatches, loader.total_batch_size) == (dispatches, total)
    assert (loader.source is not None) is has_source
