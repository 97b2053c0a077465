"""What a checkpoint's states have to hold before anything loads them, and what is settled afterwards."""

from __future__ import annotations

import copy
import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from hf_compat.checkpoint import validation
from hf_compat.checkpoint.validation import FieldSpec, list_of, wrong_field
from hf_compat.errors import CheckpointError, CheckpointMismatch


def stepped(kind=torch.optim.AdamW, **options):
    """An optimizer over two parameters that has made a step, and a copy of its state."""
    layer = nn.Linear(3, 2)
    optimizer = kind(layer.parameters(), lr=0.1, **options)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer, copy.deepcopy(optimizer.state_dict())


def check(change, kind=torch.optim.AdamW, **options):
    optimizer, content = stepped(kind, **options)
    validation.check_optimizer("optimizer.pt", change(content) or content, optimizer)


def without(*path):
    def change(content):
        for step in path[:-1]:
            content = content[step]
        del content[path[-1]]

    return change


def having(value, *path):
    def change(content):
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda content: None,
        having({}, "state"),  # before the first step
        having({}, "state", 1),  # a parameter that had no gradient
        lambda content: content["state"].pop(1) and None,
        having("more", "param_groups", 0, "own"),
    ],
)
def test_a_state_that_an_optimizer_can_go_on_with(change):
    assert check(change) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: ["text"], "not the state of an optimizer"),
        (without("param_groups"), "param_groups"),
        (without("state"), "state"),
        (having(3, "param_groups", 0), "param_groups"),
        (having("high", "param_groups", 0, "lr"), "lr"),
        (having(None, "param_groups", 0, "params"), "params"),
        (having(3, "state", 0), "state"),
        (having({"step": torch.tensor(1.0)}, "state", 7), "has the parameter 7, which is in no group"),
        (without("param_groups", 0, "lr"), "`lr` of a group is missing"),
        (without("state", 0, "exp_avg_sq"), "lacks `exp_avg_sq`"),
        (without("state", 1, "step"), "lacks `step`"),
        (having(torch.zeros(3), "state", 0, "exp_avg"), r"`exp_avg` of a parameter has the shape \[3\], its parameter"),
    ],
)
def test_a_state_that_it_cannot_go_on_with(change, told):
    with pytest.raises(CheckpointError, match=told):
        check(change)


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
        (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.RMSprop, {"centered": True}, "grad_avg"),
    ],
)
def test_options_say_what_a_state_needs(kind, options, name):
    def change(content):
        content["state"][0] = {"other": torch.zeros(2, 3), **content["state"][0]}
        del content["state"][0][name]

    with pytest.raises(CheckpointError, match=f"lacks `{name}`"):
        check(change, kind, **options)


class Own(torch.optim.Optimizer):
    """An optimizer of another package."""

    def __init__(self, parameters, lr, beta=0.5):
        super().__init__(parameters, {"lr": lr, "beta": beta})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["exp_avg"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: None, None),  # moments may have shapes of their own
        (having(1, "param_groups", 0, "more"), None),
        (without("param_groups", 0, "beta"), None),
        (having({"other": 1}, "state", 0), None),  # it keeps what it likes
        (lambda content: having(1, "param_groups", 0, "more")(content) or without("param_groups", 0, "beta")(content),
         r"have \['more'\] and lack \['beta'\]: it is of no Own"),
        (without("param_groups", 0, "lr"), "`lr` of a group is missing"),
    ],
)  # fmt: skip
def test_an_optimizer_of_another_package(change, told):
    if told is None:
        check(change, Own)
    else:
        with pytest.raises(CheckpointError, match=told):
            check(change, Own)


def scheduled():
    optimizer, _ = stepped()
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: None, None),
        (lambda content: 3, "it holds 3, not fields"),
        (without("last_epoch"), "`last_epoch` is missing"),
        (without("lr_lambdas"), "`lr_lambdas` is missing"),
        (without("base_lrs"), None),
        (having([0.1, 0.1], "base_lrs"), r"`base_lrs` is \[0\.1, 0\.1\], and the optimizer has 1 groups"),
        (having([], "_last_lr"), "`_last_lr`"),
        (having("far", "last_epoch"), "last_epoch"),
    ],
)
def test_a_schedule(change, told):
    schedule = scheduled()
    content = copy.deepcopy(schedule.state_dict())
    content = change(content) or content
    if told is None:
        validation.check_schedule("scheduler.pt", content, schedule)
    else:
        with pytest.raises(CheckpointError, match=told):
            validation.check_schedule("scheduler.pt", content, schedule)


