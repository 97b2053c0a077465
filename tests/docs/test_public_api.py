"""The page on the public API lists what the package offers: neither more nor less."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from pathlib import Path

import hf_compat
from hf_compat import errors
from hf_compat.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "public_api.md").read_text()
SECTIONS = {text.split("\n", 1)[0]: text for text in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


def names_in(text: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", text)


def rows(section: str, column: int) -> list[str]:
    lines = [line.strip("|").split("|") for line in SECTIONS[section].splitlines() if line.startswith("|")]
    return [name for cells in lines[2:] for name in names_in(cells[column])]


def test_the_names_of_the_package_are_those_of_the_page():
    listed = rows("Names of `hf_compat`", 1)
    assert sorted(listed) == sorted(hf_compat.__all__)
    assert all(not name.startswith("_") and hasattr(hf_compat, name) for name in listed)


def test_the_public_modules_are_those_that_stand_for_a_module_of_transformers():
    package = ROOT / "hf_compat"
    mirroring = [path for path in package.rglob("*.py") if "__getattr__, __dir__ = mirror(" in path.read_text()]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in mirroring}
    assert set(rows("Modules", 0)) == modules
    assert [name.replace("hf_compat", "transformers") for name in rows("Modules", 0)] == rows("Modules", 1)
    assert all(importlib.import_module(name) for name in modules)


def test_every_error_class_is_one_of_the_package():
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]
    assert len(classes) > 20
    assert all(issubclass(one, (errors.HfCompatError, errors.HfCompatWarning)) for one in classes)


def test_the_commands_are_those_of_the_page(capsys):
    with contextlib.suppress(SystemExit):
        main(["--help"])
    commands = re.findall(r"^  ([a-z]+)  +\S", capsys.readouterr().out, flags=re.MULTILINE)
    assert "compare" in commands and sorted(re.findall(r"`([a-z]+)`", SECTIONS["Commands"])) == sorted(commands)


def test_the_package_says_what_is_public():
    assert "docs/public_api.md" in (hf_compat.__doc__ or "")


def test_a_public_name_is_there_when_it_is_first_asked_for(monkeypatch):
    for name in hf_compat.__all__:
        later = getattr(hf_compat, name)
        monkeypatch.delitem(vars(hf_compat), name)
        assert getattr(hf_compat, name) is later is not None
