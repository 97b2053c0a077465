"""The docs say what is so: examples in docstrings run, commands and files that the README names exist."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["hf.arguments", "plan.translate", "plan.explain"])
def test_examples_in_docstrings(name):
    found = doctest.testmod(importlib.import_module(f"hf_compat.{name}"))
    assert found.attempted > 0 and found.failed == 0


def test_links_and_files_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    links, scripts = re.findall(r"\]\(([^)#]+)\)", text), re.findall(r"python3? ((?:examples|tests)/\S+\.py)", text)
    assert "docs/differences.md" in links and "tests/run.py" in scripts, "the patterns find what they should"
    assert [path for path in links + scripts if not (ROOT / path).exists()] == []


def test_the_number_of_configurations_is_the_real_one():
    from cases import CASES

    assert f"[{len(CASES)} configurations]" in (ROOT / "README.md").read_text()


def test_nothing_committed_names_this_machine():
    folders = ("hf_compat", "tests", "examples", "docs", ".ci", ".setup")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {path: path.read_text(errors="ignore") for path in paths if path.suffix in (".py", ".md", ".txt", "")}
    assert ROOT / "hf_compat" / "trainer.py" in texts
    assert [path for path, text in texts.items() if "/wo" + "rk/" in text] == []
