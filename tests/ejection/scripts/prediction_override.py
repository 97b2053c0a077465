"""Predict with the mean of several passes: an override of `prediction_step`, with a metric on what it gives."""

import sys

import torch
from tiny import Net, rows
from transformers import Trainer, TrainingArguments, set_seed


class SmoothTrainer(Trainer):
    passes = 3

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        has_labels = all(inputs.get(name) is not None for name in self.label_names)
        with torch.no_grad():
            loss, _ = self.compute_loss(model, inputs, return_outputs=True)
            logits = torch.stack([model(x=inputs["x"] + 0.01 * shift)["logits"] for shift in range(self.passes)])
        if prediction_loss_only:
            return (loss, None, None)
        labels = inputs.pop("labels") if has_labels else None
        return (loss.mean().detach(), logits.mean(0).softmax(-1), labels)


def compute_metrics(prediction):
    probabilities, labels = prediction.predictions, prediction.label_ids
    return {"probability": float(probabilities[range(len(labels)), labels].mean())}


set_seed(8)
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "smooth",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=5,
    learning_rate=1e-2,
    logging_steps=2,
    evaluation_strategy="epoch",
    save_strategy="no",
    report_to="none",
)
SmoothTrainer(
    model=Net(), args=args, train_dataset=rows(32), eval_dataset=rows(12, seed=1), compute_metrics=compute_metrics
).train()
