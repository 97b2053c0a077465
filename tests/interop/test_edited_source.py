"""Code that rewrites transformers' Trainer as text is refused with a sentence, and before any training."""

from __future__ import annotations

import contextlib
import inspect
import sys
import sysconfig
import warnings
from types import FunctionType, ModuleType

import pytest

import hf_compat
import hf_compat.trainer
from helpers import toy
from hf_compat.errors import OverrideError
from hf_compat.interop import patching

READ = "import inspect\ndef rewrite(trainer):\n    return inspect.getsource(trainer._inner_training_loop)\n"
COMPILED = "def evaluation_loop(self, *args, **kwargs):\n    raise RuntimeError('edited')\n"


@pytest.fixture
def patched():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes of other tests in this process are made from the originals
        hf_compat.patch()
    yield
    hf_compat.unpatch()


def module_of(name, file, text):
    module = ModuleType(name)
    module.__file__ = file
    exec(compile(text, file, "exec"), vars(module))
    return module


@pytest.mark.parametrize(
    ("name", "file"),
    [("axolotl.monkeypatch.loop", f"{sys.prefix}/lib/site-packages/axolotl/loop.py"), ("my_patches", "/home/me/p.py")],
)
def test_who_reads_the_trainers_source_to_edit_it_is_told(patched, name, file):
    import transformers

    with pytest.raises(OverrideError, match=rf"(?s){name} reads .*_inner_training_loop.*Hint: override the method"):
        module_of(name, file, READ).rewrite(transformers.Trainer)


def test_tools_and_notebooks_read_any_source(patched):
    import transformers

    tool = module_of("IPython.core.oinspect", f"{sys.prefix}/lib/site-packages/IPython/core/oinspect.py", READ)
    assert "def " in tool.rewrite(transformers.Trainer)
    cell = module_of("__main__", "cell", READ)
    del cell.__file__
    assert "def " in cell.rewrite(transformers.Trainer)
    own = module_of("my_patches", "/home/me/p.py", "import inspect\ndef show(one):\n    return inspect.getsource(one)")
    assert "module_of" in own.show(module_of) and "class TrainerState" in own.show(transformers.TrainerState)


def asked_for(home, name=None):
    """What is read: a function of a module, or its class of a name."""
    return type(name, (), {"__module__": home}) if name else FunctionType((lambda: 0).__code__, {"__name__": home})


LIBRARY, STANDARD = (sysconfig.get_path(kind) for kind in ("purelib", "stdlib"))


@pytest.mark.parametrize(
    ("read", "name", "file", "is_refused"),
    [
        (asked_for("hf_compat.trainer"), "mine", "/home/me/p.py", True),
        (asked_for("hf_compat.trainer_methods.steps", "SomeTrainer"), "mine", "/home/me/p.py", True),
        (hf_compat.trainer, "mine", "/home/me/p.py", True),
        (asked_for("hf_compat.trainer", "Other"), "mine", "/home/me/p.py", False),
        (asked_for("hf_compat.engine"), "mine", "/home/me/p.py", False),
        (asked_for("transformers.trainer"), "mine", "/home/me/p.py", False),
        (asked_for("hf_compat.trainer"), "tool", f"{LIBRARY}/tool.py", False),
        (asked_for("hf_compat.trainer"), "tool", f"{STANDARD}/tool.py", False),
        (asked_for("hf_compat.trainer"), "tool", "/other/site-packages/tool.py", False),
        (asked_for("hf_compat.trainer"), "unsloth.tool", f"{LIBRARY}/tool.py", True),
        (asked_for("hf_compat.trainer"), "__main__", None, False),
        (asked_for("hf_compat.trainer"), "axolotl", None, True),
    ],
)
def test_who_may_read_which_source(monkeypatch, read, name, file, is_refused):
    monkeypatch.setattr(patching, "_getsource", lambda one: "its source")
    caller = {"__name__": name, "read": patching._getsource_for_readers, **({"__file__": file} if file else {})}
    exec("def ask(one):\n    return read(one)\n", caller)
    with pytest.raises(OverrideError) if is_refused else contextlib.nullcontext():
        assert caller["ask"](read) == "its source"


def test_reading_is_as_ever_without_a_patch(patched):
    hf_compat.unpatch()
    assert inspect.getsource.__module__ == "inspect"


def test_a_method_that_was_compiled_from_text_is_refused_when_a_trainer_is_made(monkeypatch, make_args):
    library = {"__name__": "unsloth.trainer"}
    exec(COMPILED, library)
    monkeypatch.setattr(hf_compat.Trainer, "evaluation_loop", library["evaluation_loop"])
    with pytest.raises(OverrideError, match=r"(?s)unsloth.trainer has compiled `Trainer.evaluation_loop`.*Hint: "):
        hf_compat.Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(8))


@pytest.mark.parametrize(("module", "is_refused"), [("__main__", False), ("unsloth.trainer", True)])
def test_of_a_command_in_words_only_its_own_functions_replace_a_method(monkeypatch, make_args, module, is_refused):
    own = {"__name__": module}
    exec("def log(self, logs, start_time=None):\n    self.seen = logs\n", own)
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setattr(hf_compat.Trainer, "log", own["log"])
    with pytest.raises(OverrideError) if is_refused else contextlib.nullcontext():
        hf_compat.Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(8))


def test_a_function_of_a_module_may_replace_a_method(monkeypatch, make_args):
    def logged(self, logs, start_time=None):
        self.seen = logs

    monkeypatch.setattr(hf_compat.Trainer, "log", logged)
    trainer = hf_compat.Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(8))
    trainer.train()
    assert trainer.seen["train_loss"] > 0
