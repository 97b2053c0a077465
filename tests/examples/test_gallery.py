"""Each example of the gallery runs as a new user would run it: a copy of the file, in an empty folder, twice.

A row says how it is started and what its last lines say. Those that are cheap run here in this process, where a warning
is an error; behind `-m matrix` every row runs by its own command, in a process of its own, the second time beside what
the first one has left.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
import torch

from helpers.notebook import NOTEBOOK, executed

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DOOR = ("-m", "hf_compat", "run")


@dataclass(frozen=True)
class Row:
    """An example: words before and after its name, what it prints, and whether it runs in this process, too."""

    prints: str
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    is_cheap: bool = False


ROWS = {
    "text_classification": Row(r"paragraphs: 0\.[78]\d+\n.* is from the chapter 'debugger'", is_cheap=True),
    "token_classification": Row(r"held out: precision 0\.[5-9]\d+, recall 0\.[4-9]\d+, f1 0\.[4-9]"),
    "seq2seq_generation": Row(r"October 22, 2003 → 10-22\ndates that are right: (100|[89]\d)%"),
    "lora_sft": Row(r"(?s)before, [3-5]\.\d+ after.*adapter_model.safetensors\nengine: Lightning", DOOR),
    "mixed_callbacks": Row(
        r"best by ModelCheckpoint: step=\d+\.ckpt, 0\.[89]\d+\nCSV: .*csv\nTensorBoard", is_cheap=True
    ),
    "torchmetrics_evaluation": Row(r"eval_accuracy: 0\.[89](?s:.)*eval_f1: 0\.[89]", is_cheap=True),
    "two_processes": Row(r"processes: 2, .* 32\n.*\nheld out: .* accuracy 0\.9", (*DOOR, "--devices", "2")),
    "fsdp2": Row(r"(?s)process 1 holds 60,288 of 120,576.*again: 120,576", (*DOOR, "--devices", "2")),
    "lightning_cli": Row(
        r"last epoch: 0\.[89]\d+\nbest checkpoint: .*\.ckpt, 0\.[89]",
        after=["fit", "--config", "lightning_cli.yaml"],
        is_cheap=True,
    ),
    "native_module": Row(r"updates: 176, best checkpoint: .*ckpt\nits accuracy: 0\.[89]", is_cheap=True),
    "hyperparameter_search": Row(r"its loss: (0\.\d+), trained again: \1", is_cheap=True),
}
# The scripts of the main job and the digits' configuration have tests of their own (tests/house/test_main_job.py).
# Ray is in no environment of the tests: tests/sweeps/ray/run.py trains with it. The manifests: test_operations.py.
OPERATIONS = {"Dockerfile", "preemptible.py", "kubernetes.yaml", "skypilot.yaml", "train.sbatch", "ray_train.py"}
ELSEWHERE = {"run.py", "digits.py", "digits.yaml", "language_model.py"} | OPERATIONS


def copied(name: str, folder: Path) -> None:
    for path in EXAMPLES.glob(f"{name}.*"):
        shutil.copy(path, folder)


def left_in(folder: Path) -> set[str]:
    return {
        path.name for path in folder.iterdir() if path.suffix not in (".py", ".yaml") and path.name != "__pycache__"
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's CLI under today's jsonargparse
@pytest.mark.filterwarnings("error:(Without effect|This evaluation|The best evaluation)")  # elsewhere they are left out
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.is_cheap])
def test_an_example_in_this_process(name, tmp_path, monkeypatch, capsys):
    copied(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *ROWS[name].after])
    monkeypatch.delitem(sys.modules, name, raising=False)
    torch.manual_seed(0)
    runpy.run_path(f"{name}.py", run_name="__main__")
    assert re.search(ROWS[name].prints, capsys.readouterr().out)
    assert left_in(tmp_path) == {"trainer_output"}


@pytest.mark.matrix
@pytest.mark.parametrize("name", ROWS)
def test_an_example_by_its_command_twice(name, tmp_path, monkeypatch):
    copied(name, tmp_path)
    row = ROWS[name]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for _ in range(2):
        command = [sys.executable, *row.before, f"{name}.py", *row.after]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert re.search(row.prints, done.stdout), done.stdout[-1000:]
        assert left_in(tmp_path) == {"trainer_output"}


def assert_says_what_it_shows(text):
    assert "largest difference: 0.0\ntrained by a lightning.Trainer: True" in text
    (before, after) = re.findall(r"after (?:30|60) updates: (\d\.\d+)", text)
    assert float(after) < float(before) - 0.1


def test_the_notebook_begins_with_transformers_and_ends_in_lightning(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "notebook"}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code":
            exec(cell.source, names)
    assert_says_what_it_shows(capsys.readouterr().out)
    assert left_in(tmp_path) == {"trainer_output"}


@pytest.mark.matrix
@pytest.mark.real_python
def test_the_stored_outputs_of_the_notebook_are_those_of_a_run_but_for_the_numbers(tmp_path):
    """`tests/helpers/notebook.py` writes them anew."""
    stored, run = nbformat.read(NOTEBOOK, as_version=4), executed(tmp_path)
    printed, shown = (
        "".join(
            one.get("text", "") or one["data"]["text/html"] for cell in book.cells for one in cell.get("outputs", [])
        )
        for book in (stored, run)
    )
    assert re.sub(r"[\d.]+", "#", printed) == re.sub(r"[\d.]+", "#", shown)
    for text in (printed, shown):
        assert_says_what_it_shows(text)


def test_each_example_is_in_the_table_and_in_the_docs():
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert files - ELSEWHERE == {f"{name}.py" for name in ROWS} | {"lightning_cli.yaml", NOTEBOOK.name}
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert [name for name in sorted(files) if f"(../examples/{name})" not in page] == []


@pytest.mark.parametrize("name", ROWS)
def test_an_example_says_what_it_shows_and_how_to_run_it(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    docstring = text.split('"""')[1]
    assert "\nShows: " in docstring and f" {name}.py" in docstring
    assert len(text.splitlines()) <= 95
