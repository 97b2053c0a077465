"""`PreparedOptimizer`: when it steps and zeroes, who scales, and what it gives of the optimizer inside."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_compat.optim.prepared import PreparedOptimizer, unwrap_optimizer


class Timing:
    """Says when an update ends."""

    def __init__(self, syncs=True, kind="NO", scaler=None):
        self.sync_gradients, self.distributed_type, self.scaler = syncs, kind, scaler
        self.gradient_state, self.state = "gradient state", "state"


class Scaler:
    """A gradient scaler that may skip a step."""

    def __init__(self, steps):
        self.steps, self.told = steps, []

    def step(self, optimizer):
        self.told.append("step")
        if self.steps:
            optimizer.step()

    def update(self):
        self.told.append("update")


def made(timing, is_trained=False):
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return PreparedOptimizer(torch.optim.SGD([weight], lr=0.25), timing, is_trained), weight


@pytest.mark.parametrize(
    ("syncs", "kind", "acts"), [(True, "NO", True), (False, "NO", False), (True, "DEEPSPEED", False)]
)
def test_it_steps_and_zeroes_at_an_updates_end_alone(syncs, kind, acts):
    prepared, weight = made(Timing(syncs, kind))
    closed = []
    prepared.step(lambda: closed.append(1))
    assert weight.item() == (0.75 if acts else 1.0) and closed == [1] * acts
    prepared.zero_grad(set_to_none=False)
    assert weight.grad.item() == (0.0 if acts else 1.0)
    prepared.zero_grad()
    assert (weight.grad is None) is acts
    prepared.optimizer.zero_grad()
    assert weight.grad is None  # the optimizer inside always does


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("is_trained", [True, False])
def test_scaled_gradients_may_skip_a_step(steps, is_trained):
    scaler = Scaler(steps)
    prepared, weight = made(Timing(scaler=scaler), is_trained)
    assert prepared.step_was_skipped is False
    for _ in range(2):
        prepared.step()
        assert prepared.step_was_skipped is (not steps)
    assert weight.item() == (0.5 if steps else 1.0) and not prepared.optimizer._optimizer_step_post_hooks
    assert scaler.told == (["step", "update"] if is_trained else ["step"]) * 2


def test_the_optimizer_inside_is_seen():
    timing = Timing(scaler="scaler")
    prepared, weight = made(timing)
    inside = prepared.optimizer
    inside.own = object()
    assert prepared.param_groups is inside.param_groups and prepared.state is inside.state
    assert prepared.defaults is inside.defaults and prepared.state_dict() == inside.state_dict()
    prepared.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inside.param_groups) == 2 and prepared.own == inside.own
    seen = prepared.scaler, prepared.gradient_state, prepared.accelerator_state
    assert seen == ("scaler", "gradient state", "state") and "SGD" in repr(prepared)
    again = pickle.loads(pickle.dumps(prepared))
    assert type(again) is PreparedOptimizer and again.is_trained is False and type(again.timing) is Timing
    with pytest.raises(AttributeError, match="no_such"):
        _ = prepared.no_such
    assert weight.item() == 1.0


@pytest.mark.parametrize("name", ["train", "eval"])
@pytest.mark.parametrize("has_two_sets", [True, False])
def test_weights_are_switched_where_there_are_two_sets(name, has_two_sets):
    switched = []
    inside = SimpleNamespace(**{name: lambda: switched.append(name)} if has_two_sets else {name: None})
    getattr(PreparedOptimizer(inside, Timing()), name)()
    getattr(PreparedOptimizer(SimpleNamespace(), Timing()), name)()
    assert switched == [name] * has_two_sets


@pytest.mark.parametrize("has_accelerate", [True, False])
def test_it_is_accelerates_where_that_is_loaded(has_accelerate, monkeypatch):
    theirs = type("AcceleratedOptimizer", (), {})
    module = SimpleNamespace(AcceleratedOptimizer=theirs) if has_accelerate else None
    monkeypatch.setitem(sys.modules, "accelerate.optimizer", module)
    prepared, _ = made(Timing())
    assert isinstance(prepared, theirs) is has_accelerate and isinstance(prepared, PreparedOptimizer)


def test_wrappers_come_off_until_none_is_left():
    inside = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    once = PreparedOptimizer(inside, Timing())
    assert unwrap_optimizer(PreparedOptimizer(once, Timing())) is unwrap_optimizer(once) is inside
    assert unwrap_optimizer(inside) is inside and unwrap_optimizer(None) is None
    for other in (SimpleNamespace(optimizer=inside), SimpleNamespace(_is_accelerate_prepared=True)):
        assert unwrap_optimizer(other) is other
