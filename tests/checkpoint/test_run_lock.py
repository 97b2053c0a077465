"""One run saves into a folder at a time; what ended runs leave is taken over, what live ones have under way is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from hf_compat.checkpoint import choice, run_lock
from hf_compat.checkpoint.run_lock import LOCK_NAME, Owner, RunLock, is_free
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


def test_a_lock_is_given_back_where_ctrl_c_came_before_its_heartbeat_began(tmp_path, monkeypatch):
    def interrupted(thread):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    lock = RunLock(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_given_back(tmp_path):
    lock = RunLock(str(tmp_path / "out"))
    lock.acquire()
    assert not is_free(tmp_path / "out")
    lock.release()
    assert is_free(tmp_path / "out") and list((tmp_path / "out").iterdir()) == []


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


def test_a_run_whose_lock_is_gone_never_takes_it_again(tmp_path):
    """Another run may have taken the folder, trained to its end and given the lock back."""
    lock = RunLock(str(tmp_path))
    lock.acquire()
    (tmp_path / LOCK_NAME).unlink()
    for _ in range(2):
        with pytest.raises(OutputFolderError, match=rf"(?s){tmp_path} is no longer this run's.*Hint:.*output_dir"):
            lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    RunLock(str(tmp_path)).acquire()  # a run that starts there now takes it


@pytest.mark.parametrize("by", ["another run", "nobody", "whoever removed the folder"])
def test_a_run_learns_at_its_end_whose_the_folder_is(tmp_path, by):
    folder = tmp_path / "run"
    lock = RunLock(str(folder))
    lock.acquire()
    (folder / LOCK_NAME).unlink()
    if by == "another run":
        lock_of(folder, host="elsewhere")
    elif by != "nobody":
        folder.rmdir()
    lock.release()
    told = {"another run": "on elsewhere", "nobody": "is gone. Another run may have saved there"}.get(by)
    assert lock.lost is None if told is None else told in lock.lost


def test_a_run_that_lost_its_lock_to_one_that_was_killed_does_not_take_it_over(tmp_path):
    lock = RunLock(str(tmp_path))
    lock.acquire()
    lock_of(tmp_path, pid=ended_process())
    left = (tmp_path / LOCK_NAME).read_bytes()
    with pytest.raises(OutputFolderError, match=r"(?s)process \d+ on .*, which has ended,.*writes nothing more"):
        lock.acquire()
    lock.release()
    assert (tmp_path / LOCK_NAME).read_bytes() == left


@pytest.mark.parametrize("by", ["another run", "nobody"])
def test_a_heartbeat_remembers_that_the_lock_was_lost(tmp_path, by):
    lock = RunLock(str(tmp_path))
    lock.acquire()
    (tmp_path / LOCK_NAME).unlink()
    if by == "another run":
        lock_of(tmp_path, host="elsewhere")
    lock._heartbeat.join(20)
    assert not lock._heartbeat.is_alive() and ("on elsewhere" in lock.lost) is (by == "another run")
    (tmp_path / LOCK_NAME).unlink(missing_ok=True)  # that run has ended since
    with pytest.raises(OutputFolderError, match="writes nothing more"):
        lock.acquire()
    lock.release()


def test_a_folder_that_was_deleted_is_made_again_unless_another_run_has_made_it(tmp_path):
    lock, other = RunLock(str(tmp_path / "out")), RunLock(str(tmp_path / "out"))
    lock.acquire()
    shutil.rmtree(tmp_path / "out")
    lock.acquire()
    assert not is_free(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    other.acquire()
    other.release()
    with pytest.raises(OutputFolderError, match="writes nothing more"):
        lock.acquire()
    lock.release()


def test_a_run_whose_folder_was_taken_over_says_so_before_it_saves(tmp_path, other_process):
    lock = RunLock(str(tmp_path))
    lock.acquire()
    lock_of(tmp_path, pid=other_process.pid)
    with pytest.raises(OutputFolderError, match=f"process {other_process.pid} on "):
        lock.acquire()
    lock.release()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == other_process.pid


def test_processes_of_one_run_share_a_folder(tmp_path):
    """`save_on_each_node` on a disk that the nodes share."""
    lock_of(tmp_path, host="elsewhere", token="0123abcd")
    lock = RunLock(str(tmp_path), Owner(token="0123abcd"))
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
    assert not is_free(tmp_path)
    lock.release()


def test_a_taker_that_was_killed_keeps_nobody_out(tmp_path):
    lock_of(tmp_path, pid=ended_process())
    (tmp_path / f"{LOCK_NAME}.takeover").mkdir()
    lock = RunLock(str(tmp_path))
    lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_not_written_yet_keeps_others_out(tmp_path, monkeypatch):
    """Its file is there before its content."""
    write, begun, go = run_lock.write_new, threading.Event(), threading.Event()

    def slow(path, content):
        if not begun.is_set():
            open(path, "xb").close()
            begun.set()
            go.wait(20)
            with open(path, "r+b") as file:
                file.write(content)
            return
        threading.Timer(0.1, go.set).start()
        write(path, content)

    monkeypatch.setattr(run_lock, "write_new", slow)
    first = RunLock(str(tmp_path))
    writing = threading.Thread(target=first.acquire)
    writing.start()
    assert begun.wait(20)
    with pytest.raises(OutputFolderError, match="a Trainer of this process that is training"):
        RunLock(str(tmp_path)).acquire()
    writing.join()
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
        refused.append(error_of(lock) is not None)

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


def test_a_lock_of_another_is_not_given_back(tmp_path, other_process):
    lock = RunLock(str(tmp_path))
    lock.acquire()
    lock_of(tmp_path, pid=other_process.pid)
    lock.release()
    assert (tmp_path / LOCK_NAME).exists()


ELSEWHERE_ALIVE = Owner(host="elsewhere", token="0123abcd")


class Beating:
    """The lock of a run elsewhere, which shows life until the block ends."""

    def __init__(self, folder, show_life):
        lock_of(folder, **asdict(ELSEWHERE_ALIVE))
        self.path, self._show_life, self._over = folder / LOCK_NAME, show_life, threading.Event()
        self._thread = threading.Thread(target=self._live)

    def _live(self):
        count = 0
        while not self._over.wait(0.05):
            count += 1
            self._show_life(self.path, count)

    def __enter__(self):
        self._show_life(self.path, 0)
        self._thread.start()

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()


def refused(folder):
    with pytest.raises(OutputFolderError, match=r"process \d+ on elsewhere"):
        RunLock(str(folder)).acquire()
    return run_lock._read_owner(folder) == ELSEWHERE_ALIVE


@pytest.mark.parametrize("seconds", [-3600, 3600, 60], ids=["an hour behind", "an hour ahead", "a minute ahead"])
def test_a_clock_of_another_time_frees_no_lock(tmp_path, seconds):
    """The other node's disk, or the node itself, file_stats the file."""

    def touch(path, count):
        os.utime(path, (time.time() + seconds, time.time() + seconds))

    with Beating(tmp_path, touch):
        assert choice.get_last_checkpoint(tmp_path) is None and (tmp_path / LOCK_NAME).exists()
        assert refused(tmp_path)


