"""A trainer state is read with all its fields right, or refused with the name of the one that is wrong."""

from __future__ import annotations

import json

import pytest

from helpers import toy
from hf_compat import Trainer, get_last_checkpoint
from hf_compat.checkpoint.validation import read_trainer_state
from hf_compat.errors import CheckpointError
from hf_compat.hf.state import TrainerControl, TrainerState

WRONG = [
    *(("global_step", value) for value in ("x", -5, 1e30, float("nan"), None, True, 10**30, [])),
    *(("logging_steps", value) for value in ("x", -1, float("inf"), None)),
    ("epoch", "x"),
    ("log_history", 3),
    ("log_history", [3]),
    ("log_history", {"loss": 1}),
    ("stateful_callbacks", [1]),
    ("stateful_callbacks", {"TrainerControl": 3}),
    ("stateful_callbacks", {"TrainerControl": [3]}),
    ("stateful_callbacks", {"TrainerControl": {"args": [1]}}),
    ("best_metric", "high"),
    ("best_model_checkpoint", 3),
    ("is_hyper_param_search", "no"),
    ("trial_params", [1]),
]


def test_what_is_written_is_read(tmp_path):
    state = TrainerState(global_step=7, log_history=[{"loss": float("nan"), "step": 7}], best_metric=0.5)
    state.stateful_callbacks = {"TrainerControl": TrainerControl().state()}
    state.save_to_json(tmp_path / "trainer_state.json")
    again = read_trainer_state(tmp_path / "trainer_state.json")
    assert json.dumps(vars(again), sort_keys=True) == json.dumps(vars(state), sort_keys=True)


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_field_is_named(tmp_path, field, value):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({field: value}))
    with pytest.raises(CheckpointError, match=rf"trainer_state\.json is not a readable trainer state: `{field}` is"):
        read_trainer_state(path)


@pytest.mark.parametrize("content", ["[]", "3", '{"of_the_future": 1}'])
def test_what_is_no_state(tmp_path, content):
    (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json is not a readable trainer state: it "):
        read_trainer_state(tmp_path / "trainer_state.json")


@pytest.mark.parametrize(("field", "value"), WRONG[:2])
def test_a_checkpoint_with_a_wrong_field_is_passed_over(make_args, tmp_path, caplog, field, value):
    from hf_compat.checkpoint import manifest

    def trainer():
        values = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        return Trainer(toy.Classifier(), make_args(**values), train_dataset=toy.rows())

    trainer().train()
    folder = tmp_path / "out" / "checkpoint-4"
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, field: value}))
    (folder / "manifest.json").unlink()
    assert get_last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")
    manifest.seal(str(folder))
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed._run.checkpoint == str(tmp_path / "out" / "checkpoint-2")
    assert f"checkpoint-4 is not whole and is skipped: it cannot be loaded ({folder}" in caplog.text


def test_an_interval_of_zero_is_refused_where_the_run_counts_by_it(make_args, tmp_path, caplog):
    from hf_compat.checkpoint import manifest

    values = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    Trainer(toy.Classifier(), make_args(**values), train_dataset=toy.rows()).train()
    folder = tmp_path / "out" / "checkpoint-4"
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "logging_steps": 0}))
    (folder / "manifest.json").unlink()
    manifest.seal(str(folder))
    by_steps = Trainer(toy.Classifier(), make_args(**values), train_dataset=toy.rows())
    with pytest.raises(CheckpointError, match=r"checkpoint-4: `logging_steps` is 0 in trainer_state\.json"):
        by_steps.train(resume_from_checkpoint=str(folder))
    by_epochs = Trainer(toy.Classifier(), make_args(**values, logging_strategy="epoch"), train_dataset=toy.rows())
    assert by_epochs.train(resume_from_checkpoint=str(folder)).global_step == 4
    assert by_steps.train(resume_from_checkpoint=True).global_step == 4
    assert "checkpoint-4 is not whole and is skipped: it cannot be loaded" in caplog.text
