"""Callbacks, loggers and data modules of `pytorch_lightning`, the other distribution, work at every entry point."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import pytorch_lightning as other
import torch
from pytorch_lightning import callbacks as theirs
from toy import Classifier, rows

from hf_compat import (
    HFCallbackAdapter,
    HFDataModule,
    HFModule,
    LightningCallbackAdapter,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from hf_compat.callbacks.loggers import adopt
from hf_compat.errors import CallbackError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*no `val_dataloader`"),
]


class Counts(other.Callback):
    """A user-defined callback with a state and a call of `super`."""

    def __init__(self):
        super().__init__()
        self.updates, self.calls = 0, []

    def on_fit_start(self, trainer, pl_module):
        super().on_fit_start(trainer, pl_module)
        self.calls.append("fit")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.updates += 1

    def on_train_end(self, trainer, pl_module):
        self.calls.append("end")

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state_dict):
        self.updates = state_dict["updates"]


def fit_natively(callbacks, **options):
    quiet = {"max_epochs": 2, "accelerator": "cpu", "log_every_n_steps": 1, "logger": False,
             "enable_progress_bar": False, "enable_model_summary": False}  # fmt: skip
    trainer = pl.Trainer(callbacks=callbacks, **{**quiet, **options})
    args = TrainingArguments(per_device_train_batch_size=4, use_cpu=True)
    trainer.fit(HFModule(Classifier(), args), HFDataModule(None, rows(16), rows(8)))
    return trainer


def fit(make_args, callbacks, **values):
    trainer = Trainer(
        Classifier(), make_args(**values), train_dataset=rows(16), eval_dataset=rows(8), callbacks=callbacks
    )
    trainer.train()
    return trainer


def test_a_callback_of_the_users_own_is_called_and_resumed(make_args, tmp_path):
    counts = Counts()
    trainer = fit(make_args, [counts], save_strategy="epoch")
    assert (counts.updates, counts.calls) == (8, ["fit", "end"]) and isinstance(counts, Counts)
    assert trainer.pop_callback(Counts) is counts
    again = Counts()
    resumed = Trainer(Classifier(), make_args(num_train_epochs=3), train_dataset=rows(16), callbacks=[again])
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-4")
    assert again.updates == 12


def test_they_are_called_in_the_order_of_the_list(make_args):
    order = []
    first, last = (
        theirs.LambdaCallback(on_train_batch_end=lambda *parts, name=name: order.append(name))
        for name in ("first", "last")
    )

    class Between(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            order.append("between")

    fit(make_args, [first, Between, last], max_steps=1)
    assert order == ["first", "between", "last"]


def test_what_the_distribution_ships_does_what_it_is_for(make_args, tmp_path):
    stop = theirs.EarlyStopping("eval_loss", patience=1, min_delta=100.0)
    keep = theirs.ModelCheckpoint(tmp_path / "best", monitor="eval_loss")
    trainer = fit(make_args, [stop, keep, theirs.EMAWeightAveraging(decay=0.5)], num_train_epochs=9,
                  eval_strategy="epoch")  # fmt: skip
    assert trainer.state.epoch == 2.0 and stop.stopped_epoch == 1 and keep.best_model_path
    assert isinstance(stop, theirs.EarlyStopping) and isinstance(stop, pl.callbacks.EarlyStopping)


def test_refusals_hold_for_both_distributions(make_args):
    with pytest.raises(CallbackError, match="auto_find_batch_size=True"):
        fit(make_args, [theirs.BatchSizeFinder()])


@pytest.mark.parametrize("door", ["callbacks", "report_to"])
def test_loggers_are_logged_to(make_args, tmp_path, door):
    logger = other.loggers.CSVLogger(tmp_path, name="csv", version=0)
    fit(make_args, [logger] if door == "callbacks" else [], **({"report_to": [logger]} if door == "report_to" else {}))
    assert "train/loss" in (tmp_path / "csv/version_0/metrics.csv").read_text()


def test_natively_lightning_recognises_them(tmp_path):
    keep, counts = theirs.ModelCheckpoint(tmp_path / "best", monitor="eval_loss"), Counts()
    trainer = fit_natively(
        [keep, theirs.TQDMProgressBar(refresh_rate=0), theirs.RichModelSummary(), counts],
        enable_progress_bar=True,
        enable_model_summary=True,
        logger=other.loggers.CSVLogger(tmp_path / "csv"),
        profiler=other.profilers.SimpleProfiler(),
    )
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert names == ["TQDMProgressBar", "RichModelSummary", "Counts", "ModelCheckpoint"]
    assert trainer.checkpoint_callback is keep and keep.best_model_path and counts.updates == 8
    assert any((tmp_path / "csv").rglob("metrics.csv"))


class Data(other.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(rows(16), batch_size=4)


@pytest.mark.parametrize("by_keyword", [True, False])
def test_natively_a_data_module_gives_its_loaders(by_keyword):
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    module = HFModule(Classifier(), TrainingArguments(use_cpu=True))
    trainer.fit(module, **{"datamodule" if by_keyword else "train_dataloaders": Data()})
    assert trainer.global_step == 4


@pytest.mark.parametrize("callback", [Counts(), pl.callbacks.EarlyStopping("eval_loss")], ids=["other", "own"])
def test_the_adapter_of_hf_callbacks_refuses_lightning_ones(callback):
    with pytest.raises(CallbackError, match=r"give it to lightning\.Trainer itself"):
        HFCallbackAdapter(callback)


def test_the_adapter_of_lightning_callbacks_takes_both_distributions():
    counts = Counts()
    assert LightningCallbackAdapter(counts).callback is counts


def test_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(other, "__version__", "1.9.5")
    with pytest.raises(CallbackError, match=r"pytorch_lightning 1\.9\.5(.|\n)*lightning\.pytorch"):
        adopt(Counts())


def test_a_subclass_of_what_knows_its_own_modules_only_is_refused():
    class Own(theirs.WeightAveraging):
        pass

    with pytest.raises(CallbackError, match=r"lightning\.pytorch\.callbacks\.WeightAveraging"):
        adopt(Own())
