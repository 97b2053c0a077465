"""The table of a resume: its stages have an order, and its methods are called."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers import toy
from helpers.toy import Stream
from hf_compat import Trainer
from hf_compat.training_run.resumer import STAGES, ResumeAt, Resumer


def test_stages_stand_in_the_order_of_their_moments():
    order = list(ResumeAt)
    assert [stage.at for stage in STAGES] == sorted((stage.at for stage in STAGES), key=order.index)
    assert {stage.at for stage in STAGES} == set(ResumeAt)


@pytest.mark.parametrize("name", [stage.method for stage in STAGES if stage.method])
def test_every_override_is_called_by_a_resume(name, make_args, tmp_path):
    called = []

    def note(self, *args, **kwargs):
        called.append(name)
        return getattr(Trainer, name)(self, *args, **kwargs)

    options = {
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
    }
    Trainer(toy.Classifier(), make_args(**options), train_dataset=toy.rows(16)).train()
    options |= {"max_steps": 3, "restore_callback_states_from_checkpoint": True}
    trainer = type("Own", (Trainer,), {name: note})(toy.Classifier(), make_args(**options), train_dataset=toy.rows(16))
    trainer.train(resume_from_checkpoint=True)
    assert called == [name]


def _warned_of_workers(caplog, *, now, before=None, stream=False, evaluated=False, epoch=0, is_over=False):
    """What is said about workers: (number, whether they are kept) of the loader now, and of the interrupted run."""
    caplog.clear()
    loader = SimpleNamespace(num_workers=now[0], persistent_workers=now[1], dataset=Stream([]) if stream else [])
    resumed = None if before is None else SimpleNamespace(workers=before[0], keeps_workers=before[1])
    start = SimpleNamespace(epoch=epoch, epoch_is_over=is_over)
    Resumer._warn_of_workers(None, SimpleNamespace(loader=loader, resumed=resumed, evaluated=evaluated, start=start))
    words = {
        "stream": "share the stream's", "kept": "draws a random number", "anew": "within a worker begins anew",
    }  # fmt: skip
    return [name for name, text in words.items() if text in caplog.text]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"now": (2, False)}, []),
        ({"now": (2, False), "evaluated": True, "epoch": 1}, []),
        ({"now": (2, True)}, []),
        ({"now": (2, True), "evaluated": True}, ["anew"]),
        ({"now": (2, True), "epoch": 1}, ["anew"]),
        ({"now": (2, True), "is_over": True}, ["anew"]),
        ({"now": (2, True), "before": (2, False), "epoch": 1}, ["kept"]),
        ({"now": (2, False), "before": (2, True), "epoch": 1}, ["kept"]),
        ({"now": (2, False), "before": (1, False), "stream": True}, ["stream"]),
        ({"now": (2, False), "before": (1, False)}, []),
        ({"now": (0, False), "before": (1, False), "stream": True}, []),  # one reads the stream in both
        ({"now": (1, False), "before": (0, False), "stream": True}, []),
        ({"now": (2, True), "before": (3, False), "stream": True, "evaluated": True}, ["stream", "kept"]),
        ({"now": (2, True), "before": (None, None), "stream": True, "evaluated": True}, ["anew"]),
    ],
)
def test_workers_of_another_number_or_kind_are_told_of(caplog, facts, said):
    assert _warned_of_workers(caplog, **facts) == said
