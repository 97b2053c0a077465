"""The best evaluation: comparison, stored values, and the best checkpoint."""

from __future__ import annotations

import pytest

from hf_compat import TrainingArguments
from hf_compat.errors import MissingMetric
from hf_compat.hf.state import TrainerState
from hf_compat.training_run.best import note_best_checkpoint, update_best_metric

NAN = float("nan")


def best_of(tmp_path, values, **arguments):
    """Compare evaluations in turn. Return the state, and which of them were the best so far."""
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, **{"metric_for_best_model": "loss", "save_strategy": "steps", **arguments}
    )
    state, best = TrainerState(), []
    for update, value in enumerate(values, start=1):
        state.global_step = update
        best.append(update_best_metric(state, args, {"eval_loss": value}))
    return state, best


def test_a_lower_loss_is_better(tmp_path):
    state, best = best_of(tmp_path, [3.0, 2.0, 2.0, 4.0, 1.0, NAN])
    assert best == [True, True, False, False, True, False]
    assert (state.best_metric, state.best_global_step) == (1.0, 5)


def test_a_higher_score_is_better(tmp_path):
    state, best = best_of(tmp_path, [0.5, 0.4, 0.6], greater_is_better=True)
    assert best == [True, False, True] and state.best_metric == 0.6


def test_an_evaluation_that_is_nan_is_never_the_best(tmp_path):
    state, best = best_of(tmp_path, [NAN, 2.0])
    assert best == [False, True] and state.best_metric == 2.0


def test_without_checkpoints_no_update_is_remembered(tmp_path):
    state, _ = best_of(tmp_path, [2.0], save_strategy="no")
    assert state.best_metric == 2.0 and state.best_global_step is None


def test_without_a_metric_nothing_is_compared(tmp_path):
    state, best = best_of(tmp_path, [2.0], metric_for_best_model=None)
    assert best == [False] and state.best_metric is None


def test_a_metric_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MissingMetric, match=r"'eval_f1', which is not found .*\['eval_loss'\]"):
        best_of(tmp_path, [1.0], metric_for_best_model="f1")


def test_the_best_checkpoint_is_one_that_exists_or_is_being_written(tmp_path):
    def path_of(update):
        return str(tmp_path / f"checkpoint-{update}")

    state = TrainerState()
    note_best_checkpoint(state, path_of, path_of(2))
    assert state.best_model_checkpoint is None  # nothing was the best yet
    state.best_global_step = 2
    note_best_checkpoint(state, path_of, path_of(2))
    assert state.best_model_checkpoint == path_of(2)
    state.best_global_step = 3  # evaluated, not saved
    note_best_checkpoint(state, path_of, path_of(4))
    assert state.best_model_checkpoint == path_of(2)
    (tmp_path / "checkpoint-3").mkdir()
    note_best_checkpoint(state, path_of, path_of(4))
    assert state.best_model_checkpoint == path_of(3)
