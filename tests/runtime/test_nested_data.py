"""Nested batches and outputs, including named tuples: collated, moved, cut, joined, predicted and gathered."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate
from transformers import trainer_pt_utils

from hf_compat import Trainer
from hf_compat.data.order import RankSlice, dispatched
from hf_compat.errors import DataError
from hf_compat.runtime.nested import (
    concatenate,
    find_batch_size,
    join_batches,
    move_to_device,
    nested_numpify,
    slice_nested,
)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class PairModel(nn.Module):
    """Accepts a named tuple, and returns one among its logits."""

    def __init__(self):
        super().__init__()
        self.outer = nn.Linear(4, 2)

    def forward(self, pair, labels=None):
        logits = self.outer(pair.left + pair.right)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": Pair(logits, pair.right)}


def pairs(count):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, 2, 4, generator=generator)
    return [{"pair": Pair(*row), "labels": index % 2} for index, row in enumerate(rows)]


def test_a_named_tuple_trains_and_is_predicted(make_args):
    data = pairs(10)
    trainer = Trainer(
        PairModel(),
        make_args(max_steps=2, per_device_eval_batch_size=4, remove_unused_columns=False),
        train_dataset=data,
        data_collator=default_collate,
        compute_metrics=lambda prediction: {"rows": len(prediction.predictions.right)},
    )
    trainer.train()
    output = trainer.predict(data)
    assert type(output.predictions) is Pair and output.metrics["test_rows"] == 10
    assert np.array_equal(output.predictions.right, torch.stack([row["pair"].right for row in data]).numpy())


@pytest.mark.parametrize("limit", [0, 2, 9])
def test_a_cut_keeps_scalars_and_other_leaves(limit):
    cut = slice_nested({"pair": Pair(torch.arange(3), torch.tensor(7)), "name": "x"}, 0, limit)
    assert cut["pair"].left.tolist() == [0, 1, 2][:limit] and cut["pair"].right == 7 and cut["name"] == "x"


def test_tensors_are_moved_and_nothing_else():
    moved = move_to_device({"pair": Pair(torch.ones(1), "text"), "array": np.ones(1)}, torch.device("meta"))
    assert moved["pair"].left.is_meta and moved["pair"].right == "text" and type(moved["array"]) is np.ndarray


NESTED = [
    {"a": [torch.tensor(1), torch.ones(3, 2)]},
    {"a": "text", "b": np.ones((4, 1))},
    [[], {"a": torch.ones(5)}],
    (),
    torch.tensor(2),
]


@pytest.mark.parametrize("data", NESTED, ids=range(len(NESTED)))
def test_the_batch_size_is_the_one_that_transformers_finds(data):
    assert find_batch_size(data) == trainer_pt_utils.find_batch_size(data)


def test_joining_pads_as_transformers_does_and_keeps_named_tuples():
    batches = [torch.full((2, 3), 1.0), torch.full((1, 5), 2.0), torch.full((2, 1), 3.0)]
    theirs = batches[0]
    for batch in batches[1:]:
        theirs = trainer_pt_utils.nested_concat(theirs, batch)
    ours = join_batches([Pair(batch, [batch]) for batch in batches])
    assert torch.equal(ours.left, theirs) and torch.equal(ours.right[0], theirs)
    arrays = join_batches([nested_numpify(Pair(batch, batch)) for batch in batches])
    assert np.array_equal(arrays.right, theirs.numpy())
    with pytest.raises(TypeError, match="predictions of type str"):
        join_batches(["a", "b"])


def test_batches_read_for_all_processes_keep_named_tuples_and_lists_of_values():
    batches = [{"pair": Pair(torch.full((2,), i), torch.tensor(i)), "names": [f"{i}a", f"{i}b"]} for i in range(2)]
    joined = concatenate(batches)
    assert joined["pair"].left.tolist() == [0, 0, 1, 1] and joined["pair"].right == 0
    assert joined["names"] == ["0a", "0b", "1a", "1b"]
    ((first, samples, is_last),) = dispatched(batches, RankSlice(rank=0, world_size=2), drop_last=False)
    assert first["pair"].left.tolist() == [0, 0] and samples == 4 and is_last
    with pytest.raises(DataError, match=r"different shapes \[\(1, 2\), \(1, 3\)\]"):
        concatenate([Pair(torch.ones(1, 2), torch.ones(1)), Pair(torch.ones(1, 3), torch.ones(1))])
