"""Parts of parameters that DeepSpeed's `tensor_parallel` splits: cut out of the whole, and joined again."""

from __future__ import annotations

import pytest
import torch

from hf_compat.checkpoint import tensor_splits
from hf_compat.checkpoint.tensor_splits import TensorSplits
from hf_compat.errors import CheckpointError


def piece(shape, source, dest, *locations):
    return {"shape": shape, "source": source, "dest": dest, "locations": list(locations)}


# A 4 × 3 matrix by rows, and by columns of which both processes have the middle one
ROWS = {
    "logical_shape": [4, 3],
    "ranks": {
        0: {"shard_shape": [1, 3], "pieces": [piece([1, 3], (0, [3, 1]), (0, [3, 1]), 0)]},
        1: {"shard_shape": [3, 3], "pieces": [piece([3, 3], (3, [3, 1]), (0, [3, 1]), 1)]},
    },
}
COLUMNS = {
    "logical_shape": [4, 3],
    "ranks": {
        0: {"shard_shape": [4, 2], "pieces": [piece([4, 1], (0, [3, 1]), (0, [2, 1]), 0),
                                              piece([4, 1], (1, [3, 1]), (1, [2, 1]), 1, 0)]},
        1: {"shard_shape": [4, 2], "pieces": [piece([4, 1], (1, [3, 1]), (0, [2, 1]), 1, 0),
                                              piece([4, 1], (2, [3, 1]), (1, [2, 1]), 1)]},
    },
}  # fmt: skip
SPLITS = TensorSplits({"affine_map": {"params": {r"^a\.rows$": ROWS, "columns": COLUMNS}}})
WHOLE = torch.arange(12.0).view(4, 3)


def test_parts_are_cut_out_and_joined_bit_for_bit():
    assert bool(SPLITS) and SPLITS.ranks == 2 and not TensorSplits(None)
    assert torch.equal(SPLITS.part("a.rows", WHOLE, 1), WHOLE[1:])
    assert torch.equal(SPLITS.part("columns", WHOLE, 0), WHOLE[:, :2])
    assert torch.equal(SPLITS.part("columns", WHOLE.t().contiguous().t(), 1), WHOLE[:, 1:])
    for name in ("a.rows", "columns"):
        parts = [SPLITS.part(name, WHOLE, rank) for rank in range(2)]
        if name == "columns":
            parts[1][:, 0] = -1  # the first process's copy counts
        loaded = []
        loads = [lambda part=part, loaded=loaded: loaded.append(part) or part for part in parts]
        assert torch.equal(SPLITS.joined(name, loads), WHOLE) and len(loaded) == 2, "each is read once"
        assert SPLITS.whole_shape(name, torch.Size([1])) == (4, 3) and SPLITS.whole_size(name, 1) == 12


def test_what_is_not_split_stays_as_it_is():
    own = torch.ones(2)
    assert SPLITS.part("other", own, 1) is own and SPLITS.joined("other", [lambda: own]) is own
    assert SPLITS.whole_shape("other", own.shape) == (2,) and SPLITS.whole_size("other", 2) == 2


def test_a_part_of_another_shape_or_outside_is_an_error():
    with pytest.raises(CheckpointError, match=r"columns has the shape \(4, 3\) on a process, not \[4, 2\]"):
        SPLITS.joined("columns", [lambda: WHOLE, lambda: WHOLE])
    far = {**ROWS, "ranks": {0: {"shard_shape": [1, 3], "pieces": [piece([1, 3], (10, [3, 1]), (0, [3, 1]), 0)]}}}
    with pytest.raises(CheckpointError, match="lies outside"):
        TensorSplits({"affine_map": {"params": {"far": far}}}).part("far", WHOLE, 0)
    edge = {**ROWS, "ranks": {0: {"shard_shape": [1, 3], "pieces": [piece([1, 3], (9, [3, 1]), (0, [3, 1]), 0)]}}}
    found = TensorSplits({"affine_map": {"params": {"edge": edge}}}).part("edge", WHOLE, 0)
    assert torch.equal(found, WHOLE[3:])


@pytest.mark.parametrize(
    ("shape", "source", "size", "is_within"),
    [
        ([2], (0, [1]), 2, True),
        ([2], (1, [1]), 2, False),
        ([2], (-1, [1]), 2, False),
        ([1], (0, [1]), 1, True),
        ([2], (1, [-1]), 2, False),
        ([2], (0, [3]), 4, True),
        ([2], (0, [3]), 3, False),
        ([2, 2], (0, [2, 1]), 4, True),
        ([2, 2], (0, [2, 1]), 3, False),
        ([0], (5, [1]), 2, True),
        ([0], (0, [1]), 0, True),
        ([1], (0, [1]), 0, False),
    ],
)
def test_a_piece_lies_within_the_whole(shape, source, size, is_within):
    own = {"logical_shape": [size], "ranks": {0: {"shard_shape": shape, "pieces": []}}}
    strides = [2, 1] if len(shape) == 2 else [1]
    own["ranks"][0]["pieces"] = [piece(shape, source, (0, strides), 0)]
    whole = torch.arange(float(size))
    splits = TensorSplits({"affine_map": {"params": {"it": own}}})
    if is_within:
        assert torch.equal(splits.part("it", whole, 0), whole.as_strided(shape, source[1], source[0]))
    else:
        with pytest.raises(CheckpointError, match="lies outside"):
            splits.part("it", whole, 0)


@pytest.mark.parametrize("name", ["a.rows", "columns", "other"])
def test_each_process_gathers_the_whole(name, monkeypatch):
    parts = [SPLITS.part(name, WHOLE, rank) for rank in range(2)]
    if name == "columns":
        parts[1][:, 0] = -1  # the first process's copy counts
    sent, asked = [], []
    monkeypatch.setattr(tensor_splits.distributed, "all_reduce", lambda own, group: sent.append((own.clone(), group)))
    for rank in range(2):
        SPLITS.gathered(name, parts[rank], rank, "group")
    assert [group for _, group in sent] == ["group"] * (0 if name == "other" else 2)

    def add(own, group):
        asked.append(own.dtype)
        own.copy_(sent[0][0] + sent[1][0])

    monkeypatch.setattr(tensor_splits.distributed, "all_reduce", add)
    assert all(torch.equal(SPLITS.gathered(name, parts[rank], rank, "group"), WHOLE) for rank in range(2))
    assert set(asked) <= {torch.uint8}
