"""A run that was stopped, by anybody and anywhere, goes on where it stood: as in transformers, as if never stopped."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import lightning.pytorch.callbacks as plc
import pytest
import transformers

import hf_compat
from helpers import toy
from helpers.resume_runs import (
    LightningStop,
    Run,
    assert_as_transformers,
    assert_nothing_trained,
    assert_same,
    assert_uninterrupted,
    names,
    pairs,
    stop_and_save,
)

AXES = {
    "stopper": ("callback", "max_steps", "lightning", "signal"),
    "saved": ("in_step", "every_step", "by_epoch_end"),
    "at": ("first", "middle", "last", "second_epoch"),
    "afterwards": ("same", "more_steps", "more_epochs", "fewer"),
    "trainer": ("same", "new"),
    "data": ("map", "sized", "endless", "map_not_skipped"),
    "accumulation": (1, 3),
    "logging_steps": (1, 2),
}
UPDATES = {
    1: {"first": 1, "middle": 4, "last": 7, "second_epoch": 10},
    3: {"first": 1, "middle": 2, "last": 3, "second_epoch": 5},
}


def is_valid(case: dict) -> bool:
    endless, not_skipped = case["data"] == "endless", case["data"] == "map_not_skipped"
    by_epoch_end = case["saved"] == "by_epoch_end"
    return not (
        (case["stopper"] == "signal" and (by_epoch_end or case["trainer"] == "same"))
        or (endless and (case["afterwards"] == "more_epochs" or case["at"] == "second_epoch"))
        # an epoch is repeated there, or read again where the run was finished
        or (not_skipped and case["afterwards"] == "fewer")
        or (not_skipped and case["stopper"] == "max_steps" and case["afterwards"] == "same")
        # nothing is finished after one update
        or (case["afterwards"] == "fewer" and case["at"] == "first")
    )


CASES = {"-".join(map(str, case.values())): case for case in pairs(AXES, is_valid)}


class Plan:
    """A case in numbers: what the first run is given, and what the second."""

    def __init__(self, case: dict) -> None:
        self.case, self.at = case, UPDATES[case["accumulation"]][case["at"]]
        self.epoch = 7 if case["accumulation"] == 1 else 3
        self.endless = case["data"] == "endless"
        self.args = {
            "gradient_accumulation_steps": case["accumulation"],
            "logging_steps": case["logging_steps"],
            "ignore_data_skip": case["data"] == "map_not_skipped",
            "enable_jit_checkpoint": case["stopper"] == "signal",
            "max_steps": 2 * self.epoch if self.endless else -1,
            "num_train_epochs": 2,
        }
        self.args |= {
            "in_step": {},
            "every_step": {"save_strategy": "steps", "save_steps": 1},
            "by_epoch_end": {"save_strategy": "epoch"},
        }[case["saved"]]
        if case["stopper"] == "max_steps":
            self.args["max_steps"] = self.at
            if case["saved"] == "in_step":
                self.args |= {"save_strategy": "steps", "save_steps": 100}
        self.changed = {
            "same": {},
            "more_steps": {"max_steps": 2 * self.epoch + 2},
            "more_epochs": {"max_steps": -1, "num_train_epochs": 3},
            "fewer": {"max_steps": self.at - 1} if self.at <= self.epoch else {"max_steps": -1, "num_train_epochs": 1},
        }[case["afterwards"]]

    @property
    def is_finished(self) -> bool:
        return self.case["afterwards"] == "fewer" or (
            self.case["stopper"] == "max_steps" and self.case["afterwards"] == "same"
        )

    @property
    def is_open_at_its_end(self) -> bool:
        """Whether the checkpoint was written after an epoch's last update, and before the epoch's end."""
        skips = self.case["data"] in ("map", "sized")
        return self.at == self.epoch and self.case["saved"] != "by_epoch_end" and skips

    def callbacks(self, api) -> list:
        """Return what stops the run: for transformers always an HF callback."""
        stopper, save = self.case["stopper"], self.case["saved"] == "in_step"
        if stopper == "max_steps":
            return []
        if api is transformers or stopper == "callback":
            return stop_and_save(self.at, save=save)(api)
        if stopper == "lightning":
            return [LightningStop(self.at), *stop_and_save(self.at, stop=False, save=save)(api)]
        return [_signal_in(self.at)(api)]

    def run(self, api, folder, stops: bool = True, **args) -> Run:
        data = self.case["data"].split("_")[0]
        callbacks = self.callbacks if stops else lambda api: []
        return Run(api, folder, callbacks, data, **{**self.args, **args})


def _signal_in(update: int):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == update - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return lambda api: type("Signal", (api.TrainerCallback,), {"on_step_begin": on_step_begin})()


def stop_then_resume(plan: Plan, api, folder) -> tuple[dict, dict]:
    """Return what the run that was stopped recorded, and the one that was resumed."""
    first = plan.run(api, folder)
    if plan.case["stopper"] == "signal" and api is hf_compat:
        with pytest.raises(SystemExit):
            first.train()
        stopped = first.recorded()
    else:
        stopped = first.train()
    assert stopped["state"]["global_step"] == plan.at
    second = first if plan.case["trainer"] == "same" else plan.run(api, folder, **plan.changed)
    changed = plan.changed if plan.case["trainer"] == "same" else {}
    return stopped, second.train(first.checkpoint(plan.at), **changed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_goes_on_where_it_was_stopped(name, tmp_path):
    plan = Plan(CASES[name])
    stopped, resumed = stop_then_resume(plan, hf_compat, tmp_path / "ours")
    stopped_there, theirs = stop_then_resume(plan, transformers, tmp_path / "theirs")
    if plan.is_finished:
        assert_nothing_trained(stopped, resumed)
        # within an epoch transformers makes one more update, though all are done
        if theirs["state"]["global_step"] == stopped_there["state"]["global_step"] and not plan.is_open_at_its_end:
            assert_same(theirs["events"], resumed["events"], "events")
        return
    completes = 2 if plan.is_open_at_its_end else 0
    if completes:
        assert names(resumed["events"])[1:3] == ["on_epoch_begin", "on_epoch_end"]
    assert_as_transformers(theirs, resumed, plan.args["logging_steps"] > 1, completes)
    if not plan.args["ignore_data_skip"]:
        whole = plan.run(hf_compat, tmp_path / "whole", stops=False, **plan.changed).train()
        # an endless epoch is `max_steps` long
        assert_uninterrupted(whole, resumed, *(["epoch"] if plan.endless else []))


@pytest.mark.parametrize("saved", ["in_step", "by_epoch_end"])
@pytest.mark.parametrize("at", ["middle", "last"])
@pytest.mark.parametrize("data", ["map", "endless"])
def test_a_finished_run_logs_its_summary_again(tmp_path, saved, at, data):
    case = dict.fromkeys(AXES, None) | {"stopper": "max_steps", "saved": saved, "at": at, "afterwards": "same"}
    plan = Plan({**case, "trainer": "new", "data": data, "accumulation": 3, "logging_steps": 2})
    stopped, resumed = stop_then_resume(plan, hf_compat, tmp_path)
    assert_nothing_trained(stopped, resumed)
    assert_same(stopped["log"], resumed["log"], "log")
    assert_same(stopped["files"], resumed["files"], "files")
    ended = [name for name in names(resumed["events"]) if name not in ("on_epoch_begin", "on_epoch_end")]
    assert ended == ["on_train_begin", "on_log", "on_train_end"]


# The issue's own examples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", [transformers, hf_compat])
def test_one_epoch_of_six_updates_stopped_at_the_third(api, tmp_path):
    def run(resume=None):
        return Run(api, tmp_path, stop_and_save(3), lambda: toy.rows(12), num_train_epochs=1).train(resume)

    assert run()["state"]["global_step"] == 3
    resumed = run(str(tmp_path / "checkpoint-3"))
    assert [step for event, step, *_ in resumed["events"] if event == "on_step_end"] == [4, 5, 6]
    assert resumed["state"]["global_step"] == 6 and resumed["state"]["epoch"] == 1.0


@pytest.mark.parametrize("api", [transformers, hf_compat])
def test_max_steps_is_extended(api, tmp_path):
    def run(steps, resume=None):
        args = {"save_strategy": "steps", "save_steps": 100, "max_steps": steps}
        return Run(api, tmp_path, data=lambda: toy.rows(12), **args).train(resume)

    run(4)
    epochs = [round(entry["epoch"], 3) for entry in run(8, str(tmp_path / "checkpoint-4"))["log"]]
    assert epochs == [0.167, 0.333, 0.5, 0.667, 0.833, 1.0, 1.167, 1.333, 1.333]


@pytest.mark.parametrize("api", [transformers, hf_compat])
def test_max_steps_gives_way_to_epochs(api, tmp_path):
    def run(resume=None, **args):
        args = {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 100, **args}
        return Run(api, tmp_path, **args).train(resume)

    run(max_steps=2)
    resumed = run(str(tmp_path / "checkpoint-2"), num_train_epochs=1)
    assert resumed["state"]["global_step"] == 3 and resumed["state"]["epoch"] == 1.0


def _spend(timer, at: int):
    """Return an HF callback that lets a timer's time run out at an update."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == at:
            timer._start_time["train"] -= 8 * 3600

    return lambda api: type("Spend", (api.TrainerCallback,), {"on_step_end": on_step_end})()


