"""`hf-compat check` as a shell calls it: what it says of scripts, its exit status, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import user_scripts

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"

HEAD = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from helpers import toy
from transformers import Trainer, TrainingArguments
print("said by the script")

def options(**more):
    return {{"use_cpu": True, "report_to": "none", "max_steps": 6, "logging_steps": 2, **more}}

def train(output_dir="made_by_nobody", **more):
    args = TrainingArguments(output_dir, **options(**more))
    Trainer(toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(8)).train()
"""
# What a script says in its last lines, its exit status, and words of the answer.
SCRIPTS = {
    "fine": ("train(save_strategy='no')", 0, "nothing found"),
    "noted": (
        "train(save_strategy='no')\nif training_args.local_rank == 0: pass",
        0,
        "`training_args.local_rank == 0`",
    ),
    "wrong": (
        "train(None, eval_strategy='steps', eval_steps=2, metric_for_best_model='f1', push_to_hub=True, save_steps=2, "
        "warmup_steps=90, resume_from_checkpoint='not there')",
        1,
        "eval_f1",
    ),
    "refused": ("train(eval_strategy='epoch', load_best_model_at_end=True, save_strategy='steps')", 1, "arguments"),
    "failing": ("raise KeyError('by itself')", 2, "by itself"),
    "leaving": ("sys.exit('not today')", 2, "not today"),
    "asking": ("input()", 2, "input"),
    "never": ("print('no training')", 2, "never called"),
}
SAMPLE = {"wrong"}


def run(folder, *words, is_at_home=True):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_TOKEN", "WANDB"))}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    if is_at_home:
        environment["HOME"] = str(folder / "home")  # packages read it at their import: a fork will not do
    return subprocess.run(
        [sys.executable, "-m", "hf_compat", "check", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )


def files_below(folder):
    """List the files below a folder; caches of other packages in the user's own are theirs."""
    found = {os.path.join(place, name) for place, _, names in os.walk(folder) for name in names}
    return {path for path in found if f"{os.sep}.cache{os.sep}" not in path}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.matrix) for name in SCRIPTS]
)
def test_a_script_is_checked(name, tmp_path):
    lines, status, words = SCRIPTS[name]
    (tmp_path / "home").mkdir()
    (tmp_path / f"{name}.py").write_text(HEAD + lines)
    before = files_below(tmp_path)
    found = run(tmp_path, "--json", f"{name}.py", is_at_home=name not in SAMPLE)
    assert found.returncode == status, found.stderr
    told = json.loads(found.stdout)
    assert words in found.stdout or words in found.stderr or (words == "nothing found" and told["ok"])
    assert "said by the script" in found.stderr and told["ok"] is (status == 0)
    assert files_below(tmp_path) == before
    if name == "wrong":
        assert {one["check"] for one in told["findings"]} == {"metric name", "hub", "schedule"}
        assert f"free in {tmp_path}" in found.stdout  # where the run's own folder will be


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in user_scripts.SCRIPTS if name != "two_processes"])
def test_scripts_that_are_fine_are_found_to_be(name, tmp_path):
    (tmp_path / "home").mkdir()
    found = run(tmp_path, user_scripts.path_of(name), *user_scripts.SCRIPTS[name], "--output_dir", "out")
    assert found.returncode == 0, found.stdout + found.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.matrix
def test_several_processes_check_together(tmp_path):
    (tmp_path / "home").mkdir()
    path = user_scripts.path_of("two_processes")
    found = run(tmp_path, "--devices", "2", "--json", path, "--output_dir", "out")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "2 processes by ddp" in found.stdout and not (tmp_path / "out").exists()


@pytest.mark.matrix
def test_a_label_that_one_process_meets_does_not_let_the_other_wait(tmp_path):
    (tmp_path / "home").mkdir()
    lines = """
rows = toy.rows()
rows[5]["labels"] = 77  # of the second process's first batch
more = {"per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"}
Trainer(toy.Classifier(), TrainingArguments("out", **options(**more)), train_dataset=rows).train()
"""
    (tmp_path / "labels.py").write_text(HEAD + lines)
    found = run(tmp_path, "--devices", "2", "--json", "labels.py")
    assert found.returncode == 1, found.stderr
    told = json.loads(found.stdout)
    errors = [one["problem"] for one in told["findings"] if one["severity"] == "error"]
    assert len(errors) == 1 and errors[0].startswith("rank 1: ") and "out of bounds" in errors[0]


def test_there_is_no_such_script(tmp_path):
    from hf_compat.tools.commands.check import main

    assert main([str(tmp_path / "nothing.py")]) == 2
