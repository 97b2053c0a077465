"""Scripts in the style of four releases: rewritten for this package and for transformers 5, run, compared."""

from __future__ import annotations

import difflib
import functools
import subprocess
import sys

import pytest
from ruff import find_ruff_bin

from helpers.migrated import NAMES, SCRIPTS
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Target

# Of these, what runs with `-m matrix` only: the others rewrite and run the same things.
SAMPLE = "v4_19_weighted.py"
RULES = "E,F,I,W,UP006,B"


@functools.cache
def rewritten(name, target):
    return rewrite_python((SCRIPTS / name).read_text(), target)


def ruff(*words, cwd, text):
    command = [find_ruff_bin(), *words, "--isolated", "--stdin-filename", "script.py", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=cwd).stdout


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize("name", NAMES)
def test_a_second_run_changes_nothing(name, target):
    first = rewritten(name, target)
    assert first.text != (SCRIPTS / name).read_text()
    assert rewrite_python(first.text, target).text == first.text


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize("name", NAMES)
def test_ruff_has_nothing_new_to_say(name, target, tmp_path):
    def complaints(text):
        lines = ruff(
            "check", "--select", RULES, "--output-format=concise", "--line-length=120", cwd=tmp_path, text=text
        )
        return sorted(line.partition(": ")[2].partition(" ")[0] for line in lines.splitlines() if ": " in line)

    before = (SCRIPTS / name).read_text()
    after = ruff("format", "--line-length=120", cwd=tmp_path, text=rewritten(name, target).text)  # lines may have grown
    assert set(complaints(after)) <= set(complaints(before))


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize("name", NAMES)
def test_the_formatter_leaves_untouched_lines_untouched(name, target, tmp_path):
    formatted = ruff("format", "--line-length=120", cwd=tmp_path, text=(SCRIPTS / name).read_text())
    after = rewrite_python(formatted, target).text
    again = ruff("format", "--line-length=120", cwd=tmp_path, text=after)
    before, touched = set(formatted.splitlines()), []
    for line in difflib.ndiff(after.splitlines(), again.splitlines()):
        if line.startswith("- ") and line[2:] in before:
            touched.append(line)
    assert touched == []


def outcome(text, folder, name):
    (folder / "script.py").write_text(text)
    words = ["--output_dir", "out", "--do_train"] if "glue" in name or "classification" in name else []
    ended = subprocess.run(
        [sys.executable, "script.py", *words], capture_output=True, text=True, cwd=folder, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    kept = ("done", "losses", "perplexity", "tpu")
    return [line for line in ended.stdout.splitlines() if line.startswith(kept)]


@pytest.mark.parametrize(
    "name", [name if name == SAMPLE else pytest.param(name, marks=pytest.mark.matrix) for name in NAMES]
)
def test_the_results_run_and_give_the_same_numbers(name, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here = outcome(rewritten(name, Target.HF_COMPAT).text, tmp_path / "here", name)
    there = outcome(rewritten(name, Target.TRANSFORMERS_5).text, tmp_path / "there", name)
    assert here == there and any(line.startswith("done ") for line in here)
