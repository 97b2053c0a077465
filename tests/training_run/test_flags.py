"""Log → evaluate → save: their order, and the flags that decide."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_compat.hf.enums import SaveStrategy
from hf_compat.hf.state import TrainerControl
from hf_compat.training_run.flags import due_actions, request_save_if_best


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
