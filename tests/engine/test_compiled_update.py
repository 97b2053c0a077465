"""`compile_update`: the graphs of micro-batches give the bits of the uncompiled run, and are made once a shape."""

from __future__ import annotations

import logging
import math
import os

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import hf_compat
from helpers import toy
from helpers.parity.cases import CASES
from helpers.parity.compare import first_difference, same
from helpers.parity.runner import run_case
from hf_compat import Trainer, TrainerCallback
from hf_compat.engine import compiled_update
from hf_compat.errors import ArgumentError
from hf_compat.plan.translate import Compilation

EAGER = {"compile_update": True, "torch_compile_backend": "eager"}
# Each compiles its updates. `tests/sweeps/parity/compiled_update.py` runs all cases.
SAME = ("accumulation", "short_last_window", "no_clipping", "hard_clipping", "bf16", "label_smoothing_causal_lm")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def make(make_args):
    def make(trainer_class=Trainer, model=toy.Classifier, callbacks=None, data=toy.rows, **values):
        hf_compat.set_seed(1)
        args = make_args(**{**EAGER, "num_train_epochs": 1, "learning_rate": 1e-2, "logging_steps": 1, **values})
        return trainer_class(model(), args, train_dataset=data(48), callbacks=callbacks)

    return make


def outcome(trainer, **resume):
    trainer.train(**resume)
    logs = [(one.get("loss"), one.get("grad_norm"), one.get("learning_rate")) for one in trainer.state.log_history]
    return logs, {name: value.clone() for name, value in trainer.model.state_dict().items()}


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", SAME)
def test_a_configuration_of_the_parity_table_gives_the_bits_of_the_uncompiled_run(name, tmp_path, caplog):
    case = CASES[name]
    if case["model"] is toy.tiny_gpt2:  # each layer takes seconds
        case = {**case, "model": lambda: toy.tiny_gpt2(n_layer=1)}
    plain = run_case(hf_compat, case, tmp_path / "plain")
    compiled = run_case(hf_compat, {**case, "args": case["args"] | EAGER}, tmp_path / "compiled")
    assert same(plain, compiled), first_difference(plain, compiled)
    assert graphs() and "run uncompiled" not in caplog.text


def test_a_graph_is_made_for_each_kind_of_micro_batch_and_none_for_a_learning_rate(make):
    trainer = make(lr_scheduler_type="cosine", max_steps=9, num_train_epochs=3)
    outcome(trainer)
    assert graphs() == 1
    trainer.train()
    few = graphs()  # a second fit
    outcome(make(gradient_accumulation_steps=3, max_steps=4))
    assert graphs() - few == 3  # the first of an update, those within it, and the last, which clips


def test_a_resumed_run_goes_on_with_the_same_bits(make, tmp_path):
    values = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = outcome(make(**values))
    folder = make(**values).args.output_dir
    again = outcome(make(**values), resume_from_checkpoint=os.path.join(folder, "checkpoint-3"))
    assert same(again[1], whole[1])


class Reads(TrainerCallback):
    def __init__(self):
        self.norms = []

    def note(self, args, state, control, model=None, **kwargs):
        self.norms.append([None if p.grad is None else p.grad.norm().item() for p in model.parameters()])

    on_substep_end = on_pre_optimizer_step = on_optimizer_step = on_step_end = note


def test_a_callback_reads_the_gradients_of_the_uncompiled_run_at_each_moment(make):
    found = []
    for values in ({"compile_update": False}, {}):
        reads = Reads()
        outcome(make(callbacks=[reads], gradient_accumulation_steps=2, max_steps=3, **values))
        found.append(reads.norms)
    assert found[0] == found[1] and found[0][0][0] > 0


