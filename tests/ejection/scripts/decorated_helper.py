"""Weigh losses by a decorated function of another file, and save with the arguments that HF's Trainer passes."""

import os
import sys

import torch
from helpers_of_scripts import scores
from tiny import Net, rows
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments, set_seed


class FocalTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        labels = inputs["labels"]
        sure = scores(outputs).gather(1, labels[:, None])[:, 0]
        losses = cross_entropy(outputs["logits"], labels, reduction="none")
        loss = ((1 - sure) ** 2 * losses).mean()
        return (loss, outputs) if return_outputs else loss

    def save_model(self, output_dir, _internal_call):
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
            torch.save(self.model.state_dict(), os.path.join(output_dir, "net.bin"))


set_seed(8)
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "focal",
    max_steps=8,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=4,
    report_to="none",
)
FocalTrainer(model=Net(), args=args, train_dataset=rows(20)).train()
