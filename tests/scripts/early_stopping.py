"""Stop when the loss on one of two evaluation sets no longer falls; the best weights are kept."""

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="early_stopping")
parser.add_argument("--patience", type=int, default=2)
options = parser.parse_args()

set_seed(1)
features, labels = (torch.tensor(part, dtype=torch.float32) for part in load_breast_cancer(return_X_y=True))
features = (features - features.mean(0)) / features.std(0)
rows = [{"features": row, "labels": label} for row, label in zip(features, labels, strict=True)]


class Logistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, features, labels=None):
        logits = self.layers(features)[:, 0]
        loss = None if labels is None else nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return {"loss": loss, "logits": logits}


def accuracy(prediction):
    return {"accuracy": float(((prediction.predictions > 0) == prediction.label_ids).mean())}


args = TrainingArguments(
    output_dir=options.output_dir,
    num_train_epochs=5,
    per_device_train_batch_size=32,
    learning_rate=0.05,
    lr_scheduler_type="constant",
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    save_steps=2,
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="far_loss",
    greater_is_better=False,
)
trainer = Trainer(
    model=Logistic(),
    args=args,
    train_dataset=rows[:300],
    eval_dataset={"near": rows[300:400], "far": rows[400:]},
    compute_metrics=accuracy,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=options.patience)],
)
trainer.train()
print("stopped at", trainer.state.global_step, "best", trainer.state.best_metric)
trainer.save_model()
