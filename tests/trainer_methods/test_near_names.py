"""Names of the user's that nearly are names of a Trainer: which are told, and which are the user's own business."""

from __future__ import annotations

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest

from hf_compat import Trainer, TrainerCallback
from hf_compat.trainer_methods import near_names


@pytest.fixture
def told(monkeypatch):
    said = []
    monkeypatch.setattr(near_names, "warn_once", said.append)
    return said


def made(members=(), base=Trainer, **attributes):
    """A Trainer of the user's without a constructor, with methods of these names."""
    members = {name: (lambda self, *_: None) for name in members} if not isinstance(members, dict) else members
    trainer = type("Own", (base,), members).__new__(type("Own", (base,), members))
    vars(trainer).update(attributes)
    return trainer


def compute_los(self):
    return 1


def calls_it(self):
    return self.compute_los()


def test_a_class_of_many_methods_has_its_code_read_once(told, monkeypatch):
    read, instructions = [], near_names.dis.get_instructions
    monkeypatch.setattr(near_names.dis, "get_instructions", lambda code: read.append(code) or instructions(code))
    own = {f"own_helper_{number}": (lambda self: 1) for number in range(30)}
    near_names.tell_of_trainer_names(made(own), ())
    assert len(read) == 30 and told == []


@pytest.mark.parametrize(
    ("members", "near"),
    [
        (["compute_los"], ["compute_loss"]),
        (["computeLoss"], ["compute_loss"]),
        (["compute_loss"], []),
        (["_compute_loss"], ["compute_loss"]),
        (["compute_losses", "compute_loss"], []),
        (["my_own_helper"], []),
        (["__call__"], []),
        ({"compute_los": compute_los, "training_step": calls_it}, []),
        ({"compute_los": 3}, []),
        ({"compute_los": staticmethod(compute_los)}, ["compute_loss"]),
        ({"compute_los": property(compute_los)}, ["compute_loss"]),
    ],
)
def test_methods_that_nothing_calls(members, near, told):
    trainer = made(members)
    near_names.tell_of_trainer_names(trainer, set())
    assert [one.partition("did you mean `")[2].partition("`")[0] for one in told] == near
    assert all("Own has a method `" in one and "which no Trainer calls" in one for one in told)


@pytest.mark.parametrize(
    ("attributes", "own", "near"),
    [
        ({"compute_metric": 1}, ["compute_metrics"], ["compute_metrics"]),
        ({"compute_metric": 1}, ["compute_metrics", "compute_metric"], []),
        ({"_compute_metric": 1}, ["compute_metrics"], []),
        ({"anything": 1}, ["compute_metrics"], []),
        ({"label_namez": 1, "optimizerr": 2}, ["label_names", "optimizer"], ["label_names", "optimizer"]),
    ],
)
@pytest.mark.parametrize("is_plain", [False, True])
def test_attributes_that_nothing_reads(attributes, own, near, is_plain, told):
    trainer = Trainer.__new__(Trainer) if is_plain else made()
    vars(trainer).update(dict.fromkeys(own), **attributes)
    near_names.tell_of_trainer_names(trainer, own)
    assert sorted(one.partition("did you mean `")[2].partition("`")[0] for one in told) == near
    assert all("was set, which no Trainer reads" in one for one in told)


def test_an_attribute_that_the_users_code_reads_is_its_own(told):
    def training_step(self):
        return self.compute_metric

    trainer = made({"training_step": training_step}, compute_metric=1)
    near_names.tell_of_trainer_names(trainer, ["compute_metrics"])
    assert told == []
    trainer = made({"compute_metric": 2}, compute_metric=1)  # the class has it
    near_names.tell_of_trainer_names(trainer, ["compute_metrics"])
    assert told == []


def test_nothing_is_looked_for_in_a_trainer_of_ours(told, monkeypatch):
    monkeypatch.setattr(near_names, "near_name", lambda *_: pytest.fail("nothing is near"))
    trainer = Trainer.__new__(Trainer)
    trainer.model = 1
    near_names.tell_of_trainer_names(trainer, ["model"])
    assert told == []


@pytest.mark.parametrize("value", [None, len, near_names.near_name, SimpleNamespace(), 3, calls_it])
def test_a_method_in_whose_place_the_constructor_sets_something(value, told):
    trainer = made(["compute_metrics"], compute_metrics=value)
    near_names.tell_of_trainer_names(trainer, ["compute_metrics"])
    is_hidden = not isinstance(value, SimpleNamespace) and value is not calls_it  # what is not the user's
    assert len(told) == is_hidden
    assert all("has a method `compute_metrics`, which no Trainer calls: the constructor sets" in one for one in told)


def callback(names, *bases):
    return type("Own", bases, {name: (lambda self, *_: None) for name in names})()


@pytest.mark.parametrize(
    ("names", "bases", "said"),
    [
        (["on_train_begin"], (TrainerCallback,), []),
        (["on_train_start"], (TrainerCallback,), ["`on_train_start` is of `lightning.pytorch.Callback`"]),
        (["on_train_begin"], (pl.Callback,), ["`on_train_begin` is of `transformers.TrainerCallback`"]),
        (["on_train_start"], (pl.Callback,), []),
        (["on_evaluation"], (TrainerCallback,), ["did you mean `on_evaluate`?"]),
        (["on_evaluation", "on_evaluate"], (TrainerCallback,), []),
        (["on_train_starts"], (pl.Callback,), ["did you mean `on_train_start`?"]),
        (["on_evaluation"], (pl.Callback,), []),
        (["helper"], (TrainerCallback,), []),
        (["on_custom_event"], (TrainerCallback,), []),
        (["on_train_begin", "on_train_start"], (TrainerCallback, pl.Callback), []),
        (["on_evaluation"], (object,), ["did you mean `on_evaluate`?"]),
    ],
)
def test_methods_of_callbacks_that_are_never_called(names, bases, said, told):
    near_names.tell_of_callback_names([callback(names, *bases)])
    assert len(told) == len(said) and all(part in one for part, one in zip(said, told, strict=True)), told


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("should_save", None),
        ("should_sav", "did you mean `should_save`?"),
        ("shouldSave", "did you mean `should_save`?"),
        ("should_push", "its flags are should_save, should_log"),
        ("note", None),
    ],
)
def test_attributes_of_a_control_that_are_no_flags(name, said, told):
    near_names.tell_of_flags(SimpleNamespace(**{name: True}), ["should_save", "should_log"])
    assert len(told) == (said is not None) and all(said in one and f"`control.{name}`" in one for one in told)
