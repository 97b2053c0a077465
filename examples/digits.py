"""A plain `torch.nn.Module` on scikit-learn's digits: nothing of transformers, an HF and a Lightning callback.

python examples/digits.py --output_dir FOLDER

The same run without a script: hf-compat fit --config examples/digits.yaml
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn

from hf_compat import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed


class Classifier(nn.Module):
    """All that a model needs: a forward that returns the loss first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def forward(self, pixels, labels=None):
        logits = self.layers(pixels)
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return (loss, logits) if loss is not None else (logits,)


class BestAccuracy(pl.Callback):
    """A Lightning callback, in the same list: it reads HF's metric from Lightning."""

    best = 0.0

    def on_validation_end(self, trainer, module):
        self.best = max(self.best, float(trainer.callback_metrics["eval_accuracy"]))


def digits(part: str) -> list[dict]:
    """Samples to train on (`train`), or those that are held out."""
    data = load_digits()
    pixels = torch.tensor(data.data, dtype=torch.float32) / 16
    rows = [{"pixels": row, "labels": int(label)} for row, label in zip(pixels, data.target, strict=True)]
    return rows[:1400] if part == "train" else rows[1400:]


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/digits")
    output_dir = parser.parse_args().output_dir
    args = TrainingArguments(
        output_dir=output_dir,
        num_train_epochs=12,
        per_device_train_batch_size=32,
        learning_rate=5e-3,
        evaluation_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        use_cpu=True,
    )
    set_seed(args.seed)  # the model's first weights are drawn from it
    best = BestAccuracy()
    trainer = Trainer(
        model=Classifier(),
        args=args,
        train_dataset=digits("train"),
        eval_dataset=digits("held out"),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(4), best],
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()
    print(f"best accuracy that the Lightning callback saw: {best.best:.4f}")


if __name__ == "__main__":
    main()
