"""A LightningModule that never heard of HF, its data, and the arguments that say the same to a Trainer."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

import hf_compat
from helpers.toy import rows

ARGS = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_train_epochs": 6,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.05,
    "lr_scheduler_type": "linear",
    "logging_steps": 2,
    "logging_first_step": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 4,
    "metric_for_best_model": "loss",
    "greater_is_better": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "train_sampling_strategy": "sequential",
    "optim": "adamw_torch",
    "report_to": "none",
}


class HandWritten(pl.LightningModule):
    """A LightningModule that never heard of us."""

    def __init__(self, model, updates):
        super().__init__()
        self.model, self.updates = model, updates

    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch)["loss"], batch_size=len(batch["labels"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / self.updates))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data():
    # the loss rises again after a while: labels of the evaluation are turned round
    train = rows(24, seed=0)
    return train, [{"x": row["x"], "labels": (row["labels"] + 1) % 3} for row in train[:8]]


def bare_trainer(callbacks, folder, **options):
    settings = {"accelerator": "cpu", "max_epochs": 6, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    return pl.Trainer(
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{**settings, **options},
    )


def loaders():
    collate = hf_compat.default_data_collator
    train, evaluation = data()
    return DataLoader(train, 4, collate_fn=collate), DataLoader(evaluation, 4, collate_fn=collate)
