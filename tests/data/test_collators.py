"""Collation against transformers' own."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
import transformers

from helpers.parity.compare import same
from hf_compat.data.collators import RemoveColumnsCollator, default_data_collator
from hf_compat.errors import DataError, MissingPackage


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