def test_groups_that_came_after_the_schedule_have_rates_of_their_own():
    schedule = scheduled()
    content = copy.deepcopy(schedule.state_dict())
    schedule.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    validation.check_schedule("scheduler.pt", content, schedule)
    with pytest.raises(CheckpointError, match="has 1 groups"):
        validation.check_schedule("scheduler.pt", {**content, "base_lrs": [0.1, 0.1]}, schedule)


def random_states(**values):
    python, numpy = random.getstate(), np.random.get_state()
    return {"python": python, "numpy": numpy, "cpu": torch.get_rng_state(), **values}


BYTES = torch.zeros(16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (random_states(), None),
        (random_states(cuda=BYTES), None),
        (random_states(cuda=[BYTES, BYTES]), None),
        (random_states(cuda=None), None),
        (random_states(cuda=[None, BYTES]), None),
        (random_states(cuda=BYTES.float()), "`cuda` that are not bytes"),
        (random_states(cuda=[BYTES, "text"]), "`cuda` that are not bytes"),
        (random_states(cpu=BYTES), "random states of RuntimeError"),
        (random_states(numpy=("MT19937",)), "random states of ValueError"),
        (None, "it has no random states"),
        ("text", "it has 'text' in place of random states"),
        ({}, "random states of KeyError"),
    ],
)
def test_random_states(states, told):
    found = validation.random_states_problem(states)
    assert found is None if told is None else told in found


def test_values_get_the_layout_of_their_parameter_and_a_missing_state_is_told(caplog):
    optimizer, _ = stepped()
    weight, bias = optimizer.param_groups[0]["params"]
    moment, step = optimizer.state[weight]["exp_avg"], optimizer.state[weight]["step"]
    other = torch.arange(6.0).view(3, 2).t()
    repeated = torch.ones(1, dtype=torch.float64).expand(2, 3)
    optimizer.state[weight] |= {"exp_avg_sq": other, "more": repeated}
    validation.settle_states("optimizer.pt", optimizer)
    state = optimizer.state[weight]
    assert state["exp_avg"] is moment and state["step"] is step
    assert torch.equal(state["exp_avg_sq"], other) and state["exp_avg_sq"].stride() == weight.stride()
    assert state["more"].stride() == weight.stride() and state["more"].dtype == torch.float64 and caplog.text == ""
    optimizer.state[bias] = {}
    validation.settle_states("optimizer.pt", optimizer)
    assert "has no state of the optimizer for 1 of 2 parameters" in caplog.text
    caplog.clear()
    optimizer.state.clear()
    validation.settle_states("optimizer.pt", optimizer)
    assert caplog.text == "", "a run that has not stepped"


class Keeps(nn.Linear):
    """Takes weights of another shape."""

    def _load_from_state_dict(self, *args, **kwargs): ...


WEIGHTS = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}


@pytest.mark.parametrize(
    ("weights", "model", "told"),
    [
        (WEIGHTS, nn.Linear(3, 2), None),
        ({"weight": WEIGHTS["weight"]}, nn.Linear(3, 2), None),  # what is missing is warned of elsewhere
        ({**WEIGHTS, "more": torch.zeros(1)}, nn.Linear(3, 2), None),
        ({**WEIGHTS, "bias": torch.zeros(2).half()}, nn.Linear(3, 2), None),
        ({}, nn.Linear(3, 2), "it holds no weights"),
        ({}, nn.ReLU(), None),
        ({**WEIGHTS, "bias": torch.zeros(3)}, nn.Linear(3, 2), r"`bias` has the shape \[3\], in the model \[2\]"),
        ({**WEIGHTS, "bias": torch.zeros(2, dtype=torch.int8)}, nn.Linear(3, 2), "`bias` holds no floating-point"),
        ({"weight": torch.zeros(5)}, Keeps(3, 2), None),
        ({"0.weight": torch.zeros(5)}, nn.Sequential(Keeps(3, 2)), None),
        ({"0.weight": torch.zeros(5)}, nn.Sequential(nn.Linear(3, 2)), r"`0\.weight` has the shape"),
        ({"1.bias": torch.zeros(5)}, nn.Sequential(Keeps(3, 2), nn.Linear(3, 2)), r"`1\.bias` has the shape"),
        ({"10.bias": torch.zeros(5)}, nn.Sequential(nn.ReLU(), Keeps(3, 2), *[nn.ReLU()] * 8, nn.Linear(3, 2)),
         r"`10\.bias` has the shape"),
    ],
)  # fmt: skip
def test_weights_of_another_model(weights, model, told):
    if told is None:
        validation.check_weights("out", weights, model)
    else:
        with pytest.raises(CheckpointMismatch, match=told):
            validation.check_weights("out", weights, model)


