"""A folder is whole or it is not, and the user's own files in it are never lost."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_compat.checkpoint import choice, layout, manifest
from hf_compat.checkpoint.files import Refused
from hf_compat.checkpoint.layout import SAVING, make_hidden
from hf_compat.checkpoint.reading import Writer, read_manifest
from hf_compat.checkpoint.run_lock import Owner


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


OWNER = Owner()


def hidden_place(run_dir):
    """Where a run writes its checkpoint-2."""
    return Path(make_hidden(str(run_dir), SAVING, OWNER)) / "checkpoint-2"


def put(final):
    manifest.SavingPlace(str(final), OWNER).put()


def test_a_folder_of_that_name_is_replaced_and_the_users_files_are_copied(folder, tmp_path):
    (folder / "notes.md").write_text("mine")
    partial = hidden_place(tmp_path)
    partial.mkdir()
    (partial / "a.txt").write_text("new")
    manifest.seal(str(partial))
    put(folder)
    found = {path.name: path.read_text() for path in folder.iterdir() if path.name != "manifest.json"}
    assert found == {"a.txt": "new", "notes.md": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert manifest.problems(str(folder)) == []


def test_removing_takes_what_others_have_put_into_it(folder):
    (folder / "merged").mkdir()
    (folder / "merged" / "adapter.bin").write_text("of a callback")
    manifest.remove(str(folder))
    assert list(folder.parent.iterdir()) == []


def test_a_folder_without_a_manifest_is_not_removed(tmp_path):
    (tmp_path / "a.txt").write_text("somebody's")
    manifest.remove(str(tmp_path))
    assert (tmp_path / "a.txt").exists()


@pytest.mark.parametrize("cut", [0, 4, 30, -1])
def test_safetensors_that_are_cut_off(tmp_path, cut):
    (tmp_path / "trainer_state.json").write_text('{"global_step": 2}')
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(100)}, path)
    assert manifest.problems(str(tmp_path)) == []
    path.write_bytes(path.read_bytes()[:cut])
    assert manifest.problems(str(tmp_path)) == ["model.safetensors is cut off or damaged"]


def test_the_newest_whole_checkpoint(folder, tmp_path, caplog):
    (tmp_path / "checkpoint-10").mkdir()
    assert choice.get_last_checkpoint(tmp_path) == str(folder)
    assert "checkpoint-10 is not whole and is skipped: trainer_state.json is missing" in caplog.text
    with pytest.raises(FileNotFoundError):
        choice.get_last_checkpoint(tmp_path / "nowhere")


PARTS = [
    "optimizer.pt",
    "optimizer_0/__0_0.distcp",
    "pytorch_model_fsdp_0/.metadata",
    "global_step2/mp_rank_00_model_states.pt",
    "latest",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "adapter/adapter_model.safetensors",
    "rng_state_1.pth",
    "run_state.pt",
    "trainer_state.json",
    "training_args.bin",
]
OWN = ["notes.md", "figures/loss.png", "embeddings.pt", "model_card.md", "results/latest.txt"]


def test_only_the_users_own_files_are_carried_over(tmp_path):
    """A folder of that name without a manifest: the weights of another run are not the new checkpoint's."""
    old, partial = tmp_path / "checkpoint-2", hidden_place(tmp_path)
    for name in [*PARTS, *OWN]:
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).write_text("old")
    partial.mkdir()
    (partial / "model.safetensors").write_text("new")
    manifest.seal(str(partial))
    put(old)
    found = {path.relative_to(old).as_posix() for path in old.rglob("*") if path.is_file()}
    assert found == {"model.safetensors", "manifest.json", *OWN}


