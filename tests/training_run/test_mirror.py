"""The mirror of a folder in a store, without a store: when it begins to upload."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_compat.checkpoint.reading import Writer
from hf_compat.errors import OutputFolderError, StoreError, UnsupportedArgument
from hf_compat.training_run.mirror import StoreMirror, check_store


@pytest.mark.parametrize(("is_in_train", "finished"), [(False, 1), (True, 0)])
def test_files_written_outside_of_a_training_are_stored_at_once(monkeypatch, is_in_train, finished):
    told = []
    uploads = SimpleNamespace(finish=lambda: told.append(1))
    mirror = StoreMirror(SimpleNamespace(is_in_train=is_in_train), lambda name: False)
    monkeypatch.setattr(StoreMirror, "uploads", uploads)
    mirror.store_files()
    assert len(told) == finished


def test_without_a_store_nothing_is_uploaded(monkeypatch):
    monkeypatch.setattr(StoreMirror, "uploads", None)
    mirror = StoreMirror(SimpleNamespace(is_in_train=False), lambda name: False)
    mirror.store_files()
    assert mirror._uploads is None


@pytest.mark.parametrize(("has_begun", "expected"), [(True, ["retry", "settle"]), (False, [])])
def test_before_a_process_ends_it_waits_for_what_has_begun(has_begun, expected):
    told = []
    mirror = StoreMirror(SimpleNamespace(), lambda name: False)
    mirror.settle_now()
    mirror._uploads = SimpleNamespace(
        has_begun=has_begun, retry=lambda: told.append("retry"), settle=lambda: told.append("settle")
    )
    mirror.settle_now()
    assert told == expected


@pytest.mark.parametrize(
    ("store", "begun", "missing", "error", "lost", "notes"),
    [
        ("memory://run", True, "checkpoint-2 is not stored", ValueError("own"), False, ["checkpoint-2 is not stored"]),
        ("memory://run", True, "", ValueError("own"), False, None),
        ("memory://run", True, "checkpoint-2 is not stored", StoreError("gone"), False, None),
        ("memory://run", True, "checkpoint-2 is not stored", OutputFolderError("taken"), False, None),
        ("memory://run", True, "checkpoint-2 is not stored", ValueError("own"), True, None),
        ("memory://run", False, "checkpoint-2 is not stored", ValueError("own"), False, None),
        (None, True, "checkpoint-2 is not stored", ValueError("own"), False, None),
    ],
)
def test_an_error_that_ends_a_training_says_what_is_not_stored(store, begun, missing, error, lost, notes):
    told = []
    mirror = StoreMirror(SimpleNamespace(args=SimpleNamespace(output_store=store)), lambda name: False)
    mirror._uploads = SimpleNamespace(
        has_begun=begun, missing=lambda: missing, retry=lambda: told.append("retry"), settle=lambda: told.append("all")
    )
    mirror.send_held = lambda: told.append("held")
    mirror.settle(error, lost)
    assert getattr(error, "__notes__", None) == notes
    waits = store is not None and begun and not lost and isinstance(error, ValueError)
    assert told == (["held", "retry", "all"] if waits else [])


def of_run(writers, updates, limit, best=None, overrides=(), saved=(), host=None):
    """What is removed from a store that has checkpoints of these runs."""
    state = SimpleNamespace(best_model_checkpoint=best)
    host = SimpleNamespace(args=SimpleNamespace(save_total_limit=limit), state=state)
    mirror = StoreMirror(host, lambda name: name in overrides)
    mirror._best_of = dict(saved)
    run = SimpleNamespace(run_id="own", checkpoint=None)
    return mirror._surplus(run, updates, {f"out/checkpoint-{n}": Writer(name, 1) for n, name in writers.items()})


@pytest.mark.parametrize(
    ("writers", "updates", "limit", "best", "saved", "removed"),
    [
        ({2: "own", 4: "own", 6: "own"}, 6, None, None, {}, []),
        ({2: "own", 4: "own", 6: "own"}, 6, 2, None, {}, [2]),
        ({2: "own", 4: "own", 6: "own"}, 6, 1, None, {}, [2, 4]),
        ({2: "own", 4: "own", 6: "own"}, 6, 2, 2, {}, [4]),
        ({2: "own", 4: "own", 6: "own"}, 6, 2, None, {6: 2}, [4]),  # the best one when the newest was saved
        ({2: "own", 4: "own", 6: "own"}, 6, 2, None, {4: 2}, [2]),
        ({2: "own", 8: "other"}, 2, 1, None, {}, [8]),
        ({2: "own", 8: "own"}, 2, 1, None, {}, [8]),  # of the time before it was resumed
        ({}, 6, 1, None, {}, []),
    ],
)
def test_what_goes_from_the_store(writers, updates, limit, best, saved, removed):
    path = "out/checkpoint-{}".format
    held = {path(one): None if kept is None else path(kept) for one, kept in saved.items()}
    found = of_run(writers, updates, limit, best and path(best), saved=held)
    assert found == [path(number) for number in removed]


@pytest.mark.parametrize("name", ["_rotate_checkpoints", "_sorted_checkpoints"])
def test_a_subclass_that_rotates_decides_for_the_store_too(name, tmp_path):
    (tmp_path / "checkpoint-4").mkdir()
    paths = [str(tmp_path / f"checkpoint-{number}") for number in (2, 4, 6)]
    mirror = StoreMirror(SimpleNamespace(), lambda one: one == name)
    mirror._best_of = dict.fromkeys(paths[:2])
    assert mirror._surplus(None, 6, dict.fromkeys(paths)) == paths[:1]


@pytest.mark.parametrize(
    ("store", "nodes", "on_each", "refused"),
    [
        (None, 2, True, False),
        ("memory://run", 1, False, False),
        ("memory://run", 2, False, True),
        ("memory://run", 1, True, True),
    ],
)
def test_a_store_of_several_machines_is_refused(store, nodes, on_each, refused):
    args = SimpleNamespace(output_store=store, _launch=SimpleNamespace(nodes=nodes), save_on_each_node=on_each)
    if refused:
        with pytest.raises(UnsupportedArgument, match=f"each of {nodes} machines"):
            check_store(args)
    else:
        assert check_store(args) is None


@pytest.mark.parametrize(
    ("address", "saves", "reachable", "has"),
    [
        (None, True, True, False),
        ("memory://run", False, True, False),
        ("memory://run", True, False, False),
        ("memory://run", True, True, True),
    ],
)
def test_who_has_uploads(address, saves, reachable, has, monkeypatch, tmp_path):
    made = []

    def uploads(store, folder):
        made.append((store, folder))
        return SimpleNamespace(store=SimpleNamespace(address=store), folder=folder)

    monkeypatch.setattr("hf_compat.training_run.mirror.Uploads", uploads)
    monkeypatch.setattr("hf_compat.training_run.mirror.are_reachable", lambda: reachable)
    args = SimpleNamespace(output_store=address, should_save=saves, output_dir=str(tmp_path))
    mirror = StoreMirror(SimpleNamespace(args=args), lambda name: False)
    first = mirror.uploads
    assert (first is not None) is has and mirror.uploads is first and len(made) == has
    if has:
        args.output_dir = "other"
        assert mirror.uploads is not first
        args.output_store = "memory://other"
        assert mirror.uploads.store.address == "memory://other" and len(made) == 3


@pytest.mark.parametrize("lost", [None, OutputFolderError("taken")])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("has", [False, True])
def test_a_training_whose_store_is_lost_ends(lost, trains, has):
    mirror = StoreMirror(SimpleNamespace(is_in_train=trains), lambda name: False)
    mirror._uploads = SimpleNamespace(lost=lost) if has else None
    is_lost = has and lost is not None
    assert mirror.has_lost_store is is_lost
    if is_lost and trains:
        with pytest.raises(OutputFolderError):
            mirror.check()
    else:
        assert mirror.check() is None


@pytest.mark.parametrize(("store", "has"), [(None, True), ("memory://run", True), ("memory://run", False)])
@pytest.mark.parametrize("alone", [None, "checkpoint-2"])
@pytest.mark.parametrize("waits", [0, 2])
def test_the_end_waits_for_all_ranks(store, has, alone, waits, monkeypatch):
    told, ends = [], iter([False] * waits + [True])
    uploads = SimpleNamespace(
        retry=lambda: told.append("retry"), is_over=lambda began: told.append("waits") or next(ends),
        check=lambda: told.append("check"), keep_alone=lambda best: told.append(best),
    )  # fmt: skip
    monkeypatch.setattr(StoreMirror, "uploads", uploads if has else None)
    monkeypatch.setattr(StoreMirror, "send_held", lambda self: told.append("sent"))
    mirror = StoreMirror(SimpleNamespace(args=SimpleNamespace(output_store=store)), lambda name: False)
    mirror.alone = alone
    mirror.finish()
    if store is None:
        assert told == []
    elif has:
        assert told == ["sent", "retry", *["waits"] * (waits + 1), "check", *[alone] * (alone is not None)]
    else:
        assert told == ["sent"]


@pytest.mark.parametrize("held", [None, ("out/checkpoint-4", "me")])
@pytest.mark.parametrize("has", [False, True])
def test_a_save_is_uploaded_once_nothing_changes_it(held, has, monkeypatch):
    told = []
    uploads = SimpleNamespace(saved=lambda final, own, surplus, owner: told.append((final, own, owner)))
    monkeypatch.setattr(StoreMirror, "uploads", uploads if has else None)
    monkeypatch.setattr(
        "hf_compat.training_run.mirror.layout.list_checkpoints", lambda folder: [f"{folder}/a", f"{folder}/b"]
    )
    monkeypatch.setattr("hf_compat.training_run.mirror.written_by", lambda path: (path.endswith("a"), "writer"))
    monkeypatch.setattr("hf_compat.training_run.mirror.is_from_run", lambda run, path, writer: True)
    mirror = StoreMirror(SimpleNamespace(_run="run"), lambda name: False)
    if held is not None:
        mirror.hold(held[0], "best", held[1])
        assert mirror._best_of == {held[0]: "best"}
    for _ in range(2):
        mirror.send_held()
    assert told == ([("out/checkpoint-4", ["out/a"], "me")] if held and has else [])
