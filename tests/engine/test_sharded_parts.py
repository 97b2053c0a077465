"""Which modules FSDP shards by themselves, as the plan names them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from hf_compat.engine.strategies import _parts, gathering_method
from hf_compat.errors import ArgumentError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 3), nn.Linear(3, 4, bias=False)  # 9 and 12 parameters


class Net(nn.Module):
    def __init__(self, named=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(4, 1)  # 5
        if named is not None:
            self._no_split_modules = named


def names(model, **facts):
    plan = SimpleNamespace(**{"wrap": "classes", "wrap_classes": (), "min_num_params": 0, **facts})
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(module)] for module in _parts(model, plan)]


@pytest.mark.parametrize(
    ("least", "parts"),
    [
        (0, ["last", "blocks.1.outer", "blocks.1.inner", "blocks.1", "blocks.0.outer", "blocks.0.inner", "blocks.0"]),
        (5, ["last", "blocks.1.outer", "blocks.1.inner", "blocks.0.outer", "blocks.0.inner"]),
        (9, ["blocks.1.outer", "blocks.1.inner", "blocks.0.outer", "blocks.0.inner"]),
        (10, ["blocks.1.outer", "blocks.0.outer"]),
        (13, ["blocks.1", "blocks.0"]),
        (21, ["blocks.1", "blocks.0"]),
        (22, []),
    ],
)
def test_by_size_what_is_large_enough_without_its_parts(least, parts):
    assert names(Net(), wrap="size", min_num_params=least) == parts


def test_by_class_those_that_the_plan_or_the_model_names():
    assert names(Net(), wrap="none", wrap_classes=("Block",)) == []
    assert names(Net()) == names(Net([])) == []
    assert names(Net(["Block"])) == names(Net(), wrap_classes=("Block",)) == ["blocks.1", "blocks.0"]
    assert names(Net(["Block"]), wrap_classes=("Linear",))[0] == "last"
    with pytest.raises(ArgumentError, match=r"wraps \['Layer'\](.|\n)*its classes are Block, Linear\."):
        names(Net(), wrap_classes=("Block", "Layer"))


def test_a_method_of_a_whole_model_is_its_own():
    model = Net()
    with gathering_method(model, "get_submodule") as method:
        assert method("last") is model.last
    assert "get_submodule" not in vars(model)
