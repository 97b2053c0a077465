"""`doctor` and `migrate` read sources in an environment that has no torch, and say there what they say beside it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_compat.cli.main import COMMANDS, main

pytestmark = pytest.mark.real_python

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["tests/migration/scripts/kinds", "examples/transformers_to_lightning.ipynb"]
# Arguments whose checks ask machines, devices and stores for more, where arguments are made
ARGUMENTS = """
from transformers import TrainingArguments

TrainingArguments("s3://bucket/run", dataloader_num_workers=4, bf16=True, tf32=True, optim="adamw_hf", eval_steps=0.1)
TrainingArguments("out", fp16=True, bf16=True, fsdp="full_shard", deepspeed={"zero_optimization": None})
TrainingArguments("out", load_best_model_at_end=True, save_steps=3, evaluation_strategy="steps", eval_steps=2)
TrainingArguments("out", parallelism_config=None, report_to=["wandb"], lr_scheduler_kwargs={"a": float("nan")})
TrainingArguments("out", learning_rate="fast", warmup_ratio=2, logging_dir="gs://bucket/logs", hub_model_id="a b")
"""
NEEDED = ("libcst", "yaml", "fsspec")  # docs/command_migrate.md: "Without torch"


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """Make a function that runs Python with the packages of `NEEDED` and some others, and no others."""

    def run(*words, beside=(), script=("-m", "hf_compat")):
        folder = tmp_path_factory.mktemp("packages")
        for name in (*NEEDED, *beside):
            place = Path(importlib.util.find_spec(name).origin).parent
            (folder / place.name).symlink_to(place)
        paths = os.pathsep.join([str(ROOT), str(folder)])
        return subprocess.run(
            [sys.executable, "-S", *script, *words],
            cwd=ROOT, env={"PATH": os.environ["PATH"], "PYTHONPATH": paths}, capture_output=True, text=True,
        )  # fmt: skip

    return run


IN_ONE_PROCESS = (
    "-c",
    "import sys\nfrom hf_compat.cli.main import main\nstatus = main(sys.argv[1:])\n"
    "assert 'transformers' not in sys.modules\nsys.exit(status)",
)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("doctor", "`fp16` and `bf16` are both on"),
        ("doctor --json --to transformers-5", "evaluation_strategy"),
        ("migrate", "+TrainingArguments("),
    ],
)
def test_the_answers_are_those_beside_torch(words, told, light, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    (tmp_path / "arguments.py").write_text(ARGUMENTS)
    words = [*words.split(), *SCRIPTS, str(tmp_path / "arguments.py")]
    expected = main(words), *capsys.readouterr()
    found = light(*words, beside=("transformers",), script=IN_ONE_PROCESS)
    assert (found.returncode, found.stdout, found.stderr) == expected
    assert told in found.stdout and found.stdout.count("\n") > 40


def test_without_transformers_no_names_are_looked_up(light):
    found = light("doctor", *SCRIPTS)
    assert (found.returncode, found.stderr) == (1, "")
    assert "TrainingArguments" in found.stdout and "no names looked up" in found.stdout.splitlines()[-1]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("doctor", "migrate")])
def test_other_commands_say_that_they_need_torch(command, monkeypatch, capsys):
    from hf_compat.cli import main as module

    monkeypatch.setattr(module, "is_installed", lambda name: name != "torch")
    assert main([command, "--help"]) == 2
    assert capsys.readouterr().err == (
        f"`hf-compat {command}` needs torch. Only doctor and migrate do without.\n\n"
        "Hint: install this package with its dependencies, `pip install -e .` in a clone.\n"
    )
