"""A notebook that is run and saved: its page has bars, tables and short tracebacks, without a widget."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = [pytest.mark.real_python, pytest.mark.whole_file]

TESTS = Path(__file__).resolve().parents[1]
CELLS = [
    """
import hf_compat
hf_compat.Trainer
import torch, transformers
from helpers import toy
class Wrong(toy.Classifier):
    def forward(self, x, labels=None):
        return {"loss": torch.zeros(3) @ torch.zeros(4)}
def trainer(api, model=toy.Classifier, **values):
    args = api.TrainingArguments("out", max_steps=6, use_cpu=True, report_to="none", logging_steps=2, **values)
    torch.manual_seed(0)
    return api.Trainer(model(), args, train_dataset=toy.rows(16), eval_dataset=toy.rows(16),
                       compute_metrics=lambda prediction: {"top_accuracy": 0.5})
""",
    "t = trainer(hf_compat, eval_strategy='steps', eval_steps=2); t.train()",
    "trainer(hf_compat).evaluate()",
    "trainer(hf_compat, Wrong).train()",
    "trainer(transformers, Wrong).train()",
    "hf_compat.explain(t.args)",
    "hf_compat.Trainer(t.model, t.args, train_dataset=[1])",
    "trainer(hf_compat, eval_strategy='sometimes')",
    "import logging; logging.getLogger('hf_compat').warning('a warning')",
    "t.train()",
    "trainer(hf_compat, learning_rat=1e-3)",
    "trainer(hf_compat, load_best_model_at_end=True, save_strategy='epoch', eval_strategy='steps')",
    "t.model.inner = torch.nn.Sequential(torch.nn.Linear(99, 16)); t.train()",
    "import _thread\nt.model.inner.register_forward_pre_hook(lambda *a: _thread.interrupt_main())\nt.train()",
]
BOTH = {"never evaluated": "", "by step": "eval_strategy='steps', eval_steps=2", "by epoch": "eval_strategy='epoch'"}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    both = [f"trainer({api}, {values}).train()" for values in BOTH.values() for api in ("transformers", "hf_compat")]
    cells = [nbformat.v4.new_code_cell(cell) for cell in (*CELLS, *both)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{TESTS}:{TESTS.parent}")
        patch.setenv("OMP_NUM_THREADS", "1")
        book = nbformat.v4.new_notebook(cells=cells)
        at = {"metadata": {"path": str(folder)}}
        NotebookClient(book, timeout=500, kernel_name="python3", resources=at, allow_errors=True).execute()
    return [cell.outputs for cell in book.cells]


def pages(outputs, kind="text/html"):
    return [one.data[kind] for one in outputs if kind in one.get("data", {})]


def test_no_cell_but_the_wrong_ones_fails(outputs):
    assert [n for n, cell in enumerate(outputs) if any(one.output_type == "error" for one in cell)] == [
        *(3, 4, 6, 7, 10, 11, 12, 13)
    ]


def test_an_import_does_not_ask_for_widgets(outputs):
    assert "IProgress" not in "".join(one.text for one in outputs[0] if one.get("name") == "stderr")


def test_a_training_is_one_output_with_a_full_bar_and_a_table(outputs):
    shown = [one for one in outputs[1] if one.output_type == "display_data"]
    [page] = pages(shown)
    assert "<progress value='6' max='6'" in page and re.search(r"\[6/6 00:\d\d, Epoch 3/3\]", page)
    assert page.count("<tr") == 1 + 3 and page.count("<progress") == 1  # the bars of the evaluations are gone
    said = {name: "".join(one.text for one in outputs[1] if one.get("name") == name) for name in ("stdout", "stderr")}
    assert "%|" not in "".join(said.values()) and "'loss'" not in said["stdout"]
    assert "Training on Lightning: " in said["stdout"] and "hf_compat" not in said["stderr"], "stderr is shown in red"
    assert "Lightning" not in said["stderr"]


def test_a_warning_is_in_red(outputs):
    assert [(one.name, one.text) for one in outputs[8]] == [("stderr", "a warning\n")]


def test_a_cell_that_trains_again_has_nothing_in_red(outputs):
    said = {name: [one.text for one in outputs[9] if one.get("name") == name] for name in ("stdout", "stderr")}
    assert said["stderr"] == [] and "out holds checkpoints of an earlier run: checkpoint-6; " in "".join(said["stdout"])


def table(outputs):
    """Return what the cells of a run's table say."""
    [page] = pages([one for one in outputs if one.output_type == "display_data"])
    return [part.partition("<")[0].strip() for part in re.split("<t[hd]>", page[page.index("<table") :])[1:]]


@pytest.mark.parametrize("number", range(len(BOTH)), ids=BOTH)
def test_the_table_is_upstreams(outputs, number):
    theirs, ours = (table(outputs[len(CELLS) + 2 * number + side]) for side in (0, 1))
    assert ours == theirs and len(ours) >= 2 * 4


def test_an_evaluation_by_itself_has_a_bar_and_a_table(outputs):
    bar, table = pages([one for one in outputs[2] if one.output_type == "display_data"])
    assert "<progress value='2' max='2'" in bar and "<th>Validation Loss</th>" in table


def lines(outputs):
    [error] = [one for one in outputs if one.output_type == "error"]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback)).splitlines()


def test_a_traceback_is_shorter_than_transformers(outputs):
    ours, theirs = lines(outputs[3]), lines(outputs[4])
    assert all(any("in Wrong.forward" in line for line in found) for found in (ours, theirs))
    assert len(ours) < len(theirs) and not any(".py:" in line for line in ours), "\n".join(ours)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (6, "didn't pass an `eval_dataset`"),
        (7, "`eval_strategy='sometimes'` is not"),
        (10, "unknown argument `learning_rat=0.001`"),
        (11, "the evaluation and the save strategy to match"),
    ],
)
def test_an_error_of_a_constructor_fits_the_screen(outputs, cell, message):
    found = lines(outputs[cell])
    assert len(found) <= 25 and any(message in line for line in found), "\n".join(found)
    assert max(map(len, found)) < 200


@pytest.mark.parametrize(("cell", "message"), [(12, "RuntimeError: mat1 and mat2"), (13, "KeyboardInterrupt")])
def test_an_error_of_a_model_and_an_interruption_fit_the_screen(outputs, cell, message):
    found = lines(outputs[cell])
    assert len(found) <= 25 and message in found[-1], "\n".join(found)


def test_an_explanation_as_the_last_line_of_a_cell_is_a_page(outputs):
    explained = pages(outputs[5])[-1]
    assert explained.startswith("<pre ") and "max_steps=6" in explained
