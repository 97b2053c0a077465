"""The mirror of a folder in a store, without a store: when it begins to upload."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_compat.errors import OutputFolderError, StoreError
from hf_compat.training_run.mirror import StoreMirror


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
