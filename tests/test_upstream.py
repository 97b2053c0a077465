"""Lightning is loaded beside a transformers that it cannot import."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
from lightning_utilities.core.imports import RequirementCache

from hf_compat.upstream import load_lightning


def raising(monkeypatch, errors):
    """Let Lightning's import raise these errors in turn, and note what its requirements say each time."""
    seen = []

    def load(name):
        held = [bool(RequirementCache(one)) for one in ("transformers>=1", "torch>=1")]
        seen.append((name, held, "torchmetrics.half" in sys.modules))
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setitem(sys.modules, "torchmetrics.half", types.ModuleType("torchmetrics.half"))
    monkeypatch.setitem(sys.modules, "torchmetric", types.ModuleType("torchmetric"))
    return seen


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'x' from 'transformers'"),
        ImportError("no such name", name="transformers"),
    ],
)
def test_a_transformers_that_cannot_be_imported_counts_as_none(error, monkeypatch):
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchmetrics"}
    before, seen = RequirementCache.__bool__, raising(monkeypatch, [error])
    try:
        load_lightning()
    finally:
        sys.modules.update(kept)
    first, second = seen
    assert first == ("lightning.pytorch", [True, True], True)
    assert second == ("lightning.pytorch", [False, True], False)
    assert RequirementCache.__bool__ is before and "torchmetric" in sys.modules


@pytest.mark.parametrize("error", [ImportError("another", name="torch"), ImportError("no name")])
def test_other_errors_of_an_import_are_raised(error, monkeypatch):
    seen = raising(monkeypatch, [error])
    with pytest.raises(ImportError, match=str(error)):
        load_lightning()
    assert len(seen) == 1 and "torchmetrics.half" in sys.modules


def test_lightning_that_fails_without_transformers_too_leaves_nothing_changed(monkeypatch):
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchmetrics"}
    before = RequirementCache.__bool__
    raising(monkeypatch, [ImportError("of transformers"), ImportError("again")])
    try:
        with pytest.raises(ImportError, match="again"):
            load_lightning()
    finally:
        sys.modules.update(kept)
    assert RequirementCache.__bool__ is before


def test_nothing_is_done_where_lightning_loads(monkeypatch):
    seen = raising(monkeypatch, [])
    load_lightning()
    assert len(seen) == 1 and "torchmetrics.half" in sys.modules
