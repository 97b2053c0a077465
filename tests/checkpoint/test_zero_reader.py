"""Slices over the ranks' pieces; whole folders are in test_convert.py."""

from __future__ import annotations

import contextlib
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_compat.checkpoint import zero_reader
from hf_compat.checkpoint.convert import convert
from hf_compat.checkpoint.reading import Contents, read_torch_file
from hf_compat.checkpoint.zero_reader import _BESIDE, MODELS, OPTIMIZERS, named_zero_folder, rank_files, stored_slices
from hf_compat.errors import CheckpointError

ZERO = Path(__file__).with_name("zero")


@pytest.mark.parametrize("seed", range(20))
def test_a_slice_is_that_of_the_joined_pieces(seed):
    draw = random.Random(seed)
    pieces = [torch.rand(draw.randrange(6)) for _ in range(draw.randrange(1, 5))]
    joined = torch.cat(pieces)
    for offset in range(len(joined) + 1):
        shape = draw.choice([(0,), (1,), (2, 1), (3,), (2, 2)])
        if offset + math.prod(shape) <= len(joined):
            found = stored_slices("it", shape, [(pieces, offset, math.prod(shape))]).load()
            assert torch.equal(found, joined[offset : offset + math.prod(shape)].view(shape))


def test_latest_names_a_folder_within(tmp_path):
    contents = Contents(tmp_path)
    assert named_zero_folder(contents) is None and rank_files(contents, "", OPTIMIZERS) == []
    (tmp_path / "latest").write_text("global_step4\n")
    assert named_zero_folder(contents) == "global_step4"


@pytest.mark.parametrize(
    "name", ["../elsewhere", "/tmp", "global_step[2]", "global_step*", "a?", "", ".", "a/b", "a\0b"]
)
def test_latest_names_nothing_elsewhere_and_no_pattern(tmp_path, name):
    (tmp_path / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        named_zero_folder(Contents(tmp_path))


def on_meta(states):
    groups = states["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[:] = [piece.to("meta") for piece in groups]


def shortened(states):
    groups = states["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[:] = [piece[:2].clone() for piece in groups]


def emptied(states):
    states["optimizer_state_dict"]["single_partition_of_fp32_groups"] = []


def no_tensor(states):
    states["optimizer_state_dict"]["single_partition_of_fp32_groups"] = ["text"]


def without_a_state(states):
    del states["optimizer_state_dict"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (on_meta, "without data"),
        (shortened, "numbers where .* are needed"),
        (emptied, "IndexError"),
        (no_tensor, "not a flat tensor"),
        (without_a_state, "KeyError"),
    ],
)
def test_shards_without_data_are_an_error(tmp_path, change, what):
    """A tensor on torch's meta device has a shape and no numbers: written out, it was whatever lay in memory."""
    shutil.copytree(ZERO / "stage2", tmp_path / "zero")
    for path in (tmp_path / "zero").rglob("*_optim_states.pt"):
        states = read_torch_file(str(path), allowed=_BESIDE)
        change(states)
        torch.save(_plain(states), path)
    with pytest.raises(CheckpointError, match=what):
        convert(str(tmp_path / "zero"), str(tmp_path / "hf"))
    assert [path.name for path in tmp_path.iterdir()] == ["zero"]


def test_buffers_that_are_tensors_come_with_the_parameters(tmp_path):
    shutil.copytree(ZERO / "stage2", tmp_path / "zero")
    path = tmp_path / "zero" / "global_step4" / "mp_rank_00_model_states.pt"
    states = _plain(read_torch_file(str(path), allowed=_BESIDE))
    states["buffer_names"] = ["net.mean", "net.shared", "net.gone"]
    states["module"] |= {"net.mean": torch.tensor([1.5, -2.0]), "net.shared": None, "net.other": torch.ones(3)}
    torch.save(states, path)
    convert(str(tmp_path / "zero"), str(tmp_path / "hf"))
    found = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    assert found["net.mean"].tolist() == [1.5, -2.0] and len(found) == 5


def _plain(value):
    """Leave out what only DeepSpeed can read."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if type(value).__name__ == "_Unread" else value


def of_ranks(by_stage3, count, **facts):
    """What two ranks have saved of a parameter of two numbers, a frozen one, a buffer and tied weights."""
    key = "fp32_flat_groups" if by_stage3 else "single_partition_of_fp32_groups"
    frozen = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])] if by_stage3 else [torch.tensor([1.0, 2.0, 3.0])] * 2
    models = [
        {
            "param_shapes": [{"w": torch.Size([2])}],
            "frozen_param_shapes": {"f": torch.Size([3])},
            "frozen_param_fragments": {"f": part},
            "buffer_names": ["b", "none"],
            "module": {"b": torch.tensor([5.0]), "none": None},
            "shared_params": {"tied": "w", "gone": "unknown", "f": "w"},
            **facts,
        }
        for part in frozen
    ]
    groups = [{"partition_count": count, key: [torch.tensor([rank + 7.0])]} for rank in range(2)]
    return models, [{"optimizer_state_dict": group} for group in groups]


@pytest.mark.parametrize("by_stage3", [False, True])
@pytest.mark.parametrize("count", [2, [1, 2]])
def test_weights_of_all_kinds_are_listed(by_stage3, count):
    found = zero_reader._part("it", *of_ranks(by_stage3, count)).tensors
    values = {stored.name: stored.load().tolist() for stored in found}
    assert values == {"w": [7.0, 8.0], "f": [1.0, 2.0, 3.0], "b": [5.0], "tied": [7.0, 8.0]}
    bare = of_ranks(by_stage3, count, frozen_param_shapes=None, shared_params=None)
    assert [stored.name for stored in zero_reader._part("it", *bare).tensors] == ["w", "b"]


def test_each_rank_has_saved_its_states():
    with pytest.raises(CheckpointError, match="of 2 ranks, of 3"):
        zero_reader._part("it", *of_ranks(False, 3))


@pytest.mark.parametrize("missing", ["", OPTIMIZERS, MODELS, "both"])
def test_model_and_optimizer_states_are_read_together(tmp_path, missing):
    for rank, files in enumerate(zip(*of_ranks(False, 2), strict=True)):
        for ending, content in zip((MODELS, OPTIMIZERS), files, strict=True):
            if missing not in (ending, "both"):
                torch.save(content, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00{ending}")
    with pytest.raises(CheckpointError, match="lacks the ranks'") if missing else contextlib.nullcontext():
        assert [stored.name for stored in zero_reader.zero_tensors(str(tmp_path))] == ["w", "f", "b", "tied"]