def test_a_listed_file_that_was_written_again_is_carried_over(tmp_path):
    """An evaluation writes its results where the checkpoint will stand, in a folder that an earlier run has sealed."""
    old, partial = tmp_path / "checkpoint-2", hidden_place(tmp_path)
    for folder, names in ((old, ("logits.json", "notes.txt")), (partial, ("a.txt",))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("old")
        manifest.seal(str(folder))
    (old / "logits.json").write_text("new")
    later = (old / "manifest.json").stat().st_mtime_ns + 1
    os.utime(old / "logits.json", ns=(later, later))
    put(old)
    assert sorted(path.name for path in old.iterdir()) == ["a.txt", "logits.json", "manifest.json"]
    assert (old / "logits.json").read_text() == "new"


def test_a_linked_checkpoint_is_replaced_and_what_it_points_to_stays(folder, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        manifest.remove(str(folder))
    partial = hidden_place(tmp_path)
    partial.mkdir()
    (partial / "a.txt").write_text("new")
    manifest.seal(str(partial))
    put(folder)
    assert (folder / "a.txt").read_text() == "new" and not folder.is_symlink()
    assert (tmp_path / "elsewhere" / "a.txt").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "elsewhere"]


def test_a_manifest_names_its_run(folder):
    manifest.seal(str(folder), Writer("0123abcd", 7))
    assert read_manifest(folder).writer == Writer("0123abcd", 7) and manifest.problems(str(folder)) == []


@pytest.mark.parametrize(
    "values", [{"turn": "7"}, {"turn": -1}, {"turn": 2**70}, {"turn": True}, {"run": 3}, {"run": []}]
)
def test_who_wrote_a_checkpoint_is_not_guessed(folder, values):
    manifest.seal(str(folder), Writer("0123abcd", 7))
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    assert read_manifest(folder).files is not None and read_manifest(folder).writer is None


def test_a_removal_that_is_killed_leaves_no_folder_that_looks_whole(folder, monkeypatch):
    def stop(path, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest.shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        manifest.remove(str(folder))
    monkeypatch.undo()
    assert not folder.exists() and len(list(folder.parent.iterdir())) == 1
    manifest.recover(str(folder.parent))
    assert not folder.exists()
    manifest.recover(str(folder.parent), has_lock=True)
    assert list(folder.parent.iterdir()) == []


def test_a_rank_lists_its_own_files_that_are_there_and_none_elsewhere(folder, monkeypatch):
    (folder.parent / "secret").write_text("not of this folder")
    on_disk = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: on_disk.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    found = manifest.flushed(str(folder), ["a.txt", "part/b.txt", "../secret", "never_written"])
    assert found == {name: read_manifest(folder).files[name] for name in ("a.txt", "part/b.txt")}
    assert sorted(on_disk) == [str(folder / name) for name in ("a.txt", "part/b.txt")]


@pytest.fixture
def stages(tmp_path, monkeypatch):
    """A folder with a small and a large file, sealed by a save that ends later; what is done to each."""
    path = tmp_path / "checkpoint-2"
    path.mkdir()
    (path / "small").write_bytes(b"1" * 100)
    (path / "large").write_bytes(b"2" * (manifest._HASHED_AT_ONCE + 1))
    done = []
    real = manifest.sha256_of, manifest.flush
    monkeypatch.setattr(
        manifest, "sha256_of", lambda file: done.append(("hash", Path(file.name).name)) or real[0](file)
    )
    monkeypatch.setattr(manifest, "flush", lambda one: done.append(("flush", Path(one).name)) or real[1](one))

    def seal(**how):
        manifest.seal(str(path), flushes=False, **how)
        done.clear()
        return path, done

    return seal


def files_of(folder):
    return {name: sorted(facts) for name, facts in read_manifest(folder).files.items()}


def test_what_a_save_leaves_is_flushed_and_only_what_has_no_hash_is_hashed(stages):
    folder, done = stages()
    assert files_of(folder) == {
        "large": ["boot", "bytes", "mtime_ns"], "small": ["boot", "bytes", "mtime_ns", "sha256"],
    }  # fmt: skip
    manifest.flush_and_hash(str(folder))
    assert files_of(folder) == {"large": ["bytes", "sha256"], "small": ["bytes", "sha256"]}
    assert [one for what, one in done if what == "hash"] == ["large"]
    assert {"large", "small", folder.name} <= {one for what, one in done if what == "flush"}
    done.clear()
    manifest.flush_and_hash(str(folder))
    assert {"large", "small"}.isdisjoint(one for _, one in done), "all is done"


def test_sums_are_enough_to_flush_and_are_replaced_by_hashes(stages):
    folder, done = stages(sums=True)
    listed = files_of(folder)
    assert listed["large"] == ["boot", "bytes", "mtime_ns", "sums"]
    manifest.flush_listed(str(folder))
    assert files_of(folder) == listed and not [one for what, one in done if what == "hash"]
    assert {"large", "small", "manifest.json"} <= {one for what, one in done if what == "flush"}
    manifest.flush_and_hash(str(folder))
    assert files_of(folder) == {"large": ["bytes", "sha256"], "small": ["bytes", "sha256"]}


@pytest.mark.parametrize("sums", [False, True])
def test_a_file_that_was_changed_since_keeps_its_entry(stages, sums):
    folder, _ = stages(sums=sums)
    before = read_manifest(folder).files
    os.utime(folder / "large", ns=(1, 1))
    if sums:  # they vouch for the content, whatever the time is
        (folder / "large").write_bytes(b"3" * (manifest._HASHED_AT_ONCE + 1))
    manifest.flush_and_hash(str(folder))
    found = read_manifest(folder).files
    assert found["large"] == before["large"] and sorted(found["small"]) == ["bytes", "sha256"]


@pytest.mark.parametrize(
    ("steps", "wrong", "unloadable", "newest", "skipped", "beyond"),
    [
        ((8, 4), {}, {}, 8, {}, []),
        ((8, 4, 2), {8: ["cut"]}, {}, 4, {8: "cut"}, []),
        ((8, 6, 4), {6: ["cut"]}, {8: "odd"}, 4, {8: "odd", 6: "cut"}, []),
        ((4, 8, 6), {6: ["cut"]}, {}, 4, {}, [8]),
        ((4, 8, 2), {2: ["cut"]}, {8: "odd"}, 4, {}, []),
        ((8, 4), {8: ["a", "b"], 4: [Refused("no")]}, {}, None, {8: "a; b", 4: Refused("no")}, []),
    ],
)
def test_which_checkpoint_is_the_newest(steps, wrong, unloadable, newest, skipped, beyond):
    def find(path):
        asked.append(path)
        return wrong.get(int(path.rpartition("-")[2]), [])

    def named(values):
        return {f"out/checkpoint-{step}": value for step, value in values.items()}

    asked = []
    found = choice.newest_of([f"out/checkpoint-{step}" for step in steps], named(unloadable), find)
    assert found.newest == (newest and f"out/checkpoint-{newest}") and found.skipped == named(skipped)
    assert found.beyond == [f"checkpoint-{step}" for step in beyond] and "out/checkpoint-2" not in asked
    assert [type(one) for one in found.skipped.values()] == [type(one) for one in skipped.values()]


@pytest.mark.parametrize(
    ("size", "flushes", "sums", "names"),
    [
        (4, True, False, "bytes sha256"),
        (4, True, True, "bytes sha256"),
        (3, False, False, "boot bytes mtime_ns sha256"),
        (4, False, False, "boot bytes mtime_ns"),
        (4, False, True, "boot bytes mtime_ns sums"),
        (3, False, True, "boot bytes mtime_ns sha256"),
    ],
)
def test_what_is_listed_of_a_file(tmp_path, monkeypatch, size, flushes, sums, names):
    flushed = []
    monkeypatch.setattr(manifest, "_HASHED_AT_ONCE", 3)
    monkeypatch.setattr(manifest, "flush", flushed.append)
    (tmp_path / "it").write_bytes(b"x" * size)
    assert sorted(manifest._facts(tmp_path / "it", flushes, sums)) == names.split()
    assert flushed == [tmp_path / "it"] * flushes


@pytest.mark.parametrize(
    ("number", "is_marked"),
    [(errno.EROFS, False), (errno.EACCES, False), (errno.EPERM, False), (errno.ENOENT, False), (errno.ENOSPC, True)],
)
def test_which_errors_mark_a_file_as_refused(tmp_path, number, is_marked):
    path = tmp_path / "it"
    path.touch()
    assert manifest._mark_refused(path, OSError(number, "no")) is is_marked
    assert (path.stat().st_mtime_ns == manifest._REFUSED_NS) is is_marked


def test_what_is_carried_over_and_flushed(tmp_path, monkeypatch):
    old, new, flushed = tmp_path / "old", tmp_path / "new", []
    monkeypatch.setattr(manifest, "flush", lambda path: flushed.append(path.name))
    for folder in (old, new):
        folder.mkdir()
    for name in ("listed", "later", "mine", "there", "optimizer.pt"):
        (old / name).touch()
    (new / "there").touch()
    (old / "lead").symlink_to("mine")
    listed = {"kind": "hf_compat checkpoint", "files": {"listed": {}, "later": {}}}
    (old / "manifest.json").write_text(json.dumps(listed))
    sealed = (old / "manifest.json").stat().st_mtime_ns
    for name, more in (("listed", 0), ("later", 1)):
        os.utime(old / name, ns=(sealed + more, sealed + more))
    assert manifest._carry_over(old, new) == {"later", "mine", "lead"} and (new / "lead").is_symlink()
    assert sorted(name for name in flushed if name != "new") == ["later", "mine"]
    (tmp_path / "link").symlink_to("old")
    for name in ("link", "none", "old/mine"):
        assert manifest._carry_over(tmp_path / name, tmp_path / "other") == set()


@pytest.mark.parametrize(
    ("has_record", "there", "aside", "left"),
    [
        (True, "marked", False, None),
        (False, "marked", True, "marked"),
        (True, "of another", False, "of another"),
        (True, "sealed", True, "sealed"),
        (True, "marked", True, "aside"),
        (True, "empty", True, "aside"),
        (True, "empty", False, "empty"),
        (True, "full", True, "full"),
        (True, None, True, "aside"),
        (False, None, True, None),
    ],
)
def test_what_a_save_that_did_not_end_gives_back(tmp_path, has_record, there, aside, left):
    owner, place, final = Owner(), tmp_path / "hidden", tmp_path / "checkpoint-2"
    place.mkdir()
    if has_record:
        (place / layout.RECORD).touch()
    contents = {
        "marked": ("manifest.json", manifest.marker_of(owner.id, final.name)),
        "of another": ("manifest.json", manifest.marker_of("another", final.name)),
        "sealed": ("manifest.json", json.dumps({"kind": "hf_compat checkpoint", "files": {}}).encode()),
        "full": ("notes.txt", b""),
        "aside": ("aside.txt", b""),
    }
    for folder, what in ((final, there), (place / layout.REPLACED / final.name, "aside" if aside else None)):
        if what is not None:
            folder.mkdir(parents=True)
        if what in contents:
            (folder / contents[what][0]).write_bytes(contents[what][1])
    manifest._put_back(str(place), owner, [str(final)])
    held = {path.name: path.read_bytes() for path in final.iterdir()} if final.exists() else None
    assert held == (None if left is None else dict([contents[left]]) if left in contents else {})


@pytest.mark.parametrize(
    ("is_begun", "has_record", "there", "is_taken_out"),
    [
        (True, True, "unmarked", True),
        (True, True, "marked", False),
        (True, True, None, False),
        (True, False, "unmarked", False),
        (False, True, "unmarked", False),
    ],
)
def test_a_save_that_is_given_up_takes_out_what_it_wrote_once(
    tmp_path, monkeypatch, is_begun, has_record, there, is_taken_out
):
    owner, final, done = Owner(), tmp_path / "checkpoint-2", []
    place = manifest.SavingPlace(str(final), owner, in_place=True)
    place._is_begun = is_begun
    Path(place.hidden).mkdir()
    if has_record:
        (Path(place.hidden) / layout.RECORD).touch()
    if there is not None:
        final.mkdir()
    if there == "marked":
        (final / "manifest.json").touch()
    monkeypatch.setattr(manifest, "_take_out", lambda *words: done.append(("out", *words)))
    monkeypatch.setattr(manifest, "_put_back", lambda *words: done.append(("back", *words)))

    def fail(path):
        done.append(("removed", path))
        raise OSError("busy")

    monkeypatch.setattr(layout, "remove_hidden", fail)
    rest = [("back", place.hidden, owner, [str(final)]), ("removed", place.hidden)]
    for out in ([("out", str(final), place.hidden)] if is_taken_out else [], []):
        place.discard()
        assert done == [*out, *rest]
        done.clear()
