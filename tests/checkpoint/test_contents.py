"""Of a checkpoint with a manifest only what it lists is read, and nothing is deleted by names that lead elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers import toy
from helpers.parity.compare import same
from hf_compat import get_last_checkpoint
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.model_state import MODEL_INDEX, OPTIMIZER_INDEX, PlainState
from hf_compat.checkpoint.reading import Contents, read_weights
from hf_compat.checkpoint.run_state import RunState
from hf_compat.errors import CheckpointError

SHARDED = Path(__file__).with_name("sharded")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "out" / "checkpoint-2"
    path.mkdir(parents=True)
    torch.save({"a": torch.ones(2)}, path / "pytorch_model.bin")
    (path / "trainer_state.json").write_text('{"global_step": 2}')
    manifest.seal(str(path))
    (tmp_path / "victim.txt").write_text("victim")
    (tmp_path / "out" / "victim.txt").write_text("victim")
    return path


def list_also(folder, name):
    content = json.loads((folder / "manifest.json").read_text())
    content["files"][name] = {"bytes": 6, "sha256": "0"}
    (folder / "manifest.json").write_text(json.dumps(content))


def test_weights_that_are_not_listed_are_not_read(folder, caplog):
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    assert same(read_weights(str(folder)), {"a": torch.ones(2)})
    assert "model.safetensors is not read: manifest.json does not list it" in caplog.text


def test_states_that_are_not_listed_are_not_read(folder, caplog):
    model = toy.Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"version": 2}, folder / "run_state.pt")
    for name in ("optimizer_0", "pytorch_model_fsdp_0"):
        shutil.copytree(SHARDED / name, folder / name)
    assert not any(Contents(folder).find(index) for index in (MODEL_INDEX, OPTIMIZER_INDEX))
    assert not PlainState(model).load_optimizer(str(folder), optimizer)
    assert RunState.load(str(folder)) is None
    assert "optimizer.pt is not read" in caplog.text and "optimizer_0/.metadata is not read" in caplog.text


def test_a_shard_that_is_not_listed_is_an_error(tmp_path):
    shutil.copytree(SHARDED, tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "pytorch_model_fsdp_0" / "__0_0.distcp").rename(tmp_path / "kept")
    manifest.seal(str(tmp_path / "checkpoint-2"))
    (tmp_path / "kept").rename(tmp_path / "checkpoint-2" / "pytorch_model_fsdp_0" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"holds no 'pytorch_model_fsdp_0/__0_0\.distcp' that may be read"):
        PlainState(toy.Classifier()).load_weights(str(tmp_path / "checkpoint-2"))


def test_a_folder_without_a_manifest_is_read_whole(folder):
    (folder / "manifest.json").unlink()
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    assert same(read_weights(str(folder)), {"a": torch.zeros(2)})


@pytest.mark.parametrize(
    "name", ["../../victim.txt", "../victim.txt", "{victim}", "up/victim.txt", "a\0b", "\ud800", "x" * 5000, "", "up"]
)
@pytest.mark.parametrize("has_notes", [False, True])
def test_nothing_outside_is_deleted(folder, tmp_path, name, has_notes):
    (folder / "up").symlink_to(tmp_path)
    list_also(folder, name.format(victim=tmp_path / "victim.txt"))
    if has_notes:
        (folder / "notes.md").write_text("mine")
    assert manifest.problems(str(folder)) and get_last_checkpoint(folder.parent) is None
    manifest.remove(str(folder))
    assert (tmp_path / "victim.txt").exists() and (tmp_path / "out" / "victim.txt").exists()


@pytest.mark.parametrize("name", ["manifest.json", "trainer_state.json", "pytorch_model.bin"])
@pytest.mark.parametrize("what", ["a FIFO", "/dev/zero", "a circle"])
def test_special_files_are_passed_over_without_waiting(folder, name, what):
    newer = folder.with_name("checkpoint-4")
    shutil.copytree(folder, newer)
    (newer / name).unlink()
    if what == "a FIFO":
        os.mkfifo(newer / name)
    else:
        (newer / name).symlink_to(name if what == "a circle" else what)
    assert get_last_checkpoint(folder.parent) == str(folder)
    if name != "manifest.json":
        (newer / "manifest.json").unlink()
        assert get_last_checkpoint(folder.parent) == str(folder)


def test_a_manifest_that_is_not_readable_is_an_error(folder):
    (folder / "manifest.json").write_text("[" * 200_000)
    assert manifest.problems(str(folder)) == ["manifest.json is not readable"]
    with pytest.raises(CheckpointError, match=r"manifest\.json is not readable"):
        Contents(folder)
