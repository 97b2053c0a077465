"""Streams of several makes; which one is said by the first argument. Each ends before the run does."""

import sys
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset, interleave_datasets, load_dataset
from transformers import Trainer, TrainingArguments, set_seed


class Numbers(torch.utils.data.IterableDataset):
    """Samples made as they are read, in an order of the epoch."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for place in range(self.size):
            yield {"x": torch.randn(4) + self.epoch, "labels": place % 3}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layers(x), labels)}


SCALE = 0.5


def rows(start):
    for number in range(start, start + 40):
        yield {"x": [number * 0.01, 1.0, -0.5, number % 7 * 0.1], "labels": number % 3, "number": number}


def scaled(row):
    return {"x": [value * SCALE for value in row["x"]]}


def from_files():
    return load_dataset("json", data_files={"train": str(file)}, streaming=True)["train"].map(scaled)


def mixed():
    parts = [IterableDataset.from_generator(rows, gen_kwargs={"start": start}) for start in (0, 100)]
    return interleave_datasets(parts, probabilities=[0.3, 0.7], seed=3).filter(lambda row: row["number"] % 5 > 0)


def of_table():
    return Dataset.from_list(list(rows(0))).to_iterable_dataset(num_shards=4).shuffle(seed=2, buffer_size=8).take(30)


MADE = {"json": from_files, "mixed": mixed, "table": of_table, "own": lambda: Numbers(40)}

kind, folder = sys.argv[1:]
file = Path(__file__).with_name("streams.jsonl")
set_seed(5)
model = Net()
args = TrainingArguments(
    folder,
    max_steps=13,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_steps=4,
    disable_tqdm=True,
)
Trainer(model, args, train_dataset=MADE[kind]()).train()
