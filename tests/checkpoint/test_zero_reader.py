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
from hf_compat.checkpoint.tensor_splits import INFO
from hf_compat.checkpoint.zero_reader import _BESIDE, MODELS, OPTIMIZERS, named_zero_folder, rank_files, stored_slices
from hf_compat.errors import CheckpointError, CheckpointMismatch

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
    models[1:] = [{"frozen_param_fragments": models[1]["frozen_param_fragments"]}] if by_stage3 else [{}]
    groups = [{"partition_count": count, key: [torch.tensor([rank + 7.0])]} for rank in range(2)]
    groups[1]["partition_count"] = 9  # the first one's counts
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
    for by_stage3 in (False, True):
        models, optimizers = of_ranks(by_stage3, 1, param_shapes=[{"w": torch.Size([1])}], frozen_param_shapes=None)
        found = zero_reader._part("it", models[:1], optimizers[:1]).tensors
        assert [(stored.name, stored.load().tolist()) for stored in found] == [
            ("w", [7.0]),
            ("b", [5.0]),
            ("tied", [7.0]),
            ("f", [7.0]),
        ]


@pytest.mark.parametrize(
    ("pieces", "offset", "raised"),
    [
        ([torch.ones(3)], 1, None),
        ([torch.ones(3)], 2, ValueError),
        ([torch.ones(1), torch.ones(2)], 1, None),
        ([torch.ones(3, 1)], 0, TypeError),
        ([torch.ones(3), torch.ones(1, 1)], 0, TypeError),
        ([torch.ones(3, dtype=torch.int64)], 0, TypeError),
        ([torch.ones(3), "text"], 0, TypeError),
    ],
)
def test_pieces_are_flat_and_hold_enough_numbers(pieces, offset, raised):
    with contextlib.nullcontext() if raised is None else pytest.raises(raised, match=r"rank"):
        assert stored_slices("it", (2, 1), [(pieces, offset, 2)]).nbytes == 8


def test_the_first_part_names_the_tensors():
    def part(**values):
        return {
            name: zero_reader.StoredTensor(name=name, nbytes=4, load=lambda: value) for name, value in values.items()
        }

    found = zero_reader._joined(zero_reader.TensorSplits(None), [part(a=1), part(b=2)])
    assert [stored.name for stored in found] == ["a"]
    info = {"affine_map": {"params": {"w": {"ranks": {0: {}, 1: {}}}}}}
    found = zero_reader._joined(zero_reader.TensorSplits(info), [part(a=1), part(a=3, b=2)])
    assert [(stored.name, stored.nbytes, stored.load()) for stored in found] == [("a", 8, 1)]


