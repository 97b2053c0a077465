"""A transformers model in a `lightning.Trainer` of one's own.

    python native_module.py --output_dir FOLDER

Shows: `HFModule` and `HFDataModule` with HF's optimizer, schedule, accumulation and metrics, under Lightning's trainer,
callbacks and checkpoints; a Lightning hook in a subclass; the best checkpoint validated again.
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

from hf_compat import HFDataModule, HFModule, TrainingArguments


class Frozen(HFModule):
    """A module of one's own: the patch embeddings keep their first weights for one epoch."""

    def on_train_epoch_start(self) -> None:
        self.model.vit.embeddings.requires_grad_(self.current_epoch > 0)


def digits() -> list[dict]:
    images = load_digits()
    pixels = torch.tensor(images.images, dtype=torch.float32)[:, None] / 16
    return [{"pixel_values": image, "labels": int(label)} for image, label in zip(pixels, images.target, strict=True)]


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/native_module")
    lightning.seed_everything(42)
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=32, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=4, num_labels=10,
    )  # fmt: skip
    args = TrainingArguments(
        per_device_train_batch_size=16, gradient_accumulation_steps=2, learning_rate=5e-3, warmup_steps=20
    )
    module = Frozen(ViTForImageClassification(config), args, compute_metrics=accuracy)
    data = HFDataModule(args, digits()[:1400], digits()[1400:])
    best = ModelCheckpoint(monitor="eval_accuracy", mode="max")
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        default_root_dir=parser.parse_args().output_dir,
        callbacks=[best, EarlyStopping("eval_loss", patience=2)],
    )
    trainer.fit(module, data)
    metrics = trainer.validate(module, data, ckpt_path="best")[0]
    print(f"updates: {trainer.global_step}, best checkpoint: {best.best_model_path}")
    print(f"its accuracy: {metrics['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
