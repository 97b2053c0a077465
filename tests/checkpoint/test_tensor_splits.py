"""Parts of parameters that DeepSpeed's `tensor_parallel` splits: cut out of the whole, and joined again."""

from __future__ import annotations

import pytest
import torch

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
        assert torch.equal(SPLITS.joined(name, [lambda part=part: part for part in parts]), WHOLE)
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
