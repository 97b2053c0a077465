"""An address of other storage is no path: it names a store, or is refused before a folder of its name is made."""

from __future__ import annotations

import dataclasses
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
from hf_compat.checkpoint.unlisted_checkpoints import seal_edited
from hf_compat.cli.main import main as command
from hf_compat.errors import ArgumentError, HfCompatWarning, MissingPackage
from hf_compat.runtime import stores

S3 = "s3://bucket/run"
STORES = {S3: S3, "gs://b": "gs://b", "S3://b/": "s3://b", "memory://x": "memory://x"}
STORES |= {"hdfs://host:9000/run": "hdfs://host:9000/run", "abfss://c@account/run": "abfss://c@account/run"}
# of this machine, read alone, unknown, chained, without a place, or as `pathlib` and `normpath` leave it
REFUSED = [
    "http://host/run",
    "jlab://b",
    "libarchive://b",
    "s4://b",
    "filecache::s3://b",
    "s3://",
    "s3:/bucket/run",
    Path(S3),
    Path("dbfs:/mnt/run"),
]
PATHS = ["out:1", "run/12:30", "./s3:/run", "at//s3://x", "s3", "out:/x", "C:/run", r"C:\run", "d://run", "a::b"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The current folder, in which nothing may be made."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "_STORES", {})
    yield place
    assert [*place.iterdir()] == []


def refusal_raises(name, value=S3):
    value_told, address = re.escape(f"`{name}={value!r}`"), re.escape(repr(os.fspath(value)))
    words = rf"(?s)^{value_told} is not a path(, true or false)?\.\n\nHint: (.* copy between it and {address}|.*://)"
    return pytest.raises(ArgumentError, match=words)


@pytest.mark.parametrize("value", REFUSED)
def test_the_arguments_refuse_an_address_of_no_store(value):
    with refusal_raises("output_dir", value):
        TrainingArguments(value)
    with refusal_raises("resume_from_checkpoint", value):
        TrainingArguments("out", resume_from_checkpoint=value)
    args = TrainingArguments("out")
    with refusal_raises("output_dir", value):
        args.output_dir = value
    assert (args.output_dir, args.output_store) == ("out", None)


@pytest.mark.parametrize(("value", "address"), STORES.items())
def test_a_store_as_output_folder_gives_a_folder_of_this_machine(value, address, tmp_path):
    folder = tmp_path / "cache" / "hf_compat" / "stores" / address.replace("://", "/").replace(":", "%3A")
    args = TrainingArguments(value)
    assert (args.output_dir, args.output_store) == (str(folder), address)
    assert folder.is_dir(), "scripts look there before they make a Trainer"
    assert args.to_dict()["output_store"] == address
    assert stores.store_of(str(folder)) == address
    assigned = TrainingArguments("out")
    assigned.output_dir = value
    assert (assigned.output_dir, assigned.output_store) == (str(folder), address)
    assert TrainingArguments("out", resume_from_checkpoint=value).resume_from_checkpoint == address


def test_the_store_follows_the_output_folder(tmp_path, recwarn):
    args = TrainingArguments(str(tmp_path / "a"), output_store=S3, use_cpu=True)
    assert (args.output_dir, args.output_store) == (str(tmp_path / "a"), S3)
    same = dataclasses.replace(args, learning_rate=1.0)
    assert (same.output_dir, same.output_store) == (args.output_dir, S3)
    fold = dataclasses.replace(args, output_dir=f"{args.output_dir}/fold-1")
    assert fold.output_store == f"{S3}/fold-1"
    assert dataclasses.replace(args, output_dir="gs://b/run").output_store == "gs://b/run"
    assert dataclasses.replace(args, output_dir=str(tmp_path / "b")).output_store is None
    other = dataclasses.replace(args, output_dir=str(tmp_path / "b"), output_store="gs://b/run")
    assert (other.output_dir, other.output_store) == (str(tmp_path / "b"), "gs://b/run")
    assert not recwarn.list
    with pytest.warns(HfCompatWarning, match=rf"(?s)output_dir='{tmp_path}/b'` is another folder.*in {S3}\."):
        args.output_dir = str(tmp_path / "b")
    assert args.output_store is None
    with pytest.raises(
        ArgumentError, match=r"`output_dir='s3://bucket/run'` and `output_store='gs://b'` are two stores"
    ):
        TrainingArguments(S3, output_store="gs://b")
    with pytest.raises(
        ArgumentError, match=r"`output_store='out'` is not the address (?s:.*)such as 's3://bucket/run'"
    ):
        TrainingArguments("out", output_store="out")


def test_no_name_in_an_address_leads_out_of_the_cache(tmp_path):
    folder = TrainingArguments("memory://x/../../../../up/./a b").output_dir
    assert os.path.realpath(folder).startswith(f"{tmp_path}/cache/hf_compat/stores/memory/x/")


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


def test_arguments_of_transformers_have_a_store_once_a_trainer_has_them():
    args = transformers.TrainingArguments("memory://bucket/run", use_cpu=True, report_to="none")
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows())
    assert trainer.args is args and args.output_store == "memory://bucket/run" and os.path.isdir(args.output_dir)


@pytest.mark.parametrize(
    ("address", "package"), [("gs://b/run", "gcsfs"), ("az://b/run", "adlfs"), ("abfss://c@a/run", "adlfs")]
)
def test_a_package_that_is_missing_is_named(address, package):
    args = TrainingArguments(address, use_cpu=True, report_to="none")
    with pytest.raises(MissingPackage, match=rf"(?s)^'{address}' needs a package.*Hint: `pip install {package}`\."):
        Trainer(toy.Classifier(), args, train_dataset=toy.rows())


def test_no_method_takes_an_address(make_args):
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows())
    with refusal_raises("resume_from_checkpoint", "http://host/run"):
        trainer.train(resume_from_checkpoint="http://host/run")
    assert trainer.state.global_step == 0
    with refusal_raises("output_dir"):
        trainer.save_model(S3)
    with refusal_raises("output_dir"):
        trainer.preflight(output_dir=S3)
    with refusal_raises("output_dir"):
        trainer.accelerator.save_state(S3)
    with refusal_raises("input_dir"):
        trainer.accelerator.load_state(S3)
    with refusal_raises("folder", "http://host/run"):
        get_last_checkpoint("http://host/run")
    with refusal_raises("FOLDER"):
        seal_edited(S3)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("convert s3://bucket/run new.ckpt", "source"),
        ("convert {out} s3://bucket/run", "target"),
        ("seal s3://bucket/run", "FOLDER"),
        ("plot s3://bucket/run", "RUN"),
        ("plot {out} -o s3://bucket/run", "--output"),
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
