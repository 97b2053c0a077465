"""Runs for the tests of Lightning's own callbacks and loggers: one shape for both doors."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from helpers.toy import rows
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments

DOORS = ("native", "trainer")


class Headed(torch.nn.Module):
    """A backbone and a head."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh())
        self.head = torch.nn.Linear(16, 3)

    def forward(self, x, labels=None):
        logits = self.head(self.backbone(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@dataclass
class Run:
    """What a fit has left.

    Attributes:
        model: The trained model.
        updates: Optimizer steps.
        lightning: The Lightning trainer.
        fit_again: Fits once more with the same callbacks.
        logs: Rows of the CSV logger.
    """

    model: torch.nn.Module
    updates: int
    lightning: pl.Trainer
    fit_again: object
    logs: list[dict[str, str]]

    def column(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.logs if row.get(name)]


class Door:
    """Fits the same model on the same data, 4 updates an epoch, natively or in hf_compat.Trainer.

    Args:
        name: `native` or `trainer`.
        folder: Where everything goes.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.fits = 0

    def checkpoint(self, epoch: int) -> str:
        """Return the checkpoint that a fit with `keeps` has written at the end of an epoch, counted from 1."""
        if self.name == "native":
            return str(self.folder / "kept" / f"epoch={epoch - 1}.ckpt")
        return str(self.folder / f"checkpoint-{4 * epoch}")

    def fit(self, *callbacks, epochs=2, accumulation=1, resume=None, keeps=False, bar=False, model=None) -> Run:
        torch.manual_seed(0)
        self.fits += 1
        model = model or Headed()
        logger = CSVLogger(self.folder / "csv", name="", version=self.fits)
        run = self._fit_natively if self.name == "native" else self._fit_trainer
        lightning, updates, again = run(
            model, [*callbacks], logger, epochs, {"gradient_accumulation_steps": accumulation}, resume, keeps, bar
        )
        path = Path(logger.log_dir) / "metrics.csv"
        found = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []
        return Run(model, updates, lightning, again, found)

    def _rows(self, values):
        return rows(16 * values["gradient_accumulation_steps"]), rows(8, seed=1)

    def _fit_natively(self, model, callbacks, logger, epochs, values, resume, keeps, bar):
        if keeps:
            callbacks.append(ModelCheckpoint(self.folder / "kept", filename="{epoch}", save_top_k=-1))
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=logger, callbacks=callbacks, log_every_n_steps=1,
            enable_checkpointing=any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
            enable_progress_bar=bar, default_root_dir=self.folder, num_sanity_val_steps=0,
            enable_model_summary=any(isinstance(c, pl.callbacks.ModelSummary) for c in callbacks),
        )  # fmt: skip
        args = TrainingArguments(str(self.folder), per_device_train_batch_size=4, learning_rate=0.01, use_cpu=True,
                                 **values)  # fmt: skip
        module, data = HFModule(model, args), HFDataModule(None, *self._rows(values))
        trainer.fit(module, data, ckpt_path=resume)
        return trainer, trainer.global_step, lambda: trainer.fit(module, data)

    def _fit_trainer(self, model, callbacks, logger, epochs, values, resume, keeps, bar):
        args = TrainingArguments(str(self.folder), per_device_train_batch_size=4, learning_rate=0.01, use_cpu=True,
                                 num_train_epochs=epochs, logging_steps=1, eval_strategy="epoch", report_to="none",
                                 save_strategy="epoch" if keeps else "no", disable_tqdm=not bar, **values)  # fmt: skip
        train, evaluation = self._rows(values)
        trainer = Trainer(model, args, train_dataset=train, eval_dataset=evaluation, callbacks=[*callbacks, logger])
        trainer.train(resume_from_checkpoint=resume)
        return trainer.lightning_trainer, trainer.state.global_step, trainer.train
