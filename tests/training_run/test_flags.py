"""Log → evaluate → save: their order, and the flags that decide."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_compat.hf.enums import SaveStrategy
from hf_compat.hf.state import TrainerControl
from hf_compat.training_run import flags
from hf_compat.training_run.flags import FLAGS, FlagAgreement, FlagSources, due_actions, request_save_if_best


def actions(control, is_best=False, strategy=SaveStrategy.STEPS, evaluated=None):
    """Return the actions in order. `evaluated` is the control that an evaluation's callback returns."""
    run = SimpleNamespace(args=SimpleNamespace(save_strategy=strategy, metric_for_best_model=None), control=control)
    done = []
    for action in due_actions(run):
        done.append(action)
        if action == "evaluate":
            run.control = control if evaluated is None else evaluated
            request_save_if_best(run, is_best)
    return done


def test_all_flags_act_in_hfs_order():
    assert actions(TrainerControl(should_log=True, should_evaluate=True, should_save=True)) == [
        "log",
        "evaluate",
        "save",
    ]


def test_no_flag_does_nothing():
    assert actions(TrainerControl()) == []


def test_a_flag_that_is_set_in_the_evaluation_still_counts():
    assert actions(TrainerControl(should_evaluate=True), evaluated=TrainerControl(should_save=True)) == [
        "evaluate",
        "save",
    ]


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("is_best", [False, True])
def test_with_the_strategy_best_the_evaluation_decides(is_best, asked):
    control = TrainerControl(should_evaluate=True, should_save=asked)
    assert ("save" in actions(control, is_best, SaveStrategy.BEST)) == is_best


def test_with_the_strategy_best_a_flag_without_an_evaluation_is_obeyed():
    assert actions(TrainerControl(should_save=True), strategy=SaveStrategy.BEST) == ["save"]


@pytest.mark.parametrize(
    ("timeout", "is_distributed", "asks"), [(5.0, True, True), (0.0, True, False), (5.0, False, False)]
)
def test_a_flag_of_another_rank_is_set_here_too(timeout, is_distributed, asks, monkeypatch):
    told, control = [], TrainerControl(should_save=True)
    others = [int(name in ("should_log", "should_save")) for name in FLAGS]
    monkeypatch.setattr(flags, "is_distributed", lambda: is_distributed)
    monkeypatch.setattr(flags, "highest_on_host", lambda own, seconds: told.append((own, seconds)) or others)
    agreement = FlagAgreement(timeout)
    agreement.agree(control)
    assert told == [([int(name == "should_save") for name in FLAGS], timeout)] * asks
    expected = {"should_save", *(["should_log"] if asks else [])}
    assert {name for name in FLAGS if getattr(control, name)} == expected
    assert not agreement.sources.in_updates


@pytest.mark.parametrize("in_updates", [True, False])
@pytest.mark.parametrize("metric", [None, "loss"])
@pytest.mark.parametrize("action", ["log", "evaluate", "save"])
def test_ranks_agree_after_what_may_set_flags_on_one_of_them(in_updates, metric, action):
    agreed, args = [], SimpleNamespace(metric_for_best_model=metric)
    agreement = FlagAgreement(sources=FlagSources(in_updates=in_updates))
    agreement.agree = agreed.append
    run = SimpleNamespace(args=args, control=TrainerControl(**{f"should_{action}": True}))
    assert list(due_actions(run, agreement)) == [action]
    assert agreed == [run.control] * (in_updates or (action == "evaluate" and metric is not None))
