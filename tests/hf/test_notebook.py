"""In a notebook a run shows bars and one table of losses and metrics, as transformers' does."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

import hf_compat
from hf_compat.tools.preflight.report import PreflightReport

pytestmark = pytest.mark.real_python

KERNEL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
from IPython.utils.capture import capture_output
InteractiveShell.instance().config["IPKernelApp"] = Config()
import torch
from helpers import toy
api = __import__(sys.argv[1])
values = json.loads(sys.argv[2])
values |= {"output_dir": "out", "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 2}
args = api.TrainingArguments(max_steps=4, **values)
sets = {"a": toy.rows(8), "b": toy.rows(8)} if sys.argv[3] == "two" else toy.rows(8)
metrics = lambda prediction: {"top_accuracy": 0.5}
torch.manual_seed(0)
with capture_output(stderr=False) as captured:
    trainer = api.Trainer(toy.Classifier(), args, train_dataset=toy.rows(16), eval_dataset=sets,
                          compute_metrics=metrics)
    trainer.train()
names = [type(one).__name__ for one in trainer.callback_handler.callbacks]
tables = [o.data["text/html"] for o in captured.outputs if "<table" in o.data.get("text/html", "")]
print("RESULT" + json.dumps([names, tables, captured.stdout]))
"""


def run(package, folder, sets="one", **values):
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, package, json.dumps(values), sets],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("RESULT")[2])


@pytest.fixture(autouse=True)
def where_toy_is(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}")


def cells(table, tag):
    return [part.partition("<")[0].strip() for part in table.split(f"<{tag}>")[1:]]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, marks=pytest.mark.matrix),
        {"eval_strategy": "steps", "eval_steps": 2},
        pytest.param({"eval_strategy": "epoch"}, marks=pytest.mark.matrix),
    ],
)
def test_the_table_is_upstreams(tmp_path, values):
    names, tables, printed = run("hf_compat", tmp_path, **values)
    their_names, theirs, _ = run("transformers", tmp_path, **values)
    assert "NotebookProgressCallback" in names and "NotebookProgressCallback" in their_names
    assert "'loss'" not in printed  # the lines that a terminal shows
    ours, last = tables[-1], theirs[-1][theirs[-1].index("<table") :]
    assert [cells(ours, "th"), cells(ours, "td")] == [cells(last, "th"), cells(last, "td")]
    assert len(cells(ours, "td")) >= 4


def test_what_is_printed_is_shown_so_as_the_last_line_of_a_cell():
    explained = hf_compat.explain(hf_compat.TrainingArguments(learning_rate=0.5, run_name="<b>", use_cpu=True))
    shown = explained._repr_html_()
    assert shown.startswith("<pre ") and "learning_rate=0.5" in shown and "&lt;b&gt;" in shown and "<b>" not in shown
    from IPython.lib.pretty import pretty

    assert pretty(explained) == str(explained)
    report = PreflightReport(findings=(), unchecked=(), checked=("arguments",))
    assert pretty(report) == str(report) and "arguments" in report._repr_html_()


@pytest.mark.parametrize("kind", [hf_compat.TrainingArguments, hf_compat.Seq2SeqTrainingArguments])
def test_help_describes_every_argument(kind):
    for field in dataclasses.fields(kind):
        [line] = [line for line in kind.__doc__.splitlines() if line.startswith(f"        {field.name} (")]
        assert len(line.partition("): ")[2]) >= 10, field.name
