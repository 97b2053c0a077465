"""A script that does another thing here than under transformers, from an update on: comparisons have to find it."""

import argparse
import os
import sqlite3

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--changed", choices=("nothing", "seed", "rate", "collator", "unseeded"), default="nothing")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--hub-token")
options = parser.parse_args()
IS_HERE = Trainer.__module__.startswith("hf_compat")
assert os.environ["PYTHONHASHSEED"] == "0", "both sides have to walk through sets in the same order"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, x, labels):
        logits = self.layer(self.dropout(x))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class OwnStep(Trainer):
    """As scripts for 4.x have it: nothing of the Trainer's own step is called."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class Rate(TrainerCallback):
    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        if IS_HERE and options.changed == "rate" and state.global_step == 5:
            optimizer.param_groups[0]["lr"] *= 1.001


batches = 0


def collate(samples):
    global batches
    batches += 1
    batch = default_data_collator(samples)
    if IS_HERE and options.changed == "collator" and batches == 9:  # the first of update 5
        batch["x"][0, 0] += 1e-3
    return batch


if options.changed != "unseeded":
    set_seed(8 if IS_HERE and options.changed == "seed" else 7)


class Rows(torch.utils.data.Dataset):
    """Samples, each of which is written into a folder, where that is there: by the loader's workers."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if os.path.isdir("cache"):
            with open(f"cache/{i}.txt", "w") as file:
                file.write(str(i))
        return {"x": torch.sin(torch.arange(4.0) * i), "labels": i % 3}


rows = Rows()
args = TrainingArguments(
    output_dir="changed",
    max_steps=8,
    gradient_accumulation_steps=2,
    per_device_train_batch_size=4,
    learning_rate=0.01,
    lr_scheduler_type="constant",
    logging_steps=4,
    save_steps=4,
    dataloader_num_workers=options.workers,
    hub_token=options.hub_token,
)
model = Model()
trainer = OwnStep(model=model, args=args, train_dataset=rows, data_collator=collate, callbacks=[Rate()])
trainer.train()
with sqlite3.connect("base.db") as base:
    base.execute("create table if not exists t (a)")
trainer.save_model("changed")  # a relative path, within the folder that the script works in
