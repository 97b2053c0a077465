"""The logs that adapted callbacks get, and the logger that Lightning callbacks read as `trainer.logger`."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.utils.data import DataLoader

from helpers.handwritten import bare_trainer
from helpers.toy import Classifier, rows
from hf_compat import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    HFCallbackAdapter,
    HFDataModule,
    HFModule,
    LightningCallbackAdapter,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from hf_compat.errors import HfCompatWarning, UnmetRequirement

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*no `val_dataloader`"),
]


class Plain(pl.LightningModule):
    """A plain LightningModule."""

    def __init__(self):
        super().__init__()
        self.model, self.losses = Classifier(dropout=0.0), []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch)["loss"]
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Logs(TrainerCallback):
    def __init__(self):
        self.kept = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.kept.append((state.global_step, dict(logs)))


def bare(callbacks, **options):
    quiet = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
             "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}  # fmt: skip
    return pl.Trainer(callbacks=callbacks, **{**quiet, **options})


@pytest.mark.parametrize("interval", [1, 3])
def test_without_a_flow_callback_the_loss_comes_at_lightnings_interval(interval):
    logs, module = Logs(), Plain()
    bare([HFCallbackAdapter(logs)], log_every_n_steps=interval).fit(module, DataLoader(rows(24), batch_size=4))
    found = {step: entry["loss"] for step, entry in logs.kept if "loss" in entry}
    means = {end: sum(module.losses[end - interval : end]) / interval for end in range(interval, 7, interval)}
    assert found == pytest.approx(means, rel=1e-5)
    assert "train_loss" in logs.kept[-1][1]


@pytest.mark.parametrize("has_bar", [True, False])
def test_hfs_bar_yields_to_lightnings(has_bar, capsys):
    trainer = bare([HFCallbackAdapter(ProgressCallback())], enable_progress_bar=has_bar, log_every_n_steps=1)
    trainer.fit(Plain(), DataLoader(rows(24), batch_size=4))
    # tqdm writes HF's bar to the error stream
    assert ("6/6" in capsys.readouterr().err) is not has_bar


def test_the_sanity_check_names_its_metrics_as_an_evaluation(tmp_path):
    seen = []

    class Look(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append((trainer.sanity_checking, sorted(n for n in trainer.callback_metrics if n.endswith("l_loss"))))

    args = TrainingArguments(str(tmp_path), use_cpu=True)
    bare([Look()], num_sanity_val_steps=2, log_every_n_steps=1).fit(
        HFModule(Classifier(), args), HFDataModule(None, rows(8), rows(8))
    )
    assert seen == [(True, ["eval_loss"]), (False, ["eval_loss"])]


def test_a_monitor_in_transformers_trainer_logs_each_rate_once(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True, logging_steps=1,
                                          num_train_epochs=1, report_to="none", disable_tqdm=True)  # fmt: skip
    monitor = LightningCallbackAdapter(LearningRateMonitor("step"))
    trainer = transformers.Trainer(Classifier(), args, train_dataset=rows(8), callbacks=[monitor])
    trainer.train()
    named = {name for log in trainer.state.log_history for name in log if name.startswith("lr-")}
    assert named == {"lr-AdamW/pg1", "lr-AdamW/pg2"}


class Writes(pl.Callback):
    """Writes with the run's first tracker."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.experiment = trainer.logger.experiment
        if hasattr(self.experiment, "add_scalar"):
            self.experiment.add_scalar("mine", 2.0, trainer.global_step)


def train(make_args, callback, **values):
    Trainer(Classifier(), make_args(num_train_epochs=1, **values), train_dataset=rows(8), callbacks=[callback]).train()
    return callback.experiment


def test_the_experiment_is_tensorboards_writer(make_args, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = train(make_args, Writes(), report_to="tensorboard")
    assert isinstance(writer, SummaryWriter)
    events = EventAccumulator(writer.log_dir).Reload()
    assert [event.step for event in events.Scalars("mine")] == [1, 2] and "train/loss" in events.Tags()["scalars"]


def test_the_experiment_is_wandbs_run_and_a_lightning_loggers_own(make_args, tmp_path, monkeypatch):
    import wandb
    from lightning.pytorch.loggers import CSVLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert isinstance(train(make_args, Writes(), report_to="wandb"), wandb.Run)
    wandb.finish()
    logger = CSVLogger(tmp_path / "csv")
    assert train(make_args, Writes(), report_to=[logger]) is logger.experiment
    assert train(make_args, Writes()) is None


LEFT_TO_ARGUMENTS = {"accumulate_grad_batches": 1, "gradient_clip_val": None}


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_with_an_hfmodule_the_logs_are_the_trainers(tmp_path, accumulation):
    values = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation, "use_cpu": True}
    args = TrainingArguments(
        str(tmp_path), num_train_epochs=2, logging_steps=2, eval_strategy="epoch", report_to="none",
        disable_tqdm=True, **values,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(Classifier(), args, train_dataset=rows(30), eval_dataset=rows(9))
    trainer.train()
    torch.manual_seed(0)
    adapter, data = HFCallbackAdapter(DefaultFlowCallback, args=args), HFDataModule(None, rows(30), rows(9))
    module = HFModule(Classifier(), TrainingArguments(str(tmp_path), **values))
    bare_trainer([adapter], tmp_path, max_epochs=2, **LEFT_TO_ARGUMENTS).fit(module, data)
    ours, theirs = adapter.state.log_history, trainer.state.log_history
    assert [log.keys() for log in ours] == [log.keys() for log in theirs]
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "train_loss"):
        found = [[log[name] for log in logs if name in log] for logs in (ours, theirs)]
        assert found[0] == found[1] and found[0]
    [evaluated] = [log for log in ours if "eval_loss" in log][:1]
    ratio = evaluated["eval_samples_per_second"] / evaluated["eval_steps_per_second"]
    assert ratio == pytest.approx(9 / 2, rel=1e-2)  # both are rounded


def test_without_validation_an_early_stop_is_refused_as_in_hf(tmp_path):
    adapter = HFCallbackAdapter(EarlyStoppingCallback(2))
    with pytest.raises(UnmetRequirement, match="eval_strategy"):
        bare_trainer([adapter], tmp_path, **LEFT_TO_ARGUMENTS).fit(
            HFModule(Classifier(), None), HFDataModule(None, rows(8))
        )


def test_an_early_stop_names_all_missing_arguments_at_once(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    adapter = HFCallbackAdapter(EarlyStoppingCallback(2), args=args)
    with pytest.raises(UnmetRequirement, match=r"metric_for_best_model(.|\n)*eval_strategy"):
        bare_trainer([adapter], tmp_path, **LEFT_TO_ARGUMENTS).fit(HFModule(Classifier()), HFDataModule(None, rows(8)))


def test_arguments_that_evaluate_where_nothing_is_validated_are_told_of(tmp_path):
    args = TrainingArguments(
        str(tmp_path), eval_strategy="epoch", metric_for_best_model="loss", use_cpu=True, report_to="none"
    )
    adapter = HFCallbackAdapter(EarlyStoppingCallback(2), args=args)
    with pytest.warns(HfCompatWarning, match="eval_strategy='epoch'.*does not validate"):
        bare_trainer([adapter], tmp_path, max_epochs=1, **LEFT_TO_ARGUMENTS).fit(
            HFModule(Classifier()), HFDataModule(None, rows(8))
        )
