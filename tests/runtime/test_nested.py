"""The walker of nested data against Accelerate's and transformers', and what neither of theirs knows."""

import functools
from collections import OrderedDict, UserDict, defaultdict
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from accelerate.utils.operations import recursively_apply
from torch import nn
from transformers import BatchEncoding, trainer_pt_utils
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_compat.engine.windows import as_plain
from hf_compat.errors import DataError
from hf_compat.runtime import nested
from hf_compat.runtime.device_copies import frozen_copy
from hf_compat.runtime.nested import join_nested, leaves, map_nested


class Pair(NamedTuple):
    left: object
    right: object


def ones(*shape):
    return torch.ones(*shape)


CONTAINERS = {
    "dict": lambda: {"a": ones(2), "b": {"c": ones(1), "d": "text"}},
    "OrderedDict": lambda: OrderedDict(a=ones(2), b=3),
    "UserDict": lambda: UserDict(a=ones(2)),
    "BatchEncoding": lambda: BatchEncoding({"input_ids": ones(2, 3)}),
    "ModelOutput": lambda: SequenceClassifierOutput(loss=ones(1), logits=ones(2, 3)),
    "list": lambda: [ones(2), (ones(1), None)],
    "named tuple": lambda: Pair(ones(2), [Pair(ones(1), 5)]),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_the_structure_is_the_one_that_accelerate_gives(make):
    ours, theirs = map_nested(torch.neg, make()), recursively_apply(torch.neg, make())
    assert type(ours) is type(theirs) and repr(ours) == repr(theirs)
    assert repr(ours) != repr(make())


def test_a_defaultdict_keeps_its_default():
    counted = map_nested(torch.neg, defaultdict(list, a=ones(1)))
    assert counted["a"].item() == -1 and counted["new"] == []


def test_leaves_come_in_order_and_other_leaves_can_be_replaced():
    data = {"a": Pair(1, [2, 3]), "b": (), "c": 4}
    assert list(leaves(data)) == [1, 2, 3, 4]
    assert map_nested(torch.neg, data, on_other=lambda leaf: leaf + 1) == {"a": Pair(2, [3, 4]), "b": (), "c": 5}


def test_pieces_are_joined_place_by_place_and_have_to_fit():
    pieces = [{"a": Pair(1, [2])}, {"a": Pair(3, [4])}]
    assert join_nested(list, pieces) == {"a": Pair([1, 3], [[2, 4]])}
    with pytest.raises(ValueError):
        join_nested(list, [(1, 2), (3,)])


def test_a_frozen_copy_keeps_named_tuples_and_shared_memory():
    tied = ones(2)
    copied = frozen_copy({"pair": Pair(tied, tied), "list": [1]})
    tied += 1
    assert isinstance(copied["pair"], Pair) and copied["pair"].left is copied["pair"].right
    assert copied["pair"].left.tolist() == [1, 1]


def test_what_checkpoints_hold_of_a_loader_is_plain():
    plain = as_plain(OrderedDict(at=Pair(1, ("a", None)), random=ones(1)))
    assert type(plain) is dict and plain["at"] == [1, ["a", None]]
    assert as_plain({"handle": object()}) is None


BATCHES = {
    "dict": {"a": ones(3, 2), "b": ones(4)},
    "dict of scalars first": {"a": torch.tensor(1.0), "b": ones(4)},
    "texts first": {"a": "text", "b": [ones(4)]},
    "array": {"a": np.ones((5, 2))},
    "array of no dimension": [np.float64(1).reshape(()), ones(2)],
    "BatchEncoding": BatchEncoding({"input_ids": ones(2, 3)}),
    "named tuple": Pair(ones(2), ones(3)),
    "tensor": ones(3),
    "nothing": {"a": 1, "b": []},
    "empty": {},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_the_size_of_a_batch_is_upstreams(batch):
    dimensions = [leaf.ndim for leaf in leaves(batch) if hasattr(leaf, "ndim")]
    if 0 in dimensions:  # upstream raises an IndexError there
        assert nested.find_batch_size(batch) in (4, 2)
    else:
        assert nested.find_batch_size(batch) == trainer_pt_utils.find_batch_size(batch)


@pytest.mark.parametrize(
    "pieces",
    [
        [ones(2), ones(3)],
        [torch.tensor(1.0), torch.tensor(2.0)],
        [ones(2, 3), ones(1, 5), ones(2, 4)],
        [ones(2, 3, 4), ones(1, 2, 4)],
        [(ones(2, 3), [ones(2)]), (ones(1, 4), [ones(1)])],
        [{"a": np.ones((2, 3))}, {"a": np.ones((1, 2))}],
        [np.ones(2), np.ones(1)],
    ],
)
def test_batches_are_joined_as_upstream_joins_them(pieces):
    theirs = functools.reduce(trainer_pt_utils.nested_concat, pieces)
    assert repr(nested.join_batches(pieces)) == repr(theirs)
    with pytest.raises(TypeError, match="predictions of type str cannot be joined"):
        nested.join_batches(["a", "b"])


@pytest.mark.parametrize(
    ("pieces", "joined"),
    [
        ([[1, 2], [3]], [1, 2, 3]),
        ([("a",), ("b",)], ("a", "b")),
        ([[ones(1)], [ones(2)]], [ones(3)]),
        ([[[1], [2]], [[3], [4]]], [[1, 3], [2, 4]]),
        ([[{"a": 1}], [{"a": 2}]], [{"a": 1}]),
        ([[], []], []),
        ([Pair("a", ones(1)), Pair("b", ones(1))], Pair("a", ones(2))),
        ([torch.tensor(1.0), torch.tensor(2.0)], torch.tensor(1.0)),
        ([{"a": "x"}, {"a": "y"}], {"a": "x"}),
    ],
)
def test_batches_of_one_structure_are_concatenated(pieces, joined):
    assert repr(nested.concatenate(pieces)) == repr(joined)
    with pytest.raises(DataError, match=r"different shapes \[\(1, 2\), \(1, 3\)\]"):
        nested.concatenate([ones(1, 2), ones(1, 3)])


def test_a_move_copies_containers_and_keeps_what_is_there():
    tensor, cpu = ones(2), torch.device("cpu")
    plain, deep = {"a": tensor}, {"a": tensor, "b": [tensor, 3]}
    assert nested.move_to_device(deep, None) is deep
    for data in (plain, deep):
        moved = nested.move_to_device(data, cpu)
        assert moved == data and moved is not data and moved["a"] is tensor
    assert nested.move_to_device(deep, cpu)["b"] is not deep["b"]
    for data in (plain, [tensor]):
        assert [one.device.type for one in leaves(nested.move_to_device(data, torch.device("meta"), True))] == ["meta"]
    with pytest.raises(NotImplementedError):
        nested.move_to_device({"a": ones(2).to("meta")}, cpu)
    assert [one.ndim for one in leaves(nested.slice_nested([ones(3), torch.tensor(1.0)], 0, 1))] == [1, 0]
    assert nested.nested_numpify({"a": ones(2).bfloat16(), "b": ones(1)})["a"].dtype == np.float32
    assert not nested.nested_detach(nn.Parameter(ones(1))).requires_grad


@pytest.mark.parametrize(
    ("kinds", "sizes", "copies", "waits"),
    [
        ("cpu cuda cuda", [1, 4, 4], "cpu later later", 1),
        ("cuda cuda cuda", [4, 5, 4], "later cpu later", 1),
        ("cuda xpu mps", [1, 1, 1], "later later cpu", 2),
        ("cpu", [1], "cpu", 0),
    ],
)
def test_few_bytes_are_copied_beside_the_device(monkeypatch, kinds, sizes, copies, waits):
    def tensor(kind, size):
        one = SimpleNamespace(device=torch.device(kind), nbytes=size, cpu=lambda: "cpu")
        one.to, one.detach = (lambda place, non_blocking: "later" if non_blocking else None), (lambda: one)
        return one

    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(nested, "_STAGED", 8)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(current_stream=lambda _: stream))
    assert nested.to_host(map(tensor, kinds.split(), sizes)) == copies.split() and len(waited) == waits
