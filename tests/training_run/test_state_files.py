"""The table of a training's state files: one row is all that a new file needs to be written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers import toy
from hf_compat import Trainer
from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.files import read_json
from hf_compat.training_run import resumer, saver

NAMES = [file.name for file in saver.STATE_FILES]


def test_the_table_has_the_states_that_the_layout_names():
    assert sorted(NAMES) == sorted(layout.SHARED_STATES + layout.RANK_STATES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", [0, 7])
def test_a_state_of_each_rank_is_known_by_its_name(name, rank):
    own = layout.of_rank(name, rank, 8)
    assert layout.is_part_of_checkpoint(own)
    assert layout.rank_of(own) == (rank if name in layout.RANK_STATES else None)
    assert layout.is_loaded(name)
    as_json = str(Path(own).with_suffix(".json"))
    assert layout.is_part_of_checkpoint(as_json) and layout.rank_of(as_json) == layout.rank_of(own)
    assert layout.is_loaded(str(Path(name).with_suffix(".json")))


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize(
    ("name", "dice", "load"),
    [("dice.pt", torch.arange(6), torch.load), ("dice.json", [0, 1, 2, 3, 4, 5], read_json)],
    ids=["torch", "json"],
)
def test_one_row_is_a_new_file_that_is_written_and_restored(
    async_save, name, dice, load, make_args, tmp_path, monkeypatch
):
    read = []

    def restore(self, checkpoint):
        read.append(load(Path(checkpoint, name)))

    files = (*saver.STATE_FILES, saver.StateFile(name, lambda saver: {"eyes": dice}))
    stages = (*resumer.STAGES, resumer.Stage(resumer.ResumeAt.RUN_NEW, "the dice", action=restore))
    monkeypatch.setattr(saver, "STATE_FILES", files)
    monkeypatch.setattr(resumer, "STAGES", stages)
    args = make_args(output_dir=str(tmp_path), save_strategy="steps", save_steps=1, max_steps=2, async_save=async_save)
    Trainer(toy.Classifier(), args, train_dataset=toy.rows(16)).train()
    assert name in manifest.read_manifest(str(tmp_path / "checkpoint-1")).files
    Trainer(toy.Classifier(), args, train_dataset=toy.rows(16)).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-1")
    )
    assert [list(one["eyes"]) for one in read] == [list(dice)]
