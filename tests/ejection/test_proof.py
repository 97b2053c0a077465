"""The proof of `eject`: script and project run beside each other, and the verdict follows what was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_compat.plan.translate import RunCounts
from hf_compat.tools.ejection.proof import Proof, _compared, prove, updates_to_watch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# In the style of public scripts whose projects were wrong without a word, or ended in a traceback
PROVED = (
    "seeding_model", "drawing_sampler", "decorated_helper", "frozen_layers", "second_model", "retriever",
    "adapter_save", "lisa", "metric_state", "own_save", "forgetting",
)  # fmt: skip


def ejected(script, folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "hf_compat", "eject", *words, script, "--output_dir", folder / "out"]
    return subprocess.run(
        [*map(str, command), str(folder / "project")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.parametrize("name", [*PROVED[:1], *(pytest.param(name, marks=pytest.mark.matrix) for name in PROVED[1:])])
def test_a_project_is_proved_and_says_so(name, tmp_path):
    done = ejected(HERE / "scripts" / f"{name}.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    proof = next(line for line in done.stdout.splitlines() if line.startswith("proof: "))
    assert proof.endswith("equal, bit for bit") and " updates" in proof
    assert proof.removeprefix("proof: ") in (tmp_path / "project" / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["project"]
    assert not (tmp_path / "project" / "output").exists()


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("labels = inputs[", "The project failed within its first 6 updates: NotImplementedError: "),
        pytest.param("if self.args.should_save", "6 updates: equal, bit for bit", marks=pytest.mark.matrix),
    ],
)
def test_what_cannot_be_taken_over_is_left_with_its_place_and_the_exit_status_says_so(line, verdict, tmp_path):
    """An error within a helper of a method is a finding, not a traceback, and the other methods are taken over."""
    text = (HERE / "scripts" / "decorated_helper.py").read_text()
    text = text.replace(line, f"FACTOR.value\n        {line}")
    text = text.replace(
        "class FocalTrainer",
        "import multiprocessing\n\nFACTOR = multiprocessing.Value('d', 1.0)\n\n\nclass FocalTrainer",
    )
    for name in ("helpers_of_scripts.py", "tiny.py"):
        (tmp_path / name).write_text((HERE / "scripts" / name).read_text())
    (tmp_path / "script.py").write_text(text)
    done = ejected(tmp_path / "script.py", tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"proof: {verdict}" in done.stdout
    method = "compute_loss" if "labels" in line else "save_model"
    assert f"`FocalTrainer.{method}` ({tmp_path / 'script.py'}:" in done.stdout and "'FACTOR' in " in done.stdout


def row(**other):
    return {"batch": "b", "result": "r", "loss": [0.5], "rate": [0.1], "weights": "w", **other}


def written(folder, name, rows, metrics=None, weights=(1.0, 2.0)):
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"rows": rows, "metrics": metrics or {}}))
    torch.save({"weight": torch.tensor(weights)}, f"{path}.pt")
    return path


@pytest.mark.parametrize(
    ("here", "told"),
    [
        (row(batch="c", weights="v"), "Update 2 differs: the model is given other batches"),
        (row(result="s", loss=[0.6], weights="v"), "mode or random numbers): loss [0.5] in the script, [0.6]"),
        (row(rate=[0.2], weights="v"), "the learning rates are [0.1] in the script, [0.2] in the project"),
        (row(weights="v"), "are equal, and the new weights are not"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(here, told, tmp_path):
    theirs = written(tmp_path, "script", [row(), row()])
    proof = _compared(theirs, written(tmp_path, "project", [row(), here], weights=(1.0, 1.5)), ())
    assert proof.verdict == "differs" and not proof.holds
    assert told in proof.told and "After 2 updates the weights differ by 0.2 of the largest one" in proof.told


@pytest.mark.parametrize(
    ("weights", "rate", "inexact", "verdict"),
    [
        ((1.0, 2.0001), [0.1], ("it is added up in another order",), "close"),
        ((1.0, 2.0001), [0.1], (), "differs"),
        ((1.0, 2.1), [0.1], ("it is added up in another order",), "differs"),
        ((1.0, 2.0001), [0.2], ("it is added up in another order",), "differs"),
    ],
)
def test_rounding_is_accepted_only_where_the_project_announces_it(weights, rate, inexact, verdict, tmp_path):
    theirs = written(tmp_path, "script", [row()])
    mine = written(tmp_path, "project", [row(weights="v", rate=rate)], weights=weights)
    assert _compared(theirs, mine, inexact).verdict == verdict


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"eval_loss": 0.25, "eval_f1": float("nan")}, None),
        ({"eval_loss": 0.5, "eval_f1": float("nan")}, "eval_loss is 0.25 in the script, 0.5 in the project"),
        ({"eval_loss": 0.25}, "eval_f1 is nan in the script, not there in the project"),
    ],
)
def test_metrics_are_compared(metrics, told, tmp_path):
    theirs = written(tmp_path, "script", [row()], {"eval_loss": 0.25, "eval_f1": float("nan")})
    proof = _compared(theirs, written(tmp_path, "project", [row()], metrics), ())
    if told is None:
        assert proof == Proof("equal", "1 update and an evaluation (eval_loss, eval_f1): equal, bit for bit")
    else:
        assert proof.verdict == "differs" and told in proof.told


def test_fewer_updates_differ(tmp_path):
    theirs = written(tmp_path, "script", [row(), row()])
    proof = _compared(theirs, written(tmp_path, "project", [row()]), ())
    assert proof == Proof("differs", "The project makes 1 updates where the script makes 2.")


def test_a_script_that_fails_proves_nothing(tmp_path):
    (tmp_path / "script.py").write_text("raise ValueError('no data')")
    (tmp_path / "project").mkdir()
    proof = prove(tmp_path / "project", [str(tmp_path / "script.py")], os.environ, 2, ())
    assert proof.verdict == "failed" and not proof.holds
    assert proof.told.startswith("The script itself failed within its first 2 updates: ") and "no data" in proof.told


def test_how_many_updates_are_watched():
    counts = [RunCounts(3, updates, 8, 24.0, 4, updates, 900) for updates in (2, 5, 30, 31)]
    assert [updates_to_watch(one) for one in counts] == [5, 6, 31, 5]
