"""Which loader, sampler and columns each argument gives, and how the samples of an update are counted."""

from __future__ import annotations

from types import SimpleNamespace

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from hf_compat.data.collators import RemoveColumnsCollator
from hf_compat.data.order import RankSlice
from hf_compat.errors import ArgumentError, DataError
from hf_compat.runtime.seeding import seed_worker
from hf_compat.trainer_methods import dataloaders
from hf_compat.trainer_methods.dataloaders import DataloaderMethods

ROWS = [{"x": number} for number in range(6)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class Loads(DataloaderMethods):
    """A Trainer's loaders without a Trainer. What it makes are the keywords of a loader."""

    model = None
    label_names = ("labels",)
    train_dataset, eval_dataset, data_collator = ROWS, ROWS, "collator"
    _train_batch_size, _signature_columns, processing_class = 3, None, None

    def __init__(self, ranks=None, sequence=None, **values):
        usual = {
            "eval_batch_size": 5, "train_batch_size": 7, "per_device_train_batch_size": 3, "dataloader_num_workers": 2,
            "dataloader_pin_memory": True, "device": torch.device("cuda"), "dataloader_persistent_workers": False,
            "dataloader_multiprocessing_context": "spawn", "dataloader_prefetch_factor": 4,
            "dataloader_in_order": False,
            "dataloader_drop_last": True, "remove_unused_columns": False, "train_sampling_strategy": "random",
            "gradient_accumulation_steps": 2, "seed": 1, "data_seed": None, "length_column_name": "length",
            "world_size": 8,
        }  # fmt: skip
        self.args = SimpleNamespace(**{**usual, **values})
        self.accelerator = SimpleNamespace(
            rank_slice=ranks or RankSlice(), sequence=sequence, unwrap_model=lambda model: model,
            make_loader=lambda data, **options: Made(data, options),
        )  # fmt: skip
        self._called = None


class Made:
    """What a loader is made of."""

    def __init__(self, dataset, options):
        self.dataset, self.options, self.replaces_workers = dataset, options, None


def test_a_training_loader_takes_its_arguments():
    made = Loads(RankSlice(rank=2, world_size=4)).get_train_dataloader()
    seeds = made.options.pop("worker_init_fn")
    assert seeds.func is seed_worker and seeds.keywords == {"num_workers": 2, "rank": 2}
    assert isinstance(made.options.pop("sampler"), RandomSampler) and made.dataset is ROWS
    assert made.options == {
        "collate_fn": "collator", "num_workers": 2, "pin_memory": True, "persistent_workers": False,
        "multiprocessing_context": "spawn", "prefetch_factor": 4, "in_order": False, "batch_size": 3, "drop_last": True,
    }  # fmt: skip


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("drops", [True, False])
def test_other_loaders_have_their_size_and_no_seed(pins, device, drops):
    own = Loads(dataloader_pin_memory=pins, device=torch.device(device), dataloader_drop_last=drops)
    for made in (own.get_eval_dataloader(), own.get_test_dataloader(ROWS)):
        assert made.options["worker_init_fn"] is None and made.options["batch_size"] == 5
        assert made.options["pin_memory"] is (pins and device == "cuda") and made.options["drop_last"] is drops
        assert isinstance(made.options["sampler"], SequentialSampler)


def test_a_stream_has_no_order():
    own = Loads()
    own.train_dataset = Stream()
    options = own.get_train_dataloader().options
    assert options["batch_size"] == 3 and options["worker_init_fn"] is None
    assert not {"sampler", "drop_last", "batch_sampler"} & options.keys()


@pytest.mark.parametrize("returns", [None, "kept"])
def test_columns_are_left_out_of_tables_and_of_samples(returns, monkeypatch):
    own, asked, table = Loads(), [], datasets.Dataset.from_list(ROWS)
    own._remove_unused_columns = lambda data, description: asked.append(description) or returns
    own._get_collator_with_removed_columns = lambda collator, description: asked.append(description) or "wrapped"
    made = own._get_dataloader(table, "Training", 1)
    assert made.dataset is (table if returns is None else returns) and made.options["collate_fn"] == "collator"
    assert made.options["sampler"] is None and own._get_dataloader(ROWS, "test", 1).options["collate_fn"] == "wrapped"
    assert asked == ["Training", "test"]


class KnowsRank(list):
    """A sampler that yields one rank's batches."""


@pytest.mark.parametrize(
    ("ranks", "refused"),
    [
        (RankSlice(), ""),
        (RankSlice(world_size=2), ""),
        (RankSlice(split_batches=True), ""),
        (RankSlice(world_size=2, split_batches=True), "split_batches"),
        (RankSlice(world_size=2, dispatch_batches=True), "dispatch_batches"),
        (RankSlice(world_size=2, dispatch_batches=False), ""),
    ],
)
def test_a_sampler_of_one_ranks_batches_divides_alone(ranks, refused, monkeypatch):
    monkeypatch.setattr(dataloaders, "knows_its_rank", lambda one: isinstance(one, KnowsRank))
    own, sampler = Loads(ranks, train_sampling_strategy="batch_rebalance"), KnowsRank([[0], [1]])
    own._get_train_sampler = lambda train_dataset: sampler
    if refused:
        with pytest.raises(ArgumentError, match=rf"'{refused}': True.*batch_rebalance(.|\n)*leave out `{refused}`"):
            own.get_train_dataloader()
        return
    options = own.get_train_dataloader().options
    assert options["batch_sampler"] is sampler and not {"batch_size", "sampler", "drop_last"} & options.keys()


@pytest.mark.parametrize(("is_training", "method"), [(True, "_get_train_sampler"), (False, "_get_eval_sampler")])
def test_what_is_no_sampler_is_named_by_its_method(is_training, method):
    with pytest.raises(Exception, match=method):
        Loads()._get_dataloader(ROWS, "Training", 1, lambda dataset: 3, is_training=is_training)


@pytest.mark.parametrize(
    ("train", "message"),
    [(None, r"requires a train_dataset(.|\n)*pass `train_dataset=…`"), ([], "`train_dataset` is empty")],
)
def test_a_training_without_data_is_refused(train, message):
    own = Loads()
    own.train_dataset = train
    with pytest.raises(DataError, match=message):
        own.get_train_dataloader()


@pytest.mark.parametrize(
    ("sets", "asked", "expected", "message"),
    [
        (ROWS, None, ROWS, ""),
        (ROWS, ROWS[:2], ROWS[:2], ""),
        (None, ROWS[:2], ROWS[:2], ""),
        ({"a": ROWS, "b": ROWS[:1]}, "b", ROWS[:1], ""),
        (None, None, None, r"requires an eval_dataset(.|\n)*pass `eval_dataset=…`"),
        ({"a": ROWS, "b": ROWS}, "c", None, r"named 'c', only \['a', 'b'\]"),
        (ROWS, "c", None, r"named 'c', only \[\]"),
    ],
)
def test_which_set_is_evaluated(sets, asked, expected, message):
    own = Loads()
    own.eval_dataset = sets
    if message:
        with pytest.raises(DataError, match=message):
            own.get_eval_dataloader(asked)
    else:
        assert own.get_eval_dataloader(asked).dataset == expected


@pytest.mark.parametrize("persists", [True, False])
@pytest.mark.parametrize("has_run", [True, False])
def test_a_loader_with_persistent_workers_is_kept(persists, has_run):
    own = Loads(dataloader_persistent_workers=persists)
    own.eval_dataset, before = {"a": ROWS, "b": ROWS}, {"a"} if has_run else set()
    if has_run:
        vars(own)["_run"] = SimpleNamespace(evaluated=before)
    first, other = own.get_eval_dataloader("a"), own.get_eval_dataloader("b")
    assert first is not other
    assert (own.get_eval_dataloader("a") is first) is persists
    if persists:
        assert (first.replaces_workers, other.replaces_workers) == (has_run, False)
        assert not has_run or before == {"a", "b"}
    else:
        assert first.replaces_workers is None and before == ({"a"} if has_run else set())
    own.eval_dataset = ROWS
    plain = own.get_eval_dataloader()
    assert (own.get_eval_dataloader(ROWS) is plain) is persists
    assert own.get_eval_dataloader(ROWS[:1]) is not plain


class Endless:
    """Data without a length."""


@pytest.mark.parametrize(
    ("strategy", "data", "kind"),
    [
        ("random", ROWS, RandomSampler),
        ("sequential", ROWS, SequentialSampler),
        ("random", Endless(), type(None)),
        ("group_by_length", Endless(), type(None)),
    ],
)
def test_an_order_for_each_strategy(strategy, data, kind):
    own = Loads(train_sampling_strategy=strategy)
    assert type(own._get_train_sampler(data)) is kind
    assert type(own._get_eval_sampler(data)) is (type(None) if kind is type(None) else SequentialSampler)
    own.train_dataset = data
    assert type(own._get_train_sampler()) is kind
    own.train_dataset = None
    assert own._get_train_sampler() is None and own._get_eval_sampler(None) is None


@pytest.mark.parametrize(("data_seed", "seed"), [(None, 1), (0, 0), (9, 9)])
def test_samples_are_grouped_by_their_lengths(data_seed, seed, monkeypatch):
    made = []
    monkeypatch.setattr(
        dataloaders, "of_transformers",
        lambda module, name, what: lambda size, **options: made.append((module, name, size, options)) or what,
    )  # fmt: skip
    own, rows = Loads(train_sampling_strategy="group_by_length", data_seed=data_seed), [{"input_ids": [1]}] * 2
    assert own._get_train_sampler(rows) == own._get_eval_sampler(rows) == "`train_sampling_strategy='group_by_length'`"
    (*of_training, training), (*of_evaluation, evaluation) = made
    assert of_training == ["trainer_pt_utils", "LengthGroupedSampler", 14] and training["generator"] is None
    assert of_evaluation[2] == 5 and evaluation["generator"].initial_seed() == seed
    assert training["lengths"] == evaluation["lengths"] == [1, 1]


def test_batches_are_rebalanced_over_the_ranks(monkeypatch):
    made = []
    monkeypatch.setattr(
        dataloaders, "of_transformers",
        lambda module, name, what: lambda lengths, **options: made.append((module, name, lengths, options)) or what,
    )  # fmt: skip
    own = Loads(RankSlice(rank=1, world_size=4), train_sampling_strategy="batch_rebalance")
    assert own._get_train_sampler([{"input_ids": [1, 2]}]) == "`train_sampling_strategy='batch_rebalance'`"
    options = {"effective_batch_size": 24, "dp_size": 4, "grad_accum": 2, "rank": 1, "drop_last": True}
    assert made == [("trainer_pt_utils", "BatchRebalanceSampler", [2], options)]


@pytest.mark.parametrize(
    ("table", "names", "expected"),
    [
        (True, None, [3.0, 1.0]),
        (False, None, [2, 1]),
        (False, ["x"], [1, 2]),
        (False, [], [2, 1]),
    ],
)
def test_lengths_are_a_column_or_measured(table, names, expected):
    own = Loads()
    own.processing_class = SimpleNamespace(model_input_names=names)
    rows = [{"input_ids": [1, 2], "x": [1], "length": 3.0}, {"input_ids": [1], "x": [1, 2], "length": 1.0}]
    found = own._lengths(datasets.Dataset.from_list(rows) if table else rows)
    assert found == expected and all(type(length) is int for length in found)
    assert not own._has_lengths(datasets.Dataset.from_list([{"x": 1}]))


@pytest.mark.parametrize("removes", [True, False])
@pytest.mark.parametrize("known", [None, ["x"]])
def test_columns_that_a_model_does_not_take_are_left_out(removes, known):
    class Model(torch.nn.Module):
        def forward(self, x, y=None): ...

    own = Loads(remove_unused_columns=removes)
    own.model, own._signature_columns = Model(), known
    table = datasets.Dataset.from_list([{"x": 1, "y": 2, "z": 3, "label": 4, "label_ids": 5, "labels": 6}])
    kept = own._remove_unused_columns(table).column_names
    expected = ["x"] if known else ["x", "y", "label", "label_ids", "labels"]
    assert kept == (expected if removes else table.column_names)
    collator = own._get_collator_with_removed_columns("collator", "Training")
    if removes:
        assert isinstance(collator, RemoveColumnsCollator) and own._signature_columns[: len(expected)] == (
            ["x"] if known else ["x", "y", "label", "label_ids", "labels"]
        )
    else:
        assert collator == "collator" and own._signature_columns == known


@pytest.mark.parametrize(
    ("tensor_ranks", "by_config", "sequence", "samples", "sharing"),
    [(1, 1, None, 48, 1), (2, 1, None, 24, 1), (1, 4, None, 12, 1), (2, 1, 2, 12, 2), (1, 1, 4, 12, 4)],
)
def test_samples_of_an_update_over_all_ranks(tensor_ranks, by_config, sequence, samples, sharing, monkeypatch):
    monkeypatch.setattr(dataloaders, "tensor_ranks", lambda model: tensor_ranks)
    monkeypatch.setattr(dataloaders, "tensor_ranks_of", lambda args, variables: by_config)
    plan = None if sequence is None else SimpleNamespace(sp_size=sequence)
    counted = []
    monkeypatch.setattr(dataloaders, "make_run_counts", lambda args, **counts: counted.append(counts) or "counts")
    own = Loads(sequence=plan)
    assert own.get_total_train_batch_size(own.args) == samples and own.get_cp_size() == 1
    assert own.get_tp_size() == max(tensor_ranks, by_config) and own.get_sp_size() == sharing
    loader = torch.utils.data.DataLoader(ROWS, batch_size=2)
    assert own.set_initial_training_values(own.args, loader) == "counts"
    own.set_initial_training_values(own.args, loader, 5)
    own.set_initial_training_values(own.args, Endless())
    whole = {"micro_batches": 3 * sharing, "num_examples": 6, "total_train_batch_size": samples}
    endless = {"micro_batches": None, "num_examples": None, "total_train_batch_size": samples}
    assert counted == [whole, whole | {"total_train_batch_size": 5}, endless]


def test_an_old_method_is_given_the_samples_of_an_update(monkeypatch):
    own, given = Loads(), []
    monkeypatch.setattr(dataloaders, "RunCounts", lambda *counts: counts)
    own.get_total_train_batch_size = lambda args: 48
    own.set_initial_training_values = lambda args, loader, total_train_batch_size: (
        given.append((args, loader, total_train_batch_size)) or (1, 2)
    )
    assert own.run_counts("args", "loader") == (1, 2)
    own.set_initial_training_values = lambda args, loader: given.append((args, loader)) or (3,)
    assert own.run_counts("args", "loader") == (3,) and given == [("args", "loader", 48), ("args", "loader")]


@pytest.mark.parametrize(("data", "expected"), [(ROWS[:5], 5), (Endless(), 6), (None, 6)])
def test_samples_of_a_loader(data, expected):
    class Loader:
        dataset = data

        def __len__(self):
            return 2

    assert Loads().num_examples(Loader()) == expected
