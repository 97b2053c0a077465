"""What a script puts under names of `transformers.trainer` after `patch()`: read as upstream reads it, or told of."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import transformers

import hf_compat
from helpers import toy
from hf_compat.interop.transformers_models import global_of_trainer
from hf_compat.plan.translate import ddp_options

pytestmark = pytest.mark.filterwarnings("ignore:These were imported from transformers")


@pytest.fixture
def swapped():
    hf_compat.patch()
    yield transformers.trainer
    hf_compat.unpatch()


def steps_with(change, tmp_path, **arguments):
    """Train with what a script puts in place; returns which of its functions and callbacks were called, how often."""
    calls = []

    class Counts(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            calls.append("callback")

    class Bar(transformers.ProgressCallback):
        def on_step_end(self, args, state, control, **kwargs):
            calls.append("bar")

    given = transformers.trainer.get_scheduler

    def schedule(*args, **kwargs):
        calls.append("schedule")
        return given(*args, **kwargs)

    values = {"DEFAULT_CALLBACKS": [*transformers.trainer.DEFAULT_CALLBACKS, Counts]}
    values |= {"DEFAULT_PROGRESS_CALLBACK": Bar, "get_scheduler": schedule}
    with mock.patch(f"transformers.trainer.{change}", values[change]):
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, save_strategy="no", use_cpu=True, report_to=[], **arguments
        )
        transformers.Trainer(toy.tiny_gpt2(), args, train_dataset=toy.blocks(8)).train()
    return calls


CHANGES = [
    ("DEFAULT_CALLBACKS", ["callback"] * 2),
    ("DEFAULT_PROGRESS_CALLBACK", ["bar"] * 2),
    ("get_scheduler", ["schedule"]),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_what_upstream_reads_there_is_read_here(change, expected, tmp_path, swapped):
    ours = steps_with(change, tmp_path)
    hf_compat.unpatch()
    theirs = steps_with(change, tmp_path)
    assert ours == theirs == expected


def test_a_list_that_is_changed_in_place_counts_until_it_is_as_before(swapped):
    kind = type("Own", (transformers.TrainerCallback,), {})
    swapped.DEFAULT_CALLBACKS.append(kind)
    try:
        assert global_of_trainer("DEFAULT_CALLBACKS")[-1] is kind
    finally:
        swapped.DEFAULT_CALLBACKS.remove(kind)
    assert global_of_trainer("DEFAULT_CALLBACKS") is None and global_of_trainer("nowhere") is None


def trainer(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transformers.Trainer(toy.tiny_gpt2(), args)
    return [str(one.message) for one in caught if "has replaced" in str(one.message)]


def test_what_the_engine_does_not_read_is_told_of(tmp_path, swapped):
    schedules = transformers.optimization.TYPE_TO_SCHEDULER_FUNCTION
    hf_compat.patch()  # once more: nothing of this is the script's
    assert trainer(tmp_path) == []
    own = mock.patch("transformers.trainer.unwrap_model", len), mock.patch.dict(schedules, linear=len)
    heir = mock.patch("transformers.trainer.Trainer", type("Own", (transformers.Trainer,), {}))
    with own[0], own[1], heir:
        (told,) = trainer(tmp_path)
    assert "`transformers.optimization.TYPE_TO_SCHEDULER_FUNCTION`, `transformers.trainer.unwrap_model`" in told
    assert "override the method of Trainer" in told and "trainer.Trainer`" not in told
    assert trainer(tmp_path) == []


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # 4.x has this name alone
def test_a_checkpointing_model_is_asked_by_the_name_that_does_not_warn(tmp_path):
    args = hf_compat.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    model, found = toy.tiny_gpt2(), []
    for change in (lambda: None, model.gradient_checkpointing_enable):
        change()
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            found.append(ddp_options(args, model)["find_unused_parameters"])
    assert found == [True, False]
