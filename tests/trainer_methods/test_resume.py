"""The checkpoint that a run resumes from, and the best checkpoint that a resumed state may name."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from helpers import launching, toy
from hf_compat import Trainer, set_seed
from hf_compat.checkpoint import files, reading
from hf_compat.errors import CheckpointError

FAILS_TO_LIST = """
import sys
sys.path.insert(0, {tests!r})
from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.checkpoint import layout, manifest
from hf_compat.errors import CheckpointError

def refuse(folder):
    raise CheckpointError("the folder cannot be listed: Input/output error.")

args = TrainingArguments(sys.argv[1], use_cpu=True, disable_tqdm=True, report_to="none", max_steps=1)
trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows())
if trainer.args.process_index == 0:
    layout.list_checkpoints = refuse
try:
    trainer.train(resume_from_checkpoint=True)
except Exception as error:
    print(f"<{{trainer.args.process_index}} {{type(error).__name__}}: {{error}}>", flush=True)
"""


def test_a_folder_that_only_the_first_process_looks_into_ends_every_process(tmp_path):
    script = tmp_path / "fails_to_list.py"
    script.write_text(FAILS_TO_LIST.format(tests=str(Path(__file__).resolve().parents[1])))
    begun = time.monotonic()
    done = launching.start(tmp_path / "out", script=script)
    assert "<0 CheckpointError: the folder cannot be listed" in done.stdout, done.stderr
    assert "<1 ProcessError: Another process of this run has failed." in done.stdout
    assert "rank 0: CheckpointError: the folder cannot be listed" in done.stdout
    assert time.monotonic() - begun < 120


def make(make_args, folder, **values):
    set_seed(3)
    args = make_args(
        output_dir=str(folder), save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        metric_for_best_model="score", greater_is_better=True, **values,
    )  # fmt: skip
    scores = iter([0.9, 0.1, 0.1, 0.1])
    data = {"train_dataset": toy.rows(), "eval_dataset": toy.rows(5)}
    return Trainer(toy.Classifier(), args, compute_metrics=lambda _: {"score": next(scores)}, **data)


@pytest.fixture
def whole(make_args, tmp_path):
    folder = tmp_path / "out"
    assert make(make_args, folder, max_steps=4).train().global_step == 4
    return folder


def name_best(folder, best):
    """Write another user's state, in a folder without a manifest."""
    path = folder / "checkpoint-4" / "trainer_state.json"
    (folder / "checkpoint-4" / "manifest.json").unlink()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"best_model_checkpoint": str(best)}))


@pytest.mark.parametrize("name", ["elsewhere/checkpoint-2", "elsewhere/model", "out/../elsewhere/checkpoint-9"])
def test_a_state_cannot_name_weights_of_any_folder(make_args, tmp_path, whole, name, caplog):
    foreign = tmp_path / name
    foreign.parent.resolve().mkdir(exist_ok=True)
    shutil.copytree(whole / "checkpoint-2", foreign)
    shutil.rmtree(whole / "checkpoint-2")
    name_best(whole, foreign)
    trainer = make(make_args, whole, max_steps=4, load_best_model_at_end=True)
    with caplog.at_level("WARNING", logger="hf_compat"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint is None
    assert f"The best checkpoint {foreign} of the resumed state is not in the output folder." in caplog.text


def test_the_best_checkpoint_of_a_folder_that_was_moved_is_beside_the_one_resumed_from(make_args, tmp_path, whole):
    moved = tmp_path / "moved"
    whole.rename(moved)
    trainer = make(make_args, tmp_path / "new", max_steps=4, load_best_model_at_end=True)
    trainer.train(resume_from_checkpoint=str(moved / "checkpoint-4"))
    assert trainer.state.best_model_checkpoint == str(moved / "checkpoint-2")


def test_a_relative_name_of_the_best_checkpoint_is_kept(make_args, tmp_path, whole, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name_best(whole, "out/checkpoint-2")
    trainer = make(make_args, "out", max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint == "out/checkpoint-2"


@pytest.mark.parametrize("read", [reading.read_torch_file, reading.read_weights_file])
def test_a_file_that_becomes_a_pipe_after_the_check_does_not_hang(tmp_path, monkeypatch, read):
    path = tmp_path / ("model.safetensors" if read is reading.read_weights_file else "optimizer.pt")
    path.write_bytes(b"no tensors")
    look = files.open_regular

    def look_and_swap(looked_at, **how):
        file = look(looked_at, **how)
        os.unlink(path)
        os.mkfifo(path)
        return file

    monkeypatch.setattr(files, "open_regular", look_and_swap)
    caught: list[BaseException] = []

    def attempt():
        try:
            read(str(path))
        except CheckpointError as error:
            caught.append(error)

    reader = threading.Thread(target=attempt, daemon=True)
    reader.start()
    reader.join(30)
    assert len(caught) == 1 and not reader.is_alive()
