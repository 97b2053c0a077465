"""A folder is whole or it is not, and the user's own files in it are never lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_compat.checkpoint import manifest


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "checkpoint-2"
    (path / "part").mkdir(parents=True)
    (path / "a.txt").write_text("first")
    (path / "part" / "b.txt").write_text("second")
    manifest.seal(str(path))
    return path


def remove_b(folder):
    (folder / "part" / "b.txt").unlink()


def grow_a(folder):
    (folder / "a.txt").write_text("longer than before")


def flip_a(folder):
    (folder / "a.txt").write_text("tsrif")


def cut_manifest(folder):
    (folder / "manifest.json").write_text("{")


def name_a_file_elsewhere(folder):
    content = json.loads((folder / "manifest.json").read_text())
    content["files"]["../secret"] = content["files"]["a.txt"]
    (folder / "manifest.json").write_text(json.dumps(content))


WRONG = {
    remove_b: "part/b.txt is missing",
    grow_a: "a.txt has 18 bytes, not what manifest.json says",
    flip_a: "a.txt is damaged (its hash differs)",
    cut_manifest: "manifest.json is not readable",
    name_a_file_elsewhere: "../secret is outside the folder",
}


def test_a_sealed_folder_is_whole(folder):
    assert manifest.problems(str(folder)) == []
    assert sorted(json.loads((folder / "manifest.json").read_text())["files"]) == ["a.txt", "part/b.txt"]


@pytest.mark.parametrize("harm", WRONG, ids=lambda harm: harm.__name__)
def test_what_is_wrong_is_said(folder, harm):
    harm(folder)
    assert manifest.problems(str(folder)) == [WRONG[harm]]


def test_a_folder_of_that_name_is_replaced_and_the_users_files_are_copied(folder, tmp_path):
    (folder / "notes.md").write_text("mine")
    partial = tmp_path / "checkpoint-2.partial"
    partial.mkdir()
    (partial / "a.txt").write_text("new")
    manifest.seal(str(partial))
    manifest.put_in_place(str(partial), str(folder))
    found = {path.name: path.read_text() for path in folder.iterdir() if path.name != "manifest.json"}
    assert found == {"a.txt": "new", "notes.md": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert manifest.problems(str(folder)) == []


@pytest.mark.parametrize("has_notes", [False, True])
def test_removing_leaves_what_is_not_listed(folder, has_notes):
    if has_notes:
        (folder / "notes.md").write_text("mine")
    manifest.remove(str(folder))
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["notes.md"] * has_notes
    assert folder.exists() == has_notes and not Path(f"{folder}.deleted").exists()


def test_a_folder_without_a_manifest_is_not_removed(tmp_path):
    (tmp_path / "a.txt").write_text("somebody's")
    manifest.remove(str(tmp_path))
    assert (tmp_path / "a.txt").exists()


@pytest.mark.parametrize("suffix", ["partial", "replaced"])
def test_a_save_that_was_killed_before_the_last_rename_is_finished(folder, suffix):
    left = folder.rename(f"{folder}.{suffix}")
    manifest.recover(str(folder.parent))
    assert manifest.problems(str(folder)) == [] and not left.exists()


def test_tidying_removes_leftovers_only(folder, tmp_path):
    for name in ("checkpoint-4.partial", "checkpoint-6.deleted", "mine.partial"):
        (tmp_path / name).mkdir()
    manifest.tidy(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "mine.partial"]


@pytest.mark.parametrize("cut", [0, 4, 30, -1])
def test_safetensors_that_are_cut_off(tmp_path, cut):
    (tmp_path / "trainer_state.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(100)}, path)
    assert manifest.problems(str(tmp_path)) == []
    path.write_bytes(path.read_bytes()[:cut])
    assert manifest.problems(str(tmp_path)) == ["model.safetensors is cut off or damaged"]


def test_the_newest_whole_checkpoint(folder, tmp_path, caplog):
    (tmp_path / "checkpoint-10").mkdir()
    assert manifest.get_last_checkpoint(tmp_path) == str(folder)
    assert "checkpoint-10 is not whole and is skipped: trainer_state.json is missing" in caplog.text
    with pytest.raises(FileNotFoundError):
        manifest.get_last_checkpoint(tmp_path / "nowhere")
