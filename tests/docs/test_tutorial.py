"""Every block of the tutorial runs, in the order of the page, and prints the lines that the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r'^```(python|diff|sh|text)(?: title="([^"]+)")?\n(.*?)^```$', flags=re.DOTALL | re.MULTILINE)
RESULT = re.compile(r"^accuracy \d\.\d{4}, loss \d\.\d{6}$", flags=re.MULTILINE)


def run(command: str) -> str:
    """Run a command of the page as a reader does, with this Python."""
    program, *words = shlex.split(command)
    start = {"python": [], "hf-compat": ["-m", "hf_compat"]}[program]
    done = subprocess.run([sys.executable, *start, *words], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def apply(diff: str, path: Path) -> None:
    """Replace the lines that begin with `-` by those that begin with `+`."""
    old, new = ("".join(line[1:] + "\n" for line in diff.splitlines() if line[0] == sign) for sign in "-+")
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has no such lines:\n{old}"
    path.write_text(text.replace(old, new))


def without_digits(text: str) -> str:
    """Mask fractions: another processor rounds otherwise, and takes another time."""
    return re.sub(r"\.\d+", ".#", text)


@pytest.mark.timeout(1200)
def test_the_tutorial_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    output, results, commands = "", {}, 0
    for kind, title, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
        if kind == "sh":
            for command in text.splitlines():
                output, commands = run(command), commands + 1
                if found := RESULT.search(output):
                    results[command] = found[0]
        elif kind == "text":
            for line in text.splitlines():
                assert without_digits(line) in without_digits(output), f"{line!r} is not in:\n{output}"
        elif kind == "diff":
            apply(text, Path(title))
        else:
            Path(title).write_text(text)
    assert commands == 12, "the pattern finds every command"
    upstream, unchanged, imported, two, native = results.values()
    assert upstream == unchanged == imported == native
    assert two != upstream, "two processes draw other samples for a micro-batch"