def test_a_clock_that_jumps_frees_no_lock(tmp_path):
    def touch(path, count):
        os.utime(path, (time.time() + (-1) ** count * 3600,) * 2)

    with Beating(tmp_path, touch):
        assert refused(tmp_path)


def test_a_disk_that_rounds_times_shows_life_all_the_same(tmp_path, monkeypatch):
    """Nothing but what is in the lock changes."""
    lstat = os.lstat

    def rounded(path, **options):
        facts = lstat(path, **options)
        times = {"st_mtime": 1e9, "st_mtime_ns": 10**18}
        return os.stat_result((*facts[:8], 10**9, facts[9]), times) if str(path).endswith(LOCK_NAME) else facts

    live = RunLock(str(tmp_path), ELSEWHERE_ALIVE)
    live.acquire()
    monkeypatch.setattr(os, "lstat", rounded)
    try:
        assert refused(tmp_path)
    finally:
        live._is_over.set()
        live._heartbeat.join()


def test_a_disk_that_stalls_for_everybody_ends_nobody(tmp_path, monkeypatch, caplog):
    """While it stands still the other run cannot touch its lock; that time does not count as its silence."""
    lstat, looks, stalled = os.lstat, [], threading.Event()

    def stall(path, **options):
        facts = lstat(path, **options)
        if str(path).endswith(LOCK_NAME) and threading.current_thread() is threading.main_thread():
            looks.append(path)
            if len(looks) == 4:
                time.sleep(1.0)
                stalled.set()
        return facts

    def touch(path, count):
        if stalled.wait(0 if count == 0 else 5):
            os.utime(path)

    with Beating(tmp_path, touch):
        monkeypatch.setattr(os, "lstat", stall)
        assert refused(tmp_path) and "the disk did not answer" in caplog.text


def test_a_live_run_that_could_not_touch_its_lock_learns_at_its_next_save_that_another_has_the_folder(tmp_path):
    """Its own disk stalled for longer than the silence: it ends, and loses nothing without a word."""
    live, taker = RunLock(str(tmp_path), ELSEWHERE_ALIVE), RunLock(str(tmp_path))
    live._is_over.set()  # its heart stands still
    live.acquire()
    taker.acquire()
    with pytest.raises(OutputFolderError, match="Another run saves into"):
        live.acquire()
    assert run_lock._read_owner(tmp_path) == taker.owner
    taker.release()


