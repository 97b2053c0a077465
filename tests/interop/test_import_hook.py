"""The hook that patches at the first import of a Trainer patches once, after the outermost of the watched modules."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from hf_compat.interop import patching
from hf_compat.interop.import_hook import PatchAfterImport


@pytest.fixture
def events(monkeypatch):
    """What happens in order: modules that run, and patches."""
    found = []
    monkeypatch.setattr(patching, "patch", lambda: found.append("patch"))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return found


@pytest.fixture
def load(tmp_path, events):
    (tmp_path / "trainer.py").write_text("load('trainer_callback')\nevents.append('trainer')\n")
    (tmp_path / "trainer_callback.py").write_text("events.append('trainer_callback')\n")
    (tmp_path / "training_args.py").write_text("events.append('training_args')\nraise ValueError('broken')\n")
    hook = PatchAfterImport()
    sys.meta_path.insert(0, hook)

    def load(name):
        spec = hook.find_spec(f"transformers.{name}", [str(tmp_path)])
        module = importlib.util.module_from_spec(spec)
        module.load, module.events = load, events
        spec.loader.exec_module(module)

    load.hook, load.folder = hook, str(tmp_path)
    return load


def test_it_patches_once_when_the_outermost_module_is_loaded(load, events):
    load("trainer")
    assert events == ["trainer_callback", "trainer", "patch"]
    assert load.hook not in sys.meta_path
    load("trainer_callback")
    assert events[3:] == ["trainer_callback"]


def test_a_module_that_fails_patches_nothing_and_the_next_one_does(load, events):
    with pytest.raises(ValueError, match="broken"):
        load("training_args")
    load("trainer_callback")
    assert events == ["training_args", "trainer_callback", "patch"]


def test_other_modules_are_not_its_own(load):
    assert load.hook.find_spec("transformers.modeling_utils", [load.folder]) is None
    assert load.hook.find_spec("transformers.hf_argparser", [load.folder]) is None  # there is no such file
