"""Answers of commands: plain in a pipe, tables and colours in a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

SCRIPT = """
from hf_compat.tools.terminal import DIFF, Table, show

show(["error    weights: gone", Table(("name", "count"), [("loss", "12 differ")], frozenset({1})), "Different."])
show(["+++ b/x\\n+new\\n-old\\n"], DIFF, end="")
"""
PLAIN = "error    weights: gone\nname      count\nloss  12 differ\nDifferent.\n+++ b/x\n+new\n-old\n"


def in_terminal(**variables) -> str:
    """Run the script in a terminal; returns what it shows."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    ours, theirs = pty.openpty()
    environment = {**kept, "TERM": "xterm", "COLUMNS": "80", **variables}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            shown += piece
            if not piece:
                break
    os.close(ours)
    assert process.returncode == 0
    return shown.decode().replace("\r\n", "\n")


def letters(shown: str) -> str:
    return re.sub(r"\033\[[\d;]*m", "", shown)


def test_a_pipe_gets_plain_text():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == PLAIN


@pytest.mark.real_python
def test_a_terminal_gets_tables_and_colours():
    shown = in_terminal()
    assert "\033[1;31merror" in shown and "\033[1;31m12 differ" in shown and "\033[1;31mDifferent." in shown
    assert "┃ name ┃" in letters(shown) and "│ loss │" in letters(shown)
    assert "\033[32m+new\033[0m" in shown and "\033[31m-old\033[0m" in shown


@pytest.mark.real_python
def test_no_color_leaves_the_table_and_no_colour():
    shown = in_terminal(NO_COLOR="1")
    assert "┃ name ┃" in letters(shown) and not re.search(r"\033\[[\d;]*3\dm", shown)
