"""What an evaluation is told to have left out, by its facts alone; each bound is met from both sides."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from helpers.toy import Stream, rows
from hf_compat.engine import evaluation_contract as contract
from hf_compat.engine.evaluation_contract import EvaluationFacts, RowOrder, dropped_samples, expected_rows


def forward(x, attention_mask=None, target=None): ...


WHOLE = EvaluationFacts(
    is_prediction=False, batches=3, expected_batches=3, samples=10, expected_rows=10, rows_read=10,
    rows=10, label_rows=10, dropped=0, drops_by_argument=False, unsampled=0, way_to_order=None, names=("x", "labels"),
    removed=(), label_names=("labels",), forward=forward, has_loss=True,
    weighs_batches_alike=False, has_labels=True, has_own_step=False,
    has_metrics=True, called_metrics=True, loss_only=False,
)  # fmt: skip
NO_METRICS = {"called_metrics": False}


@pytest.fixture
def told(monkeypatch):
    said = []
    monkeypatch.setattr(contract, "warn_once", said.append)

    def tell(**changes):
        said.clear()
        contract.tell_of_breaches(dataclasses.replace(WHOLE, **changes))
        return list(said)

    return tell


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"batches": 0, "rows_read": 0}, ["as its loader gives no samples of the evaluation data set"]),
        ({"batches": 0, "samples": 0}, ["as the evaluation data set has no samples"]),
        ({"batches": 0, "samples": None, "is_prediction": True}, ["as the data set to predict has no samples"]),
        ({"batches": 0, "dropped": 10}, ["left out the last 10 samples, as its loader drops"]),
        ({"dropped": 2}, ["the last 2 samples, as its loader drops a short last batch.\n\nHint: make the loader with"]),
        (
            {"dropped": 1, "drops_by_argument": True},
            ["short batches of every loader.\n\nHint: set `trainer.args."],
        ),
        ({"weighs_batches_alike": True}, ["which weigh alike in `eval_loss`"]),
        ({"weighs_batches_alike": True, "is_prediction": True}, []),
        ({"rows_read": 9}, ["has 9 rows of 10 samples, as the collator leaves out 1"]),
        ({"rows_read": 4}, ["has 4 rows of 10 samples"]),
        ({"rows_read": 3, "rows": None, "label_rows": None}, []),
        ({"rows_read": 9, "expected_rows": None}, []),
        ({"label_rows": 9}, ["left out 1 of 10 rows"]),
        ({"label_rows": 4}, ["left out 6 of 10 rows"]),
        ({"label_rows": 3}, []),
        ({"label_rows": None}, []),
        ({"rows": 9}, ["has 9 rows of predictions for 10 samples"]),
        ({"rows": 4}, ["has 4 rows of predictions"]),
        ({"rows": 3}, []),
        ({"rows": None}, []),
        ({"expected_batches": 4}, ["got 3 batches, and the length of its loader says 4"]),
        ({"expected_batches": 2}, []),
        ({"expected_batches": None}, []),
        ({"unsampled": 2}, []),
        ({"unsampled": 2, "is_prediction": True}, ["left out 2 samples, as its sampler"]),
        (
            {"way_to_order": "sort", "is_prediction": True},
            ["which may not be the data set's"],
        ),
        ({"is_prediction": True, "has_loss": False, **NO_METRICS}, []),
        ({"has_loss": False}, ["This evaluation computed no loss, as `prediction_step` returned no predictions"]),
        ({"has_loss": False, "has_own_step": True}, []),
        (NO_METRICS, ["did not call `compute_metrics`, as `prediction_step` returned"]),
        ({"has_metrics": False, **NO_METRICS}, []),
        ({"loss_only": True, **NO_METRICS}, ["`prediction_loss_only=True` keeps no predictions"]),
        ({"loss_only": True, "has_loss": False}, ["computed no loss"]),
        ({"has_loss": False, **NO_METRICS}, ["did not call `compute_metrics` and computed no loss"]),
    ],
)
def test_what_is_told(told, changes, expected):
    found = told(**changes)
    assert len(found) == len(expected), found
    assert all(part in text for part, text in zip(expected, found, strict=True)), found


@pytest.mark.parametrize(
    ("changes", "reason", "way_out"),
    [
        ({"has_own_step": True}, "returned no predictions or no labels", "return loss, predictions and labels from"),
        ({"has_labels": False, "names": ("x",)}, "the batches have `x`, and `label_names` expects `labels`",
         "give the data a column 'labels', or evaluate without"),
        ({"has_labels": False, "names": (), "label_names": ("a", "b")}, "no names, and `label_names` expects `a`, `b`",
         "give the data a column 'a'"),
        ({"has_labels": False, "names": ("x", "attention_mask", "target")}, "`label_names` expects `labels`",
         "set `label_names=['target']`"),
        ({"has_labels": False, "names": ("x", "labels"), "label_names": ("labels", "b")}, "`label_names` expects `b`",
         "set `label_names=['labels']`"),
        ({"has_labels": False, "names": ("x",), "removed": ("y", "z")}, "have `x`",
         "the name 'labels'. `remove_unused_columns=True` removes `y`, `z`, as"),
        ({"has_labels": False, "names": ("x",), "label_names": ()}, "`label_names` is empty, and no parameter",
         "give the data a column 'labels'"),
    ],
)  # fmt: skip
def test_why_there_are_no_metrics(told, changes, reason, way_out):
    [text] = told(**NO_METRICS, **changes)
    fact, _, hint = text.partition("\n\nHint: ")
    assert reason in fact and way_out in hint


DATA = rows(7)


def loader(sampler=None, size=2, **options):
    return DataLoader(DATA, batch_size=size, sampler=sampler, **options)


@pytest.mark.parametrize(
    ("made", "dropped", "expected"),
    [
        (loader(), 0, 7),
        (loader(drop_last=True), 1, 6),
        (loader(drop_last=True, size=7), 0, 7),
        (loader(SubsetRandomSampler([4, 2, 0]), drop_last=True), 1, 2),
        (DataLoader(Stream(DATA), batch_size=2, drop_last=True), 0, None),
        (loader(size=None), 0, None),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), 0, None),
        ([1, 2], 0, None),
    ],
)
def test_samples_that_a_loader_drops_and_rows_that_it_gives(made, dropped, expected):
    assert dropped_samples(made) == dropped and expected_rows(made) == expected


@pytest.mark.parametrize(
    ("sampler", "order", "left_out"),
    [
        (SubsetRandomSampler([4, 2, 0]), None, 4),
        ([4, 2, 0, 1, 3, 5, 6], [2, 3, 1, 4, 0, 5, 6], 0),
        ([1, 1, 0, 2, 3, 4, 5], None, 0),
        (["a", "b", "c", "d", "e", "f", "g"], None, 0),
    ],
)
def test_rows_are_put_into_the_order_of_the_data_set(sampler, order, left_out):
    made = loader(sampler)
    noted = RowOrder(made)
    assert noted.is_other
    list(made.batch_sampler)
    results = {"a": torch.arange(7.0), "b": (np.arange(7),)} if left_out == 0 else torch.arange(3.0)
    ordered, way_out = noted.undone(results)
    noted.end()
    assert made.batch_sampler.sampler is sampler
    if left_out == 0:
        assert noted.left_out(results) == 0
        assert (way_out is None) == (order is not None)
        assert order is None or (ordered["a"].tolist() == order and ordered["b"][0].tolist() == order)
    else:
        assert noted.left_out(results) == left_out and noted.left_out(results[:1]) == 6
        assert way_out is None and len(ordered) == 3


def test_what_cannot_be_put_in_order():
    noted = RowOrder(loader(RandomSampler(DATA)))
    assert noted.undone(None) == (None, None)
    parts = [torch.arange(2)]
    assert noted.undone(parts) == (parts, "set `eval_do_concat_batches=True`, so that rows can be put in order")
    uneven = (torch.arange(2), torch.arange(3))
    assert noted.undone(uneven)[1] == "use a `SequentialSampler`, or a sampler of single samples"
    for in_order in (loader(), loader(SequentialSampler(DATA)), [1], loader(size=None)):
        assert not RowOrder(in_order).is_other


def test_a_loader_that_drops_gives_fewer_rows_than_its_sampler():
    made = loader([4, 2, 0, 1, 3, 5, 6], drop_last=True)
    noted = RowOrder(made)
    list(made.batch_sampler)
    assert (
        dropped_samples(made, 9) == 1
        and noted.places(6) == [2, 3, 1, 4, 0, 5]
        and noted.places(7) == [2, 3, 1, 4, 0, 5, 6]
        and noted.places(8) is None
    )


def test_a_batch_sampler_of_ones_own_is_not_looked_into():
    class Own(BatchSampler):
        def __iter__(self):
            return iter([[0, 1]])

    made = DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 2, False))
    noted = RowOrder(made)
    assert noted.is_other and expected_rows(made) is None
    noted.end()
    shared = DataLoader(DATA, batch_sampler=[[0]])
    shared.__dict__["batch_sampler"] = SimpleNamespace(batch_sampler=BatchSampler([1, 0], 2, False))
    assert expected_rows(shared) == 2


@pytest.mark.parametrize(
    ("results", "same", "most"),
    [
        (torch.zeros(3, 2), 3, 3),
        (np.zeros(3), 3, 3),
        (torch.tensor(1.0), None, None),
        ((torch.zeros(3), np.zeros(3)), 3, 3),
        ((torch.zeros(3), np.zeros(2)), None, 3),
        ({"a": torch.zeros(2), "b": (torch.zeros(2),)}, 2, 2),
        ({"a": torch.zeros(2), "b": torch.tensor(1)}, None, 2),
        ([torch.zeros(2), torch.zeros(4)], None, 4),
        ("text", None, None),
        ((), None, None),
    ],
)
def test_rows_of_results(results, same, most):
    assert (contract.rows_of(results), contract.most_rows(results)) == (same, most)
