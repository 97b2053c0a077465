"""Two heads on one encoder: each batch has labels of both tasks, the loss is weighted, and a helper computes it."""

import argparse

import numpy as np
import torch
from tiny import rows
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

TASKS = ("topic", "score")


class MultitaskModel(nn.Module):
    def __init__(self, encoder, heads):
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict(heads)

    def forward(self, x, topic_labels=None, score_labels=None):
        hidden = torch.tanh(self.encoder(x))
        return {name: head(hidden) for name, head in self.heads.items()}


class MultitaskTrainer(Trainer):
    task_weights = {"topic": 1.0, "score": 0.3}

    def _task_loss(self, name, logits, labels):
        if name == "score":
            return nn.functional.mse_loss(logits.squeeze(-1), labels)
        return nn.functional.cross_entropy(logits, labels)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = {name: inputs[f"{name}_labels"] for name in TASKS}
        outputs = model(inputs["x"])
        loss = sum(self.task_weights[name] * self._task_loss(name, outputs[name], labels[name]) for name in TASKS)
        loss = loss / len(self.label_names)
        return (loss, {"loss": loss, **outputs}) if return_outputs else loss


def compute_metrics(prediction):
    topic, score = prediction.predictions
    topic_labels, score_labels = prediction.label_ids
    return {
        "topic_accuracy": float((np.argmax(topic, -1) == topic_labels).mean()),
        "score_mse": float(((score[:, 0] - score_labels) ** 2).mean()),
    }


def samples(count, seed):
    return [
        {"x": row["x"], "topic_labels": row["labels"], "score_labels": float(row["x"].mean())}
        for row in rows(count, seed)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="multitask")
    options = parser.parse_args()
    set_seed(1)
    model = MultitaskModel(nn.Linear(8, 16), {"topic": nn.Linear(16, 3), "score": nn.Linear(16, 1)})
    args = TrainingArguments(
        options.output_dir,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        evaluation_strategy="epoch",
        save_strategy="no",
        label_names=["topic_labels", "score_labels"],
        remove_unused_columns=False,
        report_to="none",
    )
    MultitaskTrainer(
        model, args, train_dataset=samples(44, 0), eval_dataset=samples(12, 1), compute_metrics=compute_metrics
    ).train()
