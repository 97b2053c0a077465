"""LightningCLI from YAML: HF's arguments, any model and Lightning's trainer in one configuration.

    python lightning_cli.py fit --config lightning_cli.yaml
    python lightning_cli.py fit --config lightning_cli.yaml --model.args.learning_rate 1e-2 --trainer.max_epochs 3

Shows: `LightningCLI(HFModule, HFDataModule)`, with class paths for the model, the data sets and the metric. The file
beside this one is the configuration; Lightning's trainer decides epochs, validation, logging and checkpoints.
"""

import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits

from hf_compat import HFDataModule, HFModule


class Classifier(torch.nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))

    def forward(self, pixels, labels):
        logits = self.layers(pixels)
        return torch.nn.functional.cross_entropy(logits, labels), logits


def digits(part: str) -> list[dict]:
    images = load_digits()
    pixels = torch.tensor(images.data, dtype=torch.float32) / 16
    rows = [{"pixels": row, "labels": int(label)} for row, label in zip(pixels, images.target, strict=True)]
    return rows[:1400] if part == "train" else rows[1400:]


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    cli = LightningCLI(HFModule, HFDataModule)
    if cli.subcommand == "fit":
        best = cli.trainer.checkpoint_callback
        print(f"accuracy of the last epoch: {float(cli.trainer.callback_metrics['eval_accuracy']):.3f}")
        print(f"best checkpoint: {best.best_model_path}, {best.best_model_score:.3f}")


if __name__ == "__main__":
    main()
