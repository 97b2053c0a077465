"""The table of a resume: its stages have an order, and its methods are called."""

from __future__ import annotations

import pytest

from helpers import toy
from hf_compat import Trainer
from hf_compat.training_run.resumer import STAGES, ResumeAt


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
