"""Files are read as tensors and plain containers; whatever else is in them is an error that names the file."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from helpers import toy
from helpers.parity.compare import same
from hf_compat.checkpoint.files import first_line
from hf_compat.checkpoint.reading import (
    MANIFEST_KIND,
    Manifest,
    Writer,
    manifest_of,
    names_of,
    plain_names,
    read_manifest,
    read_torch_file,
    read_weights,
    read_weights_file,
    shard_names,
)
from hf_compat.errors import CheckpointError

WEIGHTS = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}


class Harmful:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


def test_a_torch_file_runs_nothing(tmp_path):
    torch.save({"weights": WEIGHTS, "note": "plain"}, tmp_path / "it.pt")
    assert same(read_torch_file(str(tmp_path / "it.pt"))["weights"], WEIGHTS)
    torch.save(Harmful(tmp_path / "mark"), tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=r"bad\.pt cannot be read"):
        read_torch_file(str(tmp_path / "bad.pt"))
    assert not (tmp_path / "mark").exists()


def test_further_types_are_let_through_by_name(tmp_path):
    torch.save({"device": torch.device("cpu"), "kind": toy.Classifier}, tmp_path / "it.pt")
    with pytest.raises(CheckpointError):
        read_torch_file(str(tmp_path / "it.pt"))
    assert read_torch_file(str(tmp_path / "it.pt"), allowed=[toy.Classifier])["kind"] is toy.Classifier


def test_damaged_safetensors_are_named(tmp_path):
    (tmp_path / "it.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match=r"it\.safetensors cannot be read"):
        read_weights_file(str(tmp_path / "it.safetensors"))


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("in_shards", [False, True])
def test_weights_are_found_in_each_form(tmp_path, form, in_shards):
    stem = {"safetensors": "model", "bin": "pytorch_model"}[form]
    write = save_file if form == "safetensors" else torch.save
    if in_shards:
        files = {name: f"{stem}-{name}.{form}" for name in WEIGHTS}
        for name, file in files.items():
            write({name: WEIGHTS[name]}, tmp_path / file)
        (tmp_path / f"{stem}.{form}.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        write({f"_orig_mod.{name}": tensor for name, tensor in WEIGHTS.items()}, tmp_path / f"{stem}.{form}")
    assert same(read_weights(str(tmp_path)), WEIGHTS)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "..", ""])
def test_an_index_names_no_file_elsewhere(tmp_path, file):
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        shard_names(str(tmp_path / "index.json"))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_what_is_no_index_is_said(tmp_path, content):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(CheckpointError, match="not a readable index"):
        shard_names(str(tmp_path / "index.json"))


def test_names_follow_the_model_compiled_or_not():
    model = toy.Classifier()
    plain = model.state_dict()
    model.inner = torch.compile(model.inner, backend="eager")
    assert set(names_of(model, plain)) == set(model.state_dict()) != set(plain)
    assert same(plain_names(names_of(model, plain)), plain)
    assert names_of(toy.Classifier(), plain) is plain


def test_the_first_line_of_an_error():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(KeyError()) == "KeyError"


@pytest.mark.parametrize("size", [10, 2**21])
def test_a_file_of_torch_is_opened_once(tmp_path, size):
    content = {"a": torch.arange(float(size)), "b": [1, "x"], "c": torch.ones(3, dtype=torch.bfloat16)}
    torch.save(content, tmp_path / "own.pt")
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    found = read_torch_file(str(tmp_path / "own.pt"))
    assert same(found, content)
    assert opened.count(str(tmp_path / "own.pt")) == 1 and not [path for path in opened if path.startswith("/proc")]


def test_a_manifest_that_was_written_anew_is_read_anew(tmp_path):
    def write(name):
        text = json.dumps({"kind": "hf_compat checkpoint", "files": {name: {}}})
        (tmp_path / "manifest.json").write_text(text)

    for name in ("one", "two", "six"):  # at once, with the same size
        write(name)
        assert list(read_manifest(tmp_path).files) == [name]
    time.sleep(0.15)  # until its time of change is past
    assert list(read_manifest(str(tmp_path)).files) == ["six"] and read_manifest(tmp_path) is read_manifest(tmp_path)
    write("ten")
    assert list(read_manifest(tmp_path).files) == ["ten"]


OURS = {"kind": MANIFEST_KIND}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([], {}),
        ({"kind": "another", "files": {}}, {}),
        ({"files": {}, "run": "r", "turn": 1}, {}),
        (OURS, {}),
        ({**OURS, "files": {"a": {}}}, {"files": {"a": {}}}),
        ({**OURS, "files": ["a"]}, {}),
        ({**OURS, "run": "r", "turn": 1}, {"writer": Writer("r", 1)}),
        ({**OURS, "run": "r", "turn": 2**53 - 1}, {"writer": Writer("r", 2**53 - 1)}),
        *(({**OURS, "run": "r", "turn": turn}, {}) for turn in (0, 2**53, 1.0, True, None)),
        ({**OURS, "run": 3, "turn": 1}, {}),
        ({**OURS, "saving": "o", "name": "checkpoint-2"}, {"saving": "o"}),
        ({**OURS, "saving": "o", "name": "checkpoint-3"}, {"saving": "o", "exists": False}),
        ({**OURS, "saving": 3, "name": "checkpoint-3"}, {}),
    ],
)
def test_what_a_manifest_says(content, expected):
    place = "/run/checkpoint-2/manifest.json"
    assert manifest_of(place, json.dumps(content).encode()) == Manifest(**{"exists": True, **expected})
