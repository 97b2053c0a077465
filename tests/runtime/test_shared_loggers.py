"""Messages that transformers has too are logged in our name, and in its name once a process is patched."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from types import SimpleNamespace

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


@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.parametrize("level", [None, logging.DEBUG])
def test_transformers_level_follows_in_a_patched_process(monkeypatch, is_patched, level):
    theirs = logging.getLogger("transformers")
    before = theirs.level
    monkeypatch.setattr(theirs, "level", before)
    monkeypatch.setattr(console, "_in_place_of_transformers", [])
    console.log_as_transformers(is_patched)
    console.follow_level(level)
    assert theirs.level == (level if is_patched and level is not None else before)
    console.log_as_transformers(False)
    assert console._in_place_of_transformers == []


def test_a_warning_about_a_step_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(console, "_in_place_of_transformers", [])
    monkeypatch.setattr(logging.getLogger("hf_compat"), "propagate", True)
    shared = console.SharedLogger("hf_compat.once", "transformers.once")
    for text in ("first", "second", "first"):
        shared.warning_once(text)
    assert (
        caplog.messages == ["first", "second"]
        and caplog.records[0].funcName == "test_a_warning_about_a_step_is_said_once"
    )


@pytest.mark.parametrize(
    ("own", "level", "shown"),
    [
        (logging.NOTSET, None, logging.INFO),
        (logging.ERROR, None, logging.ERROR),
        (logging.NOTSET, logging.DEBUG, logging.DEBUG),
        (logging.ERROR, logging.WARNING, logging.WARNING),
    ],
)
@pytest.mark.parametrize("handlers", [(), ("hf_compat",), ("",)])
def test_lines_are_shown_where_the_program_shows_none(monkeypatch, own, level, shown, handlers):
    loggers = {name: logging.Logger(name) for name in ("hf_compat", "")}
    loggers["hf_compat"].setLevel(own)
    for name in handlers:
        loggers[name].addHandler(logging.NullHandler())
    monkeypatch.setattr(
        console, "logging", SimpleNamespace(**vars(logging) | {"getLogger": lambda name="": loggers[name]})
    )
    for _ in range(2):
        console.show_logs(level)
    added = [one for one in loggers["hf_compat"].handlers if isinstance(one, console._AboveBars)]
    assert len(added) == (not handlers) and loggers["hf_compat"].level == shown
    assert all(one.format(logging.makeLogRecord({"msg": "said"})) == "said" for one in added)


@pytest.mark.parametrize("notebook", [False, True])
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_notebook_shows_warnings_alone_in_red(monkeypatch, capsys, notebook, level):
    monkeypatch.setattr(console, "in_notebook", lambda: notebook)
    monkeypatch.setattr(console.tqdm, "external_write_mode", lambda stream: contextlib.nullcontext())
    console._AboveBars().emit(logging.makeLogRecord({"msg": "said", "levelno": level}))
    out, err = capsys.readouterr()
    assert (out, err) == (("said\n", "") if notebook and level == logging.INFO else ("", "said\n"))


@pytest.mark.parametrize(
    ("ipython", "found"),
    [
        (None, False),
        (SimpleNamespace(get_ipython=lambda: None), False),
        (SimpleNamespace(get_ipython=lambda: SimpleNamespace(config={"TerminalIPythonApp": 1})), False),
        (SimpleNamespace(get_ipython=lambda: SimpleNamespace(config={"IPKernelApp": 1})), True),
    ],
)
def test_a_notebooks_kernel_is_known(monkeypatch, ipython, found):
    monkeypatch.setattr(console.sys, "modules", {"IPython": ipython} if ipython else {})
    assert console.in_notebook() is found


@pytest.mark.parametrize(("lists", "has"), [([], True), (["", "\n"], False), (["", "12 13 "], True)])
def test_children_are_known_on_linux(monkeypatch, tmp_path, lists, has):
    for place, text in enumerate(lists):
        (tmp_path / f"{place}").mkdir()
        (tmp_path / f"{place}" / "children").write_text(text)
    monkeypatch.setattr(console, "Path", lambda path: tmp_path)
    assert console.has_children() is has


@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.parametrize("otherwise", [None, "hf_compat.own"])
def test_a_line_of_transformers_is_on_its_logger(monkeypatch, is_patched, otherwise):
    said = []
    loggers = lambda name: SimpleNamespace(info=lambda line, **_: said.append((name, line)))  # noqa: E731
    monkeypatch.setattr(console, "_in_place_of_transformers", [True] if is_patched else [])
    monkeypatch.setattr(console, "logging", SimpleNamespace(getLogger=loggers))
    console.log_line("it", otherwise and loggers(otherwise))
    name = "transformers.trainer" if is_patched else otherwise
    assert said == ([(name, "it")] if name else [])
