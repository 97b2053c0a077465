"""Slices over the ranks' pieces; whole folders are in test_convert.py."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hf_compat.checkpoint.zero_reader import _slice_of, find_zero_folder, named_zero_folder
from hf_compat.errors import CheckpointError


@pytest.mark.parametrize("seed", range(20))
def test_a_slice_is_that_of_the_joined_pieces(seed):
    draw = random.Random(seed)
    pieces = [torch.rand(draw.randrange(6)) for _ in range(draw.randrange(1, 5))]
    joined = torch.cat(pieces)
    for offset in range(len(joined) + 1):
        shape = draw.choice([(0,), (1,), (2, 1), (3,), (2, 2)])
        if offset + math.prod(shape) <= len(joined):
            found = _slice_of(pieces, offset, shape)()
            assert torch.equal(found, joined[offset : offset + math.prod(shape)].view(shape))


def test_latest_names_a_folder_within(tmp_path):
    assert named_zero_folder(str(tmp_path)) is None and find_zero_folder(str(tmp_path)) is None
    (tmp_path / "latest").write_text("global_step4\n")
    assert named_zero_folder(str(tmp_path)) == str(tmp_path / "global_step4")
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        named_zero_folder(str(tmp_path))
