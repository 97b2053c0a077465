"""Metrics of torchmetrics in an evaluation: several at once, batch by batch, in constant memory.

    python torchmetrics_evaluation.py --output_dir FOLDER

Shows: a `MetricCollection` as `compute_metrics`, early stopping on one of its metrics, and a metric of the training
itself by `log_metric`. A small vision transformer reads scikit-learn's digits.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError, MulticlassF1Score
from transformers import ViTConfig, ViTForImageClassification

from hf_compat import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed


class WithTrainingAccuracy(Trainer):
    """The accuracy on training batches stands beside `loss` in each log."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        hits = (outputs.logits.argmax(-1) == inputs["labels"]).float().mean()
        if model.training:
            self.log_metric("accuracy", hits, weight=len(inputs["labels"]))
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/torchmetrics_evaluation")
    args = TrainingArguments(
        output_dir=parser.parse_args().output_dir,
        num_train_epochs=5,
        per_device_train_batch_size=32,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="f1",
        use_cpu=True,
    )
    set_seed(args.seed)
    images = load_digits()
    pixels = torch.tensor(images.images, dtype=torch.float32)[:, None] / 16
    rows = [{"pixel_values": image, "labels": int(label)} for image, label in zip(pixels, images.target, strict=True)]
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=32, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=4, num_labels=10,
    )  # fmt: skip
    metrics = {
        "accuracy": MulticlassAccuracy(10),
        "f1": MulticlassF1Score(10),
        "calibration": MulticlassCalibrationError(10),
    }
    trainer = WithTrainingAccuracy(
        model=ViTForImageClassification(config),
        args=args,
        train_dataset=rows[:1400],
        eval_dataset=rows[1400:],
        compute_metrics=MetricCollection(metrics),
        callbacks=[EarlyStoppingCallback(2)],
    )
    trainer.train()
    print(
        "training accuracy by epoch:",
        [round(log["accuracy"], 3) for log in trainer.state.log_history if "accuracy" in log],
    )
    for name, value in trainer.evaluate().items():
        if name.removeprefix("eval_") in metrics:
            print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
