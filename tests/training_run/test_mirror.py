"""The mirror of a folder in a store, without a store: when it begins to upload."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
