"""Collation against transformers' own."""

import dataclasses
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from helpers.parity.compare import same
from hf_compat.data import collators
from hf_compat.data.collators import PaddingCollator, RemoveColumnsCollator, default_data_collator
from hf_compat.errors import DataError, MissingPackage


class Kind(dict):
    """A dict of another kind."""


@dataclasses.dataclass
class Row:
    x: list
    label: int


FEATURES = {
    "label": [{"x": [1, 2], "label": 1}, {"x": [3, 4], "label": 0}],
    "label of floats": [{"x": [1.5], "label": 0.5}, {"x": [3.0], "label": 2.0}],
    "label ids": [{"x": [1], "label_ids": [1, 2]}, {"x": [3], "label_ids": [3, 4]}],
    "tensors": [{"x": torch.ones(2), "label": torch.tensor(1)}, {"x": torch.zeros(2), "label": torch.tensor(0)}],
    "label ids as tensors": [{"label_ids": torch.tensor([1, 2])}, {"label_ids": torch.tensor([3, 4])}],
    "arrays": [{"x": np.ones(2, np.float32)}, {"x": np.zeros(2, np.float32)}],
    "strings and None": [{"x": 1, "name": "a", "y": None}, {"x": 2, "name": "b", "y": None}],
    "objects": [Row([1, 2], 1), Row([3, 4], 0)],
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_batches_are_transformers(features):
    ours, theirs = default_data_collator(features), transformers.default_data_collator(features)
    assert same(ours, theirs) and {k: v.dtype for k, v in ours.items()} == {k: v.dtype for k, v in theirs.items()}


VALUES = (
    *(3, 2.5, True, [1, 2], [1.0, 2.0], (1, 2), [[1, 2], [3, 4]], [np.int64(1)], None, "a"),
    *(np.int64(3), np.int32(3), np.float32(2.5), np.bool_(True), np.array(3), np.array(2.5), np.array([1, 2])),
    *(torch.tensor(3), torch.tensor(1.5), torch.tensor([1, 2])),
    *(torch.tensor(3, dtype=torch.int32), torch.tensor(1.5, dtype=torch.float64)),
)


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays")  # torch's, on either side
@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("key", ["label", "label_ids", "labels", "x"])
def test_every_value_becomes_what_it_does_there(key, kind):
    compared = 0
    for value in VALUES:
        features = [{key: value, "other": [0, 1]}] * 2
        try:
            theirs = transformers.default_data_collator([dict(row) for row in features], return_tensors=kind)
        except (TypeError, IndexError, RuntimeError, ValueError):
            continue  # what fails there may work here
        ours = default_data_collator(features, return_tensors=kind)
        assert list(ours) == list(theirs), value
        for name, array in theirs.items():
            assert type(ours[name]) is type(array) and ours[name].dtype == array.dtype, (value, name)
            assert ours[name].tolist() == array.tolist(), (value, name)
        compared += 1
    assert compared >= 9


def test_arrays_on_demand_and_nothing_else():
    assert type(default_data_collator([{"x": 1}], "np")["x"]) is np.ndarray
    with pytest.raises(ValueError, match="'tf'"):
        default_data_collator([{"x": 1}], "tf")


def test_columns_that_the_model_does_not_take_are_dropped():
    collate = RemoveColumnsCollator(lambda rows: rows, ["x"], None, "Model", "Training")
    assert collate([{"x": 1, "y": 2}, (3,)]) == [{"x": 1}, (3,)]
    with pytest.raises(DataError, match=r"Training data set match what `Model.forward` takes \(x\).*\[y\]"):
        collate([{"y": 2}])


def test_dropped_columns_are_logged_once(caplog):
    caplog.set_level("INFO", "hf_compat")
    collate = RemoveColumnsCollator(lambda rows: rows, ["x"], model_name="Model", description="training")
    for _ in range(2):
        collate([{"x": 1, "y": 2, "z": 3}] * 2)
    (told,) = caplog.messages
    assert "in the training set" in told and "`Model.forward` and have been ignored: y, z." in told


def test_arrays_without_transformers_name_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.data.data_collator", None)
    with pytest.raises(MissingPackage, match=r"return_tensors='np'(.|\n)*pip install 'transformers>="):
        default_data_collator([{"label": 1}], return_tensors="np")


@pytest.mark.parametrize(
    ("kept", "features", "result", "dropped"),
    [
        (["x"], [{"x": 1, "y": 2}], [{"x": 1}], ("y",)),
        (["x"], [{"x": 1}, {"x": 1, "y": 2}, {"x": 1, "z": 2}], [{"x": 1}] * 3, ("y",)),
        (["x"], [{"x": 1, "z": 2, "y": 3}], [{"x": 1}], ("y", "z")),
        (["x", "y"], [{"x": 1}], [{"x": 1}], ()),
        (["x"], [{}], [{}], ()),
        (["x"], [Kind(x=1, y=2)], [{"x": 1}], ("y",)),
        (["x"], [Kind(x=1)], [{"x": 1}], ()),
        (["x"], [(1, 2)], [(1, 2)], ()),
    ],
)
@pytest.mark.parametrize("logs", [False, True])
def test_what_is_dropped_is_kept_in_mind(kept, features, result, dropped, logs, caplog):
    caplog.set_level("INFO", "hf_compat")
    collate = RemoveColumnsCollator(lambda rows: rows, kept, **({} if logs else {"logger": None}))
    before = [dict(one) if isinstance(one, dict) else one for one in features]
    found = collate(features)
    assert found == result and collate.dropped == dropped and features == before
    assert all(one is not other for one, other in zip(found, features, strict=True) if isinstance(other, dict))
    assert len(caplog.messages) == (logs and bool(dropped)) and collate.message_logged is (logs and bool(dropped))


class Pads:
    """A tokenizer that pads nothing, and tells what it was asked for."""

    def __init__(self, warns, fails=None):
        self.told, self.fails = [], fails
        if warns:
            self.deprecation_warnings = {}

    def pad(self, features, **options):
        self.told.append(options)
        if self.fails:
            raise self.fails
        return {name: [row[name] for row in features] for name in features[0]}


@pytest.mark.parametrize("warns", [False, True])
@pytest.mark.parametrize(
    ("row", "batch"),
    [
        ({"x": 1, "label": 2}, {"x": [1], "labels": [2]}),
        ({"x": 1, "label_ids": 2}, {"x": [1], "labels": [2]}),
        ({"x": 1, "label": 2, "label_ids": 3}, {"x": [1], "labels": [3]}),
        ({"x": 1, "labels": 2}, {"x": [1], "labels": [2]}),
        ({"x": 1}, {"x": [1]}),
    ],
)
def test_a_tokenizer_pads_and_labels_are_renamed(warns, row, batch):
    ours, theirs = Pads(warns), Pads(warns)
    assert PaddingCollator(ours)([row]) == batch == transformers.DataCollatorWithPadding(theirs)([dict(row)])
    assert ours.told == [{"padding": True, "return_tensors": "pt"}]
    assert getattr(ours, "deprecation_warnings", None) == ({"Asking-to-pad-a-fast-tokenizer": True} if warns else None)


@pytest.mark.parametrize(("row", "error"), [({"x": 1}, KeyError), (3, DataError)])
def test_rows_that_cannot_be_padded_are_named(row, error):
    with pytest.raises(error):
        PaddingCollator(Pads(False, KeyError("input_ids")))([row])


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": 1}, None),
        ({}, None),
        ({"x": 1, 2: 3}, "with the key 2"),
        ({None: 3}, "with the key None"),
        (None, "that is None"),
        ("text", "that is str ('text')"),
        (3, "that is int (3)"),
        (torch.zeros(2), "that is Tensor"),
        (np.zeros(2), "that is ndarray"),
        ([1], "that is a list"),
        ((1,), "that is a tuple"),
    ],
)
def test_a_batch_without_names_is_named(batch, said):
    if said is None:
        assert collators.raise_for_bad_batch(batch, "the model") is None
    else:
        with pytest.raises(DataError, match=re.escape(f"The collator made a batch {said}")):
            collators.raise_for_bad_batch(batch, "the model")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"x": 1}, {"x": 1}], None),
        ([{"x": 1}, {"y": 1}], "sample 1 of 2 lacks 'y', which others have"),
        ([{"x": 1}, {"x": 1, "y": 2}, {}], "sample 1 of 3 lacks 'y', which others have"),
        ([{"x": 1, "y": 2}, {"x": 1}], "sample 2 of 2 lacks 'y', which others have"),
        ([{"x": 1}, {"x": "a"}], "'x' is a number in one sample and a str in another"),
        ([{"x": 1}, {"x": None}], "'x' is None in one sample and a number in another"),
        ([{"x": 1}, {"x": np.float32(2)}], None),
        ([{"x": True}, {"x": 2.0}], None),
        ([{"x": [1]}, {"x": [1, 2]}], "'x' is of shape (1,) in one sample and of shape (2,) in another"),
        ([{"x": [1]}, {"x": [[1], [1, 2]]}], "'x' is of shape (1,) in one sample and of varying shapes in another"),
        ([{"x": 1}, 3], "sample 2 of 2 is int (3), not a mapping"),
        ([torch.zeros(1)], "sample 1 of 1 is Tensor"),
        ([len], "sample 1 of 1 is"),
        ([Kind], "sample 1 of 1 is"),
        ([SimpleNamespace(x=1), SimpleNamespace(x=2)], None),
        ([SimpleNamespace(x=1), SimpleNamespace()], "sample 2 of 2 lacks 'x'"),
    ],
)
def test_samples_that_cannot_be_joined_are_named(rows, said):
    if said is None:
        assert collators.raise_for_bad_samples(rows, ValueError("torch's")) is None
    else:
        with pytest.raises(DataError, match=re.escape(said)):
            collators.raise_for_bad_samples(rows, ValueError("torch's"))
