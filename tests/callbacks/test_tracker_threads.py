"""Our trackers end their threads after training, after evaluation, and after errors in either."""

from __future__ import annotations

import threading

import pytest

from helpers import toy
from hf_compat import Trainer, TrainerCallback


class Fail(TrainerCallback):
    fails = True

    def on_step_end(self, args, state, control, **kwargs):
        if self.fails and state.global_step == 3:
            raise ValueError("mine")


def make(make_args, **values):
    return Trainer(
        toy.Classifier(), make_args(report_to=["tensorboard"], **values), train_dataset=toy.rows(16),
        eval_dataset=toy.rows(8),
    )  # fmt: skip


def count() -> int:
    return sum("_AsyncWriterThread" in type(thread).__name__ for thread in threading.enumerate())


def test_training_and_evaluating_leave_no_thread(make_args, tmp_path):
    before = count()
    trainer = make(make_args)
    for call in (trainer.evaluate, trainer.train, trainer.evaluate, trainer.evaluate, trainer.train, trainer.evaluate):
        call()
        assert count() == before
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = {path.parent for path in (tmp_path / "out").rglob("events.out*")}
    found = [EventAccumulator(str(folder)).Reload().Scalars("eval/loss") for folder in folders]
    assert sum(len(points) for points in found) == 4


def test_a_writer_is_open_while_training(make_args):
    seen, before = [], count()

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(count())

    trainer = make(make_args)
    trainer.add_callback(Look)
    trainer.train()
    assert set(seen) == {before + 1} and count() == before


def test_an_error_leaves_no_thread(make_args):
    before = count()
    trainer = make(make_args)
    trainer.add_callback(Fail)
    with pytest.raises(ValueError, match="mine"):
        trainer.train()
    assert count() == before
    Fail.fails = False
    assert trainer.train().global_step == 8 and count() == before
