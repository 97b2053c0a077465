"""The example of the page on `migrate` is what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

from hf_compat.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "command_migrate.md"


def test_the_example_of_the_page(tmp_path, monkeypatch, capsys):
    section = PAGE.read_text(encoding="utf-8").partition("\n## migrate\n")[2].partition("\n## ")[0]
    (source,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (diff,) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(source)
    assert main(["migrate", "train.py"]) == 1
    out, err = capsys.readouterr()
    assert out == diff and f"```\n{err}```" in section
    assert main(["migrate", "--write", "train.py"]) == 0 and main(["migrate", "train.py"]) == 0
