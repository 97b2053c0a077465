"""What an adapted run does before a fit's first update: states, flags, the observer, and what callbacks are given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import hf_compat
from hf_compat import HFCallbackAdapter, TrainingArguments
from hf_compat.callbacks import hf_in_lightning
from hf_compat.callbacks.hf_in_lightning import AdaptedRun


class Counted(hf_compat.TrainerCallback):
    """Has a state that a checkpoint keeps."""

    def __init__(self, count=0):
        self.count = count

    @classmethod
    def from_state(cls, state):
        return cls(state)


class Other(Counted):
    """Another one."""


@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize("own_module", ["logs", "silent", "handwritten"])
@pytest.mark.parametrize("has_optimizers", [True, False])
@pytest.mark.parametrize("on_start", [True, False])
def test_a_fit_of_lightning_begins(decides, own_module, has_optimizers, on_start, monkeypatch):
    told, asked = [], []
    monkeypatch.setattr(hf_in_lightning, "switch_off_own_validation", lambda trainer: told.append("switched off"))
    monkeypatch.setattr(hf_in_lightning, "highest_each", lambda own: list(own))
    monkeypatch.setattr(hf_in_lightning, "flag_sources", lambda *given: asked.append(given) or (1, 0, 1))
    monkeypatch.setattr(AdaptedRun, "_begin", lambda self, trainer: told.append("begun"))
    monkeypatch.setattr(AdaptedRun, "restore", lambda self, saved: told.append(saved["state"]))
    monkeypatch.setattr(AdaptedRun, "fire", lambda self, event: told.append(event))
    monkeypatch.setattr(AdaptedRun, "evaluate", lambda self, trainer, cause: told.append(cause))
    run = AdaptedRun(TrainingArguments("a", use_cpu=True, eval_on_start=on_start, ddp_timeout=7), True)
    flow = [hf_in_lightning.DefaultFlowCallback()] if decides else []
    saved = {"state": "first", "callbacks": {"Counted": [1, 2, 3], "Other": 4, "Missing": 5}}
    second = {"state": "second", "callbacks": {"Other": [6]}}
    adapters = [
        SimpleNamespace(_restored=given, handler=SimpleNamespace(callbacks=[*callbacks]))
        for given, callbacks in (
            (saved, [Counted(), Other(), Counted(), *flow]), (None, [Counted(9)]), (second, [Other()])
        )
    ]  # fmt: skip
    run.adapters = adapters
    module = SimpleNamespace()
    if own_module != "handwritten":
        module = hf_compat.HFModule.__new__(hf_compat.HFModule)
        steps = SimpleNamespace(args=SimpleNamespace(gradient_accumulation_steps=4))
        vars(module).update(observer="none", steps=steps)
        monkeypatch.setattr(type(module), "logs_to_lightning", own_module == "logs", raising=False)
    empty, own = SimpleNamespace(param_groups=[]), SimpleNamespace(param_groups=[1])
    trainer = SimpleNamespace(
        optimizers=[empty, own] if has_optimizers else [empty], train_dataloader="loader",
        lr_scheduler_configs=[SimpleNamespace(scheduler="linear")] if has_optimizers else [],
    )  # fmt: skip
    run.on_train_start(trainer, module)
    assert told == [
        "begun", "first", *(["switched off"] if decides else []), "on_init_end", "on_train_begin",
        *(["start"] if on_start else []),
    ]  # fmt: skip
    handler, is_observed = run.callback_handler, own_module == "logs"
    counts = [one.count for one in handler.callbacks if isinstance(one, Counted)]
    assert counts == [1, 4, 2, 9, 6] and [one._restored for one in adapters] == [None] * 3
    assert run.flags_decide is decides
    assert vars(module).get("observer") == (run if is_observed else None if own_module == "handwritten" else "none")
    assert asked == [(handler.callbacks, False, HFCallbackAdapter, 4 if is_observed else 1)]
    assert run.run.flag_agreement.sources == (True, False, True)
    assert (handler.optimizer and handler.optimizer.optimizer) is (own if has_optimizers else None)
    assert handler.lr_scheduler == ("linear" if has_optimizers else None) and handler.train_dataloader == "loader"


@pytest.mark.parametrize("in_update", [True, False])
def test_a_batch_of_lightning_begins_an_update_once(in_update, monkeypatch):
    fired, run = [], AdaptedRun(TrainingArguments("a", use_cpu=True), True)
    monkeypatch.setattr(AdaptedRun, "fire", lambda self, event: fired.append(event))
    run.in_update = run._is_told = in_update
    run.on_train_batch_start(None, None, None, 0)
    assert fired == ["on_step_begin"] * (not in_update) and run.in_update
    run.on_train_epoch_start(None, None)
    assert fired[-1] == "on_epoch_begin" and run.in_update is run._is_told is False


@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize("is_windows", [True, False])
@pytest.mark.parametrize(("groups", "rate"), [([{"lr": 0.5}, {"lr": 1.0}], 0.5), ([{}], None), ([], None)])
def test_an_update_of_lightnings_is_measured_before_it_is_made(decides, is_windows, groups, rate, monkeypatch):
    fired, run = [], AdaptedRun(TrainingArguments("a", use_cpu=True), True)
    monkeypatch.setattr(AdaptedRun, "fire", lambda self, event: fired.append(event))
    module = torch.nn.Linear(2, 1)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    if is_windows:
        module = hf_compat.HFModule.__new__(hf_compat.HFModule)
    run.flags_decide, run.run.learning_rate, run.run.grad_norm = decides, 9.0, None
    run.on_before_optimizer_step(None, module, SimpleNamespace(param_groups=groups))
    assert run.run.learning_rate == (9.0 if is_windows else rate) and fired == ["on_pre_optimizer_step"]
    measured = decides and not is_windows
    assert (run.run.grad_norm is not None) is measured and (not measured or run.run.grad_norm.item() == 5.0)
