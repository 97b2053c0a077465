"""Which processes share a model's layers, read off its parameters on pretended ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_compat.errors import UnsupportedArgument
from hf_compat.runtime import meshes
from hf_compat.runtime.meshes import as_before_split, split_again, split_by_mesh, tensor_ranks


@pytest.fixture
def four_ranks():
    """A group of four, of which this process is rank 0. The others are never there."""
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    distributed.destroy_process_group()


def layers(*axes):
    """A model whose first layers are split over these meshes."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(len(axes) + 1)))
    for layer, mesh in zip(model, axes, strict=False):
        parallelize_module(layer, mesh, ColwiseParallel())
    return model


def test_neighbours_share_layers(four_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert tensor_ranks(layers(mesh["tp"], mesh["tp"])) == 2
    assert tensor_ranks(layers()) == tensor_ranks(None) == 1
    whole = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    assert tensor_ranks(layers(whole["tp"], mesh["tp"])) == 2, "an axis of one process splits nothing"


def test_without_a_group_no_parameter_is_looked_at(monkeypatch):
    monkeypatch.setattr(meshes, "tensor_axes", None)
    assert tensor_ranks(layers()) == 1


def test_ranks_that_do_not_follow_one_another_are_refused(four_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    with pytest.raises(
        UnsupportedArgument, match=r"(?s)'0\.weight'.*is \[0, 2\].*make the axis that splits layers the last"
    ):
        tensor_ranks(layers(mesh["tp"]))


def test_layers_that_differ_in_their_split_are_refused(four_ranks):
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    with pytest.raises(UnsupportedArgument, match=r"'0\.weight' between 2, '1\.weight' between 4"):
        tensor_ranks(layers(pairs, init_device_mesh("cpu", (4,), mesh_dim_names=("all",))))


def test_groups_of_two_meshes_are_split_and_joined_again(four_ranks):
    model = layers(init_device_mesh("cpu", (2,)))
    names = {parameter: name for name, parameter in model.named_parameters()}
    whole = [{"params": list(names), "lr": 1.0}, {"params": [], "lr": 2.0}, {"params": [torch.zeros(1)], "lr": 3.0}]
    split = split_by_mesh(whole)
    assert len(split) == 4 and [group["lr"] for group in split] == [1.0, 1.0, 2.0, 3.0]
    assert {type(one) for one in split[0]["params"]} != {type(one) for one in split[1]["params"]}
    joined = as_before_split(split, [*names, *whole[2]["params"]])
    assert [[id(one) for one in group.pop("params")] for group in joined] == [
        [id(one) for one in group["params"]] for group in whole
    ]
    assert joined == [{"lr": 1.0}, {"lr": 2.0}, {"lr": 3.0}]

    numbered = [{**group, "params": [names.get(one, "other") for one in group["params"]]} for group in split]
    saved = [{"params": list(names.values()), "lr": 5.0, "step": 1}, {"params": [], "lr": 6.0}, {"params": ["other"]}]
    given = split_again(saved, [group for group in numbered if group["params"]])
    assert [(group["lr"], group.get("step")) for group in given] == [(5.0, 1), (5.0, 1), (3.0, None)]
    assert [group["params"] for group in given] == [group["params"] for group in numbered if group["params"]]
    assert split_again(saved, [{"params": ["other"]}]) is saved


@pytest.fixture
def alone():
    """A group of one process, whose meshes give real numbers."""
    distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("max_norm", [0.5, 100.0, float("inf")])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("used", [0, 2, 4])
def test_gradients_on_several_meshes_are_clipped_together(alone, max_norm, norm_type, used):
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(3)) for _ in range(5)]
    by_name = [init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in "ab"]
    own = [copy.deepcopy(one) for one in whole]
    for place, mesh in ((0, by_name[0]), (1, by_name[1]), (2, by_name[0])):
        own[place] = nn.Parameter(distribute_tensor(whole[place].detach(), mesh, [Shard(0)]))
    for one, other in list(zip(whole, own, strict=True))[:used]:  # the last has no gradient
        one.grad = torch.randn(3)
        has_mesh = not isinstance(other.data, torch.Tensor) or hasattr(other.data, "device_mesh")
        other.grad = distribute_tensor(one.grad, other.device_mesh, [Shard(0)]) if has_mesh else one.grad.clone()
    found, expected = meshes.clip_on_meshes(own, max_norm, norm_type), nn.utils.get_total_norm(
        [one.grad for one in whole if one.grad is not None], norm_type
    )  # fmt: skip
    nn.utils.clip_grads_with_norm_(whole, max_norm, expected)
    torch.testing.assert_close(found, expected)
    for one, other in zip(whole, own, strict=True):
        grad = other.grad.full_tensor() if hasattr(other.grad, "full_tensor") else other.grad
        assert grad is one.grad is None if one.grad is None else torch.allclose(grad, one.grad)


def test_the_norm_is_of_order_two_by_default(alone):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert meshes.clip_on_meshes([parameter], 1.0) == 5.0 and torch.allclose(parameter.grad.norm(), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("names", "kept", "first", "axes"),
    [
        (("dp", "tp"), "tp", 0, ("dp",)),
        (("dp", "tp"), ("dp", "tp"), 1, ("dp",)),
        (("dp", "tp"), ("dp", "tp"), 0, None),
        (("dp", "tp"), "dp", 1, ("dp", "tp")),
        (None, None, 0, None),
    ],
)
def test_batches_differ_over_the_other_axes(four_ranks, monkeypatch, names, kept, first, axes):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    found = [("a", mesh[kept] if kept else mesh, first), ("b", None, 0)]
    monkeypatch.setattr(meshes, "tensor_axes", lambda model: iter(found))
    of_data = meshes.data_mesh(None)
    assert (None if of_data is None else of_data.mesh_dim_names) == axes
    found.clear()
    assert meshes.data_mesh(None) is None


@pytest.mark.parametrize(
    ("shape", "names", "first", "ranks"),
    [((2, 2), ("shard", "tp"), 1, 2), ((4, 1), ("shard", "tp"), 1, 1), ((2, 1, 2), ("copy", "shard", "tp"), 2, 2)],
)
def test_axes_of_fsdp_come_before_those_that_split_layers(four_ranks, shape, names, first, ranks):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = layers(mesh["tp"], mesh["tp"])[:2]
    assert {place for *_, place in meshes.tensor_axes(model)} == {0}
    fully_shard(model, mesh=mesh[names[:-1]])
    axes = list(meshes.tensor_axes(model))
    assert [name for name, *_ in axes] == [name for name, _ in model.named_parameters()]
    assert {place for *_, place in axes} == {first} and tensor_ranks(model) == ranks
    assert list(meshes.tensor_axes(layers())) == []


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_each_rank_looks_for_its_own_neighbours(rank):
    distributed.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert tensor_ranks(layers(mesh["tp"])) == 2 and tensor_ranks(layers(init_device_mesh("cpu", (4,)))) == 4
    finally:
        distributed.destroy_process_group()
