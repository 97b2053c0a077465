"""Blocks of other pages than the tutorial that run as they are: the first example, and what `explain` answers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hf_compat.cli.main import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMANDS = re.findall(
    r"^hf-compat (explain (?:[^\n]*\\\n)*[^\n]*)$",
    "\n".join(
        block for page in sorted(DOCS.glob("*.md")) for block in re.findall(r"```\n(.*?)```", page.read_text(), re.S)
    ),
    flags=re.MULTILINE,
)


def test_the_first_example_says_what_arguments_become(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "start.md").read_text(), re.DOTALL)
    exec(compile(code, "docs/start.md", "exec"), {})
    assert "precision='bf16-mixed'" in capsys.readouterr().out


def test_explain_is_shown_in_the_docs():
    assert len(COMMANDS) >= 2


@pytest.mark.parametrize("command", COMMANDS)
def test_explain_gives_the_sizes_that_the_page_names(command, capsys):
    assert main(shlex.split(command.replace("\\\n", " "))) == 0
    size = re.search(r"each device holds ([\d.]+ GiB)", capsys.readouterr().out)[1]
    assert f"holds {size.replace('.0 ', ' ')}" in (DOCS / "scale.md").read_text()
