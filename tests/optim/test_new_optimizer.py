"""An optimizer of ours is a name and an entry. A copy of the package gets one more, and the tests of the table pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAME = ("hf/enums.py", "OWN_OPTIMIZERS: tuple[str, ...] = (", 'OWN_OPTIMIZERS: tuple[str, ...] = ("adamax", ')
ENTRY = (
    "optim/optimizers.py",
    "    # Their states take 8 or 4 bits",
    '    "adamax": _torchs("Adamax", 2, with_adam, foreach=_SWITCH),\n    # Their states take 8 or 4 bits',
)
SCRIPT = """
import sys
import torch
from helpers.toy import Classifier, rows
import hf_compat
from hf_compat.hub.model_card import CardArguments
from hf_compat.optim.optimizers import state_bytes

folder = sys.argv[1]
args = hf_compat.TrainingArguments(folder, optim="adamax", optim_args="foreach=false", adam_beta1=0.8, max_steps=2,
                                   save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
trainer = hf_compat.Trainer(Classifier(), args, train_dataset=rows(16))
trainer.train()
trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
made = trainer.optimizer.optimizer
assert isinstance(made, torch.optim.Adamax) and made.defaults["betas"][0] == 0.8 and not made.defaults["foreach"]
assert hf_compat.TrainingArguments(**args.to_dict()).optim == args.to_dict()["optim"] == "adamax"
assert CardArguments(args).optim == "adamax"
assert state_bytes("adamax", None) == 8 and "`optim='adamax'` does not" not in str(hf_compat.explain(args))
try:
    hf_compat.TrainingArguments(folder, optim="adamaxx")
except ValueError as error:
    assert "did you mean 'adamax'" in str(error)
"""
# Those that compare the table with transformers' names.
COMPARED = (
    "optim/test_optimizer_table.py",
    "hf/test_count_support.py",
    "hf/test_arguments.py::test_enums_have_upstreams_members_in_its_order",
)


@pytest.mark.matrix
@pytest.mark.real_python
def test_a_name_and_an_entry_are_all_that_an_optimizer_of_ours_takes(tmp_path):
    copy = tmp_path / "repository"
    for folder in ("hf_compat", "tests"):
        shutil.copytree(
            Path(__file__).parents[2] / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "sweeps")
        )
    shutil.copy(Path(__file__).parents[2] / "pyproject.toml", copy)
    for name, before, after in (NAME, ENTRY):
        file = copy / "hf_compat" / name
        text = file.read_text()
        assert text.count(before) == 1
        file.write_text(text.replace(before, after))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "tests")])}
    commands = (
        ["-c", SCRIPT, str(tmp_path / "out")],
        ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *(f"tests/{name}" for name in COMPARED)],
    )
    for command in commands:
        run = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, cwd=copy
        )
        assert run.returncode == 0, run.stdout + run.stderr
