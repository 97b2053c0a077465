"""Where Lightning's own code has to run a batch, and what is called in its place, by objects that run nothing."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch import nn

from hf_compat.engine import window_trainer as lean
from hf_compat.engine.module import WindowModule
from hf_compat.engine.strategies import ForwardPrecision, HFSingleDeviceStrategy
from hf_compat.engine.window_trainer import find_listeners


def method(self, *args, **kwargs):
    """Replace a hook."""


def made(base, names=(), **values):
    """An object of a class that replaces methods, without its constructor."""
    kind = type("Own", (base,), dict.fromkeys(names, method)) if names else base
    own = kind.__new__(kind)
    if issubclass(base, nn.Module):
        nn.Module.__init__(own)
    own.__dict__.update(values)
    return own


def trainer(module=(), strategy=(), precision=(), callbacks=(), profiler=None, scaler=None, engine=None):
    return SimpleNamespace(
        lightning_module=made(WindowModule, module), strategy=made(HFSingleDeviceStrategy, strategy),
        precision_plugin=made(ForwardPrecision, precision, scaler=scaler, engine=engine),
        profiler=PassThroughProfiler() if profiler is None else profiler,
        callbacks=[made(pl.Callback, names) for names in callbacks],
    )  # fmt: skip


ANY = ["train", "validation", "test"]


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, []),
        ({"profiler": SimpleProfiler()}, ANY),
        ({"module": ["on_before_batch_transfer"]}, ANY),
        ({"module": ["transfer_batch_to_device"]}, ANY),
        ({"module": ["on_after_batch_transfer"]}, ANY),
        ({"strategy": ["batch_to_device"]}, ANY),
        ({"precision": ["convert_input"]}, ANY),
        ({"module": ["on_train_batch_start"]}, ["train"]),
        ({"module": ["on_train_batch_end"]}, ["train"]),
        ({"strategy": ["on_train_batch_start"]}, ["train"]),
        ({"strategy": ["post_training_step"]}, ["train"]),
        ({"module": ["on_validation_batch_start", "on_test_batch_end"]}, []),
        ({"callbacks": [["on_train_batch_start", "on_validation_batch_end"]]}, []),
    ],
)
@pytest.mark.parametrize("stage", ANY)
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("debugs", [False, True])
def test_where_lightnings_own_code_runs(changes, stages, stage, is_known, debugs, monkeypatch):
    monkeypatch.setattr(lean, "IS_KNOWN", is_known)
    monkeypatch.setattr(lean._CALLS, "level", logging.DEBUG if debugs else logging.INFO)
    lean._CALLS._cache.clear()
    found = find_listeners(trainer(**changes), stage)
    lean._CALLS._cache.clear()
    assert (found is None) is (stage in stages or not is_known or debugs)


@pytest.mark.parametrize(
    ("changes", "backward", "optimizer"),
    [
        ({}, True, True),
        ({"scaler": "scaler"}, False, False),
        ({"engine": "engine"}, False, False),
        ({"precision": ["clip_gradients"]}, False, False),  # a subclass may have changed anything
        ({"strategy": ["optimizer_step"]}, True, False),
        ({"strategy": ["optimizer_step"], "scaler": "scaler"}, False, False),
        ({"strategy": ["backward"]}, False, True),
        ({"strategy": ["pre_backward"]}, False, True),
        ({"strategy": ["post_backward"]}, False, True),
        ({"module": ["backward"]}, False, True),
        ({"module": ["on_before_backward"]}, False, True),
        ({"callbacks": [[], ["on_before_backward"]]}, False, True),
        ({"callbacks": [["on_after_backward"]]}, False, True),
        ({"callbacks": [["on_train_batch_end"]]}, True, True),
    ],
)
def test_what_a_backward_pass_and_a_step_need(changes, backward, optimizer):
    found = find_listeners(trainer(**changes), "train")
    assert (found.backward_is_plain, found.optimizer_is_plain) == (backward, optimizer)


@pytest.mark.parametrize("stage", ANY)
@pytest.mark.parametrize("precision", [[], ["clip_gradients"]])
@pytest.mark.parametrize("own", [False, True])
def test_whose_step_is_called(stage, precision, own):
    step = "training_step" if stage == "train" else f"{stage}_step"
    asked = trainer(strategy=[step] if own else [], precision=precision)
    found = find_listeners(asked, stage)
    is_modules = not own and not precision
    assert found.step == getattr(asked.lightning_module if is_modules else asked.strategy, step)
    assert found.names == (f"on_{stage}_batch_start", step, f"on_{stage}_batch_end") and found.takes_index
    assert found.module is asked.lightning_module


def test_hooks_are_called_in_the_order_of_callbacks_and_the_modules_last():
    asked = trainer(module=["on_before_optimizer_step"], callbacks=[[], ["on_before_optimizer_step"], ["setup"]])
    found = find_listeners(asked, "train")
    assert len(found.before_optimizer) == 2 and found.before == found.after == []
    first, last = found.before_optimizer
    assert first.args == (asked, asked.lightning_module) and first.func.__self__ is asked.callbacks[1]
    assert last.__self__ is asked.lightning_module
