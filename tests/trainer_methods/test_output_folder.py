"""The constructor creates the output folder, as upstream."""

from __future__ import annotations

import logging

import pytest

from helpers import toy
from hf_compat import Trainer, TrainerCallback
from hf_compat.errors import ArgumentError, OutputFolderError


class WritesLog(TrainerCallback):
    def __init__(self):
        self.lines = 0

    def on_log(self, args, state, control, **kwargs):
        with open(f"{args.output_dir}/log.jsonl", "a") as file:
            self.lines += file.write("{}\n") // 3


@pytest.mark.parametrize("save_strategy", ["no", "steps"])
def test_callbacks_find_it(make_args, tmp_path, save_strategy):
    folder, writes = tmp_path / "a" / "b", WritesLog()
    args = make_args(output_dir=str(folder), save_strategy=save_strategy, max_steps=2, logging_steps=1)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8), callbacks=[writes])
    assert folder.is_dir()
    trainer.train()
    assert writes.lines == len((folder / "log.jsonl").read_text().splitlines()) == 3


def test_a_run_that_saves_nothing_needs_none(make_args, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    args = make_args(output_dir=str(tmp_path / "file" / "out"), save_strategy="no", max_steps=1)
    with caplog.at_level(logging.WARNING):
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8))
    assert "cannot be created" in caplog.text and trainer.train().global_step == 1


def test_a_file_is_refused_also_by_a_run_that_saves_nothing(make_args, tmp_path):
    (tmp_path / "file").write_text("")
    args = make_args(output_dir=str(tmp_path / "file"), save_strategy="no", max_steps=1)
    with pytest.raises(OutputFolderError, match="File exists"):
        Trainer(toy.Classifier(), args, train_dataset=toy.rows(8))


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_a_model_that_cannot_recompute_is_named_with_the_argument(make_args, name):
    trainer = Trainer(toy.Classifier(), make_args(max_steps=1, **{name: True}), train_dataset=toy.rows(8))
    with pytest.raises(ArgumentError, match=rf"`{name}[`=].* Classifier has no method"):
        trainer.train()
