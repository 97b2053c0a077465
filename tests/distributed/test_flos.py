"""Floating-point operations of all ranks are in a checkpoint, though a save makes no exchange of its own for them."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
import transformers.trainer  # before the fork

import hf_compat
from helpers import toy
from helpers.forking import run_ranks

SUMS = 3 * (16_777_217 + 2 * 16_777_217)  # of three updates, before float32 rounds


def saved_flos(folder, api: ModuleType, overrides: bool) -> list[list[float | None]]:
    """Save every three updates on two ranks; the operations in the states, and in the trainers at the end."""

    def body(rank):
        class Counted(api.Trainer):
            def floating_point_ops(self, inputs):
                return 16_777_217 * (1 + rank)

        if overrides:

            def store_flos(self):
                self.stored = getattr(self, "stored", 0) + 1
                super(Counted, self).store_flos()

            Counted.store_flos = store_flos
        args = api.TrainingArguments(
            str(folder / "run"), max_steps=6, save_steps=3, logging_strategy="no", use_cpu=True, disable_tqdm=True,
            report_to="none",
        )  # fmt: skip
        trainer = Counted(toy.Classifier(), args, train_dataset=toy.rows(64))
        trainer.train()
        (folder / f"{rank}.json").write_text(json.dumps([trainer.state.total_flos, getattr(trainer, "stored", None)]))

    for ended in run_ranks(folder / "logs", body):
        assert ended.status == 0, ended.said
    saved = [json.loads((folder / f"run/checkpoint-{at}/trainer_state.json").read_text()) for at in (3, 6)]
    return [[state["total_flos"] for state in saved], *(json.loads((folder / f"{r}.json").read_text()) for r in (0, 1))]


def test_a_save_adds_up_what_ranks_have_counted_as_transformers_does(tmp_path):
    theirs, ours, with_override = (
        saved_flos(tmp_path / str(place), api, overrides)
        for place, (api, overrides) in enumerate(((transformers, True), (hf_compat, False), (hf_compat, True)))
    )
    assert with_override == theirs
    assert ours[0] == theirs[0] == pytest.approx([SUMS, 2 * SUMS], rel=1e-6)
