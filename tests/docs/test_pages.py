"""What the sentences of the pages quote exists: commands with their options, files of the repository."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from pathlib import Path

import pytest

from hf_compat.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```([a-z]*)[^\n]*\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
# Their options are those of the arguments, which `tests/cli` tries.
WITH_ARGUMENTS = ("fit", "validate", "test", "predict")

pytestmark = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@functools.cache
def help_of(*command: str) -> str:
    shown = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
        main([*command, "--help"])
    return shown.getvalue()


def commands() -> list[str]:
    return ["help", *re.findall(r"^  ([a-z]+)  +\S", help_of(), flags=re.MULTILINE)]


def test_commands_within_sentences_exist_and_have_their_options(page):
    for line in re.findall(r"`hf-compat ([a-z][^`]*)`", BLOCK.sub("", page.read_text())):
        command, *words = line.split()
        assert command in commands(), line
        ends = [index for index, word in enumerate(words) if word.endswith(".py") or word == "-m"]
        options = [word.split("=")[0] for word in words[: ends[0] if ends else None] if word.startswith("--")]
        if command not in WITH_ARGUMENTS:
            known = re.findall(r"--[\w-]+", help_of(command))
            assert [option for option in options if option not in known] == [], line


def test_no_word_is_taken_for_an_html_tag(page):
    prose = re.sub(r"`[^`]*`", "", BLOCK.sub("", page.read_text()))
    assert re.findall(r"<[a-zA-Z/][^>\n]*>", prose) == []


def test_files_that_are_named_exist(page):
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)(?: [^`]*)?`", page.read_text())
    paths = [path for path in named if path.endswith((".py", ".json")) or path.startswith(("tests/", "examples/"))]
    roots = (ROOT, ROOT / "hf_compat", ROOT / "tests" / "sweeps")
    known = [path for path in paths if path not in ("project/module.py", "checkpoint-8/")]
    assert [path for path in known if not any((root / path).exists() for root in roots)] == []
