"""Pull a model towards the one it began as: an own loss with another model, made in the Trainer's constructor."""

import copy
import sys

import torch
from tiny import Net, rows
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class AnchoredTrainer(Trainer):
    def __init__(self, *args, strength=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self.strength = strength
        self.reference = copy.deepcopy(self.model).eval().requires_grad_(False)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        with torch.no_grad():
            before = self.reference(**inputs)
        distance = nn.functional.mse_loss(outputs["logits"], before["logits"])
        loss = outputs["loss"] + self.strength * distance
        return (loss, outputs) if return_outputs else loss


set_seed(10)
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "anchored",
    num_train_epochs=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=3,
    save_strategy="no",
    report_to="none",
)
AnchoredTrainer(model=Net(), args=args, train_dataset=rows(21), eval_dataset=rows(7, seed=1)).train()
