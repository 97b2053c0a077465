"""Errors name unreadable data: data sets, lengths, samples, batches."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from helpers import toy
from hf_compat import Trainer, default_data_collator
from hf_compat.data.collators import check_dataset, check_iterable, is_raised_by_user_code
from hf_compat.errors import DataError, LossError, OverrideError


class Long(toy.Table):
    length: object = 24

    def __len__(self):
        return self.length


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ((row for row in toy.rows(4)), "is a generator, which can be read once"),
        (zip([1], [2], strict=True), "is a zip, which can be read once"),
        ({1, 2}, "is a set, which has no `__getitem__`"),
        ({"train": [1], "test": [2]}, "is a dict with the keys 'train', 'test'"),
        ("data.json", "is str ('data.json'), not data"),
        (3, "is int (3), not data"),
        (toy.Table, "is the class Table"),
        (DataLoader([1, 2]), "is a DataLoader"),
    ],
)
def test_what_is_no_data_set(dataset, words):
    with pytest.raises(DataError, match=f"`eval_dataset` {re.escape(words)}.*\n\nHint: "):
        check_dataset("eval_dataset", dataset)


@pytest.mark.parametrize(
    "dataset", [toy.rows(3), toy.Stream([]), toy.Table([]), torch.zeros(3, 8), np.zeros(3), {0: "a", 1: "b"}, ()]
)
def test_what_is_one(dataset):
    assert check_dataset("train_dataset", dataset) is None


@pytest.mark.parametrize(
    ("length", "shown"), [(2.0, r"float \(2.0\)"), (-1, r"int \(-1\)"), ("2", "str"), (None, "None")]
)
def test_a_length_that_is_none(make_args, length, shown):
    data = Long(toy.rows(2))
    data.length = length
    with pytest.raises(DataError, match=f"`train_dataset`: `Long.__len__` returned {shown}"):
        Trainer(toy.Classifier(), make_args(), train_dataset=data)
    with pytest.raises(DataError, match=f"`eval_dataset`: `Long.__len__` returned {shown}"):
        Trainer(toy.Classifier(), make_args(), eval_dataset=data).evaluate()
    data.length = np.int64(2)
    assert Trainer(toy.Classifier(), make_args(), train_dataset=data).train().global_step == 2


def test_lists_of_columns_are_told_from_rows():
    import datasets

    sets = datasets.DatasetDict({"train": datasets.Dataset.from_list(toy.sequences(3))})
    with pytest.raises(DataError, match="DatasetDict with the keys 'train'"):
        check_dataset("train_dataset", sets)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([{"x": 1}, None], "sample 2 of 2 is None, not a mapping"),
        (["text"], r"sample 1 of 1 is str \('text'\)"),
        ([torch.zeros(2)] * 2, r"sample 1 of 2 is Tensor of shape \(2,\)"),
        ([{"x": 1, "y": 2}, {"x": 1}], "sample 2 of 2 lacks 'y'"),
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], r"'x' is of shape \(2,\) in one sample and of shape \(3,\)"),
        ([{"x": [1, 2]}, {"x": [1]}], r"'x' is of shape \(1,\) in one sample and of shape \(2,\)"),
        (
            [{"x": [1] * size} for size in (1, 2, 3)],
            r"'x' is of shape \(1,\) in one sample and of shape \(2,\) in another",
        ),
        ([{"x": 1}, {"x": "a"}], "'x' is a number in one sample and a str in another"),
    ],
)
def test_samples_that_cannot_be_joined(samples, words):
    with pytest.raises(DataError, match=f"The samples of a batch cannot be joined: {words}"):
        default_data_collator(samples)


def test_what_upstream_says_of_others_stays():
    with pytest.raises(ValueError, match="too many dimensions"):
        default_data_collator([{"x": ["a"]}])


class OnTuples(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        x, labels = inputs if isinstance(inputs, (tuple, list)) else (inputs[:, :8], inputs[:, 8].long())
        return model(x.contiguous(), labels)["loss"]  # on some processors strides change the last bit of a product


def as_tuple(rows):
    return torch.stack([row["x"] for row in rows]), torch.tensor([row["labels"] for row in rows])


def as_tensor(rows):
    x, labels = as_tuple(rows)
    return torch.cat([x, labels[:, None].float()], 1)


@pytest.mark.parametrize("collate", [as_tuple, lambda rows: list(as_tuple(rows)), as_tensor])
def test_batches_without_names_train_where_a_subclass_takes_them(make_args, collate):
    trained = []
    for kind, collator in ((OnTuples, collate), (Trainer, None)):
        torch.manual_seed(0)
        trainer = kind(toy.Classifier(), make_args(), data_collator=collator, train_dataset=toy.rows())
        trainer.train()
        trained.append(trainer.model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_such_batches_are_named_where_nobody_takes_them(make_args):
    trainer = Trainer(toy.Classifier(), make_args(), data_collator=as_tuple, train_dataset=toy.rows())
    with pytest.raises(DataError, match=r"made a batch that is a tuple, but the model needs a mapping.*\n\nHint"):
        trainer.train()
    trainer = OnTuples(
        toy.Classifier(), make_args(), data_collator=as_tuple, train_dataset=toy.rows(), eval_dataset=toy.rows(4)
    )
    with pytest.raises(DataError, match="a tuple, but `prediction_step` needs a mapping"):
        trainer.evaluate()


def test_an_override_that_returns_nothing_is_named():
    with pytest.raises(OverrideError, match="`get_train_dataloader` returned None"):
        check_iterable("get_train_dataloader", None, "a loader")
    assert issubclass(OverrideError, TypeError)


class Stops(toy.Table):
    def __getitem__(self, index):
        return next(iter(())) if index == 20 else super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_iteration_in_the_data_ends_nothing_in_silence(make_args, workers):
    args = make_args(dataloader_num_workers=workers)
    with pytest.raises(DataError, match=r"raised StopIteration.*the rest"):
        Trainer(toy.Classifier(), args, train_dataset=Stops(toy.rows())).train()
    with pytest.raises(DataError, match="raised StopIteration"):
        Trainer(toy.Classifier(), args, eval_dataset=Stops(toy.rows())).evaluate()


def test_a_stream_ends_by_itself(make_args):
    class Own(toy.Stream):
        def __iter__(self):
            return self.pull()

        def pull(self):
            yield from self.samples

    args = make_args(max_steps=4)
    assert Trainer(toy.Classifier(), args, train_dataset=Own(toy.rows(12))).train().global_step == 4


def test_a_length_that_was_promised_is_missed(make_args, caplog):
    class Short(toy.SizedStream):
        def __iter__(self):
            return iter(self.samples[:10])

    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=Short(toy.rows(24)))
    with caplog.at_level("WARNING", logger="hf_compat"):
        assert trainer.train().global_step == 6
    assert caplog.text.count("6 micro-batches (24 samples) an epoch, and this one had 3") == 1


def test_losses_that_are_none(make_args):
    class Detached(toy.Classifier):
        def forward(self, x, labels=None):
            out = super().forward(x, labels)
            return {**out, "loss": out["loss"].detach()}

    with pytest.raises(LossError, match="The loss does not require grad"):
        Trainer(Detached(), make_args(), train_dataset=toy.rows()).train()


def test_losses_that_are_not_finite_stand_in_the_summary(make_args, caplog):
    trainer = Trainer(toy.NanAt(), make_args(), train_dataset=toy.rows())
    with caplog.at_level("WARNING", logger="hf_compat"):
        metrics = trainer.train().metrics
    assert metrics["nonfinite_steps"] == 3 and "The loss of 3 updates was not finite" in caplog.text
    assert "nonfinite_steps" not in Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows()).train().metrics


def test_old_overrides_of_saving_hand_the_metrics_on(make_args, tmp_path):
    class Old(Trainer):
        def _save_checkpoint(self, model, trial, metrics=None):
            super()._save_checkpoint(model, trial, metrics=metrics)

    args = make_args(save_strategy="steps", save_steps=2, max_steps=2)
    Old(toy.Classifier(), args, train_dataset=toy.rows()).train()
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").is_file()


class Ends:
    """Samples, of which the third raises what looks like the end of the data."""

    def __len__(self):
        return 4

    def __getitem__(self, place):
        if place == 2:
            raise StopIteration
        return place


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def stopping(samples):
    raise StopIteration


@pytest.mark.parametrize(
    ("data", "options", "is_the_users"),
    [
        (Ends(), {"batch_size": 2}, True),
        (Ends(), {"batch_size": None}, True),
        (list(range(3)), {"batch_size": 2, "collate_fn": stopping}, True),
        (Streamed(), {"batch_size": 2, "collate_fn": stopping}, True),
        (Streamed(), {"batch_size": 2}, False),
        (Streamed(), {"batch_size": None}, False),
        (list(range(3)), {"batch_size": 2}, False),
    ],
)
def test_a_stop_of_the_users_is_no_end_of_the_data(data, options, is_the_users):
    loader = DataLoader(data, **options)
    batches = iter(loader)
    with pytest.raises(StopIteration) as raised:
        for _ in range(10):
            next(batches)
    is_map_style, auto_collates = not isinstance(data, IterableDataset), options["batch_size"] is not None
    found = is_raised_by_user_code(raised.value, is_map_style, auto_collates)
    assert found is is_the_users
