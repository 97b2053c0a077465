"""The rows of `seam_cases.py` by an `HFModule` in a `lightning.Trainer` of two ranks."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

from helpers import toy
from helpers.parity.seam_cases import EPOCHS, PAIRS, TRIPLES, arguments_of, parts_of, resumed_at, updates_of

OF_THE_TRAINER = ("eval_strategy", "eval_steps", "save_strategy", "save_steps", "max_steps", "logging_steps")


def run(row: dict[str, str], api, folder: Path) -> dict:
    """Train a row, and go on from its checkpoint if the row says so; `api` is hf_compat."""
    os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning sets as many as there are cores
    found = {"whole": trained(row, api, folder)}
    if row["run"] == "resumed":
        found["resumed"] = trained(row, api, folder, resumed_at(row))
    return found


def trained(row: dict[str, str], api, folder: Path, first: int = 0) -> dict:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    losses: list[float] = []
    evaluations: list[dict[str, float]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            losses.append(float(trainer.strategy.reduce(outputs["loss"].clone(), reduce_op="mean")))

        def on_validation_end(self, trainer, module):
            evaluations.append(
                {name: float(value) for name, value in trainer.callback_metrics.items() if "eval" in name}
            )

    saved = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"max_epochs": EPOCHS} if row["data"] != "stream" else {"max_steps": EPOCHS * updates_of(row)}
    validated = {"val_check_interval": 1, "check_val_every_n_epoch": None} if row["evaluated"] == "within" else {}
    trainer = pl.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=None if validated else 0,
        enable_checkpointing=row["run"] == "resumed",
        callbacks=[Watch(), *([saved] if row["run"] == "resumed" else [])], **options, **validated,
    )  # fmt: skip
    values = {name: value for name, value in arguments_of(row).items() if name not in OF_THE_TRAINER}
    args = api.TrainingArguments(str(folder), per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
                                 num_train_epochs=EPOCHS, report_to="none", **values)  # fmt: skip
    api.set_seed(1)
    model, parts = toy.Classifier(), parts_of(row, "hf_compat")
    module = api.HFModule(model, args, compute_metrics=parts["compute_metrics"])
    data = api.HFDataModule(None, parts["train_dataset"], parts["eval_dataset"])
    trainer.fit(module, data, ckpt_path=folder / f"step={first}.ckpt" if first else None)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if row["evaluated"] == "outside":
        trainer.limit_val_batches = 1.0
        trainer.validate(module, data, verbose=False)
    return {"losses": losses_of(row, losses), "weights": weights, "evaluations": evaluations}


def losses_of(row: dict[str, str], losses: list[float]) -> list[float]:
    """Return the losses of updates, or none where Lightning tells those of a stream's left-over micro-batches apart."""
    return [] if (row["data"], row["update"]) == ("stream", "short_window") else losses


def expected_of(row: dict[str, str], theirs: dict, first: int = 0) -> dict:
    """Return what a row has to give, from transformers' result; Lightning keeps 32 bits of metrics.

    Args:
        row: The row.
        theirs: What transformers gave.
        first: The update that is resumed. The evaluation after it is still to come.
    """
    whole = theirs["after"]["whole"]
    within = [log for log in whole["log"] if "eval_loss" in log and log["step"] >= first]
    evaluations = within if row["evaluated"] == "within" else [whole["evaluated"]]
    return {
        "losses": losses_of(row, [log["loss"] for log in whole["log"] if "loss" in log and log["step"] > first]),
        "weights": whole["weights"],
        "evaluations": [
            {name: torch.tensor(value).float().item() for name, value in one.items() if name in OF_EVALUATIONS}
            for one in evaluations
        ],
    }


OF_EVALUATIONS = ("eval_loss", "eval_accuracy", "eval_count", "eval_each")
# Lightning also validates after the left-over micro-batches of a stream, and each validation draws a random number
NATIVE_ROWS = {
    name: row
    for name, row in {**PAIRS, **TRIPLES}.items()
    if (row["data"], row["update"], row["evaluated"]) != ("stream", "short_window", "within")
}
NATIVE = {f"native_{name}": {"run": functools.partial(run, row)} for name, row in NATIVE_ROWS.items()}
