"""Write a classifier's head beside its encoder: an own `_save` that calls HF's, on a model of transformers."""

import json
import os
import sys

import torch
from texts import classifier, sentences
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer import WEIGHTS_NAME, is_sagemaker_mp_enabled


class PartsTrainer(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        output_dir = output_dir or self.args.output_dir
        super()._save(output_dir, state_dict)
        if is_sagemaker_mp_enabled():
            return
        parts = self.parts_of(state_dict or self.model.state_dict())
        for name, weights in parts.items():
            torch.save(weights, os.path.join(output_dir, f"{name}.{WEIGHTS_NAME}"))
        with open(os.path.join(output_dir, "parts.json"), "w") as file:
            json.dump({"parts": sorted(parts), "step": self.state.global_step, "seed": self.args.seed}, file)

    @staticmethod
    def parts_of(weights):
        parts = {}
        for name, weight in weights.items():
            part, _, inner = name.partition(".")
            parts.setdefault(part, {})[inner] = weight.cpu()
        return parts


set_seed(13)
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "parts",
    num_train_epochs=2,
    per_device_train_batch_size=6,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_ratio=0.2,
    logging_steps=1,
    save_strategy="epoch",
    eval_strategy="epoch",
    report_to="none",
)
trainer = PartsTrainer(model=classifier(), args=args, train_dataset=sentences(20), eval_dataset=sentences(7, seed=1))
trainer.train()
trainer.save_model(args.output_dir)
