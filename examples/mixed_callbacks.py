"""Callbacks of HF and of Lightning in one list, with loggers of both.

    python mixed_callbacks.py --output_dir FOLDER

Shows: HF's `EarlyStoppingCallback` and an event of one's own beside Lightning's `ModelCheckpoint` and a hook of one's
own; TensorBoard by HF's name and Lightning's `CSVLogger`, which get the same values.
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from transformers import TrainerCallback

from hf_compat import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def forward(self, pixels, labels):
        logits = self.layers(pixels)
        return torch.nn.functional.cross_entropy(logits, labels), logits


class HalfWay(TrainerCallback):
    """HF: an event asks for an evaluation by a flag of `TrainerControl`."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = state.global_step == state.max_steps // 2


class Progress(pl.Callback):
    """Lightning: a hook reads HF's metrics, wherever an evaluation came from."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_validation_end(self, trainer, pl_module):
        self.seen.append((trainer.global_step, round(float(trainer.callback_metrics["eval_accuracy"]), 3)))


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/mixed_callbacks")
    folder = Path(parser.parse_args().output_dir)
    csv = CSVLogger(folder, name="csv")
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=9,
        per_device_train_batch_size=32,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=20,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=["tensorboard", csv],
        use_cpu=True,
    )
    set_seed(args.seed)
    images = load_digits()
    pixels = torch.tensor(images.data, dtype=torch.float32) / 16
    rows = [{"pixels": row, "labels": int(label)} for row, label in zip(pixels, images.target, strict=True)]
    progress, best = Progress(), ModelCheckpoint(monitor="eval_accuracy", mode="max", filename="{step}")
    Trainer(
        model=Classifier(),
        args=args,
        train_dataset=rows[:1400],
        eval_dataset=rows[1400:],
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(3), HalfWay(), best, progress],
    ).train()
    print(f"evaluations that the Lightning callback saw: {progress.seen}")
    print(f"best by ModelCheckpoint: {Path(best.best_model_path).name}, {best.best_model_score:.3f}")
    print(f"CSV: {Path(csv.log_dir) / 'metrics.csv'}")
    print(f"TensorBoard: {next(folder.rglob('events.out.tfevents.*'))}")


if __name__ == "__main__":
    main()
