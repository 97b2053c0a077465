"""A first run of each door, in a process of its own: stderr has no warning that is not the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import sys; sys.path.insert(0, {tests!r})
import lightning, torch
from helpers import toy
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from torch.utils.data import DataLoader
"""
OURS = """
args = TrainingArguments("out", per_device_train_batch_size=4, eval_strategy="epoch", save_strategy="epoch")
trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(32), eval_dataset=toy.rows(16))
trainer.train()
trainer.evaluate()
trainer.predict(toy.rows(8))
"""
NATIVE = """
args = TrainingArguments(per_device_train_batch_size=4)
module = HFModule(toy.Classifier().eval(), args)
data = HFDataModule(args, toy.rows(32), toy.rows(16), toy.rows(16))
trainer = lightning.Trainer(max_epochs=2)
trainer.fit(module, data)
trainer.validate(module, data)
trainer.test(module, data)
trainer.predict(module, data)
"""
NO_VALIDATION = """
module = HFModule(toy.Classifier(), TrainingArguments(per_device_train_batch_size=4))
lightning.Trainer(max_epochs=1).fit(module, HFDataModule(None, toy.rows(32)))
loader = DataLoader(toy.rows(32), batch_size=4, num_workers=2, persistent_workers=True)
lightning.Trainer(max_epochs=1).fit(module, loader)
"""
CHECKPOINTS = """
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
module = HFModule(toy.Classifier(), TrainingArguments(per_device_train_batch_size=4))
callbacks = [ModelCheckpoint("kept", every_n_train_steps=4, save_top_k=-1), StochasticWeightAveraging(1e-3)]
lightning.Trainer(max_epochs=3, callbacks=callbacks).fit(module, HFDataModule(None, toy.rows(32), toy.rows(8)))
"""
TWO_PROCESSES = """
if __name__ == "__main__":
    module = HFModule(toy.Classifier(), TrainingArguments(per_device_train_batch_size=4, use_cpu=True))
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", strategy="ddp", devices=2)
    trainer.fit(module, HFDataModule(None, toy.rows(32), toy.rows(16), toy.rows(16)))
"""
CLI = """
from lightning.pytorch.cli import LightningCLI

class Module(HFModule):
    def __init__(self, lr: float = 0.01):
        super().__init__(toy.Classifier(), TrainingArguments(per_device_train_batch_size=4, learning_rate=lr))

class Data(HFDataModule):
    def __init__(self, size: int = 32):
        super().__init__(None, toy.rows(size), toy.rows(16), toy.rows(16))

LightningCLI(Module, Data, args=["fit", "--trainer.max_epochs=2"])
"""
DOORS = {"Trainer": OURS, "native": NATIVE, "no validation": NO_VALIDATION, "checkpoints": CHECKPOINTS,
         "two processes": TWO_PROCESSES, "LightningCLI": CLI}  # fmt: skip
CONFIG = """
model: {class_path: helpers.toy.Classifier}
data: {train_dataset: {class_path: helpers.toy.rows}, eval_dataset: {class_path: helpers.toy.rows}}
args: {output_dir: out, per_device_train_batch_size: 8, eval_strategy: epoch}
"""


def run(folder, words, **environment) -> str:
    tests = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    variables.pop("PYTHONWARNINGS", None)
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=300, env=variables
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def warnings_in(text: str) -> list[str]:
    words = ("warn", "deprecat", "recommend", "consider", "is not supported")
    return [line for line in text.splitlines() if any(word in line.lower() for word in words)]


@pytest.mark.parametrize("door", DOORS)
def test_a_first_run_prints_no_warning(tmp_path, door):
    (tmp_path / "script.py").write_text(HEAD.format(tests=str(Path(__file__).resolve().parents[1])) + DOORS[door])
    assert warnings_in(run(tmp_path, ["script.py"])) == []


def test_a_first_run_of_the_command_line_prints_no_warning(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    said = run(tmp_path, ["-m", "hf_compat", "fit", "--config", "config.yaml"])
    assert "eval_loss" in said and warnings_in(said) == []


def test_what_applies_to_other_modules_is_warned_of_once_the_run_is_over(tmp_path):
    script = (
        HEAD.format(tests=str(Path(__file__).resolve().parents[1]))
        + NO_VALIDATION
        + """
from lightning.pytorch.demos.boring_classes import BoringModel
class Other(BoringModel):
    val_dataloader = None
lightning.Trainer(max_epochs=1, limit_train_batches=1).fit(Other())
"""
    )
    (tmp_path / "script.py").write_text(script)
    assert "have no `val_dataloader`" in run(tmp_path, ["script.py"])
