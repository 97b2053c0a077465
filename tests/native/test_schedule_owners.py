"""Who steps which schedule of a native fit, and what Lightning sees meanwhile, with stand-ins for the fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_compat.native import schedules
from hf_compat.native.schedules import LightningSchedules, take_schedules_read


class Module:
    """A module and its trainer, as Lightning would ask them."""

    def __init__(self, configs, said="by the class"):
        self._said_by_class = said
        self.trainer = SimpleNamespace(
            lightning_module=self, is_last_batch=True, callback_metrics={"loss": 1},
            strategy=SimpleNamespace(lr_scheduler_configs=list(configs)),
        )  # fmt: skip
        self.steps = SimpleNamespace(lr_scheduler="hf's")

    @property
    def _said_automatic(self):
        return vars(self).get("_said_automatic", self._said_by_class)

    @property
    def configs(self):
        return self.trainer.strategy.lr_scheduler_configs


def config(name, monitor="loss"):
    return SimpleNamespace(scheduler=name, monitor=monitor)


@pytest.fixture
def facts(monkeypatch):
    """Which schedule is HF's, whether it follows a metric, and whether an epoch was resumed."""
    made = SimpleNamespace(follows=False, resumed=False)
    monkeypatch.setattr(schedules, "is_stepped_by_hf", lambda one, of_hf: one.scheduler == of_hf)
    monkeypatch.setattr(schedules, "follows_metric", lambda one: made.follows)
    monkeypatch.setattr(schedules, "is_in_resumed_epoch", lambda trainer: made.resumed)
    return made


def owner(module, makes_updates=False):
    """The steps of a fit's schedules, and what Lightning's own code has been asked for, and shown."""
    made, asked = LightningSchedules.__new__(LightningSchedules), []
    made.module, made.makes_updates = module, makes_updates
    module.trainer.lr_scheduler_configs = list(module.configs)

    def own(interval, follows):
        asked.append((interval, follows, [one.scheduler for one in module.configs], module._said_automatic))

    made.own = own
    return made, asked


@pytest.mark.parametrize(
    ("is_hfs", "makes_updates", "follows", "owned"),
    [
        (False, False, False, True), (False, True, True, True), (True, False, False, False),
        (True, True, False, True), (True, True, True, False), (True, False, True, False),
    ],
)  # fmt: skip
def test_lightning_steps_all_but_hfs_schedule(is_hfs, makes_updates, follows, owned, facts):
    facts.follows = follows
    made, _ = owner(Module([]), makes_updates)
    assert made.owns(config("hf's" if is_hfs else "other")) is owned


@pytest.mark.parametrize("said", [None, False])
@pytest.mark.parametrize(
    ("interval", "follows", "steps"),
    [("epoch", True, False), ("epoch", False, True), ("step", True, True), ("step", False, True)],
)
def test_what_follows_a_metric_waits_for_the_epochs_end(interval, follows, steps, said, facts):
    configs = [config("hf's"), config("other")]
    module = Module(configs)
    if said is not None:
        vars(module)["_said_automatic"] = said
    made, asked = owner(module)
    made.step(interval, follows)
    assert asked == [(interval, follows, ["other"], True)] * steps
    assert module.configs == configs and vars(module).get("_said_automatic") is said


def test_another_module_is_lightnings_own(facts):
    module = Module([config("other")])
    made, asked = owner(module)
    module.trainer.lightning_module = "another"
    made.step("epoch", True)
    assert asked == [("epoch", True, ["other"], "by the class")]


@pytest.mark.parametrize("is_last", [True, False])
def test_an_epochs_end_comes_after_the_modules_hook(is_last, facts):
    module, called = Module([config("other")]), []
    made, asked = owner(module)
    module.trainer.is_last_batch = is_last
    made._end_epoch(lambda: called.append(len(asked)))
    assert called == [0] and asked == [("epoch", True, ["other"], True)] * is_last


@pytest.mark.parametrize(
    ("follows", "resumed", "stepped"),
    [(True, True, ["other"]), (True, False, ["other", "unlogged"]), (False, True, ["other", "unlogged"])],
)
def test_a_metric_that_a_resumed_epoch_has_not_logged_is_not_followed(follows, resumed, stepped, facts):
    facts.resumed = resumed
    made, asked = owner(Module([config("other"), config("unlogged", "accuracy")]))
    made._step("epoch", follows)
    assert [shown for *_, shown, _ in asked] == [stepped]
    without, nothing = owner(Module([config("hf's")]))
    without._step("epoch", follows)
    assert nothing == []


def test_what_lightning_saw_comes_back_after_an_error(facts):
    module = Module([config("other")])
    made, _ = owner(module)

    def fail(*args):
        raise ValueError("theirs")

    made.own, before = fail, module.configs
    with pytest.raises(ValueError, match="theirs"):
        made._step("step", False)
    assert module.configs is before and "_said_automatic" not in vars(module)


@pytest.mark.parametrize("read", [None, [config("other")]])
def test_configurations_that_were_read_take_the_places_of_lightnings(read):
    module, own = Module([]), [config("other"), config("new")]
    module.trainer.strategy.lr_scheduler_configs, module.configured_schedules = own, read
    take_schedules_read(module)
    assert module.configs == (own if read is None else [read[0], own[1]])
    assert read is None or module.configs[0] is read[0]