@pytest.mark.parametrize("at", [1, 8, 13])
@pytest.mark.parametrize("again", ["without", "with_a_longer_one"])
def test_lightnings_timer(tmp_path, at, again):
    """One epoch of 13 updates (50 samples, batches of 4); the timer of the README ends it early."""
    args = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 1}

    def run(folder, callbacks=lambda api: [], resume=None):
        return Run(hf_compat, folder, callbacks, toy.rows, **args).train(resume)

    timer = plc.Timer("00:08:00:00")
    stopped = run(tmp_path, lambda api: [_spend(timer, at)(api), timer])
    assert stopped["state"]["global_step"] == at
    longer = [] if again == "without" else [plc.Timer(timedelta(hours=16))]
    resumed = run(tmp_path, lambda api: longer, str(tmp_path / f"checkpoint-{at}"))
    assert resumed["state"]["global_step"] == 13
    assert_uninterrupted(run(tmp_path / "whole"), resumed)


# Early stopping -------------------------------------------------------------------------------------------------------


# transformers begins the patience anew, which is what the cases without `restored` compare
@pytest.mark.filterwarnings("ignore:The resumed run does not restore the states of callbacks")
@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("moment", ["steps", "epoch"])
@pytest.mark.parametrize("best", [False, True])
def test_after_early_stopping(tmp_path, moment, restored, best):
    args = {
        "learning_rate": 0.3,
        "num_train_epochs": 4,
        "eval_strategy": moment,
        "save_strategy": moment,
        "eval_steps": 2,
        "save_steps": 2,
        "metric_for_best_model": "eval_loss",
        "load_best_model_at_end": best,
        "restore_callback_states_from_checkpoint": restored,
    }

    def both(api):
        folder = tmp_path / api.__name__
        run = Run(api, folder, lambda api: [api.EarlyStoppingCallback(1)], **args)
        stopped = run.train()
        again = Run(api, folder, lambda api: [api.EarlyStoppingCallback(3)], **args)
        return stopped, again.train(run.checkpoint(stopped["state"]["global_step"]))

    (stopped, ours), (theirs_stopped, theirs) = both(hf_compat), both(transformers)
    assert_same(theirs_stopped["log"], stopped["log"], "log of the stopped run")
    assert stopped["state"]["global_step"] < 28
    assert_as_transformers(theirs, ours)