def test_who_reads_a_lock_that_is_touched_reads_its_owner(tmp_path):
    lock = RunLock(str(tmp_path))
    lock.acquire()
    read = set()
    give_up = time.monotonic() + 20
    while len(read) < 3 and time.monotonic() < give_up:
        read.add((tmp_path / LOCK_NAME).read_bytes())
        assert run_lock._read_owner(tmp_path) == lock.owner
    assert len(read) == 3 and len({len(content) for content in read}) == 1
    lock.release()


def test_a_heartbeat_writes_nothing_into_the_lock_of_a_taker(tmp_path, monkeypatch):
    """It takes the lock between the look at it and the count."""
    lock_of(tmp_path, host="elsewhere")
    before, lock, looks = (tmp_path / LOCK_NAME).read_bytes(), RunLock(str(tmp_path)), []
    monkeypatch.setattr(run_lock, "_read_owner", lambda folder: looks.append(folder) or lock.owner)
    beating = threading.Thread(target=lock._beat)
    beating.start()
    give_up = time.monotonic() + 20
    while len(looks) < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
    lock._is_over.set()
    beating.join()
    assert len(looks) >= 3 and (tmp_path / LOCK_NAME).read_bytes() == before


def error_of(lock):
    try:
        lock.acquire()
    except OutputFolderError as error:
        return error
    return None


def acquired(lock, seconds=20):
    """Acquire in a thread, so that a test of what once waited for ever ends."""
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(error_of(lock)), daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it waits for ever"
    return outcome[0]


def a_folder_with_a_file(path):
    path.mkdir()
    (path / "notes.txt").write_text("mine")


@pytest.mark.parametrize(
    "make",
    [lambda path: path.write_text("mine"), a_folder_with_a_file, lambda path: path.symlink_to("/nowhere"), os.mkfifo],
    ids=["a file", "a folder that is not empty", "a link", "a fifo"],
)
def test_what_is_in_the_way_of_a_takeover_is_named_and_stays(tmp_path, make):
    lock_of(tmp_path, pid=ended_process())
    make(tmp_path / f"{LOCK_NAME}.takeover")
    error = acquired(RunLock(str(tmp_path)))
    assert isinstance(error, OutputFolderError)
    assert f"{LOCK_NAME}.takeover is not the empty folder" in str(error) and "Hint: remove" in str(error)
    assert os.path.lexists(tmp_path / f"{LOCK_NAME}.takeover")


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_takers_folder_goes_by_no_clock(tmp_path, seconds):
    lock_of(tmp_path, pid=ended_process())
    turnstile = tmp_path / f"{LOCK_NAME}.takeover"
    turnstile.mkdir()
    os.utime(turnstile, (time.time() + seconds,) * 2)
    begun = time.monotonic()
    lock = RunLock(str(tmp_path))
    assert acquired(lock) is None and time.monotonic() - begun >= run_lock.SILENCE_SECONDS
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_written_through_no_link(tmp_path):
    out, private = tmp_path / "out", tmp_path / "private"
    out.mkdir()
    private.write_text("mine")
    lock = RunLock(str(out), Owner(token="0123abcd"))
    (out / f"{LOCK_NAME}.0123abcd").symlink_to(private)
    lock.acquire()
    lock.release()
    assert private.read_text() == "mine"


def test_a_look_for_the_last_checkpoint_removes_the_lock_of_the_dead_alone(tmp_path, other_process):
    """Scripts refuse a folder that holds something but no checkpoint: a run killed early would not start again."""
    for name, facts in {"alive": {"pid": other_process.pid}, "elsewhere": {"host": "elsewhere"}}.items():
        lock_of(tmp_path / name, **facts)
        assert choice.get_last_checkpoint(tmp_path / name) is None and (tmp_path / name / LOCK_NAME).exists()
    lock_of(tmp_path / "dead", pid=ended_process())
    assert choice.get_last_checkpoint(tmp_path / "dead") is None and list((tmp_path / "dead").iterdir()) == []


def a_run(alive, is_here=False, pid=7):
    return SimpleNamespace(is_alive=lambda: alive, is_of_this_process=is_here, pid=pid, host="there", token="theirs")