def test_a_frozen_parameter_and_another_shape_get_graphs_of_their_own(make):
    class Freezes(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            next(model.parameters()).requires_grad_(state.global_step < 2)

    plain = outcome(make(callbacks=[Freezes()], compile_update=False, per_device_train_batch_size=5))
    assert same(outcome(make(callbacks=[Freezes()], per_device_train_batch_size=5)), plain)


class NoisyStep(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        for parameter in self.model.parameters():
            parameter.grad *= 2
        return loss


class Prints(toy.Classifier):
    def forward(self, x, labels=None):
        torch._dynamo.graph_break()
        return super().forward(x, labels)


class Hears(pl.Callback):
    def on_after_backward(self, trainer, module):
        pass


def hooked():
    model = toy.Classifier()
    next(model.parameters()).register_hook(lambda gradient: gradient * 0.5)
    return model


def test_an_override_of_the_step_changes_gradients_before_they_are_clipped(make):
    compiled = outcome(make(NoisyStep, max_grad_norm=0.1))
    assert graphs() == 1
    assert same(compiled, outcome(make(NoisyStep, max_grad_norm=0.1, compile_update=False)))


@pytest.mark.parametrize(
    ("reason", "values"),
    {
        "graph_break": {"model": Prints},
        "a value that changes": {"model": toy.NanAt},
        "activation checkpointing": {
            "model": toy.tiny_gpt2,
            "data": toy.blocks,
            "activation_checkpointing": True,
            "torch_compile_backend": None,
        },
        "hears of backward passes": {"callbacks": [Hears()]},
        "hooks for their gradients": {"model": hooked},
        "`torch_empty_cache_steps`": {"torch_empty_cache_steps": 2},
    }.items(),
)
def test_what_cannot_be_compiled_runs_as_without_it_and_the_log_says_why(make, caplog, reason, values):
    with caplog.at_level(logging.WARNING):
        compiled = outcome(make(**values))
    said = [one for one in caplog.messages if "`compile_update=True`: updates run uncompiled" in one]
    assert len(said) == 1 and reason in said[0]
    assert same(compiled, outcome(make(**values, compile_update=False)))


def test_an_unknown_backend_is_refused_and_torchs_settings_come_back(make):
    with pytest.raises(ArgumentError, match="torch_compile_backend"):
        make(torch_compile_backend="nobody's")
    before = torch._dynamo.config.trace_autograd_ops
    outcome(make(max_steps=1))
    assert torch._dynamo.config.trace_autograd_ops == before


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"backend": "inductor"}, False),
        ({"backend": "inductor", "mode": "reduce-overhead"}, True),
        ({"backend": "inductor", "mode": "max-autotune"}, True),
        ({"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}, False),
        ({"backend": "cudagraphs"}, True),
        ({"backend": "eager", "mode": "reduce-overhead"}, False),
    ],
)
def test_modes_with_cuda_graphs_are_known(how, expected):
    assert compiled_update.reuses_memory(Compilation(**how)) is expected


def _replayed(module, inputs):
    """A backend after whose call no earlier result is left, as those of CUDA graphs share their memory."""

    def run(*values):
        for one in _of_graphs:
            one.fill_(math.nan)
        results = module(*values)
        _of_graphs[:] = [one for one in results if one is not None]
        return results

    return run


_of_graphs: list[torch.Tensor] = []


def test_results_of_graphs_that_reuse_their_memory_are_kept(make, monkeypatch):
    registry = torch._dynamo.backends.registry
    for backends in (registry._BACKENDS, registry._COMPILER_FNS):
        monkeypatch.setitem(backends, "replayed", None)
        monkeypatch.delitem(backends, "replayed")  # what is registered goes with the test
    torch._dynamo.register_backend(_replayed, "replayed")
    monkeypatch.setattr(compiled_update, "reuses_memory", lambda how: True)
    values = {"gradient_accumulation_steps": 3, "logging_steps": 2}
    plain = outcome(make(compile_update=False, torch_compile_backend=None, **values))
    compiled = outcome(make(torch_compile_backend="replayed", **values))
    assert same(plain, compiled), first_difference(plain, compiled)
    assert graphs()


@pytest.mark.parametrize("most", [None, 0.1, 5.0, 1e9, float("inf")])
@pytest.mark.parametrize("has_earlier", [False, True])
@pytest.mark.parametrize("divisor", [1, 4])
def test_a_micro_batch_outside_of_a_graph_is_that_of_torch(most, has_earlier, divisor):
    torch.manual_seed(0)
    model, unused = nn.Linear(3, 2), nn.Parameter(torch.ones(1))
    parameters, x = [*model.parameters(), unused], torch.randn(4, 3)

    def compute_loss(called, inputs, num_items_in_batch):
        return called(inputs).pow(2).sum() / num_items_in_batch

    earlier = [torch.ones_like(one) for one in parameters[:2]] + [None] if has_earlier else None
    loss, gradients, norm = compiled_update._micro_batch(compute_loss, model, x, 8, divisor, parameters, earlier, most)
    expected = compute_loss(model, x, 8) / divisor
    expected.backward()
    for parameter in parameters[:2] if has_earlier else ():
        parameter.grad += 1
    whole = None if most is None else nn.utils.clip_grad_norm_(parameters, most)
    assert torch.equal(loss, expected.detach()) and not loss.requires_grad
    assert (norm is None) is (most is None) and (norm is None or torch.equal(norm, whole))
    assert gradients[2] is None and all(map(torch.equal, gradients[:2], [one.grad for one in parameters[:2]]))


def test_gradients_that_only_an_earlier_micro_batch_has_are_kept():
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    earlier = [None, torch.full((1,), 3.0)]
    _, gradients, _ = compiled_update._micro_batch(
        lambda model, inputs, num_items_in_batch: one.sum() * 2, None, None, None, 1, [one, other], earlier, None
    )
    assert [float(gradient) for gradient in gradients] == [2.0, 3.0]
