"""Equivalent callbacks of transformers and ours count as one for adding, removing and `isinstance`."""

from __future__ import annotations

import logging

import pytest
import transformers
from transformers.integrations import TensorBoardCallback

import hf_compat
from helpers import toy
from hf_compat import Trainer

BUILT_IN = ["DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "EarlyStoppingCallback"]


def make(make_args, callbacks=None, **values):
    return Trainer(toy.Classifier(), make_args(**values), train_dataset=toy.rows(8), callbacks=callbacks)


def names(trainer):
    return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("given, asked", [(hf_compat, transformers), (transformers, hf_compat)], ids=["ours", "theirs"])
def test_either_class_removes_the_other(make_args, name, given, asked):
    trainer = make(make_args)
    trainer.callback_handler.callbacks.clear()
    trainer.add_callback(getattr(given, name)())
    popped = trainer.pop_callback(getattr(asked, name))
    assert type(popped).__name__ == name and names(trainer) == []
    trainer.add_callback(popped)
    trainer.remove_callback(getattr(asked, name))
    assert names(trainer) == []


def test_what_a_trainer_adds_is_removed_by_the_class_of_transformers(make_args, tmp_path):
    trainer = make(make_args, report_to="tensorboard", logging_dir=str(tmp_path / "logs"))
    for kind in (transformers.PrinterCallback, TensorBoardCallback):
        [ours] = [one for one in trainer.callback_handler.callbacks if isinstance(one, kind)]
        assert trainer.pop_callback(kind) is ours and trainer.pop_callback(kind) is None
    trainer.remove_callback(transformers.DefaultFlowCallback)
    assert names(trainer) == []


def test_a_subclass_is_no_twin_of_its_base(make_args):
    class Quiet(transformers.PrinterCallback):
        pass

    trainer = make(make_args)
    assert trainer.pop_callback(Quiet) is None and "PrinterCallback" in names(trainer)
    trainer.add_callback(Quiet)
    trainer.pop_callback(transformers.PrinterCallback)
    assert isinstance(trainer.pop_callback(hf_compat.PrinterCallback), Quiet)


def test_a_second_one_is_named(make_args, caplog):
    trainer = make(make_args)
    with caplog.at_level(logging.WARNING):
        trainer.add_callback(transformers.PrinterCallback)
    assert "There is a PrinterCallback among the callbacks already" in caplog.text
    assert names(trainer).count("PrinterCallback") == 2  # both are called, as upstream


def test_a_tracker_that_the_user_brings_is_not_made_again(make_args, tmp_path):
    trainer = make(make_args, [TensorBoardCallback()], report_to="tensorboard", logging_dir=str(tmp_path / "logs"))
    assert names(trainer).count("TensorBoardCallback") == 1


@pytest.mark.parametrize("kind", [hf_compat.PrinterCallback, transformers.PrinterCallback])
def test_a_run_goes_on_without_the_printer(make_args, capsys, kind):
    trainer = make(make_args, max_steps=2, logging_steps=1)
    trainer.remove_callback(kind)
    assert trainer.train().global_step == 2
    assert capsys.readouterr().out == ""


def test_the_classes_stay_ours(make_args, capsys):
    trainer = make(make_args, max_steps=2, logging_steps=1)
    [printer] = [one for one in trainer.callback_handler.callbacks if isinstance(one, transformers.PrinterCallback)]
    assert isinstance(printer, hf_compat.PrinterCallback)
    assert type(printer).on_log is hf_compat.PrinterCallback.on_log
    trainer.train()
    assert capsys.readouterr().out.count("'grad_norm'") == 2  # printed once each
