"""How optimizers of each kind step, by their hooks and switches alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from hf_compat.optim import stepping
from hf_compat.optim.stepping import (
    FusedStepping,
    LayerWiseDummyOptimizer,
    LayerWiseDummyScheduler,
    OptimizerBehaviour,
    ScheduleFreeStepping,
    behaviour_of,
)


def parameters(*trained):
    return [nn.Parameter(torch.ones(1), requires_grad=one) for one in trained]


class Lomo(Optimizer):
    """An optimizer without a step, whose hooks update in the backward pass."""

    def __init__(self, given):
        super().__init__(given, {"lr": 0.1})
        self.seen = []

    def grad_func(self, gradient):
        self.seen.append(float(gradient))

    # torch binds a new method at each reading; LOMO holds a function
    def __getattr__(self, name):
        raise AttributeError(name)

    def fused_backward(self, loss, rate):
        loss.backward()


def lomo(*trained, has_hooks=True, has_step=False):
    held = parameters(*trained)
    kind = type("Own", (Lomo,), {"step": lambda self, closure=None: "stepped"}) if has_step else Lomo
    optimizer = kind(held)
    if has_hooks:
        hook = optimizer.grad_func
        optimizer.grad_func = hook
    return optimizer, held


def test_hooks_of_a_fused_backward_pass_are_registered_once_and_removed():
    optimizer, (trained, frozen) = lomo(True, False)
    seen = []
    trained.register_hook(lambda gradient: seen.append("own"))
    behaviour = behaviour_of(optimizer)
    behaviour.attach()
    behaviour.attach()
    behaviour.fused_backward((trained * 3).sum(), 0.1)
    assert optimizer.seen == [3.0] and seen == ["own"] and not frozen._backward_hooks
    behaviour.detach()
    (trained * 3).sum().backward()
    assert optimizer.seen == [3.0] and seen == ["own", "own"]


@pytest.mark.parametrize("has_step", [False, True])
def test_an_optimizer_without_a_step_gets_one_that_does_nothing(has_step):
    optimizer, (parameter,) = lomo(True, has_step=has_step)
    behaviour_of(optimizer).attach()
    assert optimizer.step() == ("stepped" if has_step else None)
    assert ("step" in vars(optimizer)) is not has_step
    assert getattr(optimizer, "_opt_called", False) is not has_step
    if not has_step:
        assert optimizer.step(lambda: 3.0) == 3.0
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert parameter.item() == 1.0


def test_hooks_that_are_not_known_are_left_alone():
    (parameter,) = parameters(True)
    optimizer = type("Own", (SGD,), {"fused_backward": lambda self, loss, rate: None})([parameter], lr=0.1)
    behaviour = behaviour_of(optimizer)
    behaviour.attach()
    behaviour.detach()
    assert not parameter._backward_hooks and type(behaviour) is FusedStepping


@pytest.mark.parametrize(("has_averages", "told"), [(True, 1), (False, 0)])
def test_averages_that_no_checkpoint_holds_are_told(has_averages, told, monkeypatch):
    said = []
    monkeypatch.setattr(stepping, "warn_once", said.append)
    optimizer, _ = lomo(True)
    if has_averages:
        optimizer.exp_avg_sq = {}
    behaviour = behaviour_of(optimizer)
    behaviour.tell_of_resuming()
    assert len(said) == told and behaviour.steps_in_backward


@pytest.mark.parametrize("modes", [[True], [False], [False, True], [None], []])
def test_weights_that_are_saved_as_trained_are_told(modes, monkeypatch):
    said = []
    monkeypatch.setattr(stepping, "warn_once", said.append)
    groups = [{} if mode is None else {"train_mode": mode} for mode in modes]
    ScheduleFreeStepping(SimpleNamespace(param_groups=groups)).tell_of_saving()
    assert len(said) == (True in modes)
    ScheduleFreeStepping(SimpleNamespace()).tell_of_saving()
    assert len(said) == (True in modes)


@pytest.mark.parametrize("names", [["train", "eval"], ["train"], ["eval"]])
def test_averages_are_put_in_force_by_the_methods_that_there_are(names):
    told = []
    optimizer = SimpleNamespace(**{name: (lambda name=name: told.append(name)) for name in names})
    behaviour = behaviour_of(optimizer)
    assert type(behaviour) is ScheduleFreeStepping and behaviour.switches and not behaviour.steps_in_backward
    behaviour.to_training()
    behaviour.to_evaluation()
    assert told == names
    optimizer.train = optimizer.eval = 3
    assert type(behaviour_of(optimizer)) is OptimizerBehaviour


def layerwise(*trained):
    held = parameters(*trained)
    return LayerWiseDummyOptimizer({one: SGD([one], lr=0.5) for one in held}, lr=0.5), held


def test_each_parameter_steps_with_its_gradient():
    optimizer, (first, frozen, last) = layerwise(True, False, True)
    rates = optimizer.schedulers[first] = SimpleNamespace(steps=0)
    rates.step = lambda: vars(rates).update(steps=rates.steps + 1)
    behaviour = behaviour_of(optimizer)
    behaviour.attach()
    behaviour.attach()
    assert len(optimizer._handles) == 2 and behaviour.not_in_checkpoints
    (first + frozen * 2 + last * 4).sum().backward()
    assert [one.item() for one in (first, frozen, last)] == [0.5, 1.0, -1.0] and rates.steps == 1
    assert first.grad is None and last.grad is None
    optimizer._step_one(first)  # a hook of another's may have removed the gradient
    assert first.item() == 0.5 and rates.steps == 1
    behaviour.detach()
    (first * 1).sum().backward()
    assert first.item() == 0.5 and optimizer._handles == []
    assert optimizer.step() is None and optimizer.step(lambda: 2.0) == 2.0
    optimizer.zero_grad()
    assert float(first.grad) == 1.0


@pytest.mark.parametrize("has_parameters", [False, True])
def test_one_schedule_shows_the_rate_of_the_first_parameter(has_parameters):
    optimizer, (one,) = layerwise(True)
    schedule = LayerWiseDummyScheduler(optimizer.optimizer_dict if has_parameters else None, lr=0.25)
    assert schedule.get_last_lr() == [0.5 if has_parameters else 0.25]
    optimizer.optimizer_dict[one].param_groups[0]["lr"] = 0.125
    schedule.step()
    assert schedule.get_last_lr() == [0.125 if has_parameters else 0.25]
    assert schedule._get_closed_form_lr() == schedule.base_lrs


def test_several_optimizers_are_asked_in_turn():
    told = []
    one = SimpleNamespace(train=lambda: told.append("train"), eval=lambda: told.append("eval"))
    optimizer, (parameter,) = layerwise(True)
    behaviour = behaviour_of(one, optimizer, None)
    assert behaviour.switches and behaviour.steps_in_backward and len(behaviour.parts) == 3
    behaviour.to_training()
    behaviour.to_evaluation()
    behaviour.attach()
    parameter.sum().backward()
    assert told == ["train", "eval"] and parameter.item() == 0.5
    behaviour.detach()
    assert optimizer._handles == []
    none = behaviour_of(SGD(parameters(True), lr=0.1), None)
    assert not none.switches and not none.steps_in_backward
    assert type(behaviour_of(None)) is OptimizerBehaviour and behaviour_of().parts == []
