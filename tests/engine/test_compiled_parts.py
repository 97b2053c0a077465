"""`CompiledUpdate` around its graph, with a function in the graph's place: what goes in, what is kept, when it ends."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_compat.engine import compiled_update
from hf_compat.engine.compiled_update import CompiledUpdate, reason_against


def update(graph, clips=True, max_norm=1.0, syncs=True, hears=None, reuses=False):
    made = CompiledUpdate.__new__(CompiledUpdate)
    made.steps = SimpleNamespace(
        accelerator=SimpleNamespace(run_backward=hears, sync_gradients=syncs),
        args=SimpleNamespace(max_grad_norm=max_norm),
        _tree=SimpleNamespace(parameters=lambda model: list(model.parameters())),
    )  # fmt: skip
    made._clips, made._norm, made._reuses_memory, made._graph = clips, "norm of before", reuses, graph
    return made


class Graph:
    """Takes the place of a graph of torch."""

    def __init__(self, error=None):
        self.given, self.error = [], error
        self.loss, self.norm = torch.tensor(2.0), torch.tensor(4.0)

    def __call__(self, *args):
        self.given.append(args)
        if self.error is not None:
            raise self.error
        self.gradients = [torch.full_like(one, 3.0) for one in args[5][:-1]] + [None]
        return self.loss, self.gradients, self.norm


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize(("max_norm", "expected"), [(1.5, 1.5), (0.0, math.inf)])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_graph_is_given_the_gradients_so_far_and_the_norm_of_an_updates_end(
    clips, syncs, max_norm, expected, has_gradient
):
    model, graph = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), Graph()
    model[0].bias.requires_grad_(False)
    trained = [model[0].weight, model[1].weight, model[1].bias]
    earlier = [torch.ones(1, 1), None, None] if has_gradient else None
    if has_gradient:
        trained[0].grad = earlier[0]
    made = update(graph, clips, max_norm, syncs)
    assert made.run("compute", model, "inputs", "items", 4) is graph.loss
    (*plain, parameters, before, limit), = graph.given  # fmt: skip
    assert plain == ["compute", model, "inputs", "items", 4] and before == earlier
    assert all(one is own for one, own in zip(parameters, trained, strict=True))
    assert limit == (expected if clips and syncs else None)
    assert all(one.grad is gradient for one, gradient in zip(trained, graph.gradients, strict=True))
    assert model[0].bias.grad is None and made.take_norm() is graph.norm and made.take_norm() is None


def test_what_the_next_call_writes_over_is_copied():
    model, graph = nn.Linear(1, 1), Graph()
    made = update(graph, reuses=True)
    loss = made.run(None, model, None, None, 1)
    graph.loss.zero_(), graph.norm.zero_(), graph.gradients[0].zero_()
    assert (float(loss), float(made.take_norm()), float(model.weight.grad)) == (2, 4, 3) and model.bias.grad is None


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"hears": lambda loss: None}, None, "a callback or the module hears of backward passes"),
        ({}, torch._dynamo.exc.FailOnRecompileLimitHit("many"), "read a value that changes, and torch made eight"),
        ({}, torch._dynamo.exc.Unsupported("a call. \n\nMore"), "because a call."),
    ],
)
def test_what_cannot_be_traced_runs_uncompiled_from_then_on(changes, error, told, caplog):
    made = update(Graph(error), **changes)
    assert made.run(None, nn.Linear(1, 1), None, None, 1) is None and made._graph is None and made._norm is None
    (record,) = caplog.records
    assert told in record.getMessage() and record.getMessage().endswith(".") and ".." not in record.getMessage()
    assert made.run(None, None, None, None, 1) is None and len(caplog.records) == 1


def test_another_error_is_the_users():
    with pytest.raises(ValueError, match="theirs"):
        update(Graph(ValueError("theirs"))).run(None, nn.Linear(1, 1), None, None, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, None),
        (("mechanics", "engine", object()), "DeepSpeed's engine runs"),
        (("accelerator", "num_processes", 2), "exchanged between processes"),
        (("mechanics", "scaling", object()), "float16's gradient scaler"),
        (("stepping", "steps_in_backward", True), "steps within the backward"),
        (("beside", 0, "one"), "parameters beside the model"),
        (("hook", "_backward_hooks", {1: 2}), "hooks for their gradients"),
        (("hook", "_post_accumulate_grad_hooks", {1: 2}), "hooks for their gradients"),
        (("model", "gradient_checkpointing", True), "activation checkpointing"),
        (("model", "gradient_checkpointing", 1), None),
        (("args", "torch_empty_cache_steps", 0), "`torch_empty_cache_steps` acts"),
    ],
)
def test_why_the_updates_of_a_fit_are_not_compiled(change, reason):
    parts = {
        "stepping": SimpleNamespace(steps_in_backward=False), "accelerator": SimpleNamespace(num_processes=1),
        "args": SimpleNamespace(torch_empty_cache_steps=None), "model": nn.Linear(1, 1), "hook": SimpleNamespace(),
        "mechanics": SimpleNamespace(engine=None, scaling=None),
    }  # fmt: skip
    beside = []
    if change is not None and change[0] == "beside":
        beside = ["one"]
    elif change is not None:
        setattr(parts[change[0]], *change[1:])
    mechanics = parts["mechanics"]
    mechanics.stepping = parts["stepping"]
    steps = SimpleNamespace(model=parts["model"], args=parts["args"], accelerator=parts["accelerator"])
    found = reason_against(steps, mechanics, [SimpleNamespace(), parts["hook"]], beside)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("has_transformers", [True, False])
def test_warnings_are_skipped_in_a_graph(has_transformers, monkeypatch):
    once = print if has_transformers else None
    monkeypatch.setattr(logging.Logger, "warning_once", once, raising=False)
    config, before = torch._dynamo.config, torch._dynamo.config.trace_autograd_ops
    with compiled_update.tracing_gradients():
        assert config.trace_autograd_ops is True
        assert config.ignore_logging_functions == {logging.Logger.warning, *([print] if has_transformers else [])}
    assert config.trace_autograd_ops == before
