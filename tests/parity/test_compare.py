"""What the parity tests compare with sees type, dtype, shape and the last bit."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from helpers.parity.compare import first_difference, same

ONE = torch.ones(2, 3)
LAST_BIT = torch.tensor(1.0 + 2**-52, dtype=torch.float64)  # which float32 does not hold
DIFFERENT = {
    "dtype": (ONE, ONE.double()),
    "narrow dtype": (ONE, ONE.bfloat16()),
    "shape": (ONE, ONE.reshape(3, 2)),
    "no dimension": (torch.tensor(1.0), torch.tensor([1.0])),
    "the last bit of float64": (torch.tensor(1.0, dtype=torch.float64), LAST_BIT),
    "a big integer": (torch.tensor(2**60), torch.tensor(2**60 + 1)),
    "the sign of zero": (torch.tensor(0.0), torch.tensor(-0.0)),
    "dtype of an array": (np.ones(2, np.float32), np.ones(2, np.float64)),
    "ragged arrays": (np.array([[1], [2, 3]], object), np.array([[1], [2, 4]], object)),
    "integer and float": (1, 1.0),
    "truth value and integer": (True, 1),
    "numpy's and Python's float": (np.float64(1.0), 1.0),
    "list and tuple": ([1], (1,)),
    "keys": ({"a": 1}, {"a": 1, "b": 2}),
    "lengths": ([1], [1, 2]),
    "nested": ({"a": [ONE]}, {"a": [ONE + 1]}),
    "tensor and array": (ONE, ONE.numpy()),
}
Theirs, Ours = namedtuple("Theirs", "predictions"), namedtuple("Ours", "predictions")
ALIKE = {
    "not a number": (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])),
    "not a number in Python": (float("nan"), float("nan")),
    "strides": (ONE, torch.ones(3, 2).T),
    "ordered": (OrderedDict(a=ONE), {"a": ONE.clone()}),
    "named tuples of two packages": (Theirs(ONE), Ours(ONE.clone())),
    "ragged arrays": (np.array([[1], [2, 3]], object), np.array([[1], [2, 3]], object)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_differences_are_seen_and_named(name):
    left, right = DIFFERENT[name]
    assert not same(left, right) and not same(right, left)
    assert "transformers" in first_difference({"part": left}, {"part": right}) or name == "lengths"


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_alike(name):
    left, right = ALIKE[name]
    assert same(left, right) and same(right, left)
