"""How long a run waits for its store, what it says meanwhile, and what it names as not stored."""

from __future__ import annotations

import logging
import os
import threading
from types import SimpleNamespace

import pytest

from hf_compat.checkpoint.store import told_size
from hf_compat.errors import StoreError
from hf_compat.training_run import uploads
from hf_compat.training_run.uploads import PATIENCE_SECONDS, SLOWEST_BYTES_PER_SECOND, Uploads


@pytest.fixture
def held(tmp_path, monkeypatch):
    """Uploads whose thread goes on with a checkpoint, and a clock that a test sets."""
    made = Uploads("memory://held", str(tmp_path))
    monkeypatch.setattr(made, "_start", lambda: None)
    made._now, made._waiting = "checkpoint-4", [str(tmp_path / "checkpoint-2")]
    made._thread = threading.current_thread()
    now = [1000.0]
    monkeypatch.setattr(uploads.time, "monotonic", lambda: now[0])
    made.clock, made.waits = now, []
    monkeypatch.setattr(made, "wait", lambda seconds: made.waits.append(seconds) or made._thread is None)
    yield made
    made._thread, made._has_given_up = None, True


def test_a_run_has_begun_with_its_first_save(held, tmp_path):
    assert not held.has_begun
    held.saved(str(tmp_path / "checkpoint-6"), [], lambda paths: [], "the run")
    assert held.has_begun


@pytest.mark.parametrize(("sent", "more"), [(0, 0.0), (1_000_000, 1_000_000 / SLOWEST_BYTES_PER_SECOND)])
def test_a_wait_ends_after_ten_minutes_and_the_time_of_a_slow_connection(held, caplog, sent, more):
    held._to_send, began = sent, held.clock[0]
    with caplog.at_level(logging.INFO):
        for waited in (0.0, PATIENCE_SECONDS, PATIENCE_SECONDS + more):
            held.clock[0] = began + waited
            assert not held.is_over(began)
    assert held.missing() == "" and held.waits == [1.0, uploads.PROGRESS_SECONDS] * 3
    assert (
        "Waiting for checkpoint-4 to be stored in memory://held" in caplog.text
        and ", 1 more, 600 s so far" in caplog.text
    )
    held.clock[0] = began + PATIENCE_SECONDS + more + 0.5
    assert held.is_over(began) and not held._waiting
    assert held.missing().startswith("checkpoint-2, checkpoint-4: not stored in memory://held, but in the local folder")
    assert f"it was not stored within {PATIENCE_SECONDS + more + 0.5:.0f} seconds" in held.missing()
    held._missing.clear()
    assert not held.may_write_at_exit
    with pytest.raises(StoreError, match="checkpoint-4"):
        held._note("checkpoint-4", StoreError("it broke"))
        held.check()


