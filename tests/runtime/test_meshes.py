"""Which processes share a model's layers, read off its parameters on pretended ranks."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_compat.errors import UnsupportedArgument
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
