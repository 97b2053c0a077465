"""A resumed run begins after the moment at which its checkpoint was written.

What came before is not repeated, what comes after is complete. The moments: after an update's actions, after an
epoch's, after an evaluation.
"""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import transformers

import hf_compat
from helpers.resume_runs import OF_A_STEP, Run, assert_same, assert_uninterrupted, names, pairs

AXES = {
    "save": ("steps", "epoch", "best", "on_evaluate", "on_epoch_end", "on_log"),
    "evaluate": ("no", "epoch", "steps", "last_step"),
    "log": (1, 2, "epoch"),
    "restore": (False, True),
    "accumulation": (1, 3),
    "data": ("map", "sized"),
    "left_at": (None, 1, 2, "last"),  # a callback ends an epoch early: here, unlike in transformers, it stays ended
    "callbacks": ("hf", "both"),
}


def is_valid(case: dict) -> bool:
    return not (case["save"] in ("best", "on_evaluate") and case["evaluate"] == "no")


CASES = {"-".join(map(str, case.values())): case for case in pairs(AXES, is_valid)}


def updates_of_an_epoch(case: dict) -> int:
    return 7 if case["accumulation"] == 1 else 3


def callbacks(case: dict):
    """Return what makes a case's callbacks: they ask for checkpoints, and end an epoch early."""
    left_at = updates_of_an_epoch(case) if case["left_at"] == "last" else case["left_at"]

    def save(self, args, state, control, **kwargs):
        control.should_save = True

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop |= state.global_step == left_at

    def make(api) -> list:
        methods = {case["save"]: save} if case["save"].startswith("on_") else {}
        own = type("Own", (api.TrainerCallback,), {**methods, "on_step_end": on_step_end})
        mixed = case["callbacks"] == "both" and api is hf_compat
        return [pl.Callback(), own(), pl.Callback()] if mixed else [own()]

    return make


def arguments(case: dict) -> dict:
    args = {
        "gradient_accumulation_steps": case["accumulation"],
        "restore_callback_states_from_checkpoint": case["restore"],
        "learning_rate": 0.05,
        "lr_scheduler_type": "linear",
    }
    args |= {"logging_strategy": "epoch"} if case["log"] == "epoch" else {"logging_steps": case["log"]}
    args |= {
        "no": {},
        "epoch": {"eval_strategy": "epoch"},
        "steps": {"eval_strategy": "steps", "eval_steps": 2},
        "last_step": {"eval_strategy": "steps", "eval_steps": updates_of_an_epoch(case)},
    }[case["evaluate"]]
    saves = {"best": {"save_strategy": "best", "metric_for_best_model": "loss"}, "epoch": {"save_strategy": "epoch"}}
    return args | saves.get(
        case["save"], {"save_strategy": "steps", "save_steps": 1} if case["save"] == "steps" else {}
    )


def expected_events(whole: dict, step: int) -> list:
    """Return the events of a run that goes on after the moment at which a checkpoint was written."""
    events = [list(event) for event in whole["events"]]
    written = max(i for i, (event, at, *_) in enumerate(events) if event == "on_save" and at == step)
    rest = [event[:3] for event in events[written + 1 :]]
    epoch = events[written][2]
    begin = [["on_train_begin", step, epoch]]
    within = rest[0][0] in ("on_step_begin", "on_epoch_end")  # else the epoch has ended, or the run
    return begin + ([["on_epoch_begin", step, epoch]] if within else []) + rest


# Every second case; the others with `-m matrix`
HALF = [pytest.param(name, marks=[pytest.mark.matrix] * (number % 2)) for number, name in enumerate(CASES)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HALF)
def test_goes_on_after_the_moment_of_every_checkpoint(name, tmp_path):
    case = CASES[name]
    whole = run_whole(case, tmp_path)
    saved = sorted({at for event, at, *_ in whole["events"] if event == "on_save"})
    steps = [at for at in saved if at % updates_of_an_epoch(case) in (0, 1, 2) or at == saved[-1]]
    assert steps
    for step in steps:
        run = Run(hf_compat, tmp_path / f"from{step}", callbacks(case), case["data"], **arguments(case))
        resumed = run.train(str(tmp_path / "ours" / f"checkpoint-{step}"))
        assert_uninterrupted(whole, resumed)
        assert_same(expected_events(whole, step), [list(e[:3]) for e in resumed["events"]], f"events from {step}")
        if step < whole["state"]["global_step"]:  # else nothing draws
            assert_same(whole["random"], resumed["random"], "random")
        later = [name for name in whole["files"] if int(name.split("/")[0].split("-")[1]) > step]
        assert_same(later, resumed["files"], "files")


def run_whole(case: dict, folder) -> dict:
    """Return the uninterrupted run, which is transformers'."""
    runs = (Run(api, folder / where, callbacks(case), case["data"], **arguments(case)) for api, where in WHERE)
    theirs, ours = (run.train() for run in runs)
    for part in theirs:
        assert_same(theirs[part], ours[part], part)
    return ours


WHERE = ((transformers, "theirs"), (hf_compat, "ours"))


