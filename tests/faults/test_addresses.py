"""An address of other storage is no path: it is refused where it is taken, before a folder of its name is made."""

from __future__ import annotations

import os
import re
from pathlib import Path

import fsspec
import lightning
import pytest
import transformers

from helpers import toy
from hf_compat import (
    HFCallbackAdapter,
    HFDataModule,
    HFModule,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_last_checkpoint,
)
from hf_compat.checkpoint.judging import seal_edited
from hf_compat.cli.main import main as command
from hf_compat.errors import ArgumentError

S3 = "s3://bucket/run"
SPELLINGS = [S3, "gs://b", "S3://b", "memory://x", "hdfs://host:9000/run", "abfss://c@account/run", "filecache::s3://b"]
SPELLINGS += ["s3:/bucket/run", Path(S3), Path("dbfs:/mnt/run")]  # as `pathlib` and `normpath` leave them
PATHS = ["out:1", "run/12:30", "./s3:/run", "at//s3://x", "s3", "out:/x", "C:/run", r"C:\run", "d://run", "a::b"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The current folder, in which nothing may be made."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    yield place
    assert [*place.iterdir()] == []


def refusal_raises(name, value=S3):
    value_told, address = re.escape(f"`{name}={value!r}`"), re.escape(repr(os.fspath(value)))
    words = rf"(?s)^{value_told} is not a path(, true or false)?\.\n\nHint: .* copy between it and {address}"
    return pytest.raises(ArgumentError, match=words)


@pytest.mark.parametrize("value", SPELLINGS)
def test_the_arguments_refuse_an_address(value):
    with refusal_raises("output_dir", value):
        TrainingArguments(value)
    with refusal_raises("resume_from_checkpoint", value):
        TrainingArguments("out", resume_from_checkpoint=value)
    args = TrainingArguments("out")
    with refusal_raises("output_dir", value):
        args.output_dir = value


@pytest.mark.parametrize("value", PATHS)
def test_a_path_with_a_colon_or_a_drive_is_a_path(value):
    assert TrainingArguments(value).output_dir == value


@pytest.mark.parametrize(
    ("address", "path"),
    [("file:///tmp/a%20run", "/tmp/a run"), ("file://localhost/run", "/run"), ("file:/run", "/run")],
)
def test_an_address_of_a_file_is_answered_by_its_path(address, path):
    with pytest.raises(ArgumentError, match=rf"(?s)output_dir='{address}'.*Hint: write it as '{path}'\.$"):
        TrainingArguments(address)


def test_arguments_of_transformers_are_refused_by_the_trainer():
    args = transformers.TrainingArguments(S3, use_cpu=True, report_to="none")
    with refusal_raises("output_dir"):
        Trainer(toy.Classifier(), args, train_dataset=toy.rows())


def test_no_method_takes_an_address(make_args):
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows())
    with refusal_raises("resume_from_checkpoint"):
        trainer.train(resume_from_checkpoint=S3)
    assert trainer.state.global_step == 0
    with refusal_raises("output_dir"):
        trainer.save_model(S3)
    with refusal_raises("output_dir"):
        trainer.preflight(output_dir=S3)
    with refusal_raises("output_dir"):
        trainer.accelerator.save_state(S3)
    with refusal_raises("input_dir"):
        trainer.accelerator.load_state(S3)
    for take, name in ((get_last_checkpoint, "folder"), (seal_edited, "FOLDER")):
        with refusal_raises(name):
            take(S3)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("convert s3://bucket/run new.ckpt", "source"),
        ("convert {out} s3://bucket/run", "target"),
        ("seal s3://bucket/run", "FOLDER"),
        ("plot s3://bucket/run", "RUN"),
        ("plot {out} -o s3://bucket/run", "--output"),
        ("explain output_dir=s3://bucket/run", "output_dir"),
        ("compare --output s3://bucket/run {script}", "--output"),
        ("eject {script} s3://bucket/run", "DIR"),
    ],
)
def test_no_command_takes_an_address(tmp_path, words, name, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    assert command(words.format(out=tmp_path, script=script).split()) != 0
    said = capsys.readouterr()
    assert f"`{name}='{S3}'` is not a path.\n\nHint: " in said.out + said.err


def test_a_lightning_trainer_keeps_its_own_storage_and_no_folder_takes_its_place():
    """Lightning writes a `.ckpt` to any storage of fsspec. The folders of this package have none."""

    class Saves(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 2

    args = TrainingArguments(use_cpu=True, per_device_train_batch_size=4)
    module = HFModule(toy.Classifier(), args)
    trainer = lightning.Trainer(
        default_root_dir="memory://root", max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[HFCallbackAdapter(Saves())], enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, HFDataModule(args, toy.rows()))
    assert "/root/checkpoint-2.ckpt" in fsspec.filesystem("memory").find("/")
    with refusal_raises("target"):
        module.save_hf_checkpoint(S3)


def test_tensorboard_writes_to_its_own_storage(make_args):
    args = make_args(max_steps=1, report_to="tensorboard", logging_dir="memory://logs/run")
    Trainer(toy.Classifier(), args, train_dataset=toy.rows()).train()
    assert any(name.startswith("/logs/run/events") for name in fsspec.filesystem("memory").find("/"))
