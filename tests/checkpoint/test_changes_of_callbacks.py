"""What the run's own callbacks do to a checkpoint in `on_save` belongs to it; nothing is written into it afterwards."""

from __future__ import annotations

import os
import shutil
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_compat
from helpers.toy import Classifier, rows
from hf_compat import Trainer, TrainerCallback
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint import manifest as sealing
from hf_compat.trainer_utils import get_last_checkpoint


class OnSave(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_save(self, args, state, control, **kwargs):
        self.act(f"{args.output_dir}/checkpoint-{state.global_step}")


def train(make_args, act, kind=Trainer, resume=None, **values):
    torch.manual_seed(0)
    args = make_args(**{"max_steps": 4, "save_steps": 2, "save_strategy": "steps", **values})
    callbacks = [] if act is None else [OnSave(act)]
    trainer = kind(Classifier(), args, train_dataset=rows(32), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def halve(folder):
    path = f"{folder}/model.safetensors"
    save_file({name: tensor / 2 for name, tensor in load_file(path).items()}, path)


def drop_optimizer(folder):
    os.remove(f"{folder}/optimizer.pt")


def note_beside(folder):
    with open(f"{folder}/notes.txt", "w") as file:
        file.write("mine")


@pytest.mark.parametrize("act", [drop_optimizer, halve, note_beside])
@pytest.mark.parametrize("limit", [None, 1])
def test_a_changed_checkpoint_is_whole(make_args, tmp_path, caplog, act, limit):
    train(make_args, act, save_total_limit=limit)
    last = str(tmp_path / "out" / "checkpoint-4")
    assert manifest.problems(last) == [] and get_last_checkpoint(tmp_path / "out") == last
    told = {drop_optimizer: "optimizer.pt is removed", halve: "model.safetensors is changed", note_beside: None}[act]
    assert (told or "have changed it") in caplog.text if told else "have changed it" not in caplog.text
    caplog.clear()
    resumed = train(make_args, None, resume=True, max_steps=6)
    assert resumed.state.global_step == 6
    assert ("both start anew" in caplog.text) == (act is drop_optimizer)


def test_a_run_without_its_optimizer_goes_on_as_in_transformers(make_args, tmp_path):
    class Drop(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            drop_optimizer(f"{args.output_dir}/checkpoint-{state.global_step}")

    def losses(api, callback):
        found = []
        for resume in (None, True):
            torch.manual_seed(0)
            args = api.TrainingArguments(
                str(tmp_path / api.__name__), max_steps=6 if resume else 4, save_steps=2, logging_steps=1, use_cpu=True,
                per_device_train_batch_size=4, report_to="none", disable_tqdm=True,
            )  # fmt: skip
            trainer = api.Trainer(Classifier(), args, train_dataset=rows(32), callbacks=[callback])
            trainer.train(resume_from_checkpoint=resume)
            found.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        return found

    assert losses(hf_compat, OnSave(drop_optimizer)) == losses(transformers, Drop())


@pytest.mark.parametrize("move", [shutil.rmtree, lambda folder: shutil.move(folder, f"{folder}.elsewhere")])
def test_a_checkpoint_may_be_taken_away(make_args, tmp_path, move):
    trainer = train(make_args, move, save_total_limit=1)
    assert trainer.state.global_step == 4
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-?")] == []
    assert not list((tmp_path / "out").glob(".*checkpoint*"))


def test_an_override_may_change_what_it_has_saved(make_args, tmp_path):
    class Lighter(Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            drop_optimizer(f"{self.args.output_dir}/checkpoint-{self.state.global_step}")

    train(make_args, None, Lighter)
    assert manifest.problems(str(tmp_path / "out" / "checkpoint-4")) == []
    assert train(make_args, None, resume=True, max_steps=6).state.global_step == 6


def test_nothing_is_written_after_on_save(make_args, tmp_path, monkeypatch):
    """The files are on the disk, with all hashes, when a callback is called; a slow disk changes nothing later."""
    flush = sealing.flush

    def slowly(path):
        time.sleep(0.01)
        flush(path)

    monkeypatch.setattr(sealing, "flush", slowly)
    seen = {}
    train(make_args, lambda folder: seen.update({folder: sealing.file_stats(folder) | stamp_of_manifest(folder)}))
    assert len(seen) == 2
    for folder, file_stats in seen.items():
        assert sealing.file_stats(folder) | stamp_of_manifest(folder) == file_stats


def stamp_of_manifest(folder):
    stat = os.stat(f"{folder}/manifest.json")
    return {"manifest.json": (stat.st_size, stat.st_mtime_ns, stat.st_ino)}
