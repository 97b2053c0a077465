"""`ModuleTree` does what torch's own methods do, whatever happens to the model between two updates."""

import copy
import pickle
from collections import UserDict

import pytest
import torch
from torch import nn

from hf_compat.runtime.module_tree import ModuleTree


def make_model():
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 2))


def replace_parameter(model):
    model[0].weight = nn.Parameter(torch.zeros(3, 2))


def replace_in_table(model):
    model[0]._parameters["bias"] = nn.Parameter(torch.zeros(3))


def swap_two(model):
    one, other = model[0], model[2]
    one._parameters["weight"], other._parameters["weight"] = other._parameters["weight"], one._parameters["weight"]


def tie(model):
    model[2].weight = model[0].weight


def add_module(model):
    model.append(nn.Linear(2, 2))


def add_deep(model):
    model[1].add_module("deep", nn.Linear(1, 1))


def remove_module(model):
    del model[1]


def remove_parameter(model):
    model[0].register_parameter("bias", None)


def replace_tables(model):
    model[0]._parameters = {"weight": nn.Parameter(torch.zeros(3, 2)), "bias": None}


def override_parameters(model):
    model.parameters = lambda: iter([model[0].weight])


def override_walk(model):
    model.named_parameters = lambda *_, **__: iter([("0.weight", model[0].weight)])


CHANGES = [
    replace_parameter, replace_in_table, swap_two, tie, add_module, add_deep, remove_module, remove_parameter,
    replace_tables, override_parameters, override_walk,
]  # fmt: skip


def ids(parameters):
    return [id(parameter) for parameter in parameters]


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_are_those_of_the_model_after_a_change(change):
    model, tree = make_model(), ModuleTree()
    assert ids(tree.parameters(model)) == ids(model.parameters())
    change(model)
    assert ids(tree.parameters(model)) == ids(model.parameters())


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_forgotten_where_torch_forgets_them(change):
    found = []
    for forget in (lambda tree, model: tree.zero_grad(model), lambda _, model: model.zero_grad()):
        model, tree = make_model(), ModuleTree()
        tree.zero_grad(model)
        change(model)
        for parameter in nn.Module.parameters(model):
            parameter.grad = torch.ones_like(parameter)
        forget(tree, model)
        found.append([parameter.grad is None for parameter in nn.Module.parameters(model)])
    assert found[0] == found[1] and True in found[0]


def test_an_own_zero_grad_is_called():
    class Keeps(nn.Linear):
        def zero_grad(self, set_to_none=True):
            self.was_asked = True

    model = Keeps(1, 1)
    model.weight.grad = torch.ones(1, 1)
    ModuleTree().zero_grad(model)
    assert model.was_asked and model.weight.grad is not None


class FrozenNorm(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.eval(),
        lambda model: model[1][1].eval(),
        lambda model: setattr(model[1], "1", FrozenNorm(3)),
        lambda model: setattr(model[0], "train", lambda mode=True: setattr(model[0], "training", False)),
        lambda model: setattr(model[1][0], "train", FrozenNorm(3).train),
        lambda model: model.append(nn.Dropout().eval()),
    ],
)
def test_the_mode_is_as_torch_sets_it_after_a_change(change):
    found = []
    for switch in (lambda tree, model: tree.train(model), lambda _, model: model.train()):
        model, tree = make_model(), ModuleTree()
        tree.train(model)
        change(model)
        switch(tree, model)
        found.append(modes(model))
    assert found[0] == found[1]


def test_a_method_replaced_in_its_class_is_called(monkeypatch):
    model, tree, asked = make_model(), ModuleTree(), []
    tree.train(model)
    own = nn.Linear.train
    monkeypatch.setattr(nn.Linear, "train", lambda self, mode=True: asked.append(self) or own(self, mode))
    tree.train(model)
    assert len(asked) == 3


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_model_is_walked_by_torch():
    model = torch.jit.script(nn.Linear(2, 2))
    tree = ModuleTree()
    model.eval()
    tree.train(model)
    assert model.training and ids(tree.parameters(model)) == ids(model.parameters())


def test_another_model_is_walked_anew():
    first, second, tree = make_model(), make_model(), ModuleTree()
    tree.train(first)
    second.eval()
    tree.train(second)
    assert all(modes(second)) and ids(tree.parameters(second)) == ids(second.parameters())


@pytest.mark.filterwarnings("error")
def test_a_model_without_parameters_is_left_to_torch_which_warns():
    with pytest.raises(UserWarning, match="empty generator"):
        nn.utils.clip_grad_norm_(ModuleTree().parameters(nn.Identity()), 1.0)


def test_copies_hold_no_model():
    model, tree = make_model(), ModuleTree()
    tree.train(model)
    copied, read = copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))
    assert copied._model is read._model is None


def own_walk(model):
    model[1][0].named_parameters = lambda *_, **__: iter(())


def leave(model):
    pass


@pytest.mark.parametrize(
    ("change", "is_same", "is_walked"),
    [
        (leave, True, True),
        (replace_parameter, False, True),
        (add_deep, False, True),
        (remove_module, False, True),
        (own_walk, True, True),  # the modules hold what they held; `parameters` asks the model itself
    ],
)
def test_a_model_is_walked_once_and_after_each_change(change, is_same, is_walked):
    model, tree = make_model(), ModuleTree()
    assert [tree._follow(model) for _ in range(3)] == [False, True, True]
    change(model)
    assert [tree._follow(model) for _ in range(3)] == [is_same, is_walked, is_walked]
    other = make_model()
    assert [tree._follow(one) for one in (other, other, model, other)] == [False, True, False, False]


def test_a_model_with_a_walk_of_its_own_is_never_taken_for_known():
    model, tree = make_model(), ModuleTree()
    own_walk(model)
    assert [tree._follow(model) for _ in range(3)] == [False] * 3
    model = make_model()
    model[0]._parameters = UserDict(model[0]._parameters)
    assert [tree._follow(one) for one in (make_model(), model, model)] == [False] * 3
