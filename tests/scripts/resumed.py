"""Train, and go on from the newest checkpoint, as after a night's job: `train` is called twice."""

import argparse

import torch
from sklearn.datasets import load_iris
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="resumed")
options = parser.parse_args()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


features, labels = load_iris(return_X_y=True)
rows = [
    {"x": torch.tensor(row, dtype=torch.float32), "labels": label}
    for row, label in zip(features, labels.tolist(), strict=True)
]


def make_trainer(updates):
    set_seed(4)
    args = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=updates,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        logging_steps=2,
        save_steps=4,
        lr_scheduler_type="constant",
    )
    return Trainer(model=Model(), args=args, train_dataset=rows)


make_trainer(8).train()
trainer = make_trainer(14)
trainer.train(resume_from_checkpoint=get_last_checkpoint(trainer.args.output_dir))
trainer.save_model()
