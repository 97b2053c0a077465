"""What may go from an output folder: what a run left there, provably; never by a read, and never what is the user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from hf_compat.checkpoint import choice, manifest, moving
from hf_compat.checkpoint import layout as hidden_folders
from hf_compat.checkpoint import manifest as sealing
from hf_compat.checkpoint.convert import writing
from hf_compat.checkpoint.layout import CONVERTING, DELETED, REPLACED, SAVING, hidden_folder, make_hidden
from hf_compat.checkpoint.reading import Writer
from hf_compat.checkpoint.run_lock import LOCK_NAME, Owner
from hf_compat.hub.client import STAGE_PREFIX

ENDED = Owner(pid=2**22 + 7)  # no process has such a number
ELSEWHERE = Owner(host="elsewhere", pid=1)


def sealed(path, text="new"):
    path.mkdir(parents=True)
    (path / "a.txt").write_text(text)
    manifest.seal(str(path))


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


USERS = [
    "checkpoint-2.replaced-old-data",
    "checkpoint-2.deleted-by-mistake",
    "checkpoint-9.partial-notes",
    "checkpoint-4.partial",
    "checkpoint-6.deleted",
    f"checkpoint-8.deleted-{ENDED.id}",
    ".saving-notes",
    f".saving-{ENDED.id}",  # of the right name, and no run made it
    f".saving-{ENDED.id}-backup",
    f"{STAGE_PREFIX}{ENDED.id}",
]


@pytest.mark.parametrize(
    "act",
    [
        choice.get_last_checkpoint,
        manifest.recover,
        partial(manifest.recover, has_lock=True),
        partial(hidden_folders.remove_ended, prefix=STAGE_PREFIX),
    ],
)
def test_folders_of_the_users_stay(tmp_path, act):
    for name in USERS:
        sealed(tmp_path / name / "checkpoint-3", "mine")
        (tmp_path / name / "notes.txt").write_text("mine")
    sealed(tmp_path / "elsewhere" / "checkpoint-2")
    (tmp_path / f".saving-{Owner(pid=ENDED.pid).id}").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".my.manifest.json.old").write_text("mine")
    before = tree(tmp_path)
    act(str(tmp_path))
    assert tree(tmp_path) == before


def left_by_a_kill(folder, owner=ENDED):
    """Make what a killed run leaves: its lock, half a save, half a removal."""
    place = Path(make_hidden(str(folder), SAVING, owner))
    (place / "checkpoint-4").mkdir()
    (place / "checkpoint-4" / "model.safetensors").write_bytes(b"half")
    removal = Path(make_hidden(str(folder), SAVING, Owner(host=owner.host, pid=owner.pid)))
    sealed(removal / DELETED / "checkpoint-2")
    return place, removal


def test_reading_deletes_nothing_and_the_next_run_that_saves_removes_what_is_left(tmp_path):
    left_by_a_kill(tmp_path)
    before = tree(tmp_path)
    assert choice.get_last_checkpoint(tmp_path) is None
    assert tree(tmp_path) == before
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    left_by_a_kill(tmp_path, Owner(pid=process.pid))
    manifest.recover(str(tmp_path), has_lock=True)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_asked_has_ended_where_the_caller_has_the_lock(tmp_path):
    left_by_a_kill(tmp_path, ELSEWHERE)
    make_hidden(str(tmp_path), CONVERTING, ELSEWHERE)  # needs no lock: it may go on
    before = tree(tmp_path)
    manifest.recover(str(tmp_path))
    assert tree(tmp_path) == before
    manifest.recover(str(tmp_path), has_lock=True)
    assert [path.name for path in tmp_path.iterdir()] == [CONVERTING + ELSEWHERE.id]


@pytest.mark.parametrize("has_lock", [True, False])
def test_a_whole_save_of_a_run_elsewhere_is_named_by_the_first_reader(tmp_path, has_lock):
    """The hosts of a job cannot ask of each other's processes. All of them find the same checkpoint all the same."""
    sealed(Path(make_hidden(str(tmp_path), SAVING, ELSEWHERE)) / "checkpoint-4")
    if has_lock:
        (tmp_path / LOCK_NAME).write_text(json.dumps(asdict(ELSEWHERE)))
    assert choice.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    assert (tmp_path / LOCK_NAME).exists() is has_lock


