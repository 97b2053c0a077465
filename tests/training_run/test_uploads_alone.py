"""The decisions of uploads, with a store that holds nothing: what is sent, in which order, and what is told."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_compat.errors import ArgumentError, CheckpointError, OutputFolderError, StoreError
from hf_compat.training_run import uploads as sending
from hf_compat.training_run.uploads import Uploads


def uploads(folder, whole=(), **values):
    """Uploads whose thread does not start."""
    made = Uploads.__new__(Uploads)
    store = SimpleNamespace(
        whole=dict.fromkeys(whole), address="memory://run", told=[], writers=lambda own, folder: {},
        remove_left=lambda: store.told.append("cleaned"),
        remove=lambda name, owner: store.told.append(("removed", name, owner)),
        put=lambda source, name, owner, count: store.told.append(("put", name, owner)), storage=None,
        take=lambda owner: store.told.append(("taken", owner)), look=lambda: store.told.append("looked"),
    )  # fmt: skip
    usual = {
        "store": store, "folder": str(folder), "lost": None, "_lock": threading.Condition(), "_owner": "me",
        "_next_owner": "me", "_cleans": False, "_has_looked": True, "_has_given_up": False, "_waiting": [],
        "_surplus": lambda writers: [], "_looks_at_others": False, "_thread": "none", "_missing": {}, "_told": set(),
        "_sent": 0, "_to_send": 0, "_now": "", "_began": 0.0, "_tries_again": False, "_others": {},
    }  # fmt: skip
    vars(made).update(usual | values)
    return made


@pytest.mark.parametrize(
    ("others", "waiting", "whole", "now", "queue"),
    [
        ([], [], [], "", ["checkpoint-6"]),
        (["checkpoint-2", "checkpoint-4"], [], [], "", ["checkpoint-2", "checkpoint-4", "checkpoint-6"]),
        (["checkpoint-4", "checkpoint-2"], [], ["checkpoint-2"], "", ["checkpoint-4", "checkpoint-6"]),
        (["checkpoint-4"], [], [], "checkpoint-4", ["checkpoint-6"]),
        (["checkpoint-6"], ["checkpoint-6"], [], "", ["checkpoint-6"]),
        ([], ["checkpoint-10", "checkpoint-4"], [], "", ["checkpoint-4", "checkpoint-10", "checkpoint-6"]),
        (["/elsewhere/checkpoint-2"], [], [], "", ["checkpoint-6"]),
    ],
)
def test_the_newest_save_is_sent_first_and_the_late_ones_after_it(others, waiting, whole, now, queue, tmp_path):
    def path(name):
        return name if name.startswith("/") else str(tmp_path / name)

    own = uploads(tmp_path, whole, _now=now, _waiting=list(map(path, waiting)))
    surplus = object()
    own.saved(path("checkpoint-6"), map(path, others), surplus, "next")
    assert own._waiting == list(map(path, queue))
    assert own._surplus is surplus and own._looks_at_others and own._next_owner == "next" and own.has_begun


@pytest.mark.parametrize(("now", "waited", "told"), [("checkpoint-2", 60, 1), ("checkpoint-2", 0, 0), ("", 60, 0)])
def test_a_save_that_waits_is_told(now, waited, told, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sending.time, "monotonic", lambda: 100.0)
    own = uploads(tmp_path, _now=now, _began=100.0 - waited)
    with caplog.at_level("INFO"):
        own.saved(str(tmp_path / "checkpoint-6"), (), None, "me")
    assert caplog.text.count("checkpoint-6 waits until checkpoint-2 is uploaded") == told


def test_a_checkpoint_elsewhere_is_not_uploaded(tmp_path, caplog):
    own = uploads(tmp_path / "out")
    own.saved(str(tmp_path / "checkpoint-6"), (), None, "me")
    assert own._waiting == [] and "so it is not uploaded" in caplog.text


@pytest.mark.parametrize(
    ("waiting", "others", "again", "missing", "expected", "goes_on"),
    [
        (["a", "checkpoint-4"], True, False, {}, ("checkpoint", "checkpoint-4"), True),
        ([], True, False, {}, ("others",), True),
        ([], False, False, {}, None, False),
        ([], False, True, {}, None, False),
        ([], False, True, {"checkpoint-2": "why"}, ("checkpoint", "checkpoint-2"), True),
        ([], True, True, {"logs/a": "why"}, ("others",), True),
    ],
)
def test_the_next_thing_is_sent(waiting, others, again, missing, expected, goes_on, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(
        Uploads, "_send_checkpoint", lambda self, path: told.append(("checkpoint", os.path.basename(path)))
    )
    monkeypatch.setattr(Uploads, "_send_others", lambda self: told.append(("others",)))
    queue = [str(tmp_path / name) for name in waiting]
    own = uploads(tmp_path, _waiting=queue, _looks_at_others=others, _tries_again=again, _missing=missing)
    assert own._step() is goes_on and told == ([] if expected is None else [expected])
    assert own._now == ("" if expected is None else expected[1] if len(expected) > 1 else sending._OTHERS)
    assert (own._thread is None) is not goes_on and own._tries_again is (again and bool(waiting))
    assert own._looks_at_others is (others and expected is not None and expected[0] == "checkpoint")


@pytest.mark.parametrize(
    ("changes", "fails", "told", "missing"),
    [
        ({}, None, [("put", "checkpoint-2", "me")], []),
        ({"_cleans": True}, None, ["cleaned", ("put", "checkpoint-2", "me")], []),
        ({"_owner": "old"}, None, [("taken", "me"), "looked", "cleaned", ("put", "checkpoint-2", "me")], []),
        ({"surplus": True}, None, [], []),
        ({}, StoreError("full"), [], ["checkpoint-2"]),
        ({}, CheckpointError("gone"), [], ["checkpoint-2"]),
    ],
)
def test_a_checkpoint_is_sent(changes, fails, told, missing, tmp_path, monkeypatch):
    changes, path = dict(changes), tmp_path / "checkpoint-2"
    path.mkdir()
    (path / "file").write_text("four")
    is_surplus = changes.pop("surplus", False)
    monkeypatch.setattr(Uploads, "_is_surplus", lambda self, one: is_surplus)
    monkeypatch.setattr(sending, "_READ_BY_RUNS", ())
    monkeypatch.setattr(sending, "linked", lambda one: contextlib.nullcontext(Path(one)))
    own = uploads(tmp_path, _now="checkpoint-2", _missing={"checkpoint-2": StoreError("before")}, **changes)
    if fails is not None:

        def put(*_):
            raise fails

        own.store.put = put
    own._send_checkpoint(str(path))
    assert own.store.told == told and list(own._missing) == missing and own._cleans is False
    assert own._to_send == (0 if is_surplus else 4)
    assert all(isinstance(one, StoreError) for one in own._missing.values())


@pytest.mark.parametrize(
    ("known", "chosen", "is_surplus"), [([], True, True), ([], False, False), (["checkpoint-2"], True, False)]
)
def test_a_checkpoint_that_rotation_would_remove_is_not_sent(known, chosen, is_surplus, tmp_path):
    path = str(tmp_path / "checkpoint-2")
    own = uploads(tmp_path, _surplus=lambda writers: [one for one in writers if chosen])
    own.store.writers = lambda mine, folder: {str(tmp_path / name): None for name in known}
    assert own._is_surplus(path) is is_surplus


def test_what_is_too_much_is_removed(tmp_path, caplog):
    own = uploads(tmp_path, ["checkpoint-2", "checkpoint-4"])
    names = ["checkpoint-2", "checkpoint-3", "/elsewhere/checkpoint-4"]
    own._surplus = lambda writers: [name if name.startswith("/") else str(tmp_path / name) for name in names]
    own._remove_surplus(str(tmp_path / "checkpoint-6"))
    assert own.store.told == [("removed", "checkpoint-2", "me")]

    def fail(name, owner):
        raise StoreError("denied")

    own.store.remove = fail
    own._remove_surplus(str(tmp_path / "checkpoint-6"))
    assert "checkpoint-2 could not be removed. denied" in caplog.text


@pytest.mark.parametrize(("best", "removed"), [("checkpoint-2", ["checkpoint-4"]), ("checkpoint-3", [])])
def test_the_best_one_stays_alone(best, removed, tmp_path):
    own = uploads(tmp_path, ["checkpoint-2", "checkpoint-4"])
    own.store.writers = lambda mine, folder: {str(tmp_path / name): None for name in own.store.whole}
    own.keep_alone(str(tmp_path / best))
    assert own.store.told == [("removed", name, "me") for name in removed]


@pytest.mark.parametrize(
    ("ends", "waited", "to_send", "outcome"),
    [
        ([True], 0, 0, True),
        ([False, True], 0, 0, True),
        ([False, False], 0, 0, False),
        ([False, False], sending.PATIENCE_SECONDS, 0, False),
        ([False, False], sending.PATIENCE_SECONDS + 1, 0, True),
        ([False, False], sending.PATIENCE_SECONDS + 1, 10**9, False),
    ],
)
def test_how_long_is_waited(ends, waited, to_send, outcome, tmp_path, monkeypatch):
    answers, seconds = iter(ends), []
    monkeypatch.setattr(sending.time, "monotonic", lambda: 1000.0 + waited)
    monkeypatch.setattr(Uploads, "wait", lambda self, most: seconds.append(most) or next(answers))
    own = uploads(tmp_path, _to_send=to_send, _waiting=[str(tmp_path / "checkpoint-2")])
    assert own.is_over(1000.0) is outcome and len(seconds) == len(ends)
    has_given_up = outcome and ends[-1] is False
    assert own._has_given_up is has_given_up and list(own._missing) == ["checkpoint-2"] * has_given_up
    assert seconds == [1.0, sending.PROGRESS_SECONDS][: len(ends)]


def test_an_interrupted_wait_gives_up(tmp_path, monkeypatch):
    def interrupt(self, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(Uploads, "wait", interrupt)
    own = uploads(tmp_path, _now="checkpoint-4", _waiting=[str(tmp_path / "checkpoint-2")])
    with pytest.raises(KeyboardInterrupt):
        own.is_over(0.0)
    assert own._has_given_up and sorted(own._missing) == ["checkpoint-2", "checkpoint-4"] and own._waiting == []


@pytest.mark.parametrize(
    ("changes", "ended", "changed", "writes"),
    [
        ({}, True, True, True),
        ({}, False, False, True),
        ({}, True, False, False),
        ({"lost": OutputFolderError("taken")}, False, True, False),
        ({"_has_given_up": True}, False, True, False),
        ({"_missing": {"a": StoreError("b")}}, False, True, False),
        ({"folder": "/nowhere/at/all"}, False, True, False),
    ],
)
def test_what_a_script_has_written_is_sent_at_its_exit(changes, ended, changed, writes, tmp_path, monkeypatch):
    monkeypatch.setattr(Uploads, "wait", lambda self, seconds: ended)
    monkeypatch.setattr(Uploads, "_changed", lambda self: iter(["file"] * changed))
    own = uploads(tmp_path)
    vars(own).update(changes)
    assert own.may_write_at_exit is writes


@pytest.mark.parametrize("waiting", [[], ["checkpoint-2"], ["checkpoint-9"]])
def test_what_has_failed_is_tried_again(waiting, tmp_path):
    failed = {"checkpoint-2": 1, "logs/a": 1, "checkpoint-4": 1, "checkpoint-6": 1}
    own = uploads(tmp_path, _missing=failed, _now="checkpoint-6", _waiting=[str(tmp_path / name) for name in waiting])
    own.retry()
    first = [name for name in ("checkpoint-2", "checkpoint-4") if name not in waiting]
    assert own._waiting == [str(tmp_path / name) for name in [*first, *waiting]]
    assert own._looks_at_others and own._tries_again


@pytest.mark.parametrize("count", [0, 1, 5, 6, 8])
def test_what_is_not_stored_is_named(count, tmp_path):
    own = uploads(tmp_path, _missing={f"checkpoint-{number}": StoreError("full.") for number in range(count)})
    text = own.missing()
    if not count:
        assert text == "" and own.check() is None
        return
    more = f" and {count - 5} more" if count > 5 else ""
    assert f"checkpoint-{min(count, 5) - 1}{more}: not stored in memory://run" in text and "alone. full.\n" in text
    with pytest.raises(StoreError, match="not stored in memory"):
        own.check()
    own.lost = OutputFolderError("taken")
    with pytest.raises(OutputFolderError):
        own.check()


def test_a_failure_is_said_once(tmp_path, caplog):
    own = uploads(tmp_path)
    with caplog.at_level("INFO"):
        for _ in range(2):
            own._note("checkpoint-2", CheckpointError("gone"))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_mistake_in_the_thread_does_not_look_as_if_all_were_stored(tmp_path, monkeypatch):
    def fail(self):
        self._now = "checkpoint-2"
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Uploads, "_step", fail)
    own = uploads(tmp_path, _thread=threading.current_thread())
    own._work()
    assert str(own._missing["checkpoint-2"]) == "ZeroDivisionError: ours" and own._thread is None and own._now == ""

    def lose(self):
        raise OutputFolderError("taken")

    monkeypatch.setattr(Uploads, "_step", lose)
    own._thread = "another"
    own._work()
    assert str(own.lost) == "taken" and own._thread == "another"


def test_files_beside_the_checkpoints_are_sent_when_they_change(tmp_path, monkeypatch):
    monkeypatch.setattr(Uploads, "_is_own", staticmethod(lambda path: os.path.basename(path).startswith("own")))
    (tmp_path / "logs").mkdir()
    (tmp_path / "own").mkdir()
    for name in ("b", "a", "logs/c", "own/d", "own_e"):
        (tmp_path / name).write_text(name)
    sent, own = [], uploads(tmp_path, _missing={"a": StoreError("before")})
    own.store.storage = SimpleNamespace(send=lambda path, name, count: sent.append(name))
    own._send_others()
    own._send_others()
    assert sent == ["a", "b", "logs/c"] and own._missing == {}
    (tmp_path / "b").write_text("longer")
    own._send_others()
    assert sent == ["a", "b", "logs/c", "b"]

    def fail(path, name, count):
        raise (FileNotFoundError if name == "a" else StoreError)("why")

    own.store.storage.send, own._others = fail, {}
    own._send_others()
    assert list(own._missing) == ["b"] and own._others == {}


@pytest.mark.parametrize(
    ("best", "brought", "wrong", "told"),
    [
        (None, [], [], 0),
        ("out/best", [], [], 0),
        ("was/checkpoint-2", [1], [], 0),
        ("was/checkpoint-2", [1], ["bad"], 1),
    ],
)
def test_the_best_checkpoint_is_brought(best, brought, wrong, told, tmp_path, monkeypatch, caplog):
    asked = []
    own = uploads(tmp_path)
    own.store.bring = lambda path, folder, anew: asked.append((path, folder, anew)) or True
    monkeypatch.setattr(sending.manifest, "problems", lambda path: wrong)
    own.bring_best("out/checkpoint-4", best)
    assert asked == [(os.path.join("out", "checkpoint-2"), str(tmp_path), False)] * len(brought)
    assert caplog.text.count("came damaged: bad") == told


@pytest.mark.parametrize("there", [False, True])
def test_a_run_takes_the_store_and_reads_what_runs_read(there, tmp_path, monkeypatch):
    monkeypatch.setattr(sending, "_READ_BY_RUNS", ("known.json", "lacks.json"))

    def read(name):
        if name == "lacks.json":
            raise FileNotFoundError
        return b"stored"

    own = uploads(tmp_path, _has_looked=True, _has_given_up=True, lost="lost", _owner="", _next_owner="")
    own.store.storage = SimpleNamespace(read=read)
    if there:
        (tmp_path / "known.json").write_bytes(b"here")
    assert not own.has_begun
    own.begin("me")
    assert own.store.told == [("taken", "me"), "looked"] and (own._owner, own._next_owner, own._cleans) == (
        "me",
        "me",
        True,
    )
    assert (tmp_path / "known.json").read_bytes() == (b"here" if there else b"stored")
    assert not (tmp_path / "lacks.json").exists() and own.lost is None and not own._has_given_up and own.has_begun
    own.look()
    assert own.store.told.count("looked") == 1


@pytest.mark.parametrize(
    ("ours", "problems", "sent"),
    [(True, [], True), (True, ["damaged"], False), (False, [], False), (False, ["x"], False)],
)
def test_whole_checkpoints_of_ours_are_uploaded_first(ours, problems, sent, tmp_path, monkeypatch):
    done, path = [], str(tmp_path / "checkpoint-2")
    own = SimpleNamespace(
        begin=lambda owner: done.append("begun"), finish=lambda: done.append("finished"),
        saved=lambda one, others, surplus, owner: done.append((one, others, surplus({}))),
    )  # fmt: skip
    monkeypatch.setattr(sending, "Uploads", lambda address, folder: own)
    monkeypatch.setattr(sending.layout, "list_checkpoints", lambda folder: [path])
    monkeypatch.setattr(sending.manifest, "is_ours", lambda one: ours)
    monkeypatch.setattr(sending.manifest, "problems", lambda one: problems)
    monkeypatch.setattr(sending.manifest, "flush_and_hash", lambda one: done.append("hashed"))
    assert sending.upload_folder(str(tmp_path), "memory://run") == ["checkpoint-2"] * sent
    assert done == ["begun", *["hashed", (path, (), [])] * sent, "finished"]


@pytest.mark.parametrize(
    ("folder", "address", "said"), [("none", "memory://run", "FOLDER"), ("", "no-address", "ADDRESS")]
)
def test_what_cannot_be_uploaded_is_named(folder, address, said, tmp_path):
    with pytest.raises(ArgumentError, match=f"`{said}="):
        sending.upload_folder(str(tmp_path / folder), address)
