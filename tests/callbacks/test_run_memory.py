"""`trackers.json` is advice. A damaged or hostile one costs a warning, never a training."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.toy import Classifier, rows
from hf_compat import Trainer
from hf_compat.callbacks import trackers
from hf_compat.callbacks.trackers import RunMemory

CONTENTS = {
    "a list": b"[1]",
    "null": b"null",
    "a number": b"5",
    "text": b'"x"',
    "empty": b"",
    "cut off": b'{"tensorboard": {"logdir": "',
    "binary": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "digits": b'{"tensorboard": {"step": ' + b"9" * 10_000 + b"}}",
    "large": b" " * (2**20 + 1),
    "records that are none": b'{"tensorboard": [1], "wandb": null}',
    "records of text": b'{"tensorboard": "logdir", "wandb": 5}',
    "fields that are none": b'{"tensorboard": {"logdir": 5}, "wandb": {"id": [1], "step": "x", "logs": NaN}}',
    "fields that are null": b'{"tensorboard": {"logdir": null}, "wandb": {"id": null, "step": null}}',
    "an empty folder": b'{"tensorboard": {"logdir": ""}, "wandb": {"id": ""}}',
    "NUL": b'{"tensorboard": {"logdir": "a\\u0000b"}, "wandb": {"id": "a\\u0000b"}}',
    "a lone surrogate": b'{"tensorboard": {"logdir": "\\ud800"}, "wandb": {"id": "\\ud800"}}',
    "a path as id": b'{"tensorboard": {"logdir": "~nobody/x"}, "wandb": {"id": "../../x"}}',
    "long": b'{"tensorboard": {"logdir": "' + b"x" * 5000 + b'"}, "wandb": {"id": "' + b"x" * 5000 + b'"}}',
}
FILES = ["FIFO", "/dev/zero", "circle", "folder"]


def put(path, kind):
    path.unlink(missing_ok=True)
    if kind in CONTENTS:
        path.write_bytes(CONTENTS[kind])
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name if kind == "circle" else kind)


@pytest.mark.parametrize("kind", [*CONTENTS, *FILES])
def test_whatever_the_file_holds_a_warning_is_all(kind, tmp_path, caplog):
    put(tmp_path / "trackers.json", kind)
    wandb = RunMemory(str(tmp_path), "wandb")
    assert wandb.read() == {}
    assert "trackers.json" in caplog.text
    wandb.write(id="abc", step=1, logs=2)
    again = RunMemory(str(tmp_path), "wandb").read()
    assert again == ({} if kind == "folder" else {"id": "abc", "step": 1, "logs": 2})


def trained(make_args, resume=None, tracker="tensorboard", **values):
    args = make_args(
        max_steps=2 if resume is None else 4, save_strategy="steps", save_steps=2, report_to=tracker, **values
    )
    trainer = Trainer(Classifier(), args, train_dataset=rows(16))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("kind", ["a list", "null", "records that are none", "fields that are none", "deep", "folder"])
def test_a_resume_goes_on_past_a_damaged_file(kind, make_args, caplog, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "disabled")
    first = trained(make_args, tracker="wandb")
    wandb.finish()
    put(Path(first.args.output_dir, "trackers.json"), kind)
    assert trained(make_args, True, tracker="wandb").state.global_step == 4
    wandb.finish()
    assert "trackers.json" in caplog.text


def test_a_folder_that_an_argument_names_is_used_wherever_it_is(make_args, tmp_path):
    trained(make_args, logging_dir=str(tmp_path / "elsewhere"))
    trained(make_args, True, logging_dir=str(tmp_path / "elsewhere"))
    assert len(os.listdir(tmp_path / "elsewhere")) == 2


def test_a_resume_goes_on_in_the_newest_folder_of_runs(make_args):
    runs = Path(trained(make_args).args.output_dir, "runs")
    (run,) = runs.iterdir()
    (runs / "earlier").mkdir()
    os.utime(runs / "earlier", (1, 1))
    (runs / "notes.txt").touch()
    trained(make_args, True)
    assert len(list(run.iterdir())) == 2 and not any((runs / "earlier").iterdir())


def test_a_link_in_the_place_of_the_partial_file_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    (out / "trackers.json.tmp").symlink_to(victim)
    RunMemory(str(out), "wandb").write(id="abc")
    assert victim.read_text() == "mine" and RunMemory(str(out), "wandb").read() == {"id": "abc"}


@pytest.mark.parametrize(
    ("record", "is_one"),
    [
        ({}, True), ({"id": "a"}, True), ({"id": ""}, False), ({"id": 3}, False), ({"id": "a" * 128}, True),
        ({"id": "a" * 129}, False), ({"step": 0, "logs": 0}, True), ({"step": -1}, False), ({"logs": -1}, False),
        ({"step": 2**63 - 1}, True), ({"step": 2**63}, False), ({"step": True}, False), ({"logs": 1.0}, False),
        ({"later": []}, True), ([], False), (None, False),
    ],
)  # fmt: skip
def test_what_is_a_record(record, is_one):
    assert trackers._is_record(record) is is_one


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path, caplog):
    (tmp_path / "file").touch()
    memory = RunMemory(str(tmp_path / "file" / "folder"), "wandb")
    for _ in range(2):
        memory.write(id="a")
    (said,) = caplog.messages
    assert said.startswith(f"{memory.path} cannot be written (")
