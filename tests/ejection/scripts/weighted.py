"""Weigh classes, and add a penalty to the loss of the class above: two subclasses, each with `super().compute_loss`."""

import sys

import torch
from tiny import Net, rows
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class PenaltyTrainer(Trainer):
    penalty = 0.01

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss + self.penalty * self._size_of(model)
        return (loss, outputs) if return_outputs else loss

    @staticmethod
    def _size_of(model):
        return sum((weight**2).sum() for weight in model.parameters())


class WeightedTrainer(PenaltyTrainer):
    def __init__(self, *args, class_weights=None, focus=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights.to(self.args.device)
        self.focus = focus

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        weights = self.class_weights.to(outputs["logits"].dtype)
        weighted = nn.functional.cross_entropy(outputs["logits"], labels, weight=weights)
        if self.state.global_step >= self.args.warmup_steps:
            loss = (1 - self.focus) * loss + self.focus * weighted
        return (loss, outputs) if return_outputs else loss


set_seed(5)
training_args = TrainingArguments(
    output_dir=sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "weighted",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    learning_rate=1e-2,
    warmup_steps=3,
    logging_steps=2,
    evaluation_strategy="steps",
    eval_steps=3,
    save_strategy="no",
    report_to=[],
)
trainer = WeightedTrainer(
    model=Net(),
    args=training_args,
    train_dataset=rows(40),
    eval_dataset=rows(11, seed=1),
    class_weights=torch.tensor([1.0, 2.0, 0.5]),
    focus=0.25,
)
trainer.train()
trainer.save_model()
