"""The parts of a `WindowModule`'s update, without a fit: its order, its schedules, and what it notes."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_compat.engine import module as engine
from hf_compat.engine.module import WindowModule, is_stepped_by_hf, samples_of
from hf_compat.engine.windows import UpdateObserver, Window, Windows
from hf_compat.optim.lr_schedulers import DeepSpeedSchedule
from hf_compat.optim.prepared import PreparedOptimizer

X = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("batches", "samples"),
    [([{"x": X}, {"x": X[:2]}], 5), ([{"x": X}, {}], 3), ([{}], 1), ([], 1), ([(X,), [X]], 6), (["text"], 1)],
)
def test_samples_of_micro_batches(batches, samples):
    assert samples_of(batches) == samples


OWN, OTHER = object(), object()


@pytest.mark.parametrize(
    ("changes", "own", "is_hfs"),
    [
        ({}, OWN, True),
        ({}, OTHER, False),
        ({"interval": "epoch"}, OWN, False),
        ({"frequency": 2}, OWN, False),
        ({"reduce_on_plateau": True}, OWN, False),
        ({"interval": "epoch"}, OTHER, False),
    ],
)
def test_whose_schedule_lightning_holds(changes, own, is_hfs):
    config = {"scheduler": OWN, "interval": "step", "frequency": 1, "reduce_on_plateau": False} | changes
    assert is_stepped_by_hf(SimpleNamespace(**config), own) is is_hfs


class Schedule:
    def __init__(self, optimizer=None, told=None, name="schedule"):
        self.base_lrs = [group["lr"] for group in optimizer.param_groups] if optimizer else []
        self.optimizer, self.told, self.name, self.seen = optimizer, [] if told is None else told, name, []

    def step(self):
        self.told.append(self.name)
        if self.optimizer:
            self.seen.append(len(self.optimizer.param_groups))


def config(schedule, interval="step", frequency=1, plateau=False):
    return SimpleNamespace(scheduler=schedule, interval=interval, frequency=frequency, reduce_on_plateau=plateau)


class Alone(WindowModule):
    """A module whose trainer and optimizers are what a test says."""

    def __init__(self, **values):
        nn.Module.__init__(self)
        self.told = []
        told = self.told
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        steps = SimpleNamespace(
            optimizer=optimizer, lr_scheduler=Schedule(None, told, "own"), model_wrapped="model",
            args=SimpleNamespace(max_grad_norm=1.0), _get_learning_rate=lambda: 0.25,
            _clip_grad_norm=lambda model: told.append(("clip", model)) or 2.0,
            _get_grad_norm=lambda model, grad_norm: told.append(("norm", grad_norm)) or grad_norm,
            accelerator=SimpleNamespace(sync_gradients=None, compiled_update=None, run_backward=None),
            _tree=SimpleNamespace(zero_grad=lambda model: told.append(("zero", model))),
            _asks_for_count=False, current_gradient_accumulation_steps=0, lr_of=None,
        )  # fmt: skip
        vars(steps).update(values.pop("steps", {}))
        mechanics = SimpleNamespace(exchange=None, engine=None, scaling=None)
        vars(mechanics).update(values.pop("mechanics", {}))
        trainer = SimpleNamespace(lr_scheduler_configs=[], global_step=4, current_epoch=1, optimizers=[optimizer])
        vars(trainer).update(values.pop("trainer", {}))
        observer = SimpleNamespace(
            fire=lambda event: told.append(event),
            update_made=lambda window, rate, norm: told.append(("made", rate, norm)),
            micro_batch_done=lambda loss, inputs: told.append(("done", inputs)),
            agree_to_stop=lambda: False,
        )
        self.__dict__.update(
            steps=steps, mechanics=mechanics, observer=observer, held=trainer, _calls_before_zero_grad=False,
            _in_force=(steps.optimizer, steps.lr_scheduler), take_step=lambda: told.append("step"), evaluation=None,
        )  # fmt: skip
        self.__dict__.update(values)

    trainer = property(lambda self: self.held)


@pytest.mark.parametrize("most", [0, 0.0, 1.0])
@pytest.mark.parametrize("outside", [(), ("loss.weight",)])
def test_an_update_clips_steps_and_zeroes(most, outside, monkeypatch):
    module = Alone(steps={"args": SimpleNamespace(max_grad_norm=most)}, parameters_outside_model=outside)
    monkeypatch.setattr(Alone, "_has_other_schedule", lambda self: False)
    window = Window([], None, True, 1.0)
    module._update(window)
    model = module if outside else "model"
    clipped = 2.0 if most else None
    assert module.told == [
        *[("clip", model)] * bool(most), ("norm", clipped), "step", "on_optimizer_step", "own", ("zero", model),
        ("made", 0.25, clipped),
    ]  # fmt: skip
    assert window.is_trained and module.measured == {"learning_rate": 0.25} | ({"grad_norm": 2.0} if most else {})


@pytest.mark.parametrize("is_deepspeeds", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("hooks", [False, True])
def test_a_skipped_update_steps_no_schedule(is_deepspeeds, skipped, prepared, hooks, monkeypatch):
    own = DeepSpeedSchedule.__new__(DeepSpeedSchedule) if is_deepspeeds else Schedule()
    told = []
    rates = iter([0.5, 0.25])
    scaling = SimpleNamespace(unscale=lambda optimizer: told.append("unscaled"), step_was_skipped=skipped)
    module = Alone(mechanics={"scaling": scaling}, _calls_before_zero_grad=hooks)
    module.steps.lr_scheduler, module.__dict__["_in_force"] = own, (module.steps.optimizer, own)
    if prepared:
        module.steps.optimizer = optimizer = PreparedOptimizer.__new__(PreparedOptimizer)
        vars(optimizer).update(optimizer="inner")
        module.__dict__["_in_force"] = (optimizer, own)
    module.steps._get_learning_rate = lambda: told.append("read") or next(rates)
    monkeypatch.setattr(engine, "unwrap_optimizer", lambda optimizer: "inner")
    monkeypatch.setattr(engine, "call_before_zero_grad", lambda trainer, optimizer: told.append(("hook", optimizer)))
    monkeypatch.setattr(Alone, "_has_other_schedule", lambda self: False)
    monkeypatch.setattr(
        Alone, "_step_schedules", lambda self, given: told.append("stepped" if given is own else "other")
    )
    module._update(Window([], None, True, 1.0))
    steps = [] if skipped else ["stepped"]
    order = [*steps, "read"] if is_deepspeeds else ["read", *steps]
    assert told == ["unscaled", *order, *[("hook", "inner")] * hooks]
    if prepared:
        assert module.steps.optimizer.step_was_skipped is skipped


@pytest.mark.parametrize("other", [False, True])
def test_the_rate_is_that_of_the_schedule_in_force(other, monkeypatch):
    module, given = Alone(), []
    monkeypatch.setattr(Alone, "_has_other_schedule", lambda self: other)
    monkeypatch.setattr(Alone, "_step_schedules", lambda self, own: given.append(own))
    module._update(Window([], None, True, 1.0))
    assert module.measured["learning_rate"] == (0.5 if other else 0.25)
    assert given == [None if other else module.steps.lr_scheduler]
    assert module._rate_of_update() == (0.5 if other else 0.25)
    module.held.optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.125)]
    assert module._rate_of_update() == 0.125


def test_an_engine_steps_and_knows_its_norm():
    module = Alone(mechanics={"engine": SimpleNamespace(get_global_grad_norm=lambda: 7.0)})
    module._update(Window([], None, True, 1.0))
    assert module.told[:2] == ["step", "on_optimizer_step"] and module.told[-1] == ("made", 0.25, 7.0)


@pytest.mark.parametrize("norm", [None, 3.0])
def test_a_compiled_update_has_clipped(norm):
    module = Alone()
    module.steps.accelerator.compiled_update = SimpleNamespace(take_norm=lambda: norm)
    module._update(Window([], None, True, 1.0))
    assert (("clip", "model") in module.told) is (norm is None) and ("norm", norm or 2.0) in module.told


@pytest.mark.parametrize("changed", ["optimizer", "lr_scheduler", ""])
def test_what_a_callback_has_replaced_is_taken_over(changed, monkeypatch):
    module, told = Alone(), []
    if changed:
        other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        setattr(module.steps, changed, other if changed == "optimizer" else Schedule())
    monkeypatch.setattr(Alone, "_take_over_replaced", lambda self: told.append("taken"))
    monkeypatch.setattr(engine, "unwrap_optimizer", lambda optimizer: "inner")
    monkeypatch.setattr(Alone, "_has_other_schedule", lambda self: False)
    module._update(Window([], None, True, 1.0))
    assert told == ["taken"] * bool(changed)


@pytest.mark.parametrize(("replaces", "schedule"), [(True, "new"), (False, "new"), (True, None), (False, None)])
def test_the_parts_that_follow_a_replaced_optimizer(replaces, schedule, monkeypatch):
    told, before = [], Schedule()
    mechanics = {
        "end": lambda module: told.append("end"),
        "begin": lambda *what: told.append(what[1:]),
        "backward": "backward",
    }
    module = Alone(mechanics=mechanics)
    module.held.lr_scheduler_configs = [config("other"), config(before)]
    module.__dict__["_in_force"] = (OTHER if replaces else module.steps.optimizer, before)
    module.steps.lr_scheduler = schedule
    monkeypatch.setattr(engine, "replace_optimizer", lambda trainer, optimizer: told.append(optimizer))
    monkeypatch.setattr(engine, "behaviour_of", lambda *optimizers: ("behaviour", len(optimizers)))
    module._take_over_replaced()
    begun = ("behaviour", 1), module._rate_of_update
    assert told == ([module.steps.optimizer, "end", begun] if replaces else [])
    assert module.steps.accelerator.run_backward == ("backward" if replaces else None)
    assert module._in_force == (module.steps.optimizer, schedule)
    assert [one.scheduler for one in module.held.lr_scheduler_configs] == ["other", schedule or before]


@pytest.mark.parametrize(
    ("interval", "frequency", "plateau", "is_own", "moment", "stepped"),
    [
        ("step", 1, False, False, "step", True),
        ("step", 2, False, False, "step", True),
        ("step", 3, False, False, "step", False),
        ("epoch", 1, False, False, "step", False),
        ("epoch", 2, False, False, "epoch", True),
        ("epoch", 3, False, False, "epoch", False),
        ("step", 1, False, False, "epoch", False),
        ("step", 1, True, False, "step", False),
        ("step", 1, False, True, "step", False),
    ],
)
def test_schedules_that_a_callback_has_installed(interval, frequency, plateau, is_own, moment, stepped):
    module, schedule = Alone(), Schedule()
    module.held.lr_scheduler_configs = [config(schedule, interval, frequency, plateau)]
    if is_own:
        module.steps.lr_scheduler = schedule
    module._step_installed(moment)
    assert schedule.told == ["schedule"] * stepped


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_schedule_steps_its_own_groups(follows, own, monkeypatch):
    module = Alone()
    optimizer = module.steps.optimizer
    schedule = Schedule(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1})
    monkeypatch.setattr(engine, "follows_metric", lambda given: follows)
    monkeypatch.setattr(Alone, "_step_installed", lambda self, moment: schedule.told.append(moment))
    module._step_schedules(schedule if own else None)
    steps = own and not follows
    assert schedule.told == ["step", *["schedule"] * steps] and schedule.seen == [1] * steps
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert ("initial_lr" in optimizer.param_groups[1]) is steps and "initial_lr" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("configs", "is_other"),
    [([], False), (["own"], False), (["other"], True), (["other", "own"], False), (["epoch"], True)],
)
def test_others_replace_the_schedule_if_none_is_hfs(configs, is_other):
    module = Alone()
    own = module.steps.lr_scheduler
    kinds = {"own": config(own), "other": config(Schedule()), "epoch": config(own, "epoch")}
    module.held.lr_scheduler_configs = [kinds[name] for name in configs]
    assert module._has_other_schedule() is is_other


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("stops", [None, 1, 2])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("exchanges", [False, True])
def test_the_micro_batches_of_an_update(complete, stops, asks, exchanges, monkeypatch):
    told, losses = [], iter([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0)])
    module = Alone(mechanics={"exchange": (lambda is_last: told.append(("exchange", is_last))) if exchanges else None})
    steps, stop = module.steps, iter(range(1, 9))
    module.observer.agree_to_stop = lambda: next(stop) == stops
    module.observer.fire = told.append
    monkeypatch.setattr(
        Alone, "_update", lambda self, window: told.append(("update", steps.accelerator.sync_gradients))
    )
    steps._asks_for_count = asks

    def training_step(model, inputs, num_items_in_batch=None):
        told.append((model, inputs, num_items_in_batch, steps.accelerator.sync_gradients))
        steps._asks_for_count = False
        return next(losses)

    steps.training_step = training_step
    steps.watched_count = lambda items: ("watched", items)
    steps.judge_count = lambda items, loss, inputs: told.append(("judged", items, float(loss), inputs))
    total = module.training_step(Window(["a", "b", "c"], 9, complete, 1.0), 0)
    expected, made = [], 3 if stops is None else stops
    for place, name in enumerate("abc"[:made], 1):
        is_first, ends = asks and place == 1, complete and place == 3
        expected += [("exchange", place == 3)] * exchanges
        expected.append(("model", name, ("watched", 9) if is_first else 9, ends))
        expected += [("judged", ("watched", 9), 1.0, "a")] * is_first
        expected.append(("update", True) if ends else "on_substep_end")
    assert told == expected and float(total) == {1: 1.0, 2: 3.0, 3: 7.0}[made]
    assert steps.current_gradient_accumulation_steps == 3
    assert [one for one in module.told if one[0] == "done"] == [("done", name) for name in "abc"[:made]]


@pytest.mark.parametrize("is_native", [False, True])
def test_a_copy_shares_a_trainer_and_owns_its_model(is_native):
    steps = SimpleNamespace(model="model")
    module = Alone(logs_to_lightning=is_native)
    module.__dict__.update(steps=steps, observer=UpdateObserver(), _in_force=None)
    module.model = nn.Linear(1, 1)
    copied = copy.deepcopy(module)
    assert copied.model is not module.model and torch.equal(copied.model.weight, module.model.weight)
    assert (copied.steps is steps) is not is_native
    assert (copied.observer is module.observer) is not is_native
    assert "mechanics" not in vars(copied) and "_in_force" not in vars(copied)


@pytest.mark.parametrize("barebones", [False, True])
@pytest.mark.parametrize("is_native", [False, True])
def test_numbers_of_an_evaluation_are_noted(barebones, is_native, monkeypatch):
    told = []
    module = Alone(logs_to_lightning=is_native, trainer={"barebones": barebones})
    output = SimpleNamespace(metrics={"eval_loss": 1, "eval_b": 0.5, "flag": True, "text": "a", "none": None})
    module.evaluation = SimpleNamespace(output=None, finish=lambda: output)
    monkeypatch.setattr(Alone, "log", lambda self, name, value, **options: told.append((name, value, options)))
    monkeypatch.setattr(engine, "note_for_callbacks", lambda trainer, name, value: told.append((name, value)))
    module.on_validation_epoch_end()
    options = ({"batch_size": 1, "sync_dist": True, "reduce_fx": "max"},) if is_native else ()
    assert told == ([] if barebones else [("eval_loss", 1.0, *options), ("eval_b", 0.5, *options)])
    assert module.evaluated_numbers({"x": 2, "y": False}) == {"x": 2.0}
    module.evaluation.output = SimpleNamespace(metrics=None)
    assert module.evaluated_numbers() == {}


@pytest.mark.parametrize("is_windows", [False, True])
def test_an_epoch_ends_its_data_and_its_schedules(is_windows, monkeypatch):
    told = []
    windows = Windows.__new__(Windows) if is_windows else object()
    monkeypatch.setattr(Windows, "finish_epoch", lambda self: told.append("finished"))
    monkeypatch.setattr(Alone, "_step_installed", lambda self, moment: told.append(moment))
    Alone(trainer={"train_dataloader": windows}).end_epoch()
    assert told == ["finished"] * is_windows + ["epoch"]


def test_a_run_is_collected_within_its_context():
    module = Alone()
    module.evaluation = "outer"
    with pytest.raises(ValueError, match="within"), module.evaluating("inner"):
        assert module.evaluation == "inner"
        raise ValueError("within")
    assert module.evaluation == "outer"