@pytest.mark.parametrize(
    ("owner", "is_silent", "is_there", "later", "told"),
    [
        (a_run(False), None, True, None, None),
        (a_run(True), None, True, None, r"process 7 on there.*end it \(`kill 7`\), or name another"),
        (a_run(True, is_here=True), None, True, None, "a Trainer of this process .* `output_dir` of its own"),
        (None, True, True, None, None),
        (None, False, False, None, None),
        (None, False, True, None, "a run that cannot be named.*wait for it, or name another"),
        (None, False, True, a_run(True), "process 7 on there"),
        (a_run(None), True, True, None, None),
        (a_run(None), False, True, a_run(True, pid=8), "process 8 on there"),
        (a_run(None), False, True, None, "process 7 on there"),
    ],
)
def test_a_live_owner_keeps_others_out(tmp_path, monkeypatch, owner, is_silent, is_there, later, told):
    monkeypatch.setattr(run_lock, "_is_silent", lambda path: watched.append(path) or is_silent)
    monkeypatch.setattr(run_lock, "_read_owner", lambda folder: later)
    lock, watched = RunLock(str(tmp_path)), []
    if is_there:
        (tmp_path / LOCK_NAME).touch()
    with pytest.raises(OutputFolderError, match=f"(?s){told}") if told else contextlib.nullcontext():
        assert lock._refuse_live(owner) is None
    assert len(watched) == (is_silent is not None)


@pytest.mark.parametrize(
    ("content", "is_lost"), [("own", False), ("other", True), ("none", True), ("gone", False), ("made anew", True)]
)
def test_a_run_looks_again_whose_the_folder_is(tmp_path, monkeypatch, content, is_lost):
    folder = tmp_path / "out"
    lock = RunLock(str(folder))
    if content in ("own", "other", "none"):
        folder.mkdir()
    if content in ("own", "other"):
        facts = {} if content == "other" else {"token": lock.owner.token}
        lock_of(folder, **facts)
    if content == "made anew":  # by another run, after the first look
        make = os.makedirs
        monkeypatch.setattr(os, "makedirs", lambda path: (lock_of(folder), make(path)))
    lock._look_again()
    assert (lock.lost is not None) is is_lost
    if content == "gone":
        assert json.loads((folder / LOCK_NAME).read_text())["token"] == lock.owner.token


@pytest.mark.parametrize(
    ("form", "owners", "is_removed"),
    [
        ("file", "aa", True),
        ("folder", "aa", True),
        ("link", "aa", True),
        ("file", "b", False),
        ("file", "ab", False),
        ("none", "", False),
        ("given back", "a", False),
    ],
)
def test_the_lock_of_one_owner_is_removed(tmp_path, monkeypatch, form, owners, is_removed):
    path, other, left = tmp_path / LOCK_NAME, tmp_path / "other", list(owners)
    other.mkdir()
    if form in ("file", "given back"):
        path.touch()
    elif form == "folder":
        path.mkdir()
    elif form == "link":
        path.symlink_to(other)
    make = os.mkdir
    if form == "given back":
        monkeypatch.setattr(os, "mkdir", lambda at: (make(at), path.unlink()))
    monkeypatch.setattr(run_lock, "_read_owner", lambda folder: left.pop(0))
    assert run_lock._remove_ended(tmp_path, "a") is is_removed
    assert left == [] and other.is_dir() and not (tmp_path / f"{LOCK_NAME}.takeover").exists()
    assert os.path.lexists(path) is (owners in ("b", "ab"))


@pytest.mark.parametrize(
    ("looks", "stalls", "is_silent", "waited"),
    [
        ([], {}, True, 0.6),
        ([0], {}, False, 0),
        ([1, 1, 2], {}, False, 0.03),
        ([1, 1, 1, 0], {}, False, 0.07),
        ([], {1: 0.18}, True, 0.6),
        ([], {1: 0.25}, True, 0.86),
    ],
)
def test_silence_is_measured_while_the_disk_answers(monkeypatch, looks, stalls, is_silent, waited):
    def look(path):
        seen.append(path)
        clock[0] += stalls.get(len(seen) - 1, 0)
        at = len(seen) - 1
        return (b"x", looks[at] if at < len(looks) else 1) if (at >= len(looks) or looks[at]) else None

    seen, clock = [], [100.0]
    time_here = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda pause: clock.__setitem__(0, clock[0] + pause))
    monkeypatch.setattr(run_lock, "time", time_here)
    monkeypatch.setattr(run_lock, "_look", look)
    assert run_lock._is_silent("it") is is_silent
    assert clock[0] - 100 == pytest.approx(waited, abs=0.06)


@pytest.mark.parametrize(
    ("silent", "held", "raised"),
    [(False, "empty", False), (True, "empty", False), (True, None, False), (True, "full", True)],
)
def test_the_folder_of_a_killed_taker_is_removed(tmp_path, monkeypatch, silent, held, raised):
    turnstile = tmp_path / "turnstile"
    if held is not None:
        turnstile.mkdir()
    if held == "full":
        (turnstile / "a").touch()
    monkeypatch.setattr(run_lock, "_is_silent", lambda path: silent)
    with pytest.raises(OutputFolderError, match="not the empty folder") if raised else contextlib.nullcontext():
        run_lock._wait_at(str(turnstile))
    assert turnstile.exists() is (held == "full" or (held == "empty" and not silent))