@pytest.mark.parametrize("updates", [4, 7])  # within an epoch, and before the first update of the second one
@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step"])
def test_an_update_that_a_callback_saves_in_the_middle_of_is_made_again(tmp_path, event, updates):
    """Its window counted as trained: the resumed run passed over it, and made one update fewer."""

    def save(self, args, state, control, **kwargs):
        if state.global_step == updates:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    saver = type("Saver", (hf_compat.TrainerCallback,), {event: save})()
    run = Run(hf_compat, tmp_path / "whole", lambda api: [saver], save_strategy="steps", save_steps=100)
    saver.trainer = run.trainer
    whole = run.train()
    resumed = Run(hf_compat, tmp_path / "resumed").train(run.checkpoint(updates))
    assert names(resumed["events"]).count("on_step_end") == 14 - updates
    assert resumed["state"] == whole["state"]
    if event == "on_step_begin":  # later the random states, and on_optimizer_step the weights, have moved on
        assert_same(whole["weights"], resumed["weights"], "weights")
        assert_same(whole["log"], resumed["log"], "log")


@pytest.mark.parametrize("updates", [4, 7])
def test_an_order_drawn_from_the_global_generator_is_drawn_again(tmp_path, updates):
    """Before the first update of an epoch nothing is skipped, and the order was drawn from the restored states."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == updates:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    saver = type("Saver", (hf_compat.TrainerCallback,), {"on_step_begin": on_step_begin})()
    shuffled = {"accelerator_config": {"use_seedable_sampler": False}}
    run = Run(hf_compat, tmp_path / "whole", lambda api: [saver], save_strategy="steps", save_steps=100, **shuffled)
    saver.trainer = run.trainer
    whole = run.train()
    resumed = Run(hf_compat, tmp_path / "resumed", **shuffled).train(run.checkpoint(updates))
    assert_same(whole["weights"], resumed["weights"], "weights")
    assert_same(whole["log"], resumed["log"], "log")


@pytest.mark.parametrize("evaluate", ["no", "epoch"])
@pytest.mark.parametrize("log", ["epoch", 2])
def test_resumed_twice_in_a_row(tmp_path, evaluate, log):
    """From an epoch's end, then from within the next epoch, then from its end."""
    case = {"save": "steps", "evaluate": evaluate, "log": log, "restore": True, "accumulation": 3}
    whole = Run(hf_compat, tmp_path / "whole", **arguments(case)).train()
    last = str(tmp_path / "whole" / "checkpoint-3")
    for step in (5, 6):
        run = Run(hf_compat, tmp_path / f"to{step}", **arguments(case))
        assert_uninterrupted(whole, run.train(last))
        last = run.checkpoint(step)
    assert_uninterrupted(whole, Run(hf_compat, tmp_path / "end", **arguments(case)).train(last))


@pytest.mark.parametrize("restore", [False, True])
def test_restored_flags_are_not_acted_on_again(tmp_path, restore):
    """The issue's example: checkpoint-6 was written a second time."""
    args = {"save_strategy": "epoch", "eval_strategy": "epoch", "restore_callback_states_from_checkpoint": restore}
    run = Run(hf_compat, tmp_path, gradient_accumulation_steps=3, num_train_epochs=3, **args)
    whole = run.train()
    resumed = Run(hf_compat, tmp_path / "again", gradient_accumulation_steps=3, num_train_epochs=3, **args)
    resumed = resumed.train(run.checkpoint(6))
    assert [step for event, step, *_ in resumed["events"] if event == "on_save"] == [9]
    assert [step for event, step, *_ in resumed["events"] if event == "on_evaluate"] == [9]
    assert_uninterrupted(whole, resumed)


# Data that never end, and runs that are finished ----------------------------------------------------------------------

ENDLESS = {"data": "endless", "gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize("trainer", ["same", "new"])
@pytest.mark.parametrize("data", ["endless", "map"])
@pytest.mark.parametrize("steps", [4, 6])  # within an epoch of the sized data, and at its end
def test_a_finished_run_trains_nothing(tmp_path, data, trainer, steps):
    args = {**ENDLESS, "data": data, "max_steps": steps}
    run = Run(hf_compat, tmp_path, **args)
    stopped = run.train()
    again = run if trainer == "same" else Run(hf_compat, tmp_path, **args)
    resumed = again.train(run.checkpoint(steps))
    assert not [event for event in names(resumed["events"]) if event in OF_A_STEP]
    assert_uninterrupted(stopped, resumed)
    assert resumed["state"] == stopped["state"]


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("trainer", ["same", "new"])
def test_endless_data_go_on_with_more_steps(tmp_path, step, trainer):
    def both(api):
        run = Run(api, tmp_path / api.__name__, max_steps=4, **ENDLESS)
        run.train()
        again = run if trainer == "same" else Run(api, tmp_path / api.__name__, max_steps=7, **ENDLESS)
        return again.train(run.checkpoint(step), max_steps=7)

    theirs, ours = both(transformers), both(hf_compat)
    for entries in (theirs["log"], ours["log"]):
        entries[-1].pop("train_loss")  # of the whole run here, of one call there
    for part in ("log", "events", "weights", "state", "files", "random"):
        assert_same(theirs[part], ours[part], part)
