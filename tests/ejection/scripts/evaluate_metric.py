"""Add the perplexity to what `evaluate` returns, and keep the checkpoint that has the lowest."""

import argparse
import math

import numpy as np
from tiny import Net, rows
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed


class PerplexityTrainer(Trainer):
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        metrics = super().evaluate(eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)
        perplexity = math.exp(metrics[f"{metric_key_prefix}_loss"])
        metrics[f"{metric_key_prefix}_perplexity"] = perplexity
        self.log({f"{metric_key_prefix}_perplexity": perplexity})
        if self.is_world_process_zero():
            print(f"step {self.state.global_step}: {perplexity:.3f}")
        return metrics


def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    return {"accuracy": float((np.argmax(predictions, axis=1) == labels).mean())}


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="perplexity")
set_seed(0)
args = TrainingArguments(
    parser.parse_args().output_dir,
    num_train_epochs=4,
    per_device_train_batch_size=10,
    learning_rate=2e-2,
    logging_steps=3,
    evaluation_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="eval_perplexity",
    greater_is_better=False,
    report_to="none",
)
trainer = PerplexityTrainer(
    model=Net(),
    args=args,
    train_dataset=rows(30),
    eval_dataset=rows(12, seed=1),
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
trainer.train()
