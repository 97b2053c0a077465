"""State and control as files and as callbacks' states: both directions between transformers and here."""

import dataclasses
import json

import pytest
import transformers

import hf_compat
from hf_compat import EarlyStoppingCallback, TrainerControl, TrainerState
from hf_compat.errors import CallbackError
from hf_compat.hf.state import export_states, is_exportable


def test_the_file_is_transformers(tmp_path):
    callbacks = [EarlyStoppingCallback(3, 0.1), TrainerControl(should_save=True)]
    ours = TrainerState(epoch=0.5, global_step=3, log_history=[{"loss": 1.0}], stateful_callbacks=callbacks)
    ours.save_to_json(str(tmp_path / "ours.json"))
    theirs = transformers.TrainerState.load_from_json(str(tmp_path / "ours.json"))
    theirs.save_to_json(str(tmp_path / "theirs.json"))
    assert json.loads((tmp_path / "ours.json").read_text()) == json.loads((tmp_path / "theirs.json").read_text())
    assert TrainerState.load_from_json(tmp_path / "theirs.json") == ours


def test_states_of_one_class_become_a_list_and_rebuild_their_objects():
    exported = export_states([EarlyStoppingCallback(1), EarlyStoppingCallback(2), TrainerControl(should_log=True)])
    assert [state["args"]["early_stopping_patience"] for state in exported["EarlyStoppingCallback"]] == [1, 2]
    rebuilt = EarlyStoppingCallback.from_state(exported["EarlyStoppingCallback"][1])
    assert rebuilt.early_stopping_patience == 2
    assert TrainerControl.from_state(exported["TrainerControl"]) == TrainerControl(should_log=True)


def test_what_has_no_state_is_refused():
    assert is_exportable(transformers.EarlyStoppingCallback()) and not is_exportable(object())
    assert export_states([object(), TrainerControl()]) == export_states([TrainerControl()])
    with pytest.raises(CallbackError, match="object has no state"):
        TrainerState(stateful_callbacks=[object()])


@pytest.mark.parametrize("steps, expected", [(0.1, 2), (0.07, 2), (1, 1), (5, 5), (None, 500)])
def test_shares_of_the_run_become_updates(make_args, steps, expected):
    args = make_args(logging_steps=3)
    args.eval_steps = steps
    ours, theirs = TrainerState(), transformers.TrainerState()
    ours.compute_steps(args, 20)
    theirs.compute_steps(args, 20)
    assert (ours.logging_steps, ours.eval_steps) == (theirs.logging_steps, theirs.eval_steps) == (3, expected)


@dataclasses.dataclass
class Score:
    value: float = 0.5


@pytest.mark.parametrize("logged", [0.5, Score()])
def test_a_state_is_written_as_upstream_writes_it(tmp_path, logged):
    for api in (hf_compat, transformers):
        api.TrainerState(global_step=3, log_history=[{"loss": logged, "step": 3}]).save_to_json(str(tmp_path / "state"))
        text = (tmp_path / "state").read_text()
        assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
        assert json.loads(text)["log_history"] == [{"loss": 0.5 if logged == 0.5 else {"value": 0.5}, "step": 3}]
