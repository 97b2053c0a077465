"""A script that does another thing here than under transformers, from an update on: comparisons have to find it."""

import argparse

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--changed", choices=("nothing", "seed", "rate", "collator", "unseeded"), default="nothing")
options = parser.parse_args()
IS_HERE = Trainer.__module__.startswith("hf_compat")


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
rows = [{"x": torch.sin(torch.arange(4.0) * i), "labels": i % 3} for i in range(64)]
args = TrainingArguments(
    output_dir="changed",
    max_steps=8,
    gradient_accumulation_steps=2,
    per_device_train_batch_size=4,
    learning_rate=0.01,
    lr_scheduler_type="constant",
    logging_steps=4,
    save_steps=4,
)
model = Model()
trainer = OwnStep(model=model, args=args, train_dataset=rows, data_collator=collate, callbacks=[Rate()])
trainer.train()
trainer.save_model("changed")  # a relative path, within the folder that the script works in
