"""The runs whose checkpoints `old_checkpoints/` keeps, in words that both that version and today's understand.

    python tests/helpers/old_runs.py API FORM FOLDER [stop|CHECKPOINT]

trains a form under `hf_compat` or `transformers`, from the start (the whole run, or until it stops early) or from a
checkpoint, and writes `result.pickle` (the log history without
durations, and the weights) into FOLDER. A launcher starts those of two processes.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from helpers import toy

BASE = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "logging_steps": 2,
    "save_strategy": "steps",
    "save_steps": 3,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
}
# 21 samples are 11 micro-batches, and 4 updates an epoch; two processes share 42.
FORMS = {
    "plain": {},
    "epoch_end": {"save_strategy": "epoch", "eval_strategy": "epoch"},
    # stopped by `max_steps` at update 2; the rate does not depend on how long the run is
    "stopped": {"lr_scheduler_type": "constant", "warmup_steps": 0, "save_steps": 2, "logging_steps": 1},
    "stream": {"max_steps": 8},
    "ddp": {"ddp_backend": "gloo"},
    "fsdp": {"fsdp": True},
    "fsdp_sharded": {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    "native": {},
    "adapter": {"metric_for_best_model": "loss", "eval_strategy": "epoch"},
}
SEVERAL = ("ddp", "fsdp", "fsdp_sharded")
#: The update after which each checkpoint was written.
SAVED_AT = {**dict.fromkeys(FORMS, 3), "epoch_end": 4, "stopped": 2}
TIMED = ("_runtime", "_per_second", "_preparation_time")


class HandWritten(pl.LightningModule):
    """A LightningModule that never heard of us."""

    def __init__(self):
        super().__init__()
        self.model = toy.Classifier(dropout=0.0)

    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch)["loss"], batch_size=len(batch["labels"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def lightning_trainer(folder, callbacks, **options):
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=callbacks, default_root_dir=folder, **options,
    )  # fmt: skip


def train_native(api, args, folder, resume):
    """HFModule in a Lightning trainer; Lightning's ModelCheckpoint writes."""
    saver = pl.callbacks.ModelCheckpoint(folder, filename="it", every_n_train_steps=SAVED_AT["native"], save_top_k=-1)
    torch.manual_seed(5)
    module = api.HFModule(toy.Classifier(), args)
    pl.seed_everything(args.seed, verbose=False)
    data = api.HFDataModule(args, toy.rows(21))
    lightning_trainer(folder, [saver], max_epochs=2).fit(module, data, ckpt_path=resume)
    return module.model, []


def train_adapter(api, args, folder, resume):
    """HF callbacks in a Lightning trainer; the adapter writes `checkpoint-3.ckpt`."""

    class Save(api.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == SAVED_AT["adapter"]

    collate = api.default_data_collator
    adapter = api.HFCallbackAdapter(Save(), api.EarlyStoppingCallback(9), args=args)
    torch.manual_seed(5)
    module = HandWritten()
    loaders = DataLoader(toy.rows(12), 4, collate_fn=collate), DataLoader(toy.rows(8, 1), 4, collate_fn=collate)
    options = {"max_epochs": 3, "log_every_n_steps": 1, "enable_checkpointing": False}
    # the adapter's state holds numbers of numpy, which only a full read understands
    lightning_trainer(folder, [adapter], **options).fit(module, *loaders, ckpt_path=resume, weights_only=True)
    logs = [{k: v for k, v in log.items() if k != "total_flos"} for log in adapter.state.log_history]
    return module.model, logs  # the summary of that version does not count operations


def train_trainer(api, args, form, resume):
    """The Trainer, in one process or several."""
    data = toy.rows(42 if form in SEVERAL else 21)
    api.set_seed(5)
    model = toy.Classifier(dropout=0.0 if form.startswith("fsdp") else 0.3)
    trainer = api.Trainer(
        model, args, train_dataset=toy.Stream(data) if form == "stream" else data, eval_dataset=toy.rows(9, 4)
    )
    trainer.train(resume_from_checkpoint=resume)
    if form in SEVERAL:
        trainer.save_model(args.output_dir + "/final")
        torch.distributed.barrier()  # it is written
    return trainer.model, trainer.state.log_history


def run(api_name: str, form: str, folder: Path, resume: str | None = None, **changes) -> dict:
    """Train a form; returns its log history without durations, and the weights."""
    api = importlib.import_module(api_name)
    args = api.TrainingArguments(str(folder), **{**BASE, **FORMS[form], **changes})
    if form == "native":
        model, logs = train_native(api, args, folder, resume)
    elif form == "adapter":
        model, logs = train_adapter(api, args, folder, resume)
    else:
        model, logs = train_trainer(api, args, form, resume)
    if form in SEVERAL:
        from safetensors.torch import load_file

        weights = load_file(folder / "final" / "model.safetensors")
    else:
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return {"logs": [{k: v for k, v in log.items() if not k.endswith(TIMED)} for log in logs], "weights": weights}


def digest(weights: dict) -> str:
    """Of all weights, bit for bit."""
    content = b"".join(weights[name].contiguous().numpy().tobytes() for name in sorted(weights))
    return hashlib.sha256(content).hexdigest()


def main() -> None:
    api_name, form, folder, *more = sys.argv[1:]
    checkpoint, changes = (None, {"max_steps": 2}) if more == ["stop"] else ((*more, None)[0], {})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    result = run(api_name, form, Path(folder), checkpoint, **changes)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "result.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
