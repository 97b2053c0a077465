"""Collect parts of the loss in `compute_loss`, and log their means in an override of `log`."""

import sys
from collections import defaultdict

from tiny import Net, rows
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class PartsTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parts = defaultdict(list)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        cross_entropy = nn.functional.cross_entropy(outputs["logits"], inputs["labels"])
        entropy = nn.functional.softmax(outputs["logits"], dim=-1).pow(2).sum(-1).mean()
        if model.training:
            self.parts["cross_entropy"].append(cross_entropy.item())
            self.parts["entropy"].append(entropy.item())
        loss = cross_entropy + 0.1 * entropy
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, start_time=None, *args, **kwargs):
        if "loss" in logs:
            for name, values in self.parts.items():
                logs[name] = sum(values) / len(values)
            self.parts.clear()
            logs["updates_left"] = self.state.max_steps - self.state.global_step
        super().log(logs, *args, **kwargs)


set_seed(11)
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "parts",
    num_train_epochs=2,
    per_device_train_batch_size=6,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    logging_steps=2,
    logging_first_step=True,
    evaluation_strategy="epoch",
    save_strategy="no",
    report_to="none",
)
PartsTrainer(model=Net(), args=args, train_dataset=rows(30), eval_dataset=rows(8, seed=2)).train()
