"""Read handwritten digits: a plain PyTorch module and a data set of dicts, without anything of a model hub."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed


class Digits(Dataset):
    def __init__(self, start, end):
        digits = load_digits()
        self.images = torch.tensor(digits.images[start:end], dtype=torch.float32)[:, None] / 16
        self.targets = torch.tensor(digits.target[start:end])

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return {"image": self.images[index], "labels": self.targets[index]}


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 36, 10)
        )

    def forward(self, image, labels=None):
        logits = self.layers(image)
        if labels is None:
            return (logits,)
        return nn.functional.cross_entropy(logits, labels), logits


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="digits")
parser.add_argument("--epochs", type=float, default=1.0)
options = parser.parse_args()

set_seed(0)
trainer = Trainer(
    model=Reader(),
    args=TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        optim="sgd",
        optim_args="momentum=0.9",
        logging_steps=5,
        save_steps=10,
        dataloader_drop_last=True,
        seed=0,
    ),
    train_dataset=Digits(0, 500),
    eval_dataset=Digits(500, 600),
    compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
)
trainer.train()
metrics = trainer.evaluate()
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)
trainer.save_model()
