"""Sources that would end the process, or take minutes: one line each, and the files beside them are migrated."""

from __future__ import annotations

import json
import time

import pytest

from helpers.migrated import today
from hf_compat.cli.main import main
from hf_compat.errors import MigrationError
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Target

IMPORT = "from transformers import Trainer, TrainingArguments\n"
DEEP = {
    "parentheses": f"x = {'(' * 5000}1{')' * 5000}\n",
    "calls within each other": f"x = {'f(' * 3000}{')' * 3000}\n",
    "lists": f"x = {'[' * 3000}{']' * 3000}\n",
    "chained attributes": f"x = a{'.b' * 20000}\n",
    "chained calls": f"x = a{'()' * 5000}\n",
    "a sum": f"x = {' + '.join(['1'] * 20000)}\n",
    "not": f"x = {'not ' * 5000}1\n",
    "lambdas": f"x = {'lambda: ' * 3000}1\n",
    "conditions": f"x = {'a if b else ' * 3000}c\n",
    "elif": "if a:\n    pass\n" + "".join(f"elif a == {n}:\n    pass\n" for n in range(5000)),
    "parentheses in Python 2": f"print 'x'\nx = {'(' * 5000}1{')' * 5000}\n",
    "entries": f"x = {{{', '.join(f'{n}: {n}' for n in range(130_000))}}}\n",
}  # fmt: skip


@pytest.mark.parametrize("kind", DEEP)
def test_what_is_too_deep_or_too_large_is_refused_at_once(kind):
    began = time.monotonic()
    with pytest.raises(MigrationError) as raised:
        rewrite_python(IMPORT + DEEP[kind], Target.HF_COMPAT)
    assert "\n" not in str(raised.value) and time.monotonic() - began < 20


def test_chains_of_names_and_of_functions_are_followed_to_a_bound():
    functions = "".join(f"def f{n}(**k):\n    return f{n + 1}(**k)\n" for n in range(120))
    assert f"{IMPORT.replace('transformers', 'hf_compat')}{functions}" == today(f"{IMPORT}{functions}")
    aliases = "a0 = Trainer\n" + "".join(f"a{n + 1} = a{n}\n" for n in range(150)) + "a1(m, tokenizer=t)\n"
    result = today(f"{IMPORT}{aliases}a150(m, tokenizer=t)\n")
    assert "a1(m, processing_class=t)\na150(m, tokenizer=t)\n" in result, "a chain of one is followed, of 150 not"


def test_one_bad_file_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, kind in (("a.py", "parentheses"), ("b.py", "chained attributes"), ("c.py", "a sum")):
        (tmp_path / name).write_text(IMPORT + DEEP[kind])
    (tmp_path / "d.py").write_text("from transformers import Trainer\n")
    assert main(["migrate", "--write", "."]) == 2
    assert (tmp_path / "d.py").read_text() == "from hf_compat import Trainer\n"
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2].partition(":")[0] for line in lines if line.startswith("error")] == [
        "a.py",
        "b.py",
        "c.py",
    ]


def test_a_cell_that_is_too_deep_is_one_line_too(tmp_path, capsys):
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [{**cell, "source": [IMPORT]}, {**cell, "source": [DEEP["parentheses"]]}]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "n.ipynb").write_text(json.dumps(notebook))
    assert main(["migrate", str(tmp_path / "n.ipynb")]) == 2
    assert "5000 brackets within each other" in capsys.readouterr().err


def test_files_without_transformers_are_not_even_parsed():
    text = DEEP["parentheses"]
    assert rewrite_python(text, Target.HF_COMPAT).text == text
