"""Train a list of modules that saves and loads itself, as sentence-transformers does, in several processes.

    library_job.py FOLDER [name=value …]

Its Trainer's `_save` asks the model for its weights and leaves `state_dict` unread; `_load_from_checkpoint` loads a
whole model of the same class. One parameter never has a gradient. The first process writes `result.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers import toy
from helpers.jobs.job import BASE, value
from hf_compat import Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)


class Listed(nn.Sequential):
    """Modules in a row, each saved by itself; a file names the class."""

    def __init__(self):
        classifier = toy.Classifier(dropout=0.0)
        classifier.pooler = nn.Linear(3, 3)  # nothing calls it
        super().__init__(classifier)

    def forward(self, x, labels=None):
        return self[0](x=x, labels=labels)

    def save_pretrained(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(self[0].state_dict(), Path(folder, "0.safetensors"))
        Path(folder, "modules.json").write_text(json.dumps([type(self).__name__]))

    @classmethod
    def from_folder(cls, folder):
        model = cls()
        model[0].load_state_dict(load_file(Path(folder, "0.safetensors")))
        return model


class ListedTrainer(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        self.model.save_pretrained(output_dir)

    def _load_from_checkpoint(self, checkpoint_path):
        self.model.load_state_dict(type(self.model).from_folder(checkpoint_path).state_dict())


def main():
    folder, *words = sys.argv[1:]
    given = {name: value(text) for name, text in (word.split("=", 1) for word in words)}
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    args = TrainingArguments(folder, **{**BASE, "max_steps": 6, "logging_steps": 2, **best, **given})
    set_seed(5)
    trainer = ListedTrainer(Listed(), args, train_dataset=toy.rows(40), eval_dataset=toy.rows(8, seed=4))
    trainer.train()
    trainer.save_model(str(Path(folder, "final")))
    first = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")))  # the model is in parts by now
    again = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    if os.environ.get("RANK", "0") == "0":
        best = Path(trainer.state.best_model_checkpoint).name
        Path(folder, "result.json").write_text(json.dumps({"first": first, "again": again, "best": best}))


if __name__ == "__main__":
    main()
