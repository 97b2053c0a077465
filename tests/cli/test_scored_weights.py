"""`--ckpt_path`: `validate`, `test` and `predict` score a run's weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from hf_compat.cli.main import main

ROOT = Path(__file__).resolve().parent.parent.parent
CHANGED = ("_runtime", "_per_second", "_preparation_time", "epoch")
DATA = """
from helpers.toy import Classifier, rows

def train(): return rows(48)
def held_out(): return rows(24, 1)
def accuracy(p): return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}
def wider(): return Classifier(classes=5)

class Deeper(Classifier):
    def __init__(self):
        super().__init__()
        from torch import nn
        self.further = nn.Linear(2, 2)
"""
ADAPTED = """
from peft import LoraConfig, get_peft_model
from helpers.toy import blocks
from transformers import AutoModelForCausalLM

def data(): return blocks(16)
def model():
    base = AutoModelForCausalLM.from_pretrained("pretrained")
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=True))
"""
CONFIG = {
    "model": {"class_path": "helpers.toy.Classifier"},
    "data": {"train_dataset": "scored.train", "eval_dataset": "scored.held_out", "test_dataset": "scored.held_out"},
    "compute_metrics": "scored.accuracy",
    "args": {
        "output_dir": "out", "num_train_epochs": 2, "learning_rate": 1e-2, "eval_strategy": "epoch",
        "save_strategy": "epoch", "metric_for_best_model": "accuracy", "use_cpu": True, "disable_tqdm": True,
        "report_to": "none",
    },
}  # fmt: skip


def numbers(folder, name):
    read = json.loads((Path(folder) / f"{name}_results.json").read_text())
    return {key.partition("_")[2]: value for key, value in read.items() if not key.endswith(CHANGED)}


def files(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    sys.modules.pop("scored", None)
    (tmp_path / "scored.py").write_text(DATA)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


@pytest.fixture
def trained(project):
    assert main(["fit", "-c", "run.yaml"]) == 0
    return project / "out"


@pytest.mark.matrix
def test_fit_validate_test_and_predict_of_the_digits_give_the_same_numbers(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")

    def run(*words):
        command = [sys.executable, "-m", "hf_compat", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("fit", "--config", "examples/digits.yaml", "--output_dir", "out", "--num_train_epochs", "3")
    out = tmp_path / "out"
    before = files(out)
    of_fit = numbers(out, "eval")
    assert of_fit["accuracy"] > 0.8
    told = run("validate", "--config", "out/config.yaml", "--ckpt_path", "best")
    assert "weights: out/checkpoint-132" in told
    run("validate", "--config", "out/config.yaml", "--ckpt_path", "out/checkpoint-132", "--output_dir", "again")
    assert numbers(tmp_path / "again", "eval") == of_fit
    for command in ("test", "predict"):
        run(command, "--config", "out/config.yaml", "--ckpt_path", "last")
        assert numbers(out, command) == of_fit
    predicted = np.load(out / "predictions.npz")
    assert float((predicted["predictions"].argmax(-1) == predicted["labels"]).mean()) == of_fit["accuracy"]
    together = json.loads((out / "all_results.json").read_text())
    assert {"train_loss", "eval_loss", "test_loss", "predict_loss"} <= together.keys()
    after = files(out)
    changed = {path.name for path in before if after[path] != before[path]}
    assert changed == {"eval_results.json", "all_results.json"}  # with other times


@pytest.mark.parametrize("form", ["folder", "last", "true", "ckpt", "final", "weights alone"])
def test_every_form_of_a_checkpoint(form, trained, capsys):
    of_fit = numbers(trained, "eval")
    path = {"folder": "out/checkpoint-12", "ckpt": "it.ckpt", "final": "out"}.get(form, form)
    if form == "weights alone":
        (trained.parent / form).mkdir()
        shutil.copy(trained / "checkpoint-12" / "model.safetensors", form)
    if form == "ckpt":
        assert main(["convert", "out/checkpoint-12", "it.ckpt"]) == 0
    assert main(["validate", "-c", "run.yaml", f"--ckpt_path={path}"]) == 0
    assert numbers(trained, "eval") == of_fit


def test_a_scored_checkpoint_replaces_the_results_of_the_fit(trained, capsys):
    assert main(["validate", "-c", "run.yaml", "--ckpt_path", "out/checkpoint-6"]) == 0
    assert "eval_loss" in capsys.readouterr().out
    kept = json.loads((trained / "eval_results.json").read_text())
    history = json.loads((trained / "trainer_state.json").read_text())["log_history"]
    (first,) = [log for log in history if log.get("epoch") == 1.0 and "eval_loss" in log]
    for name in ("eval_loss", "eval_accuracy", "epoch"):
        assert kept[name] == first[name], name
    together = json.loads((trained / "all_results.json").read_text())
    assert together["eval_loss"] == kept["eval_loss"] and "train_loss" in together


def test_predictions_report_metrics_under_the_name_of_the_command(trained, capsys):
    assert main(["predict", "-c", "run.yaml", "--ckpt_path", "last"]) == 0
    assert "predict_loss" in capsys.readouterr().out
    assert (
        json.loads((trained / "predict_results.json").read_text())["predict_loss"] == numbers(trained, "eval")["loss"]
    )


def test_the_best_is_the_one_that_the_run_knows(trained, capsys):
    state = json.loads((trained / "checkpoint-12" / "trainer_state.json").read_text())
    assert main(["validate", "-c", "run.yaml", "--ckpt_path", "best"]) == 0
    assert f"weights: {state['best_model_checkpoint']}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "has no `--ckpt_path`: it would score the untrained weights"),
        (["--ckpt_path", "out/checkpoint-7"], "does not exist.\n\nHint: there are out/checkpoint-6, out/checkpoint-12"),
        (["--resume_from_checkpoint", "out/checkpoint-12"], "Hint: `hf-compat {} --ckpt_path out/checkpoint-12`"),
        (["--resume_from_checkpoint", "true", "--ckpt_path", "last"], "`resume_from_checkpoint='true'` is for `fit`"),
        (["--ckpt_path", "hpc"], "is a value of Lightning's"),
        (["--ckpt_path", "best", "--output_dir", "other"], "other has no complete checkpoint"),
        (["--ckpt_path", "run.yaml"], "run.yaml cannot be read"),
        (["--ckpt_path", "empty"], "empty cannot be scored: trainer_state.json is missing"),
        (["--ckpt_path", "last", "--model", "scored.wider"], "does not fit the model"),
        (["--ckpt_path", "last", "--model", "scored.Deeper"], "lacks 2 weights of the model: further.bias, further.w"),
    ],
)  # fmt: skip
def test_what_is_not_there_or_not_whole_is_told_before_anything_is_scored(
    words, message, command, project, tmp_path_factory, capsys
):
    (project / "empty").mkdir()
    kept = tmp_path_factory.getbasetemp() / "trained_once"
    if not kept.exists():
        assert main(["fit", "-c", "run.yaml"]) == 0
        shutil.copytree(project / "out", kept)
    shutil.copytree(kept, project / "out", dirs_exist_ok=True)
    before = files("out")
    capsys.readouterr()
    assert main([command, "-c", "run.yaml", *words]) == 2
    told = capsys.readouterr()
    assert message.format(command) in told.err and "metrics" not in told.out and files("out") == before


def test_the_weights_that_the_model_makes_are_scored_on_request(project, capsys):
    assert main(["validate", "-c", "run.yaml", "--ckpt_path", "initial"]) == 0
    assert "weights: those that `model` makes; no checkpoint of a run is loaded" in capsys.readouterr().out
    assert numbers(project / "out", "eval")["loss"] > 0


def test_a_pretrained_model_is_scored_as_it_is_and_the_command_says_so(project, capsys):
    from helpers.toy import tiny_gpt2

    tiny_gpt2().save_pretrained("pretrained")
    (project / "scored.py").write_text("from helpers.toy import blocks\ndef held_out(): return blocks(8)\n")
    model = {
        "class_path": "transformers.AutoModelForCausalLM.from_pretrained",
        "init_args": {"pretrained_model_name_or_path": "pretrained"},
    }
    config = {"model": model, "data": {"eval_dataset": "scored.held_out"}, "args": CONFIG["args"]}
    (project / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["validate", "-c", "run.yaml"]) == 0
    told = capsys.readouterr().out
    assert "AutoModelForCausalLM.from_pretrained of pretrained; no checkpoint of a run is loaded" in told


def test_fit_goes_on_from_a_ckpt_path(trained, capsys):
    whole = torch.load(trained / "checkpoint-12" / "optimizer.pt", weights_only=True)
    shutil.rmtree(trained / "checkpoint-12")
    for path in ("last", "out/checkpoint-6"):
        assert main(["fit", "-c", "run.yaml", "--ckpt_path", path, "--output_dir", "out"]) == 0
        again = torch.load(trained / "checkpoint-12" / "optimizer.pt", weights_only=True)
        assert all(torch.equal(again["state"][i]["exp_avg"], whole["state"][i]["exp_avg"]) for i in whole["state"])
    kept = yaml.safe_load((trained / "config-3.yaml").read_text())
    assert kept["args"]["resume_from_checkpoint"] == "out/checkpoint-6" and "ckpt_path" not in kept
    assert main(["validate", "-c", "out/config-3.yaml", "--ckpt_path", "last"]) == 0
    words = ["--ckpt_path", "last", "--resume_from_checkpoint", "out/checkpoint-6"]
    assert main(["fit", "-c", "run.yaml", *words]) == 2
    assert "name two checkpoints to resume from" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_an_adapter_is_scored(project):
    from helpers.toy import tiny_gpt2

    tiny_gpt2().save_pretrained("pretrained")
    (project / "scored.py").write_text(ADAPTED)
    arguments = {**CONFIG["args"], "metric_for_best_model": "loss"}
    data = {"train_dataset": "scored.data", "eval_dataset": "scored.data"}
    (project / "run.yaml").write_text(yaml.safe_dump({"model": "scored.model", "data": data, "args": arguments}))
    assert main(["fit", "-c", "run.yaml"]) == 0
    of_fit = numbers("out", "eval")
    assert main(["validate", "-c", "run.yaml", "--ckpt_path", "last", "--seed", "3", "--output_dir", "again"]) == 2
    words = ["--ckpt_path", "out/checkpoint-4", "--seed", "3", "--output_dir", "again"]
    assert main(["validate", "-c", "run.yaml", *words]) == 0
    assert numbers("again", "eval") == of_fit
