"""The walker of nested data against Accelerate's and transformers', and what neither of theirs knows."""

from collections import OrderedDict, UserDict, defaultdict
from typing import NamedTuple

import pytest
import torch
from accelerate.utils.operations import recursively_apply
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_compat.engine.windows import as_plain
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
