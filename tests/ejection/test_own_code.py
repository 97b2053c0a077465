"""What a script does in classes of its own: the project does it, bit for bit, or says where it is left to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.ejection_outcomes import differences

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUTCOMES = Path(__file__).resolve().parents[1] / "helpers" / "ejection_outcomes.py"
# In the style of scripts for 4.x; each is the project's bit for bit. `save_override` leaves a push to the Hub to do.
SCRIPTS = ("distillation", "evaluate_metric")
MORE_SCRIPTS = (
    "callback_class", "log_override", "multitask", "one_name", "own_sampler", "prediction_override", "save_override",
    "weighted",
)  # fmt: skip
STATUS = {"save_override": 1}


def run(*words, folder, status=0):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, done.stderr


def ejected(script, *arguments, folder, status=0):
    words = (
        "-m",
        "hf_compat",
        "eject",
        "--updates",
        "0",
        script,
        *arguments,
        "--output_dir",
        folder / "out",
        folder / "project",
    )
    return run(*words, folder=folder, status=status)


def check_the_same(script, folder, status=0):
    ejected(script, folder=folder, status=status)
    run(OUTCOMES, "trained", script, "--output_dir", folder / "out", folder=folder)
    run(OUTCOMES, "ejected", folder=folder / "project")
    found = differences(folder, folder / "project")
    assert "weights" in found and "loss" in found and set(found.values()) == {0.0}, found


@pytest.mark.parametrize("name", [*SCRIPTS, *(pytest.param(name, marks=pytest.mark.matrix) for name in MORE_SCRIPTS)])
def test_a_script_with_code_of_its_own_bit_for_bit(name, tmp_path):
    check_the_same(HERE / "scripts" / f"{name}.py", tmp_path, STATUS.get(name, 0))
    if name == "save_override":
        for folder in ("checkpoint-3", "checkpoint-6", "checkpoint-7", "model"):
            saved = tmp_path / "project" / "output" / folder
            assert sorted(path.name for path in saved.iterdir()) == ["head.bin", "labels.json"]
            assert json.loads((saved / "labels.json").read_text()) == ["first", "second", "third"]


LEFT = """
import logging
import sys
import torch
from datasets import Dataset
from tiny import Net, rows
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments


class Restless(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = True


class Unusual(Trainer):
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        loader = self.get_eval_dataloader(eval_dataset)
        return self.evaluation_loop(loader, description="here").metrics

    def get_batch_samples(self, *args, **kwargs):
        return super().get_batch_samples(*args, **kwargs)

    def create_model_card(self, *args, **kwargs):
        pass


def prepared(self, data):
    return data


Trainer._prepare_input = prepared
Trainer.compute_loss = lambda self, model, inputs, return_outputs=False, **_: model(**inputs).loss
logging.basicConfig(level=logging.INFO)
for _ in tqdm(range(3)):
    logging.info("a page of it")
Dataset.from_list([{"a": 1}] * 9).map(lambda row: row)
logging.warning("a warning")
args = TrainingArguments(
    sys.argv[2], max_steps=2, eval_strategy="epoch", report_to="none", save_strategy="no", lr_scheduler_type="greedy"
)
Unusual(Net(), args, train_dataset=rows(16), eval_dataset=rows(4), callbacks=[Restless]).train()
"""


def test_what_is_left_to_do_stands_where_it_belongs(tmp_path):
    (tmp_path / "tiny.py").write_text((HERE / "scripts" / "tiny.py").read_text())
    script = tmp_path / "unusual.py"
    script.write_text(LEFT)
    told, shown = ejected(script, folder=tmp_path, status=1)
    assert shown.index("runs up to its first `train()`") < shown.index("a warning")
    assert "a warning" in shown and "a page of it" not in shown and "%|" not in shown
    todos = told[told.index("left to do: 7") :].splitlines()[1:]
    for todo in todos:
        place, _, text = todo.strip().partition(": ")
        file, _, line = place.partition(":")
        written = (tmp_path / "project" / file).read_text().splitlines()
        assert written[int(line) - 1].strip() == f"# TODO: {text}"
        raises = "raise NotImplementedError" in written[int(line)]
        assert raises == ("create_model_card" not in text), text
    places = {
        "`Unusual.evaluate`": "user_code.py", "`Unusual.get_batch_samples`": "module.py",
        "`Trainer._prepare_input`": "module.py", "`Trainer.compute_loss`": "user_code.py",
        "`Unusual.create_model_card`": "module.py", "The callback Restless": "callbacks.py", "greedy": "module.py",
    }  # fmt: skip
    for what, file in places.items():
        (todo,) = [todo for todo in todos if what in todo]
        assert todo.strip().startswith(f"{file}:") and "Lightning has" in todo
        assert f"{script}:" in todo or what == "greedy"
        assert todo.strip().partition(": ")[2] in (tmp_path / "project" / "README.md").read_text()


TIED = """
import argparse

import torch
from tiny import rows
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments


class Tied(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, first, heads):
        super().__init__(PretrainedConfig())
        self.first, self.heads = first, nn.ModuleDict(heads)

    def forward(self, x, labels=None):
        logits = self.heads["a"](x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Loads(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
head = nn.Linear(8, 3)
args = TrainingArguments(parser.parse_args().output_dir, max_steps=2, report_to="none", save_strategy="no")
Loads(Tied(head, {"a": head}), args, train_dataset=rows(16)).train()
"""


@pytest.mark.matrix
def test_a_model_that_shares_weights_in_its_own_way_is_left_to_do(tmp_path):
    """As multi-task scripts have it; saved as a model of transformers it ends in a RuntimeError."""
    (tmp_path / "tiny.py").write_text((HERE / "scripts" / "tiny.py").read_text())
    script = tmp_path / "tied.py"
    script.write_text(TIED)
    told, _ = ejected(script, folder=tmp_path, status=1)
    loader, model = told[told.index("left to do: 2") :].splitlines()[1:3]
    assert (
        loader.startswith("  data.py:")
        and f"a DataLoader ({script}:{TIED[: TIED.index('def get_train')].count(chr(10)) + 1})" in loader
    )
    assert model.startswith("  model.py:") and "shared tensors" in model and "some of its weights were tied" in model