def test_a_wait_that_is_interrupted_gives_up(held, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(held, "wait", interrupted)
    held._now = ""
    with pytest.raises(KeyboardInterrupt):
        held.settle()
    assert held.missing().startswith("checkpoint-2: not stored") and "the wait was interrupted" in held.missing()


def test_a_wait_that_is_over_at_once_says_nothing(held, caplog):
    held._thread = None
    with caplog.at_level(logging.INFO):
        held.settle()
    assert held.waits == [1.0] and not caplog.text and held.missing() == ""


@pytest.mark.parametrize(
    ("count", "told"),
    [(1, "checkpoint-1:"), (5, "checkpoint-5:"), (6, "checkpoint-5 and 1 more:"), (8, "5 and 3 more:")],
)
def test_five_of_those_that_are_missing_are_named(held, count, told):
    for number in range(1, count + 1):
        held._note(f"checkpoint-{number}", StoreError(f"error {number}."))
    first, _, rest = held.missing().partition(" not stored in ")
    assert first.endswith(told) and first.startswith("checkpoint-1") and ". error 1.\n\nHint:" in rest


def test_a_failure_is_a_warning_once(held, caplog):
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            held._note("checkpoint-1", StoreError("it broke"))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_an_upload_that_waits_for_another_says_so(held, caplog, tmp_path):
    held._began = held.clock[0]
    for waited, says in ((uploads.PROGRESS_SECONDS, False), (uploads.PROGRESS_SECONDS + 1, True)):
        held.clock[0] = held._began + waited
        with caplog.at_level(logging.INFO):
            held.saved(str(tmp_path / "checkpoint-6"), [str(tmp_path / "checkpoint-1")], lambda writers: [], "owner")
        assert ("checkpoint-6 waits until checkpoint-4 is uploaded" in caplog.text) == says
    assert [path.rpartition("-")[2] for path in held._waiting] == ["1", "2", "6"]
    held.saved("/elsewhere/checkpoint-8", [], lambda writers: [], "owner")
    assert "/elsewhere/checkpoint-8 is not in" in caplog.text and len(held._waiting) == 3


def test_what_has_failed_is_tried_again_before_what_waits(held, tmp_path):
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-4", "other files"):
        held._note(name, StoreError("it broke"))
    held.retry()
    assert held._waiting == [str(tmp_path / "checkpoint-1"), str(tmp_path / "checkpoint-2")]
    assert held._looks_at_others and held._tries_again


def test_a_mistake_in_the_thread_is_told(held, monkeypatch, caplog):
    def broken():
        raise RuntimeError("a package")

    monkeypatch.setattr(held, "_step", broken)
    held._work()
    assert "checkpoint-4: not stored" in held.missing() and "RuntimeError: a package" in held.missing()
    assert held._thread is None and held._now == "" and "The thread that uploads to memory://held" in caplog.text


def test_other_files_are_sent_until_one_fails(held, tmp_path, monkeypatch):
    (tmp_path / "a folder").mkdir()
    for name in ("a", "a folder/b", "c", "d", "hf_compat.lock"):
        (tmp_path / name).write_text(name)
    sent, failing = [], {}

    def send(path, name, tell):
        sent.append(name)
        if name == failing.get("gone"):
            raise FileNotFoundError(path)
        if name == failing.get("broken"):
            raise StoreError("it broke")

    monkeypatch.setattr(held.store.storage, "send", send)
    for now, expected in (
        ({"gone": "a"}, ["a", "c", "d", "hf_compat.lock", "a folder/b"]),
        ({"broken": "a"}, ["a"]),
        ({}, ["a"]),
        ({}, []),
    ):
        sent.clear()
        failing.clear()
        failing.update(now)
        held._send_others()
        assert [one for one in sent if "lock" not in one] == [one for one in expected if "lock" not in one]
    (tmp_path / "c").write_text("changed")
    assert [name for name, _, _ in held._changed()] == ["c"]
    assert held.missing() == ""


@pytest.mark.parametrize(
    ("held", "is_fork", "error", "finishes", "said"),
    [
        (None, False, None, False, ""),
        ({"may_write_at_exit": False}, False, None, False, ""),
        ({"may_write_at_exit": True}, True, None, False, ""),
        ({"may_write_at_exit": True}, False, None, True, ""),
        ({"may_write_at_exit": True}, False, StoreError("it broke"), True, "it broke"),
        ({"may_write_at_exit": True}, False, KeyboardInterrupt(), True, "two are missing"),
    ],
)
def test_what_a_script_has_written_is_stored_at_the_end_of_its_process(caplog, held, is_fork, error, finishes, said):
    finished = []

    def finish():
        finished.append(1)
        if error is not None:
            raise error

    kept = None if held is None else SimpleNamespace(**held, finish=finish, missing=lambda: "two are missing")
    uploads._finish_at_exit(lambda: kept, os.getpid() + is_fork)  # the process that has registered it
    assert finished == [1] * finishes and [record.message for record in caplog.records] == [said] * bool(said)


@pytest.mark.parametrize(
    ("size", "told"), [(0, "0.0 MB"), (1_250_000, "1.2 MB"), (1e9 - 1, "1000.0 MB"), (1e9, "1.00 GB")]
)
def test_sizes_in_words(size, told):
    assert told_size(size) == told