# Other ways to stop, and other things that go on ----------------------------------------------------------------------


def _stop(event: str, at: int):
    def method(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == at

    return lambda api: [type("Stop", (api.TrainerCallback,), {event: method})()]


EVERY = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
EPOCH = {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch"}
# name: (arguments, changed arguments, update of the checkpoint, what stops)
SIBLINGS = {
    "metric_callback": (EVERY, {}, 2, _stop("on_evaluate", 2)),
    "after_a_log": (EVERY, {}, 2, _stop("on_log", 2)),
    "after_a_save": (EVERY, {}, 2, _stop("on_save", 2)),
    "best_model": ({**EVERY, "load_best_model_at_end": True, "learning_rate": 0.1}, {}, 2, _stop("on_step_end", 2)),
    "model_only": ({**EVERY, "save_only_model": True}, {}, 2, _stop("on_step_end", 2)),
    "eval_on_start": ({**EVERY, "eval_on_start": True}, {}, 2, _stop("on_step_end", 2)),
    "on_epoch_end": (EPOCH, {}, 3, _stop("on_epoch_end", 3)),
    "everything_by_epoch": (EPOCH, {}, 2, _stop("on_step_end", 2)),
    "everything_by_epoch_restored": (
        {**EPOCH, "restore_callback_states_from_checkpoint": True},
        {},
        2,
        _stop("on_step_end", 2),
    ),
    "steps_of_epochs": ({**EPOCH, "max_steps": 2}, {"max_steps": 5}, 2, lambda api: []),
    "parts_of_epochs": ({**EPOCH, "num_train_epochs": 1.34}, {"num_train_epochs": 2.34}, 5, lambda api: []),
    "smaller_batches": (
        {**EVERY, "auto_find_batch_size": True, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        {},
        1,  # of two, once seven samples are a batch
        _stop("on_step_end", 1),
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SIBLINGS)
def test_goes_on_as_transformers(name, tmp_path):
    args, changed, at, stops = SIBLINGS[name]
    args = {"gradient_accumulation_steps": 3, **args}
    model = (lambda: toy.OutOfMemoryAbove(7)) if "auto_find_batch_size" in args else toy.Classifier

    def both(api):
        first = Run(api, tmp_path / api.__name__, stops, model=model, **args)
        stopped = first.train()
        second = Run(api, tmp_path / api.__name__, stops, model=model, **{**args, **changed})
        return stopped, second.train(first.checkpoint(at))

    (theirs_stopped, theirs), (stopped, ours) = both(transformers), both(hf_compat)
    for part in theirs_stopped:
        assert_same(theirs_stopped[part], stopped[part], part)
    assert_as_transformers(theirs, ours, sums_begin_again=False)


@pytest.mark.parametrize("saved", ["in_step", "by_epoch_end"])
@pytest.mark.parametrize("at", [2, 3])
@pytest.mark.parametrize("data", ["map", "sized", "endless"])
def test_a_checkpoint_of_transformers_goes_on_here_as_there(tmp_path, data, at, saved):
    args = {"gradient_accumulation_steps": 3, "max_steps": 6}
    if saved == "by_epoch_end":
        args["save_strategy"] = "epoch"
    written = Run(transformers, tmp_path / "written", stop_and_save(at, save=saved == "in_step"), data, **args)
    written.train()
    theirs, ours = (
        Run(api, tmp_path / api.__name__, data=data, **args).train(written.checkpoint(at))
        for api in (transformers, hf_compat)
    )
    for part in theirs:
        assert_same(theirs[part], ours[part], part)


@pytest.mark.parametrize("saved", ["in_step", "by_epoch_end"])
@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("data", ["map", "endless"])
def test_a_finished_run_of_transformers_is_finished_here(tmp_path, data, steps, saved):
    """There one more update is made, in every case but that of an epoch's end."""
    saves = {"save_strategy": "epoch"} if saved == "by_epoch_end" else {"save_strategy": "steps", "save_steps": 100}
    args = {"gradient_accumulation_steps": 3, "max_steps": steps, **saves}
    written = Run(transformers, tmp_path / "written", data=data, **args)
    stopped = written.train()
    ours = Run(hf_compat, tmp_path / "ours", data=data, **args).train(written.checkpoint(steps))
    assert_nothing_trained(stopped, ours)
