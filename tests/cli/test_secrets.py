"""A token on the command line or in a file reaches the run, and neither the disk nor the screen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from hf_compat import TrainingArguments
from hf_compat.cli.main import main
from hf_compat.errors import UnknownArgument
from hf_compat.tools.explanation import explain

TESTS = Path(__file__).resolve().parent.parent
SECRET = "hf_aSecretOfMine"
PROJECT = """
from helpers import toy

def data(token=None):
    return toy.rows()

class Check:
    def on_train_begin(self, args, state, control, **kwargs):
        assert args.hub_token == "%s", "the run itself gets the token"
        open(args.output_dir + "/stamp", "w").write("seen")
"""
CONFIG = {
    "model": {"class_path": "helpers.toy.Classifier"},
    "data": {"train_dataset": {"class_path": "project.data", "init_args": {"token": SECRET}}},
    "callbacks": ["project.Check"],
    "args": {
        "output_dir": "out", "max_steps": 2, "save_steps": 1, "save_strategy": "steps", "logging_steps": 1,
        "use_cpu": True, "report_to": ["tensorboard"],
    },
}  # fmt: skip


@pytest.fixture
def project(tmp_path):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "toy.py").write_text((TESTS / "helpers" / "toy.py").read_text())
    (tmp_path / "project.py").write_text(PROJECT % SECRET)
    return tmp_path


def fit(folder, config, *words):
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "hf_compat.cli.main", "fit", "--config", "run.yaml", *words],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert SECRET not in done.stdout + done.stderr
    return done


def holding_the_secret(folder):
    return [str(path) for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("way", ["option", "section", "file", "old name"])
def test_a_token_is_neither_written_nor_printed(project, way):
    words = {"option": ["--hub_token", SECRET], "section": [f"--args.hub_token={SECRET}"]}.get(way, [])
    names = {"file": {"hub_token": SECRET}, "old name": {"push_to_hub_token": SECRET}}.get(way, {})
    done = fit(project, {**CONFIG, "args": {**CONFIG["args"], **names}}, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    out = project / "out"
    written = {path.name for path in out.rglob("*")}
    assert {"stamp", "config.yaml", "trainer_state.json", "training_args.bin", "checkpoint-2"} <= written
    assert any("tfevents" in name for name in written), "the tracker's configuration is looked at as well"
    assert holding_the_secret(out) == []
    kept = yaml.safe_load((out / "config.yaml").read_text())
    assert kept["args"].get("hub_token") is None and kept["args"]["max_steps"] == 2
    assert not kept["data"]["train_dataset"]["init_args"].get("token")


def test_a_printed_configuration_has_no_token(project):
    done = fit(project, CONFIG, "--hub_token", SECRET, "--print_config")
    assert done.returncode == 0 and yaml.safe_load(done.stdout)["args"]["max_steps"] == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, ["--hub_tokn", SECRET]),
        ({}, [f"--hub-toke={SECRET}"]),
        ({"hub_token": [SECRET]}, []),
        ({"max_steps": "x"}, ["--hub_token", SECRET]),
    ],
)
def test_mistakes_do_not_print_a_token(project, args, words):
    done = fit(project, {**CONFIG, "args": {**CONFIG["args"], **args}}, *words)
    assert done.returncode == 2 and "Hint" in done.stderr, done.stderr


def test_messages_about_arguments_hide_tokens(capsys):
    for wrong in ({"hub_tokn": SECRET}, {"access_token": SECRET}):
        with pytest.raises(UnknownArgument) as caught:
            TrainingArguments("out", use_cpu=True, **wrong)
        assert SECRET not in str(caught.value)
    with pytest.raises(ValueError, match="hub_token") as caught:
        TrainingArguments("out", use_cpu=True, hub_token="other", push_to_hub_token=SECRET)
    assert SECRET not in str(caught.value)
    assert main(["explain", "use_cpu=true", f"hub_token={SECRET}"]) == 0
    assert SECRET not in capsys.readouterr().out


def test_views_of_the_arguments_hide_tokens(tmp_path):
    args = TrainingArguments("out", use_cpu=True, hub_token=SECRET)
    torch.save(args.to_dict(), tmp_path / "args")
    views = [
        repr(args),
        args.to_json_string(),
        str(args.to_sanitized_dict()),
        str(explain(args)),
        explain(args).to_json(),
    ]
    assert not any(SECRET in view for view in views) and holding_the_secret(tmp_path) == []
    assert args.hub_token == SECRET
