"""Weigh rare classes: a Trainer of one's own with `compute_loss`, and accuracy of each class."""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_wine
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class Classifier(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, classes))

    def forward(self, features, labels=None):
        return {"logits": self.layers(features)}


class WeighingTrainer(Trainer):
    def __init__(self, *args, class_weights, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs["logits"], labels, weight=self.class_weights)
        return (loss, {"loss": loss, **outputs}) if return_outputs else loss


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="custom_loss")
parser.add_argument("--batch_size", type=int, default=16)
options = parser.parse_args()

set_seed(3)
features, labels = load_wine(return_X_y=True)
features = (features - features.mean(0)) / features.std(0)
rows = [
    {"features": torch.tensor(row, dtype=torch.float32), "labels": int(label)}
    for row, label in zip(features, labels, strict=True)
]
order = np.random.default_rng(3).permutation(len(rows))
rows = [rows[index] for index in order]
counts = torch.bincount(torch.tensor(labels))


def by_class(prediction):
    hits = np.argmax(prediction.predictions, axis=-1) == prediction.label_ids
    return {f"accuracy_{label}": hits[prediction.label_ids == label].mean() for label in range(3)}


args = TrainingArguments(
    output_dir=options.output_dir,
    per_device_train_batch_size=options.batch_size,
    num_train_epochs=3,
    learning_rate=1e-2,
    logging_strategy="epoch",
    eval_strategy="epoch",
    save_strategy="no",
    max_grad_norm=0.5,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=4,
)
trainer = WeighingTrainer(
    Classifier(features.shape[1], 3),
    args,
    train_dataset=rows[:140],
    eval_dataset=rows[140:],
    compute_metrics=by_class,
    class_weights=counts.sum() / counts,
)
trainer.train()
trainer.save_model()
