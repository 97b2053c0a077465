"""The docs say what is so: examples in docstrings run, commands and files that the README names exist."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers

from hf_compat.hf.argument_values import NEWEST
from hf_compat.tools.explanation import RELEASES
from house.pages import PAGES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name",
    [
        "callbacks.hf_in_lightning",
        "callbacks.lightning_in_hf",
        "hf.arguments",
        "native.module",
        "plan.translate",
        "tools.explanation",
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_examples_in_docstrings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "callbacks.lightning_in_hf":  # DeepSpeed prints something when the first of them is made
        transformers.Trainer(torch.nn.Linear(1, 1), transformers.TrainingArguments("out", use_cpu=True, report_to=[]))
    found = doctest.testmod(importlib.import_module(f"hf_compat.{name}"))
    assert found.attempted > 0 and found.failed == 0


def test_the_release_that_docstrings_mirror_stands_once():
    at_a_symbol = re.compile(rf"`, {re.escape(RELEASES[NEWEST])}\b")
    lines = [line for path in (ROOT / "hf_compat").rglob("*.py") for line in path.read_text().splitlines()]
    assert any("Mirrors" in line for line in lines) and [line for line in lines if at_a_symbol.search(line)] == []


def test_links_and_files_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    links, scripts = re.findall(r"\]\(([^)#]+)\)", text), re.findall(r"python3? ((?:examples|tests)/\S+\.py)", text)
    assert "docs/differences.md" in links and "tests/run.py" in scripts, "the patterns find what they should"
    assert [path for path in links + scripts if not (ROOT / path).exists()] == []


def test_nothing_committed_names_this_machine():
    folders = ("hf_compat", "tests", "examples", "docs", ".ci", ".setup")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {path: path.read_text(errors="ignore") for path in paths if path.suffix in (".py", ".md", ".txt", "")}
    assert ROOT / "hf_compat" / "trainer.py" in texts
    assert [path for path, text in texts.items() if "/wo" + "rk/" in text] == []


def _table(heading: str) -> list[list[str]]:
    """Rows of the tables under a heading of the code map, as cells."""
    text = (ROOT / "docs" / "code_map.md").read_text().split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_package_layout_is_the_order_that_the_layer_test_checks():
    layers = runpy.run_path(str(ROOT / "tests" / "house" / "test_layers.py"))
    named = [name for row in _table("Package layout") for name in re.findall(r"`([^`]+)`", row[0])]
    rooms = [room for room in layers["ROOMS"] if room != "__main__"]
    tools = [f"tools/{name}" for name in layers["TOOLS"]]
    assert [name.rstrip("/").removesuffix(".py") for name in named] == rooms + tools


def test_the_files_that_the_code_map_names_exist():
    rows = _table("Which file to change")
    named = [name for row in rows for name in re.findall(r"`([a-z_0-9/]+(?:\.py|/))`", row[1])]
    assert "engine/module.py" in named, "the pattern finds what it should"
    for name in named:
        assert (ROOT / "hf_compat" / name).exists(), name


def test_the_checks_of_a_complete_checkpoint_are_named_as_in_the_code():
    section = (ROOT / "docs" / "faults.md").read_text().partition("## How a complete checkpoint is recognised")[2]
    named = re.findall(r"^\| `(\w+)\.(\w+)` \|", section.partition("\n## ")[0], flags=re.MULTILINE)
    sources = {path.stem: path.read_text() for path in (ROOT / "hf_compat").rglob("*.py") if path.stem != "__init__"}
    assert len(named) >= 10
    assert [f"{file}.{name}" for file, name in named if f"def {name}(" not in sources.get(file, "")] == []


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_made_from_the_code(name):
    page = (ROOT / "docs" / name).read_text()
    assert page == PAGES[name](page), "run: .venv/bin/python tests/house/pages.py"
    assert not re.search(r"\bTODO\b", page)


def test_a_row_of_each_table_stands_in_its_page():
    rows = {
        "arguments.md": "### `async_save`\n\nWrite checkpoints in the background.",
        "checkpoints.md": "| `rng_state.pth`, or `rng_state_<rank>.pth` | random states",
        "events_and_hooks.md": "`on_step_end`\n\nAfter an update.\n\n- **Lightning's hook**: `on_train_batch_end`\n",
        "how_it_works.md": "made | the gradient scaler | `_load_scaler` |\n",
        "scale.md": "docs/stable/elastic/run.html) | each | `RANK` of `WORLD_SIZE` |",
    }
    assert rows.keys() == PAGES.keys()
    assert [name for name, text in rows.items() if text not in (ROOT / "docs" / name).read_text()] == []
