"""Schedules that a script makes itself; which one is said by the first argument."""

import sys

import torch
from sklearn.datasets import load_wine
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR
from transformers import Trainer, TrainingArguments, get_cosine_schedule_with_warmup, get_scheduler, set_seed


class Staircase(LRScheduler):
    """Halve the rate every few updates."""

    def __init__(self, optimizer, width):
        self.width = width
        super().__init__(optimizer)

    def get_lr(self):
        return [rate * 0.5 ** (self.last_epoch // self.width) for rate in self.base_lrs]


def decay(step):
    return 0.9**step


def sequence(optimizer):
    warmup, rest = LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, T_max=10)
    return SequentialLR(optimizer, [warmup, rest], milestones=[4])


MADE = {
    "sequence": sequence,
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=30),
    "lambda": lambda optimizer: LambdaLR(optimizer, decay),
    "own": lambda optimizer: Staircase(optimizer, width=3),
    "cosine": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 3, num_training_steps=14),
    "polynomial": lambda optimizer: get_scheduler(
        "polynomial", optimizer, 2, 14, scheduler_specific_kwargs={"power": 2.0}
    ),
}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(13, 16), torch.nn.Linear(16, 3)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.outer(torch.tanh(self.inner(x))), labels)}


class Overriding(Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = OneCycleLR(self.optimizer, max_lr=0.01, total_steps=num_training_steps + 1)
        return self.lr_scheduler


kind, folder = sys.argv[1:]
set_seed(5)
wine = load_wine()
scaled = torch.tensor((wine.data - wine.data.mean(0)) / wine.data.std(0), dtype=torch.float32)
rows = [{"x": x, "labels": int(label)} for x, label in zip(scaled, wine.target, strict=True)]
model = Net()
args = TrainingArguments(
    folder, max_steps=14, per_device_train_batch_size=16, logging_steps=1, save_steps=4, disable_tqdm=True
)
if kind == "overridden":
    trainer = Overriding(model, args, train_dataset=rows)
else:
    groups = [{"params": model.inner.parameters()}, {"params": model.outer.parameters(), "lr": 5e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    trainer = Trainer(model, args, train_dataset=rows, optimizers=(optimizer, MADE[kind](optimizer)))
trainer.train()
