"""The quick search for parameters against torch's own: the same tensors in the same order, whatever the model is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_compat.runtime.inspection import forget_gradients, parameters_of


class Nest(nn.Module):
    """Parameters before, between and behind children; one that is None, one that is shared, one child that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_parameter("absent", None)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"a": nn.LayerNorm(3), "b": self.first}))
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.first.weight
        self.nothing: nn.Module | None
        self.register_module("nothing", None)


class InCircle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(2, 2)
        self.down.up = self


class OnlyTheFirst(Nest):
    def parameters(self, recurse=True):
        return iter([self.scale])


class HoldsOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2)
        self.kept = KeepsModules()


class KeepsModules(nn.Module):
    """A module that shows less than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.shown = nn.Linear(2, 2), nn.Linear(2, 2)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self
        yield f"{prefix}.shown", self.shown


def patched() -> nn.Module:
    model = Nest()
    model.inner.named_parameters = lambda *args, **kwargs: iter(())
    return model


MODELS = {
    "nested, shared and absent": Nest,
    "a circle": InCircle,
    "overrides parameters": OnlyTheFirst,
    "a child overrides named_modules": HoldsOne,
    "a method of its own by assignment": patched,
    "torch.jit": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))),
    "compiled": lambda: torch.compile(Nest(), backend="eager"),
    "a layer": lambda: nn.Linear(2, 2),
    "no parameters": nn.ReLU,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", MODELS)
def test_it_finds_what_torch_finds(name):
    model = MODELS[name]()
    found, expected = parameters_of(model), list(model.parameters())
    assert [id(parameter) for parameter in found] == [id(parameter) for parameter in expected]


def test_a_layer_that_comes_later_is_found():
    model = nn.Sequential(nn.Linear(2, 2))
    assert len(parameters_of(model)) == 2
    model.append(nn.Linear(2, 2))
    assert len(parameters_of(model)) == 4


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_forgotten_where_torch_forgets_them(name):
    ours, torchs = MODELS[name](), MODELS[name]()
    for model in (ours, torchs):
        for parameter in nn.Module.parameters(model):
            parameter.grad = torch.ones_like(parameter)
    forget_gradients(ours)
    torchs.zero_grad()
    left = [[parameter.grad is None for parameter in nn.Module.parameters(model)] for model in (ours, torchs)]
    assert left[0] == left[1]


class Counting(nn.Linear):
    calls = 0

    def zero_grad(self, set_to_none=True):
        type(self).calls += 1
        super().zero_grad(set_to_none)


def test_a_models_own_zero_grad_is_called():
    forget_gradients(Counting(2, 2))
    assert Counting.calls == 1
