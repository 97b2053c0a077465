"""`FusedStep` gives the bits of torch's own step, and leaves to it what it does not know."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from helpers import toy
from hf_compat import Trainer, TrainerCallback
from hf_compat.optim.fused_step import FusedStep

FUSED = {"lr": 1e-2, "fused": True}


def model_and_optimizer(make=AdamW, dtype=torch.float32, **values):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)).to(dtype)
    groups = [{"params": list(model[0].parameters()), "weight_decay": 0.1}, {"params": list(model[1:].parameters())}]
    return model, make(groups, **{**FUSED, **values})


def gradients(model, step):
    torch.manual_seed(step)
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = None if (index + step) % 5 == 0 else torch.randn_like(parameter)


def state_of(model, optimizer):
    return [*model.state_dict().values(), *(v for one in optimizer.state.values() for v in one.values())]


@pytest.fixture
def counted(monkeypatch):
    """The steps that torch's own code took."""
    taken = []

    def note(self, *args):
        taken.append(type(self).__name__)

    monkeypatch.setattr(torch.optim.Optimizer, "_optimizer_step_code", note)
    return taken


@pytest.mark.parametrize("make", [Adam, AdamW])
@pytest.mark.parametrize("values", [{}, {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_and_states_are_those_of_torchs_step(make, values, dtype, counted):
    (model, optimizer), (other, expected) = (model_and_optimizer(make, dtype, **values) for _ in range(2))
    step = FusedStep(optimizer)
    for number in range(12):
        gradients(model, number), gradients(other, number)
        step(), expected.step()
        for group in (*optimizer.param_groups, *expected.param_groups):
            group["lr"] *= 0.9
    assert all(torch.equal(a, b) for a, b in zip(state_of(model, optimizer), state_of(other, expected), strict=True))
    assert len(counted) == 12 + 2, "the first two meet new parameters"


def test_a_loaded_state_is_the_one_that_steps(counted):
    (model, optimizer), (other, expected) = (model_and_optimizer() for _ in range(2))
    step = FusedStep(optimizer)
    for number in range(3):
        gradients(model, number)
        step()
    other.load_state_dict(model.state_dict())
    for loaded in (optimizer, expected):
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    gradients(model, 3), gradients(other, 3)
    step(), expected.step()
    assert all(torch.equal(a, b) for a, b in zip(state_of(model, optimizer), state_of(other, expected), strict=True))


class Own(AdamW):
    pass


def hooked(optimizer, counted):
    optimizer.register_step_pre_hook(lambda *args: counted.append("hook"))


def hooked_after(optimizer, counted):
    optimizer.register_step_post_hook(lambda *args: counted.append("hook"))


def replaced(optimizer, counted):
    step = optimizer.step

    def own(*args, **kwargs):
        counted.append("own")
        return step(*args, **kwargs)

    own.__wrapped__ = step
    optimizer.step = own


def flagged(optimizer, counted):
    for group in optimizer.param_groups:
        group["maximize"] = True


def with_tensor(optimizer, counted):
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(1e-2)


def unfused(optimizer, counted):
    optimizer.param_groups[1]["fused"] = False


def scaled(optimizer, counted):
    optimizer.found_inf = torch.zeros(())


def mixed(optimizer, counted):
    new = nn.Parameter(torch.ones(2, dtype=torch.float64))
    new.grad = torch.ones_like(new)
    optimizer.param_groups[0]["params"].append(new)
    optimizer.step()


def another_kind(optimizer, counted):
    optimizer.__class__ = Own


@pytest.mark.parametrize(
    "change", [hooked, hooked_after, replaced, flagged, with_tensor, unfused, scaled, mixed, another_kind]
)
def test_what_wants_more_than_the_kernel_is_torchs_step(change, counted):
    model, optimizer = model_and_optimizer()
    step = FusedStep(optimizer)
    for _ in range(2):
        gradients(model, 1)
        step()
    gradients(model, 4), step()
    gradients(model, 4), step()
    known = len(counted)
    change(optimizer, counted)
    before, expected = len(counted), copy.deepcopy((model, optimizer.state_dict()))
    step()
    assert known == 2 and len(counted) > before
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), expected[0].parameters(), strict=True))


def test_it_can_be_copied_and_pickled_after_a_step(counted):
    model, optimizer = model_and_optimizer()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    step = FusedStep(optimizer)
    gradients(model, 1), step()
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert type(other) is FusedStep and other.optimizer is not optimizer
        other()


def test_sparse_gradients_are_refused_as_by_torch(counted):
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = AdamW(model.parameters(), **FUSED)
    model.weight.grad = torch.ones(5, 2)
    step = FusedStep(optimizer)
    step()
    model.weight.grad = None
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        step()


def test_torchs_profiler_sees_the_step():
    model, optimizer = model_and_optimizer()
    step = FusedStep(optimizer)
    for _ in range(2):
        gradients(model, 1), step()
    with torch.autograd.profiler.profile() as seen:
        step()
    assert "Optimizer.step#AdamW.step" in [event.name for event in seen.function_events]


@pytest.mark.parametrize("owner", ["class", "instance"])
def test_a_run_calls_a_step_that_someone_replaces(owner, make_args, monkeypatch):
    calls, original = [], AdamW.step

    def own(self, closure=None):
        calls.append("own")
        return original(self, closure)

    class Replaces(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            if state.global_step == 3:
                inner = optimizer.optimizer
                target, value = (AdamW, own) if owner == "class" else (inner, own.__get__(inner))
                if owner == "class":
                    vars(inner).pop("step", None)
                monkeypatch.setattr(target, "step", value, raising=False)

    args = make_args(max_steps=6)
    Trainer(toy.Classifier(), args, train_dataset=toy.rows(48), callbacks=[Replaces()]).train()
    assert len(calls) == 3


def test_a_run_steps_with_the_kernel_alone(make_args, counted):
    args = make_args(max_steps=6)
    Trainer(toy.Classifier(), args, train_dataset=toy.rows(48)).train()
    assert counted == ["AdamW"]
