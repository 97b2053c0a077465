"""Rotation in a folder that is not empty, or not ours to clean: the checkpoint just written stays, training goes on."""

from __future__ import annotations

import time

import pytest

from helpers.toy import Classifier, rows
from hf_compat import Trainer, TrainerCallback, set_seed
from hf_compat.checkpoint import choice, manifest


def train(make_args, folder, **values):
    set_seed(3)
    args = make_args(output_dir=str(folder), save_strategy="steps", save_steps=2, **values)
    trainer = Trainer(Classifier(), args, train_dataset=rows())
    trainer.train()
    return trainer


@pytest.mark.parametrize("limit", [1, 2])
def test_a_fresh_checkpoint_is_not_removed_for_an_older_run_with_more_updates(make_args, tmp_path, limit):
    train(make_args, tmp_path / "out", max_steps=12, save_total_limit=1)
    train(make_args, tmp_path / "out", max_steps=6, save_total_limit=limit)
    left = {path.name for path in (tmp_path / "out").glob("checkpoint-*")}
    assert "checkpoint-6" in left and len(left) == limit


def test_a_checkpoint_that_cannot_be_removed_does_not_end_the_training(make_args, tmp_path, monkeypatch, caplog):
    def refuse(path, *further):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(manifest, "remove", refuse)
    trainer = train(make_args, tmp_path / "out", max_steps=6, save_total_limit=1)
    assert trainer.state.global_step == 6
    assert "checkpoint-2 could not be removed" in caplog.text and "Permission denied" in caplog.text


def test_the_limit_bounds_what_callbacks_add_to_checkpoints(make_args, tmp_path):
    class AddsFiles(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            folder = tmp_path / "out" / f"checkpoint-{state.global_step}" / "merged"
            folder.mkdir()
            (folder / "model.bin").write_bytes(b"x" * 1000)

    set_seed(3)
    args = make_args(
        output_dir=str(tmp_path / "out"), save_strategy="steps", save_steps=2, max_steps=8, save_total_limit=1
    )
    Trainer(Classifier(), args, train_dataset=rows(), callbacks=[AddsFiles]).train()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-8"]
    assert (tmp_path / "out" / "checkpoint-8" / "merged" / "model.bin").exists()


class Broken(Exception):
    """Of the user's code."""


class Breaks(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise Broken


def test_an_error_waits_for_the_checkpoint_that_is_being_written(make_args, tmp_path, monkeypatch):
    seal = manifest.seal
    monkeypatch.setattr(manifest, "seal", lambda *args: (time.sleep(1), seal(*args)))  # a slow disk
    args = make_args(output_dir=str(tmp_path), save_strategy="steps", save_steps=2, max_steps=8, async_save=True)
    with pytest.raises(Broken):
        Trainer(Classifier(), args, train_dataset=rows(), callbacks=[Breaks()]).train()
    assert choice.get_last_checkpoint(str(tmp_path)).endswith("checkpoint-2")
    assert not list(tmp_path.glob(".saving-*"))


@pytest.mark.parametrize(("limit", "left"), [(1, [2]), (2, [2, 6]), (None, [2, 4, 6])])
def test_at_the_end_only_a_limit_of_one_leaves_the_best_alone(make_args, tmp_path, limit, left):
    class Worse(Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = {"eval_loss": float(self.state.global_step)}
            self.log(metrics)
            return metrics

    set_seed(3)
    args = make_args(
        output_dir=str(tmp_path), save_strategy="steps", save_steps=2, max_steps=6, save_total_limit=limit,
        eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
    )  # fmt: skip
    Worse(Classifier(), args, train_dataset=rows(), eval_dataset=rows()).train()
    assert [int(path.name.partition("-")[2]) for path in sorted(tmp_path.glob("checkpoint-*"))] == left
