"""The table of a resume: its methods exist, and the docs show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import toy
from hf_compat import Trainer
from hf_compat.training_run.resumer import STAGES, ResumeAt

HOW_IT_WORKS = Path(__file__).resolve().parents[2] / "docs" / "how_it_works.md"


def row(stage) -> str:
    return f"| {stage.at} | {stage.restores} | {'`' + stage.method + '`' if stage.method else ''} |"


def test_docs_show_the_stages():
    text = HOW_IT_WORKS.read_text()
    table = "\n".join(row(stage) for stage in STAGES)
    assert table in text, f"docs/how_it_works.md, section `A resume`, should hold:\n{table}"


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