@pytest.mark.parametrize("when", ["before the last look", "between the two renames"])
def test_a_run_whose_save_a_reader_elsewhere_has_named_goes_on(tmp_path, monkeypatch, when):
    final, replace = tmp_path / "checkpoint-4", os.replace
    place = manifest.SavingPlace(str(final), ELSEWHERE)
    place.prepare()
    sealed(Path(place.folder))
    place.seal(Writer("run", 1), True)
    if when == "before the last look":
        assert choice.get_last_checkpoint(tmp_path) == str(final)
    else:

        def after_a_reader(source, target, **options):
            monkeypatch.setattr(os, "replace", replace)
            if target == str(final):
                assert choice.get_last_checkpoint(tmp_path) == str(final)
            replace(source, target, **options)

        monkeypatch.setattr(os, "replace", after_a_reader)
    place.put()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"] and manifest.problems(str(final)) == []


def test_a_save_of_a_live_run_is_not_finished_by_another(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        sealed(Path(make_hidden(str(tmp_path), SAVING, Owner(pid=process.pid))) / "checkpoint-4")
        before = tree(tmp_path)
        manifest.recover(str(tmp_path), has_lock=True)
        assert choice.get_last_checkpoint(tmp_path) is None and tree(tmp_path) == before
        process.kill()
    assert choice.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


@pytest.mark.parametrize("look", [choice.get_last_checkpoint, partial(manifest.recover, has_lock=True)])
def test_killed_between_two_renames_both_copies_survive(tmp_path, look):
    """The new copy is finished; only then the old one may go."""
    place = Path(make_hidden(str(tmp_path), SAVING, ENDED))
    sealed(place / "checkpoint-4")
    sealed(place / REPLACED / "checkpoint-4", "old")
    sealed(place / REPLACED / "checkpoint-6", "old, and the new one is not whole")
    look(str(tmp_path))
    texts = [(tmp_path / name / "a.txt").read_text() for name in ("checkpoint-4", "checkpoint-6")]
    assert texts == ["new", "old, and the new one is not whole"]
    assert place.exists() is (look is choice.get_last_checkpoint)


def test_a_removal_of_the_hidden_folder_that_is_killed_is_gone_on_with(tmp_path, monkeypatch):
    place, _ = left_by_a_kill(tmp_path)

    def stop(path, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(hidden_folders.shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        hidden_folders.remove_hidden(str(place))
    monkeypatch.undo()
    manifest.recover(str(tmp_path), has_lock=True)
    assert list(tmp_path.iterdir()) == []


def test_work_of_this_process_that_goes_on_is_left_alone(tmp_path):
    with writing(str(tmp_path / "new")) as place, hidden_folder(str(tmp_path), SAVING) as other:
        os.mkdir(place)
        manifest.recover(str(tmp_path), has_lock=True)
        assert os.path.isdir(place) and os.path.isdir(other)
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]


@pytest.mark.parametrize("write", [manifest.seal, lambda folder: manifest.seal(folder, flushes=False)])
def test_a_manifest_is_written_through_no_link(tmp_path, write):
    folder, private = tmp_path / "checkpoint-2", tmp_path / "private"
    sealed(folder)
    private.write_text("mine")
    (folder / f".manifest.json.{os.getpid()}").symlink_to(private)
    (tmp_path / f".checkpoint-2.manifest.json.{os.getpid()}").symlink_to(private)
    write(str(folder))
    sealing.flush_and_hash(str(folder))
    assert private.read_text() == "mine" and manifest.problems(str(folder)) == []


def test_a_link_at_the_final_place_is_not_followed(tmp_path, caplog):
    private, out = tmp_path / "private", tmp_path / "out"
    private.mkdir()
    out.mkdir()
    final = out / "checkpoint-8"
    final.symlink_to(private)
    place = manifest.SavingPlace(str(final), Owner())
    place.prepare()
    for name in ("key.pem", "deep/er.txt"):  # newer than the save, and by an earlier one
        (private / name).parent.mkdir(exist_ok=True)
        (private / name).write_text("private")
    sealed(Path(place.folder))
    place.seal(Writer("run", 1), True)
    place.put()
    assert sorted(path.name for path in final.iterdir()) == ["a.txt", "manifest.json"] and not final.is_symlink()
    assert sorted(tree(private)) == ["deep", "deep/er.txt", "key.pem"] and "is a link to" in caplog.text
    assert [path.name for path in out.iterdir()] == ["checkpoint-8"]


def test_a_link_that_leads_to_everything_is_judged_without_a_walk(tmp_path, monkeypatch):
    everything, seen = tmp_path / "everything", []
    (everything / "usr" / "lib").mkdir(parents=True)
    (everything / "usr" / "lib" / "model.pt").write_bytes(b"x")
    out = tmp_path / "out"
    out.mkdir()
    (out / "checkpoint-9").symlink_to(everything)
    for name in ("scandir", "listdir"):
        listing = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, listing=listing: (seen.append(str(path)), listing(path))[1])
    assert choice.get_last_checkpoint(out) is None
    assert seen and not any("usr" in path for path in seen)


def test_a_conversion_removes_what_killed_ones_have_left(tmp_path):
    for owner in (ENDED, ELSEWHERE):
        make_hidden(str(tmp_path), CONVERTING, owner)
    with writing(str(tmp_path / "target")) as place:
        Path(place).write_text("converted")
        assert not (tmp_path / (CONVERTING + ENDED.id)).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONVERTING + ELSEWHERE.id, "target"]


