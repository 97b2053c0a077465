"""Save the head alone beside a file of labels: an override of `_save`, and one of `push_to_hub` that does nothing."""

import json
import os
import sys

import torch
from tiny import Net, rows
from transformers import Trainer, TrainingArguments, set_seed


class HeadTrainer(Trainer):
    labels = ["first", "second", "third"]

    def _save(self, output_dir=None, state_dict=None):
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        os.makedirs(output_dir, exist_ok=True)
        torch.save(self.model.head.state_dict(), os.path.join(output_dir, "head.bin"))
        with open(os.path.join(output_dir, "labels.json"), "w") as file:
            json.dump(self.labels, file)

    def push_to_hub(self, *args, **kwargs):
        return None


set_seed(4)
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "head",
    max_steps=7,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=3,
    report_to="none",
)
trainer = HeadTrainer(model=Net(), args=args, train_dataset=rows(20))
trainer.train()
trainer.save_model()
