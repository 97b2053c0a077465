"""`hf-compat explain SCRIPT`: the arguments of its Trainer, without training and without a file left."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers import user_scripts
from hf_compat.cli.main import main


def explained(folder, *words):
    command = [sys.executable, "-m", "hf_compat", "explain", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_a_script_is_explained_by_its_trainer(tmp_path):
    done = explained(tmp_path, "--json", user_scripts.path_of("custom_loss"), "--batch_size", "12")
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["trainer"] == "WeighingTrainer" and told["model"] == "Classifier, 547 parameters"
    assert told["run"] == "36 updates in 3 epoch(s) of 12, 12 samples each"
    values = {one["name"]: one["value"] for one in told["arguments"]}
    assert values["per_device_train_batch_size"] == 12 and values["max_grad_norm"] == 0.5 and "output_dir" not in values
    assert told["plan"]["max_epochs"] == 3 and list(tmp_path.iterdir()) == []


@pytest.mark.matrix
def test_a_script_that_never_trains_and_one_for_many_processes(tmp_path):
    (tmp_path / "never.py").write_text("import transformers")
    done = explained(tmp_path, "never.py")
    assert done.returncode == 2 and "never called `train()`" in done.stderr
    done = explained(tmp_path, "--world-size", "4", user_scripts.path_of("plain_module"))
    assert done.returncode == 0 and "over 4 processes" in done.stdout


def test_a_script_that_is_not_there_is_named(capsys):
    assert main(["explain", "absent.py", "--x"]) == 2
    assert "There is no script absent.py" in capsys.readouterr().err
