"""The checkpoints of a store, in a folder of this machine: what is whole, who saves, and what comes back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from hf_compat.checkpoint import manifest, store
from hf_compat.checkpoint.reading import Writer, read_manifest
from hf_compat.checkpoint.run_lock import Owner
from hf_compat.checkpoint.store import (
    OWNER_NAME,
    CheckpointStore,
    Superseded,
    linked,
    looking,
    name_within,
    newest_in_store,
)
from hf_compat.errors import CheckpointError, MissingCheckpoint, OutputFolderError, StoreError

ME = Owner().id


def checkpoint(folder, step=2, turn=1, value=1.0):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").unlink(missing_ok=True)
    torch.save({"a": torch.full((2,), value)}, path / "pytorch_model.bin")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    manifest.seal(str(path), Writer("run", turn))
    manifest.flush_and_hash(str(path))
    return path


@pytest.fixture
def held(tmp_path):
    found = CheckpointStore(f"file://{tmp_path}/store")
    found.take(ME)
    return found


def looked(held):
    again = CheckpointStore(held.address)
    again.look()
    return again


def sent(held, monkeypatch):
    names, send = [], held.storage.send
    monkeypatch.setattr(held.storage, "send", lambda path, name, tell: (names.append(name), send(path, name, tell)))
    return names


def test_a_checkpoint_is_whole_once_it_is_put(held, tmp_path, monkeypatch):
    path, names = checkpoint(tmp_path / "out"), sent(held, monkeypatch)
    held.put(path, path.name, ME)
    found = looked(held)
    assert (
        found.whole == held.whole and found.incomplete == {} and found.whole["checkpoint-2"].writer == Writer("run", 1)
    )
    files = ["pytorch_model.bin", "trainer_state.json"]
    assert (
        sorted(names) == [f"checkpoint-2/{name}" for name in files]
        and sorted(found.whole["checkpoint-2"].files) == files
    )
    assert found.whole["checkpoint-2"].size == sum((path / name).stat().st_size for name in files)
    held.put(path, path.name, ME)
    assert len(names) == 2, "it is there already"
    place = tmp_path / "out"
    assert found.writers(str(place), str(place)) == {str(path): Writer("run", 1)}
    assert found.writers(str(place), str(place / "inner")) == {}


def test_another_of_its_name_replaces_it(held, tmp_path, monkeypatch):
    path = checkpoint(tmp_path / "out")
    held.put(path, path.name, ME)
    names = sent(held, monkeypatch)
    (tmp_path / "store" / "checkpoint-2" / "stale").write_text("of an earlier upload")
    held.put(checkpoint(tmp_path / "out", value=2.0), path.name, ME)
    assert len(names) == 4 and len({name.rpartition("/")[0] for name in names}) == 2
    found = looked(held)
    assert found.whole == held.whole and {name for name in found.storage.sizes() if "/" in name} == {
        f"checkpoint-2/{name}" for name in ("manifest.json", "pytorch_model.bin", "trainer_state.json")
    }


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda place: os.truncate(place / "pytorch_model.bin", 5),
            "pytorch_model.bin has 5 bytes, not what manifest.json",
        ),
        (lambda place: (place / "trainer_state.json").unlink(), "trainer_state.json is missing"),
        (lambda place: (place / "manifest.json").write_text("{"), "manifest.json"),
    ],
)
def test_what_is_not_whole_is_told(held, tmp_path, damage, said):
    path = checkpoint(tmp_path / "out")
    held.put(path, path.name, ME)
    damage(tmp_path / "store" / "checkpoint-2")
    found = looked(held)
    assert found.whole == {} and said in found.incomplete["checkpoint-2"]
    held.put(checkpoint(tmp_path / "out", value=3.0), path.name, ME)
    assert looked(held).whole.keys() == {"checkpoint-2"}


def test_one_run_saves_and_learns_of_another(held, tmp_path):
    held.check(ME)
    for content in ('{"owner": "odd"}', "[]", '{"owner": 3}'):
        held.storage.write(OWNER_NAME, content.encode())
        with pytest.raises(OutputFolderError, match="another run has begun"):
            held.check(ME)
        with pytest.raises(OutputFolderError):
            held.put(checkpoint(tmp_path / "out"), "checkpoint-2", ME)
        assert looked(held).whole == {}
    held.storage.write(OWNER_NAME, json.dumps({"owner": ME[:-1] + ("0" if ME[-1] != "0" else "1")}).encode())
    with pytest.raises(OutputFolderError, match=rf"process {os.getpid()}\)"):
        held.check(ME)
    for content in (b"{", None):
        held.storage.remove(OWNER_NAME) if content is None else held.storage.write(OWNER_NAME, content)
        held.check(ME)
        assert json.loads(held.storage.read(OWNER_NAME)) == {"owner": ME}


def test_a_removal_that_is_cut_off_is_ended_by_the_next_run(held, tmp_path, monkeypatch):
    for step in (2, 4):
        held.put(checkpoint(tmp_path / "out", step), f"checkpoint-{step}", ME)
    held.remove("checkpoint-4", ME)
    assert looked(held).whole.keys() == {"checkpoint-2"} and not (tmp_path / "store" / "checkpoint-4").exists()

    def broken(*names):
        raise StoreError("no")

    with monkeypatch.context() as patch:
        patch.setattr(held.storage, "remove", broken)
        with pytest.raises(StoreError):
            held.remove("checkpoint-2", ME)
    found = looked(held)
    assert found.whole == {} and "checkpoint-2" in found.incomplete
    found.remove_left()
    assert found.storage.sizes().keys() == {OWNER_NAME}


def test_a_checkpoint_that_changes_or_is_gone_is_not_put(held, tmp_path):
    path = checkpoint(tmp_path / "out")
    (path / "trainer_state.json").unlink()
    with pytest.raises(Superseded):
        held.put(path, path.name, ME)
    (path / "manifest.json").unlink()
    with pytest.raises(Superseded):
        held.put(path, path.name, ME)
    assert looked(held).whole == {}


def test_what_a_folder_lacks_is_brought(held, tmp_path, caplog):
    source, out = tmp_path / "source", tmp_path / "out"
    held.put(checkpoint(source, 2, turn=3, value=7.0), "checkpoint-2", ME)
    out.mkdir()
    final = out / "checkpoint-2"
    assert not held.bring(str(out / "checkpoint-4"), str(out)) and not held.bring(str(tmp_path / "x"), str(out))
    assert (
        held.bring(str(final), str(out)) and manifest.problems(str(final)) == [] and os.listdir(out) == ["checkpoint-2"]
    )
    assert not held.bring(str(final), str(out)), "it is there"
    for turn, anew, is_fetched in ((4, False, False), (3, False, False), (2, False, True), (4, True, True)):
        checkpoint(out, 2, turn)
        assert held.bring(str(final), str(out), anew) is is_fetched, (turn, anew)
        value = torch.load(final / "pytorch_model.bin")["a"][0].item()
        assert value == (7.0 if is_fetched else 1.0)
    assert len([name for name in os.listdir(out) if name != "checkpoint-2"]) == 2 and "is not the one in" in caplog.text
    os.rename(final, tmp_path / "aside")
    final.symlink_to(tmp_path / "aside")
    assert not held.bring(str(final), str(out), anew=True) and final.is_symlink()


def test_what_the_store_lacks_is_left_out(held, tmp_path):
    held.put(checkpoint(tmp_path / "out"), "checkpoint-2", ME)
    (tmp_path / "store" / "checkpoint-2" / "trainer_state.json").unlink()
    told = []
    held.copy_here(held.whole["checkpoint-2"], str(tmp_path / "copy"), told.append)
    assert sorted(os.listdir(tmp_path / "copy")) == ["manifest.json", "pytorch_model.bin"]
    assert told == [(tmp_path / "copy" / "pytorch_model.bin").stat().st_size]
    with pytest.raises(FileExistsError):  # nothing of another's is mixed with it
        held.copy_here(held.whole["checkpoint-2"], str(tmp_path / "copy"))


def test_once_a_whole_one_is_found_no_more_is_fetched(tmp_path):
    asked, damaged = [], {"damaged", "damaged in both"}

    def bring(path, anew):
        asked.append((Path(path).name, anew))
        if anew and Path(path).name == "damaged":
            damaged.discard("damaged")
            return True
        return anew

    look = looking(bring, lambda path: ["cut"] if Path(path).name in damaged else [])
    assert look(str(tmp_path / "damaged in both")) == ["cut"]
    assert look(str(tmp_path / "damaged")) == []
    assert look(str(tmp_path / "older")) == []
    (tmp_path / "here").mkdir()
    assert look(str(tmp_path / "here")) == []
    both = [(name, anew) for name in ("damaged in both", "damaged") for anew in (False, True)]
    assert asked == [*both, ("here", False)]


def test_files_are_held_while_they_are_uploaded(tmp_path, monkeypatch):
    path = checkpoint(tmp_path / "out")
    for has_links in (True, False):
        with monkeypatch.context() as patch:
            if not has_links:
                patch.setattr(store.os, "link", lambda source, target: (_ for _ in ()).throw(OSError("no links")))
            with linked(str(path)) as held:
                assert held.name == path.name and sorted(os.listdir(held)) == sorted(os.listdir(path))
                assert os.path.samefile(held / "manifest.json", path / "manifest.json") == has_links
                assert manifest.problems(str(held)) == []
        assert os.listdir(tmp_path / "out") == [path.name]
    (path / "trainer_state.json").unlink()
    for _ in range(2):
        with pytest.raises(Superseded), linked(str(path)):
            raise AssertionError("it is not whole")
        (path / "manifest.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("path", "name"),
    [("out/a", "a"), ("out/a/b", "a/b"), ("out", None), ("other", None), ("out/../a", None), ("outer/a", None)],
)
def test_the_name_of_a_path_in_a_store(tmp_path, path, name):
    assert name_within(str(tmp_path / "out"), str(tmp_path / path)) == name


@pytest.mark.parametrize(
    ("files", "name", "told"),
    [
        ("checkpoint-2/a checkpoint-2/sub/b", "checkpoint-2", None),
        ("checkpoint-2/a checkpoint-2/manifest.json", "checkpoint-2", None),
        ("checkpoint-2/manifest.json checkpoint-2/checkpoint-9/manifest.json", "checkpoint-2", None),
        ("it.ckpt", "it.ckpt", None),
        (
            "run/checkpoint-2/manifest.json run/checkpoint-4/manifest.json",
            "run",
            "such as file://.*/store/run/checkpoint-4",
        ),
        ("run/a run/checkpoint-2/a", "run", None),
        ("run2/a", "run", "look at the address"),
    ],
)
def test_a_checkpoint_is_fetched_from_any_storage(tmp_path, files, name, told):
    for file in [*files.split(), "run3/other"]:
        (tmp_path / "store" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / file).write_text(file)
    address, here = f"file://{tmp_path}/store/{name}", tmp_path / "here"
    if told:
        with pytest.raises(MissingCheckpoint, match=told):
            store.fetch_checkpoint(address, str(here))
    else:
        assert store.fetch_checkpoint(address, str(here)) == str(here / name)
        assert {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()} == set(files.split())


def test_a_bucket_is_no_checkpoint(tmp_path):
    with pytest.raises(MissingCheckpoint, match="look at the address"):
        store.fetch_checkpoint("memory://bucket", str(tmp_path))


def test_the_newest_of_a_store_and_of_a_folder(held, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "store_address", lambda folder: folder if "://" in folder else None)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    assert newest_in_store(held.address, held.address) is None and newest_in_store(held.address, str(out)) is None
    held.put(checkpoint(tmp_path / "source", 4), "checkpoint-4", ME)
    held.put(checkpoint(tmp_path / "source", 8), "trial/checkpoint-8", ME)
    assert newest_in_store(held.address, held.address) == f"{held.address}/checkpoint-4"
    checkpoint(out, 2)
    assert newest_in_store(held.address, str(out)) == str(out / "checkpoint-4") and (out / "checkpoint-4").is_dir()
    checkpoint(out, 6)
    assert newest_in_store(held.address, str(out)) == str(out / "checkpoint-6")


def test_what_may_not_be_uploaded(held, tmp_path):
    path = checkpoint(tmp_path / "out")
    listed = json.loads((path / "manifest.json").read_text())
    for files in (None, {"a": 3}, {**listed["files"], "a": {"bytes": 1}}):
        (path / "manifest.json").write_text(json.dumps({**listed, "files": files}))
        with pytest.raises(CheckpointError, match="is not whole, so it is not uploaded"):
            held.put(path, path.name, ME)


def test_a_checkpoint_with_sums_is_hashed_before_it_is_uploaded(held, tmp_path, monkeypatch):
    path = checkpoint(tmp_path / "out")
    monkeypatch.setattr(manifest, "_HASHED_AT_ONCE", -1)
    (path / "manifest.json").unlink()
    manifest.seal(str(path), Writer("run", 1), flushes=False, sums=True)
    assert all("sums" in facts for facts in read_manifest(path).files.values())
    held.put(path, path.name, ME)
    assert looked(held).whole.keys() == {path.name}
    hashed = []
    monkeypatch.setattr(manifest, "flush_and_hash", hashed.append)
    assert CheckpointStore._sealed(path) and hashed == []


def test_a_place_is_taken_for_what_its_manifest_says(held):
    def content(**facts):
        return json.dumps({"kind": "hf_compat checkpoint", **facts}).encode()

    held._sizes = {"p/a": 3, "q/a": 3}
    held._take("p", "it", b"[]")
    assert held.incomplete.keys() == {"it"} and held._left == {}
    held._take("p", "it", content(saving="me", name="it"))
    assert held.incomplete.keys() == {"it"} and held._left == {"p": "me"} and held.whole == {}
    for facts in ({"bytes": 2}, 3, {}):
        held._take("p", "it", content(files={"a": facts}))
        assert held.incomplete == {"it": "a has 3 bytes, not what manifest.json says"}
    held._take("p", "it", content(files={"b": {"bytes": 3}}))
    assert held.incomplete == {"it": "b is missing"}
    held._take("p", "it", content(files={"a": {"bytes": 3}}))
    assert held.incomplete == {} and held.whole["it"].place == "p" and held.whole["it"].size == 3
    held._take("q", "it", content(files={"b": {"bytes": 3}}))
    assert held.incomplete == {} and held.whole["it"].place == "p" and held._left == {"p": "me"}
    held._take("q", "it", content(files={"a": {"bytes": 3}}))
    assert held.whole["it"].place == "p" and held._left == {"p": "me", "q": ""}
    held._take("q", "it", content(files={"a": {"bytes": 3}}, run="r", turn=1))
    assert held.whole["it"].place == "q"