@pytest.mark.parametrize("missing", ["", OPTIMIZERS, MODELS, "both"])
def test_model_and_optimizer_states_are_read_together(tmp_path, missing):
    for rank, files in enumerate(zip(*of_ranks(False, 2), strict=True)):
        for ending, content in zip((MODELS, OPTIMIZERS), files, strict=True):
            if missing not in (ending, "both"):
                torch.save(content, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00{ending}")
    with pytest.raises(CheckpointError, match="lacks the ranks'") if missing else contextlib.nullcontext():
        assert [stored.name for stored in zero_reader.zero_tensors(str(tmp_path))] == ["w", "f", "b", "tied"]


def write_states(folder, parts, by_stage3, info=None, paddings=None):
    """Write what DeepSpeed saves. `parts` has shapes by groups, and the flat groups of each of two ranks."""
    inner = "optimizer_state_dict" if by_stage3 else "base_optimizer_state"
    key = "fp32_flat_groups" if by_stage3 else "single_partition_of_fp32_groups"
    for part, (shapes, ranks) in enumerate(parts):
        model = {
            "param_shapes": shapes,
            "buffer_names": ["buffer"],
            "module": {"buffer": torch.ones(1)},
            "global_steps": 4 if part == 0 else 0,
            "global_samples": 32,
            INFO: info,
        }
        if not by_stage3:
            torch.save(model, folder / f"mp_rank_{part:02}{MODELS}")
        for rank, flats in enumerate([torch.tensor(flat) for flat in flats] for flats in ranks):
            state = {
                index: {"step": torch.tensor(index + 3.0), "exp_avg": flats[index] * 10, "flag": True}
                for index in reversed(range(len(flats)))  # places are read in their order
            }
            groups = [{"lr": float(part + rank + index), "params": [index]} for index in range(len(flats))]
            optimizer = {
                "partition_count": 2,
                key: flats,
                inner: {"state": state, "param_groups": groups},
                "param_alignment_paddings": paddings if rank == 0 else None,  # the first one's count
            }
            name = f"zero_pp_rank_{rank}_mp_rank_{part:02}"
            torch.save({"optimizer_state_dict": optimizer}, folder / f"{name}{OPTIMIZERS}")
            if by_stage3:
                torch.save(model, folder / f"{name}{MODELS}")


SHAPES = [{"a": torch.Size([2]), "b": torch.Size([3])}, {"c": torch.Size([1, 2])}]


@pytest.mark.parametrize(
    ("ranks", "by_stage3", "paddings"),
    [
        ([[[1.0, 2, 3], [6.0]], [[4.0, 5, 0], [7.0]]], False, None),
        ([[[1.0, 2, 0], [6.0]], [[3.0, 4, 5], [7.0]]], False, [[1, 0], [0]]),
        ([[[1.0, 3, 4], [6.0]], [[2.0, 5, 0], [7.0]]], True, None),
    ],
)
def test_the_state_of_an_optimizer_is_read_by_parameters(tmp_path, ranks, by_stage3, paddings):
    write_states(tmp_path, [(SHAPES, ranks)], by_stage3, paddings=paddings)
    found = zero_reader.zero_states(str(tmp_path))
    weights = {"a": torch.tensor([1.0, 2]), "b": torch.tensor([3.0, 4, 5]), "c": torch.tensor([[6.0, 7]])}
    assert list(found.by_name) == list(weights)
    for name, weight in weights.items():
        values = found.by_name[name]
        assert list(values) == ["", "exp_avg"] and found.plain[name] == {"step": torch.tensor(3.0), "flag": True}
        assert values[""].load().equal(weight) and values["exp_avg"].load().equal(weight * 10)
    assert found.param_groups == [{"lr": 0.0}, {"lr": 1.0}]
    assert found.counts == {"global_steps": 4, "global_samples": 32, "skipped_steps": 0}


def test_the_state_of_split_parameters_is_joined(tmp_path):
    pieces = [
        {"shape": [2], "source": (2 * rank, [1]), "dest": (0, [1]), "locations": [rank]} for rank in range(2)
    ]  # fmt: skip
    halves = {rank: {"shard_shape": [2], "pieces": [piece]} for rank, piece in enumerate(pieces)}
    info = {"affine_map": {"params": {"w": {"logical_shape": [4], "ranks": halves}}}}
    shapes = [{"w": torch.Size([2]), "whole": torch.Size([2])}]
    parts = [(shapes, [[[1.0, 2]], [[5.0, 6]]]), (shapes, [[[3.0, 4]], [[8.0, 9]]])]
    write_states(tmp_path, parts, by_stage3=False, info=info)
    found = zero_reader.zero_states(str(tmp_path))
    values = {name: [one.load().tolist() for one in values.values()] for name, values in found.by_name.items()}
    assert values == {"w": [[1, 2, 3, 4], [10, 20, 30, 40]], "whole": [[5, 6], [50, 60]]}
    assert found.param_groups == [{"lr": 0.0}] and found.counts["global_steps"] == 4
    weights = {stored.name: stored for stored in zero_reader.zero_tensors(str(tmp_path))}
    assert list(weights) == ["w", "whole", "buffer"] and weights["w"].nbytes == 16
    (tmp_path / f"zero_pp_rank_0_mp_rank_01{OPTIMIZERS}").unlink()
    with pytest.raises(CheckpointError, match="of 1 ranks, of 2"):
        zero_reader.zero_states(str(tmp_path))
    for path in tmp_path.glob("*mp_rank_01*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="has 1 parts of the parameters, of 2"):
        zero_reader.zero_states(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "has_groups", "told"),
    [
        ("ab", True, None),
        ("ab", False, "other groups of them"),
        ("a", True, "b"),
        ("abc", True, "c"),
        ("abhgfedc", False, "c, d, e, f, g"),
    ],
)
def test_a_state_is_of_the_models_parameters(names, has_groups, told):
    saved = zero_reader.ZeroStates(by_name={"a": {}, "b": {}}, plain={}, param_groups=[], counts={})
    with pytest.raises(CheckpointMismatch, match=f": {told}\\.$") if told else contextlib.nullcontext():
        saved.check("it", names, has_groups)


def test_files_of_ranks_are_in_the_order_of_their_numbers(tmp_path):
    names = [
        f"{name}{OPTIMIZERS}"
        for name in (
            "mp_rank_00",
            "zero_pp_rank_2_mp_rank_00",
            "zero_pp_rank_10_mp_rank_00",
            "zero_pp_rank_0_mp_rank_01",
        )
    ]
    for name in reversed([*names, f"mp_rank_00{MODELS}"]):
        (tmp_path / name).touch()
    assert [Path(path).name for path in rank_files(Contents(tmp_path), "", OPTIMIZERS)] == names
    assert [zero_reader._rank(f"mp_rank_07/{name}") for name in names] == [(0, 0), (0, 2), (0, 10), (1, 0)]
