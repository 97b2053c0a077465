"""The best evaluation: comparison, stored values, and the best checkpoint."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from hf_compat import TrainingArguments
from hf_compat.errors import MissingMetric
from hf_compat.hf.state import TrainerState
from hf_compat.training_run import best as best_evaluation
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


def told(teller, *facts):
    """The first line of the warning, or None."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        teller(*facts)
    assert len(caught) < 2
    return str(caught[0].message).partition("\n")[0] if caught else None


def arguments(**values):
    usual = {"metric_for_best_model": "eval_loss", "greater_is_better": False, "eval_strategy": "steps"}
    return SimpleNamespace(**{**usual, "_infers_direction": True, "eval_delay": 0, **values})


def state_of(**values):
    return TrainerState(**{"best_metric": 1.0, "best_global_step": 2, "global_step": 4, "max_steps": 4, **values})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"metric_for_best_model": "wer", "greater_is_better": True}, "looks like an error"),
        ({"metric_for_best_model": "wer", "greater_is_better": False}, None),
        ({"metric_for_best_model": "accuracy", "greater_is_better": True}, None),
        ({"metric_for_best_model": "neg_loss"}, "looks like the opposite of a loss"),
        ({"metric_for_best_model": "neg_loss", "greater_is_better": True}, None),
        ({"metric_for_best_model": "loss"}, None),
        ({"metric_for_best_model": None, "greater_is_better": True}, None),
        ({"metric_for_best_model": "wer", "greater_is_better": True, "_infers_direction": False}, None),
        ({"metric_for_best_model": "wer", "greater_is_better": True, "eval_strategy": "no"}, None),
    ],
)
def test_a_direction_against_the_metrics_name_is_told(values, words):
    found = told(best_evaluation.tell_of_direction, arguments(**values))
    assert found is None if words is None else words in found


LOG = [{"loss": 9.0}, {"eval_loss": 1.0}, {"eval_loss": 2.0}]


@pytest.mark.parametrize(
    ("values", "log", "best", "words"),
    [
        ({}, LOG, 1.0, None),
        ({}, LOG, 2.0, "it is the worst one by `greater_is_better=False`"),
        ({"greater_is_better": True}, LOG, 1.0, "it is the worst one by `greater_is_better=True`"),
        ({"greater_is_better": True}, LOG, 2.0, None),
        ({}, LOG[:2], 1.0, None),  # of one evaluation the best is the worst, too
        ({}, LOG, 5.0, None),
        ({"metric_for_best_model": "f1"}, LOG, 1.0, "no evaluation of the checkpoint has 'eval_f1'"),
        ({"metric_for_best_model": "f1"}, LOG[:1], 1.0, None),
        ({"metric_for_best_model": "f1"}, [{"eval_f1": "text"}], 1.0, "no evaluation of the checkpoint has"),
        ({"metric_for_best_model": "f1"}, LOG, None, None),
        ({"metric_for_best_model": None}, LOG, 2.0, None),
        ({"eval_strategy": "no"}, LOG, 2.0, None),
    ],
)
def test_a_resumed_best_of_another_metric_or_direction_is_told(values, log, best, words):
    found = told(best_evaluation.tell_of_other_best, arguments(**values), state_of(log_history=log, best_metric=best))
    assert found is None if words is None else words in found


@pytest.mark.parametrize(
    ("values", "state", "before", "words", "hint"),
    [
        ({}, {"best_model_checkpoint": "out/checkpoint-2"}, 0, None, None),
        ({}, {"best_model_checkpoint": "out/checkpoint-4"}, 0, "update 2) has no checkpoint: out", "save after"),
        ({}, {}, 0, "has no checkpoint: the weights of the last update stay", "save after each evaluation"),
        ({}, {}, 1, "has no checkpoint", "save after each evaluation"),
        ({}, {}, 2, "has no checkpoint", "resume in an output folder that has checkpoint-2"),
        ({}, {"best_metric": None}, 0, "as none was made", "lower `eval_delay`"),
        ({}, {"best_global_step": None}, 0, "as none gave a number 'eval_loss'", "NaN or infinite"),
        ({}, {"best_global_step": 0}, 0, "as none gave a number", "NaN or infinite"),
        ({"eval_strategy": "no"}, {}, 0, None, None),
    ],
)  # fmt: skip
def test_a_best_evaluation_without_its_weights_is_told(values, state, before, words, hint):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        best_evaluation.tell_of_best(arguments(**values), state_of(**state), before)
    assert len(caught) == (words is not None)
    assert words is None or (words in str(caught[0].message) and hint in str(caught[0].message))


@pytest.mark.parametrize(
    ("values", "state", "words"),
    [
        ({"eval_delay": 5}, {}, "evaluated nothing: it ended after 4 updates"),
        ({"eval_delay": 4}, {}, None),
        ({"eval_delay": 5}, {"max_steps": 5}, None),  # it was stopped
        ({"eval_delay": 5}, {"log_history": [{"loss": 1.0}]}, "evaluated nothing"),
        ({"eval_delay": 5}, {"log_history": [{"eval_loss": 1.0}]}, None),  # an own call
        ({"eval_delay": 3, "eval_strategy": "epoch"}, {"epoch": 2.0}, "it ended after 2 epochs"),
        ({"eval_delay": 2, "eval_strategy": "epoch"}, {"epoch": 2.0}, None),
        ({"eval_delay": 1, "eval_strategy": "epoch"}, {"epoch": None}, "it ended after 0 epochs"),
        ({"eval_delay": 5, "eval_strategy": "no"}, {}, None),
    ],
)
def test_a_delay_until_the_end_is_told(values, state, words):
    found = told(best_evaluation.tell_of_no_evaluation, arguments(**values), state_of(**state))
    assert found is None if words is None else words in found
