"""One run saves into a folder at a time; what ended runs leave is taken over, what live ones have under way is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict

import pytest

from hf_compat.checkpoint import manifest, run_lock
from hf_compat.checkpoint.run_lock import LOCK_NAME, Owner, RunLock, is_in_use
from hf_compat.errors import OutputFolderError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "SILENCE_SECONDS", 0.6)


@pytest.fixture
def other_process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def ended_process():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def lock_of(folder, **facts):
    folder.mkdir(exist_ok=True)
    owner = {**asdict(Owner()), "token": "0123abcd", **facts}
    (folder / LOCK_NAME).write_text(json.dumps(owner))


def test_a_lock_is_given_back(tmp_path):
    lock = RunLock(str(tmp_path / "out"))
    lock.acquire()
    assert is_in_use(tmp_path / "out")
    lock.release()
    assert not is_in_use(tmp_path / "out") and list((tmp_path / "out").iterdir()) == []


def test_a_run_in_another_process_is_named(tmp_path, other_process):
    lock_of(tmp_path, pid=other_process.pid)
    with pytest.raises(OutputFolderError, match=rf"(?s){tmp_path}.*process {other_process.pid} on .*Hint.*output_dir"):
        RunLock(str(tmp_path)).acquire()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == other_process.pid


def test_a_second_run_of_this_process_is_another_run(tmp_path):
    first = RunLock(str(tmp_path))
    first.acquire()
    with pytest.raises(OutputFolderError, match=r"(?s)a Trainer of this process that is training.*Hint"):
        RunLock(str(tmp_path)).acquire()
    first.release()
    second = RunLock(str(tmp_path))
    second.acquire()
    second.release()


ELSEWHERE = [{"host": "elsewhere"}, {"machine": "another container"}]


@pytest.mark.parametrize("facts", ELSEWHERE)
def test_a_run_elsewhere_that_shows_life_is_left_alone(tmp_path, facts):
    """Containers share names and process numbers: only what a run does can be seen."""
    lock_of(tmp_path, **facts)
    over = threading.Event()

    def live():
        while not over.wait(0.05):
            os.utime(tmp_path / LOCK_NAME)

    other = threading.Thread(target=live)
    other.start()
    try:
        with pytest.raises(OutputFolderError, match=f"process {os.getpid()} on "):
            RunLock(str(tmp_path)).acquire()
    finally:
        over.set()
        other.join()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["token"] == "0123abcd"


@pytest.mark.parametrize("facts", ELSEWHERE)
def test_a_run_elsewhere_that_is_silent_is_over(tmp_path, facts, caplog):
    lock_of(tmp_path, **facts)
    lock = RunLock(str(tmp_path))
    with caplog.at_level("WARNING", logger="hf_compat"):
        lock.acquire()
    assert "waiting for a sign of life" in caplog.text and "taken over" in caplog.text
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_nobody_waits_for_a_run_elsewhere_that_has_long_been_silent(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_lock, "SILENCE_SECONDS", 300.0)
    lock_of(tmp_path, host="elsewhere")
    os.utime(tmp_path / LOCK_NAME, (1, 1))
    lock = RunLock(str(tmp_path))
    begun = time.monotonic()
    lock.acquire()
    lock.release()
    assert time.monotonic() - begun < 60 and "waiting" not in caplog.text


def test_a_run_touches_its_lock(tmp_path):
    lock = RunLock(str(tmp_path))
    lock.acquire()
    os.utime(tmp_path / LOCK_NAME, (1, 1))
    give_up = time.monotonic() + 30
    while (tmp_path / LOCK_NAME).stat().st_mtime == 1 and time.monotonic() < give_up:
        time.sleep(0.05)
    assert (tmp_path / LOCK_NAME).stat().st_mtime > 1
    lock.release()
    assert not [thread for thread in threading.enumerate() if thread.name == "hf_compat-lock"]


def test_a_lock_that_was_deleted_is_written_again_before_a_save(tmp_path):
    lock = RunLock(str(tmp_path / "out"))
    lock.acquire()
    (tmp_path / "out" / LOCK_NAME).unlink()
    lock.renew()
    assert is_in_use(tmp_path / "out")
    lock.release()


def test_a_run_whose_folder_was_taken_over_says_so_before_it_saves(tmp_path, other_process):
    lock = RunLock(str(tmp_path))
    lock.acquire()
    lock_of(tmp_path, pid=other_process.pid)
    with pytest.raises(OutputFolderError, match=f"process {other_process.pid} on "):
        lock.renew()
    lock.release()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == other_process.pid


def test_processes_of_one_run_share_a_folder(tmp_path):
    """`save_on_each_node` on a disk that the nodes share."""
    lock_of(tmp_path, host="elsewhere", token="0123abcd")
    lock = RunLock(str(tmp_path), Owner.of_this_process("0123abcd"))
    lock.acquire()
    lock.release()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["host"] == "elsewhere"


def test_a_process_that_was_forked_off_gives_nothing_back(tmp_path):
    lock = RunLock(str(tmp_path))
    lock.acquire()
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert is_in_use(tmp_path)
    lock.release()


def test_a_taker_that_was_killed_keeps_nobody_out(tmp_path):
    lock_of(tmp_path, pid=ended_process())
    (tmp_path / f"{LOCK_NAME}.takeover").mkdir()
    lock = RunLock(str(tmp_path))
    lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    first = RunLock(str(tmp_path))
    first.acquire()
    with pytest.raises(OutputFolderError):
        RunLock(str(tmp_path)).acquire()
    first.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("attempt", range(5))
def test_one_of_many_runs_gets_the_folder(tmp_path, attempt):
    """They meet a stale lock at the same moment."""
    lock_of(tmp_path, pid=ended_process())
    locks = [RunLock(str(tmp_path)) for _ in range(8)]
    barrier, refused = threading.Barrier(8), []

    def take(lock):
        barrier.wait()
        refused.append(lock.try_to_acquire() is not None)

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(refused) == [False] + [True] * 7
    for lock in locks:
        lock.release()
    assert list(tmp_path.iterdir()) == []


STALE = {
    "a dead process": lambda: {"pid": ended_process()},
    "this process's number, in a container that was started again": dict,
    "the number of another process by now": lambda: {"pid": os.getppid(), "started": 1},
    "no process": lambda: {"pid": -1},
}


@pytest.mark.parametrize("which", STALE)
def test_the_lock_of_a_run_that_ended_is_taken_over(tmp_path, which, caplog):
    lock_of(tmp_path, **STALE[which]())
    lock = RunLock(str(tmp_path))
    with caplog.at_level("WARNING", logger="hf_compat"):
        lock.acquire()
    assert "taken over" in caplog.text
    assert json.loads((tmp_path / LOCK_NAME).read_text())["token"] == lock.owner.token
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "x", "host": 1, "token": 2}', "[" * 3000])
def test_an_unreadable_lock_is_taken_over(tmp_path, content):
    (tmp_path / LOCK_NAME).write_text(content)
    lock = RunLock(str(tmp_path))
    lock.acquire()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["token"] == lock.owner.token
    lock.release()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_in_the_place_of_a_lock_does_not_hang(tmp_path, make):
    make(tmp_path / LOCK_NAME)
    lock = RunLock(str(tmp_path))
    lock.acquire()
    assert (tmp_path / LOCK_NAME).is_file()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_look_for_the_last_checkpoint_removes_what_killed_runs_left(tmp_path):
    """Scripts end where a folder holds no checkpoint, and something else: a run killed early would start no more."""
    ended = Owner(pid=ended_process())
    lock_of(tmp_path, pid=ended.pid)
    (tmp_path / f".saving-{ended.id}" / "checkpoint-2").mkdir(parents=True)
    assert manifest.get_last_checkpoint(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_a_look_for_the_last_checkpoint_leaves_a_lock_of_a_run_that_may_live(tmp_path, other_process):
    for facts in ({"pid": other_process.pid}, {"host": "elsewhere"}):
        lock_of(tmp_path, **facts)
        assert manifest.get_last_checkpoint(tmp_path) is None and (tmp_path / LOCK_NAME).exists()
    os.utime(tmp_path / LOCK_NAME, (0, 0))  # that of elsewhere has been silent for long
    assert manifest.get_last_checkpoint(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_a_lock_of_another_is_not_given_back(tmp_path, other_process):
    lock = RunLock(str(tmp_path))
    lock.acquire()
    lock_of(tmp_path, pid=other_process.pid)
    lock.release()
    assert (tmp_path / LOCK_NAME).exists()


def test_what_a_live_run_has_under_way_is_left_alone(tmp_path, other_process):
    alive, ended = Owner(pid=other_process.pid), Owner(pid=ended_process())
    elsewhere = Owner(host="elsewhere", pid=1)
    for owner in (alive, ended, elsewhere):
        (tmp_path / f"checkpoint-4.partial-{owner.id}").mkdir()
    manifest.tidy(str(tmp_path))
    kept = {f"checkpoint-4.partial-{alive.id}", f"checkpoint-4.partial-{elsewhere.id}"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    os.utime(tmp_path / f"checkpoint-4.partial-{elsewhere.id}", (0, 0))
    manifest.tidy(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-4.partial-{alive.id}"}


def sealed(path):
    path.mkdir()
    (path / "a.txt").write_text(path.name)
    manifest.seal(str(path))


def test_a_save_of_a_live_run_is_not_finished_by_another(tmp_path, other_process):
    sealed(tmp_path / f"checkpoint-4.partial-{Owner(pid=other_process.pid).id}")
    assert manifest.get_last_checkpoint(tmp_path) is None
    other_process.kill()
    other_process.wait()
    assert manifest.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_killed_between_two_renames_both_copies_survive(tmp_path):
    """The new copy is finished; only then the old one goes."""
    owner = Owner(pid=ended_process())
    for look in (manifest.get_last_checkpoint, manifest.tidy):
        folder = tmp_path / look.__name__
        folder.mkdir()
        for kind in ("partial", "replaced"):
            sealed(folder / f"checkpoint-4.{kind}-{owner.id}")
        look(str(folder))
        assert (folder / "checkpoint-4" / "a.txt").read_text() == f"checkpoint-4.partial-{owner.id}"
        assert manifest.problems(str(folder / "checkpoint-4")) == []
