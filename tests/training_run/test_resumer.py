"""The docs say which methods a resume calls, and in which order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import toy

from hf_compat import Trainer

HOW_IT_WORKS = Path(__file__).resolve().parents[2] / "docs" / "how_it_works.md"


OVERRIDES = re.findall(r"^\| .+ \| .+ \| `(_\w+)` \|$", HOW_IT_WORKS.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", OVERRIDES)
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


def test_the_parts_are_restored_in_the_order_of_the_docs(make_args, tmp_path):
    assert len(OVERRIDES) == 6
    called = []

    def noting(name):
        def note(self, *args, **kwargs):
            found = getattr(Trainer, name)(self, *args, **kwargs)
            called.append(name)
            return found

        return note

    values = {"save_strategy": "steps", "save_steps": 2, "restore_callback_states_from_checkpoint": True}
    Trainer(toy.Classifier(), make_args(max_steps=2, **values), train_dataset=toy.rows(16)).train()
    own = type("Own", (Trainer,), {name: noting(name) for name in OVERRIDES})
    own(toy.Classifier(), make_args(max_steps=3, **values), train_dataset=toy.rows(16)).train(
        resume_from_checkpoint=True
    )
    within = "_init_training_state"  # restores the callbacks' states itself, and ends after it
    assert [name for name in called if name != within] == [name for name in OVERRIDES if name != within]
