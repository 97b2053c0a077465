"""The paths of a conversion: one clear error each, and nothing of the user's is overwritten or left over."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers import toy
from hf_compat import Trainer
from hf_compat.checkpoint.convert import checked_paths, convert
from hf_compat.cli.main import main as command
from hf_compat.errors import ArgumentError, CheckpointError, CheckpointWriteError, HfCompatError

ZERO = Path(__file__).with_name("zero") / "stage2"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(make_args, tmp_path):
    Trainer(
        toy.Classifier(), make_args(max_steps=2, save_strategy="steps", save_steps=2), train_dataset=toy.rows()
    ).train()
    return tmp_path / "out" / "checkpoint-2"


def listing(place):
    return {path: path.read_bytes() if path.is_file() else None for path in place.rglob("*")}


@pytest.mark.parametrize("target", ["", " ", "a\0b", None, 5, b"x"])
@pytest.mark.parametrize("which", ["source", "target"])
def test_what_is_no_path_is_named(which, target):
    source = str(ZERO)
    with pytest.raises(ArgumentError, match=f"`{which}` is .*, not a path"):
        convert(*((target, "new") if which == "source" else (source, target)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "does not exist"),
        ("n" * 300, "too long for a path"),
        ("\udcff", "does not exist|nothing to convert"),
    ],
)
def test_a_source_that_is_not_there(tmp_path, source, message):
    with pytest.raises(ArgumentError, match=message):
        convert(str(tmp_path / source), str(tmp_path / "new"))


@pytest.mark.parametrize("form", ["folder", "ckpt", "shards"])
@pytest.mark.parametrize("what", ["a file", "a folder", "a link to nothing"])
def test_what_is_there_is_not_overwritten(folder, tmp_path, form, what):
    source = {"folder": folder, "ckpt": tmp_path / "it.ckpt", "shards": ZERO}[form]
    if form == "ckpt":
        convert(str(folder), str(source))
    target = tmp_path / ("there.ckpt" if form == "folder" else "there")
    {
        "a file": lambda: target.write_text("mine"),
        "a folder": target.mkdir,
        "a link to nothing": lambda: target.symlink_to("x"),
    }[what]()
    before = listing(tmp_path)
    with pytest.raises(ArgumentError, match="exists and is not overwritten"):
        convert(str(source), str(target))
    assert listing(tmp_path) == before


@pytest.mark.parametrize("form", ["folder", "ckpt", "shards"])
def test_what_is_named_as_unfinished_work_is_the_users(folder, tmp_path, form):
    source = {"folder": folder, "ckpt": tmp_path / "it.ckpt", "shards": ZERO}[form]
    if form == "ckpt":
        convert(str(folder), str(source))
    target = tmp_path / ("new.ckpt" if form == "folder" else "new")
    beside = Path(f"{target}.partial")
    beside.mkdir()
    (beside / "notes.txt").write_text("mine")
    os.utime(beside / "notes.txt", (0, 0)), os.utime(beside, (0, 0))
    convert(str(source), str(target))
    assert (beside / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} >= {target.name, beside.name}
    assert not list(tmp_path.glob(".converting-*"))


@pytest.mark.parametrize("target", ["inside", "inside/deeper", "inside.ckpt", "../checkpoint-2/x"])
def test_a_target_inside_the_source_is_refused(folder, target):
    before = listing(folder)
    with pytest.raises(ArgumentError, match="is inside the source"):
        convert(str(folder), str(folder / target))
    assert listing(folder) == before


def test_a_target_inside_a_folder_of_shards_is_refused(tmp_path):
    import shutil

    shutil.copytree(ZERO, tmp_path / "zero")
    with pytest.raises(ArgumentError, match="is inside the source"):
        convert(str(tmp_path / "zero"), str(tmp_path / "zero" / "hf"))


@pytest.mark.parametrize("form", ["folder", "shards"])
@pytest.mark.parametrize("what", ["a file for a folder", "overlong", "no permission"])
def test_a_target_that_cannot_be_made(folder, tmp_path, form, what, monkeypatch):
    source, ending = (folder, ".ckpt") if form == "folder" else (ZERO, "")
    (tmp_path / "file").write_text("mine")
    place = {"a file for a folder": "file/new", "overlong": "n" * 300, "no permission": "closed/new"}[what]
    if what == "no permission":
        (tmp_path / "closed").mkdir()
        monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("closed"))  # root may do everything
    before = listing(tmp_path)
    with pytest.raises(ArgumentError, match=r"cannot be written|too long for a path"):
        convert(str(source), str(tmp_path / place) + ending)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("form", ["folder", "ckpt", "shards"])
def test_folders_on_the_way_are_made_and_slashes_at_the_end_are_no_matter(folder, tmp_path, form):
    source = {"folder": folder, "ckpt": tmp_path / "it.ckpt", "shards": ZERO}[form]
    if form == "ckpt":
        convert(str(folder), str(source))
    target = tmp_path / "a" / "b" / ("new.ckpt" if form == "folder" else "new")
    convert(f"{source}/" if form != "ckpt" else str(source), f"{target}/")
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def write_text(path):
    path.write_text("{}")


KINDS = {
    "text": write_text,
    "safetensors": lambda path: save_file({"a": torch.zeros(2)}, path),
    "nothing": lambda path: path.touch(),
    "weights": lambda path: torch.save({"a": torch.zeros(2)}, path),
    "a list": lambda path: torch.save([1], path),
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("target", ["new", "new.ckpt"])
def test_a_source_of_another_kind(tmp_path, kind, target):
    source = tmp_path / "source"
    KINDS[kind](source)
    with pytest.raises(HfCompatError) as caught:
        convert(str(source), str(tmp_path / target))
    text = str(caught.value)
    assert "source" in text and "weights_only" not in text and len(text) < 500
    assert isinstance(caught.value, (ArgumentError, CheckpointError)) and [p.name for p in tmp_path.iterdir()] == [
        "source"
    ]


@pytest.mark.parametrize("form", ["folder", "ckpt", "shards"])
def test_a_disk_that_fills_up_is_told_and_leaves_nothing(folder, tmp_path, form, monkeypatch):
    from hf_compat.checkpoint import convert as converting

    source = {"folder": folder, "ckpt": tmp_path / "it.ckpt", "shards": ZERO}[form]
    if form == "ckpt":
        convert(str(folder), str(source))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(converting, "write_weights", full)
    before = listing(tmp_path)
    target = tmp_path / ("new.ckpt" if form == "folder" else "new")
    with pytest.raises(CheckpointWriteError, match=r"new.* could not be written: No space left"):
        convert(str(source), str(target))
    assert listing(tmp_path) == before


@pytest.mark.parametrize("size", [0, -1, None, "x", 1.5, True])
def test_a_size_that_is_none(tmp_path, size):
    with pytest.raises(ArgumentError, match="`shard_bytes` is"):
        convert(str(ZERO), str(tmp_path / "new"), shard_bytes=size)


def test_the_command_tells_it_in_a_line(tmp_path, capsys):
    assert command(["convert", str(tmp_path / "nowhere"), str(tmp_path / "new")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        ("it", "new", None),
        ("it/", "new//", None),
        ("link", "a/b/new", None),
        ("one.ckpt", "new", None),
        ("gone", "new", None),
        ("it", "it2/new", None),
        ("nowhere", "new", "does not exist"),
        ("it", "one.ckpt", "exists and is not overwritten"),
        ("it", "gone", "exists and is not overwritten"),
        ("it", "one.ckpt/new", "cannot be written: Not a directory"),
        ("it", "gone/new", "you may not write to the folder .*gone"),
        ("it", "closed/new", "you may not write to the folder .*closed"),
        ("it", "it/new", "is inside the source"),
        ("it", "link/new", "is inside the source"),
        ("link", "it/a/new", "is inside the source"),
    ],
)
def test_both_paths_are_checked_at_first(tmp_path, monkeypatch, source, target, told):
    for name in ("it", "it2", "closed"):
        (tmp_path / name).mkdir()
    (tmp_path / "one.ckpt").touch()
    (tmp_path / "link").symlink_to("it")
    (tmp_path / "gone").symlink_to("nothing")
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.W_OK | os.X_OK and not path.endswith("closed"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=told) if told else contextlib.nullcontext():
        assert checked_paths(source, Path(target)) == (source.rstrip("/"), target.rstrip("/"))