def test_three_misfits_are_named():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(2)])
    with pytest.raises(CheckpointMismatch) as raised:
        validation.check_weights("out", {name: torch.zeros(7) for name in model.state_dict()}, model)
    assert str(raised.value).count("has the shape") == 3


STATE = {"global_step": 3}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (STATE, None),
        ([], "it holds no fields"),
        ({}, "`global_step` is missing"),
        ({**STATE, "epochs": 1}, "fields that are not known: 'epochs'"),
        ({**STATE, "global_step": -1}, "global_step"),
        ({**STATE, "log_history": None}, None),
        ({**STATE, "log_history": [3]}, "log_history"),
        ({**STATE, "stateful_callbacks": {"A": {"args": {}, "attributes": {}}}}, None),
        ({**STATE, "stateful_callbacks": {"A": [{"args": {}, "attributes": {}}]}}, None),
        ({**STATE, "stateful_callbacks": {"A": {}}}, None),
        ({**STATE, "stateful_callbacks": {"A": [{"args": {}}, 3]}}, "stateful_callbacks"),
        ({**STATE, "stateful_callbacks": {"A": 3}}, "stateful_callbacks"),
        ({**STATE, "stateful_callbacks": {"A": {"args": 3}}}, "stateful_callbacks"),
        ({**STATE, "stateful_callbacks": {"A": {"attributes": []}}}, "stateful_callbacks"),
    ],
)
def test_a_trainers_state(tmp_path, content, told):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(content))
    if told is None:
        assert validation.read_trainer_state(path, {"max_steps": 9}).max_steps == 9
    else:
        with pytest.raises(CheckpointError, match=told):
            validation.read_trainer_state(path)


SHARE, SHORT = FieldSpec("a share", (int, float), within=(0, 1)), FieldSpec("a short list", list, within=(1, 3))
PAIRS = FieldSpec("pairs", dict, needed={"a": FieldSpec("a number", int), "b": FieldSpec("a text", str).or_none()})


@pytest.mark.parametrize(
    ("kind", "value", "holds"),
    [
        (SHARE, 0, True),
        (SHARE, 0.5, True),
        (SHARE, 1, False),
        (SHARE, 0.999, True),
        (SHARE, -0.1, False),
        (SHARE, None, False),
        (SHARE.or_none(), None, True),
        (SHARE, True, False),
        (FieldSpec("a flag", bool), True, True),
        (FieldSpec("a flag", bool), 1, False),
        (FieldSpec("either", (bool, int)), True, True),
        (SHARE, "0", False),
        (SHORT, [], False),
        (SHORT, [1], True),
        (SHORT, [1, 2], True),
        (SHORT, [1, 2, 3], False),
        (SHORT, (1,), False),
        (list_of("shares", SHARE), [0, 0.5], True),
        (list_of("shares", SHARE), [0, 1], False),
        (list_of("shares", SHARE), (), True),
        (FieldSpec("shares", dict, items=SHARE), {"a": 0.5}, True),
        (FieldSpec("shares", dict, items=SHARE), {"a": 2}, False),
        (FieldSpec("few", dict, within=(1, 2)), {"a": 2}, True),
        (FieldSpec("few", dict, within=(1, 2)), {}, False),
        (FieldSpec("few", dict, within=(1, 2)), {"a": 1, "b": 2}, False),
        (PAIRS, {"a": 1, "b": None}, True),
        (PAIRS, {"a": 1}, False),
        (PAIRS, {"a": "x", "b": "y"}, False),
        (PAIRS, {"a": 1, "b": "y", "c": 3}, True),
        (FieldSpec("an even number", int, fits=lambda one: one % 2 == 0), 2, True),
        (FieldSpec("an even number", int, fits=lambda one: one % 2 == 0), 3, False),
    ],
)
def test_what_a_field_may_hold(kind, value, holds):
    assert kind.holds(value) is holds
    said = wrong_field({"x": value}, {"x": kind, "y": SHARE}, "data.")
    assert said is None if holds else said.startswith("`data.x` is ") and said.endswith(f", not {kind.expected}")
    assert wrong_field({}, {"x": kind}) is None
