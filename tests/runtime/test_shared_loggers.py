"""Messages that transformers has too are logged in our name, and in its name once a process is patched."""

from __future__ import annotations

import importlib
import importlib.util
import logging

import pytest

from hf_compat.runtime import console

MODULES = {
    "search.trials": "logger", "hf.callbacks": "logger", "training_run.resumer": "shared_logger",
    "trainer_methods.steps": "logger", "trainer_methods.model_setup": "logger",
    "trainer_methods.checkpoints": "shared_logger",
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("is_patched", [False, True])
def test_a_message_comes_from_where_a_script_listens(caplog, monkeypatch, module, is_patched):
    monkeypatch.setattr(console, "_in_place_of_transformers", [True] if is_patched else [])
    for name in ("hf_compat", "transformers"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    shared = getattr(importlib.import_module(f"hf_compat.{module}"), MODULES[module])
    shared.warning("said")
    (name,) = {one.name for one in caplog.records if one.message == "said"}
    assert name.startswith("transformers.") if is_patched else name == f"hf_compat.{module}"
    assert importlib.util.find_spec(name)