@pytest.mark.parametrize(
    ("path", "is_owned"),
    [
        ("{saving}{me}/checkpoint-2", True),
        ("{converting}{me}/a/checkpoint-2", True),
        ("{saving}{me}", False),
        ("{saving}nobody/checkpoint-2", False),
        ("out/checkpoint-2", False),
    ],
)
def test_whose_hidden_folder_a_path_is_in(path, is_owned):
    me = Owner().id
    found = moving._owner_of("/out/" + path.format(saving=SAVING, converting=CONVERTING, me=me))
    assert found == (me if is_owned else "")


@pytest.mark.parametrize("has_manifest", [False, True])
@pytest.mark.parametrize("goes_out", [False, True])
def test_a_folder_is_copied_and_deleted_where_the_disk_renames_none(tmp_path, monkeypatch, has_manifest, goes_out):
    me, written, flushed = Owner().id, [], []
    hidden = tmp_path / f"{SAVING}{me}"
    hidden.mkdir()
    source, target = hidden / "checkpoint-2", tmp_path / "checkpoint-2"
    source, target = (source, target) if goes_out else (target, source)
    (source / "sub").mkdir(parents=True)
    for name in ("a", "sub/manifest.json", *(["manifest.json"] if has_manifest else [])):
        (source / name).write_text(name)
    (source / "sub" / "link").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    if has_manifest:
        os.utime(source / "manifest.json", ns=(10**18, 10**18))
    put = moving._put_manifest
    note = lambda folder, content: written.append((str(folder), content)) or put(folder, content)  # noqa: E731
    monkeypatch.setattr(moving, "_put_manifest", note)
    monkeypatch.setattr(moving, "flush", lambda path: flushed.append(str(path)))
    marker = moving.marker_of(me, "checkpoint-2")
    moving._copy(source, target)
    found = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert found == {"a", "sub", "sub/manifest.json", "sub/link", *(["manifest.json"] if has_manifest else [])}
    assert (target / "sub" / "link").is_symlink() and (target / "a").read_text() == "a"
    marked = [(str(target), marker)] if goes_out else []
    assert written == marked + ([(str(target), b"manifest.json")] if has_manifest else [])
    if has_manifest:
        assert (target / "manifest.json").stat().st_mtime_ns == 10**18
    assert {str(target / "a"), str(target / "sub" / "manifest.json"), str(target.parent)} <= set(flushed)
    assert flushed[-1] == str(target) and not any(path.endswith("link") for path in flushed)

    written.clear()
    flushed.clear()
    order, unlink = [], os.unlink
    monkeypatch.setattr(moving.os, "unlink", lambda path, **other: order.append(str(path)) or unlink(path, **other))
    moving._delete(str(source), moving._owner_of(str(target)))
    assert not source.exists()
    assert written == ([] if goes_out else [(str(source), marker)]) and flushed == [path for path, _ in written]
    own = [path for path in order if path == str(source / "manifest.json")]
    assert own == ([order[-1]] if has_manifest or not goes_out else [])


def test_a_folder_of_nobodys_is_deleted_without_a_marker(tmp_path, monkeypatch):
    monkeypatch.setattr(moving, "_put_manifest", None)
    (tmp_path / "it").mkdir()
    moving._delete(str(tmp_path / "it"), "")
    assert not (tmp_path / "it").exists()
