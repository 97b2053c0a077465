"""Every flag of `lightning.Trainer.__init__` with an `HFModule`: it has its effect, or is refused with the way out.

    python tests/native/test_trainer_flags.py

prints the table of docs/native.md.
"""

from __future__ import annotations

import csv
import inspect
import os
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import HalfPrecision, TorchCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader

from helpers.toy import Classifier, rows, weights
from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.errors import ArgumentError, CheckpointError, UnsupportedArgument

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists"),
]
SIGNATURE = [name for name in inspect.signature(pl.Trainer.__init__).parameters if name != "self"]
TABLE: dict[str, str] = {}
DOCS = Path(__file__).resolve().parents[2] / "docs" / "native.md"


def flag(name: str, said: str):
    """Give a flag its row: what the decorated test asserts of it."""
    assert name in SIGNATURE, f"lightning.Trainer has no {name!r}"
    assert name not in TABLE
    TABLE[name] = said
    return lambda test: test


def table() -> str:
    lines = [f"| `{name}` | {TABLE[name]} |" for name in SIGNATURE if name in TABLE]
    return "\n".join(["| flag | with an `HFModule` |", "|---|---|", *lines])


class Seen(pl.Callback):
    """Notes what a run has done, by the updates it had made."""

    def __init__(self):
        self.batches, self.validated, self.sanity, self.epochs = [], [], 0, 0
        self.validation_batches = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(round(float(batch["x"].sum()), 3))

    def on_validation_start(self, trainer, pl_module):
        if trainer.sanity_checking:
            self.sanity += 1
        else:
            self.validated.append(trainer.global_step)

    def on_validation_batch_end(self, trainer, *rest):
        self.validation_batches += not trainer.sanity_checking

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs += 1


def logged(logger) -> list[dict[str, str]]:
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        return [{name: value for name, value in entry.items() if value} for entry in csv.DictReader(file)]


@pytest.fixture(autouse=True)
def no_process_group():
    """Leave nothing of Lightning's own launcher behind: neither a group nor the variables that make a rank."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def fit(tmp_path):
    """Fit 32 samples in batches of 4; returns the trainer, the module and what was seen."""

    def run(plain=False, samples=32, model=None, evaluates=True, accumulate=1, extra=(), ckpt_path=None, **options):
        seen = Seen()
        quiet = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
                 "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1,
                 "default_root_dir": tmp_path}  # fmt: skip
        if options.get("barebones"):
            quiet = {"max_epochs": 2, "accelerator": "cpu"}
        trainer = pl.Trainer(**{**quiet, **options}, callbacks=[seen, *extra])
        args = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, per_device_eval_batch_size=4, learning_rate=0.01,
            use_cpu=True, gradient_accumulation_steps=accumulate,
        )  # fmt: skip
        torch.manual_seed(0)
        module = HFModule(model or Classifier(), args)
        if plain:
            loaders = DataLoader(rows(samples), batch_size=4), DataLoader(rows(16, seed=3), batch_size=4)
            trainer.fit(module, *loaders, ckpt_path=ckpt_path)
        else:
            data = HFDataModule(None, rows(samples), rows(16, seed=3) if evaluates else None, rows(16))
            trainer.fit(module, data, ckpt_path=ckpt_path)
        return trainer, module, seen

    return run


def test_every_flag_has_a_row_and_the_docs_show_it():
    assert set(TABLE) == set(SIGNATURE)
    assert table() in DOCS.read_text(encoding="utf-8"), "python tests/native/test_trainer_flags.py prints the table"


# Where it runs -------------------------------------------------------------------------------------------------------
@flag("accelerator", "where the model, its inputs and evaluations are, whatever `use_cpu` leaves open")
@pytest.mark.parametrize("given", ["cpu", "auto", CPUAccelerator()])
def test_accelerator(fit, given):
    trainer, module, _ = fit(accelerator=given)
    assert module.steps.args.device == trainer.strategy.root_device and trainer.global_step == 16


@flag("strategy", "one device, or DDP in any spelling; strategies that shard are refused: `hf_compat.Trainer` with "
      "`fsdp` or `deepspeed` does so")  # fmt: skip
@pytest.mark.parametrize("given", ["auto", "ddp", "ddp_find_unused_parameters_true", DDPStrategy(), "object"])
def test_strategy(fit, given):
    _, alone, _ = fit()
    strategy = SingleDeviceStrategy("cpu") if given == "object" else given
    _, module, _ = fit(strategy=strategy, devices=1)
    assert torch.equal(weights(module), weights(alone))


def test_strategies_that_shard_are_refused(fit):
    with pytest.raises(UnsupportedArgument, match=r"ModelParallelStrategy(.|\n)*TrainingArguments\(fsdp=True\)"):
        fit(strategy=ModelParallelStrategy())


@flag("devices", "how many processes; each batch is `per_device_train_batch_size` of one of them")
def test_devices(fit):
    trainer, module, _ = fit(devices=1)
    assert trainer.world_size == 1 and module.steps.args.world_size == 1  # two: tests/distributed/


@flag("num_nodes", "how many machines, each with `devices` processes")
def test_num_nodes_is_what_the_processes_share_the_data_by(fit, monkeypatch):
    from distributed.test_native_numbers import NODES

    assert NODES == 2


@flag("precision", "mixed: autocast around the model's forward, as in HF; true: the weights themselves")
@pytest.mark.parametrize("given", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision(fit, given):
    _, alone, _ = fit()
    _, module, _ = fit(precision=given)
    kinds = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}
    assert weights(module).dtype is kinds[given] and not torch.equal(weights(module).float(), weights(alone))


@flag("plugins", "a precision plugin or a CheckpointIO does its work; precision is the plugin's")
def test_plugins(fit, tmp_path):
    written = []

    class Note(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            written.append(path)
            super().save_checkpoint(checkpoint, path, storage_options)

    saver = ModelCheckpoint(tmp_path, save_last=True)
    _, module, _ = fit(plugins=[HalfPrecision("bf16-true"), Note()], enable_checkpointing=True, extra=[saver])
    assert weights(module).dtype is torch.bfloat16 and written


@flag("sync_batchnorm", "with several processes on GPUs, batch norms count over all of them; an error without")
def test_sync_batchnorm(fit):
    class Normed(Classifier):
        def __init__(self):
            super().__init__()
            self.extra = torch.nn.BatchNorm1d(3)

    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        fit(sync_batchnorm=True, strategy="ddp", devices=1, model=Normed())


# How long it runs ----------------------------------------------------------------------------------------------------
@flag("max_epochs", "the length of the run and of the schedule; `num_train_epochs` that differs is refused")
def test_max_epochs(fit):
    trainer, module, _ = fit(max_epochs=3)
    assert trainer.global_step == 24 and module.steps.lr_scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-9)


@flag("max_steps", "updates, of the run and of the schedule; `max_steps` of the arguments that differs is refused")
def test_max_steps(fit):
    trainer, module, _ = fit(max_steps=5, max_epochs=-1, accumulate=2)
    assert trainer.global_step == 5 and module.steps.lr_scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-9)


@flag("min_epochs", "nothing that asks to stop ends the run earlier")
def test_min_epochs(fit):
    stop = EarlyStopping("loss", stopping_threshold=1e9, mode="min")
    assert fit(extra=[stop], max_epochs=5)[0].global_step == 8
    assert fit(extra=[stop], max_epochs=5, min_epochs=3)[0].global_step == 24


@flag("min_steps", "updates before which nothing that asks to stop ends the run")
def test_min_steps(fit):
    stop = EarlyStopping("loss", stopping_threshold=1e9, mode="min", check_on_train_epoch_end=True)
    trainer, _, _ = fit(extra=[stop], max_epochs=5, min_steps=10)
    assert 10 <= trainer.global_step < 40


@flag("max_time", "the run ends after the update under way")
def test_max_time(fit):
    slow = LambdaCallback(on_train_batch_end=lambda *parts: time.sleep(0.05))
    assert 2 <= fit(max_time={"seconds": 0.3}, max_epochs=500, extra=[slow])[0].global_step < 12


@flag("fast_dev_run", "so many updates and batches of each kind, whatever lengths the arguments have")
def test_fast_dev_run(tmp_path):
    seen = Seen()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(fast_dev_run=2, callbacks=[seen], **quiet)
    args = TrainingArguments(str(tmp_path), num_train_epochs=7, use_cpu=True, per_device_train_batch_size=4)
    trainer.fit(HFModule(Classifier(), args), HFDataModule(None, rows(32), rows(32)))
    assert trainer.global_step == 2 and seen.validation_batches == 2 and seen.epochs == 1


@flag("limit_train_batches", "updates of an epoch, a number or a share; the next epoch has an order of its own")
@pytest.mark.parametrize(("given", "updates"), [(3, 3), (0.25, 2)])
def test_limit_train_batches(fit, given, updates):
    trainer, module, seen = fit(limit_train_batches=given, max_epochs=3)
    assert trainer.global_step == 3 * updates and len(set(seen.batches)) == 3 * updates
    assert module.steps.lr_scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("resumed_at", [2, 3, 4])
def test_a_run_of_limited_epochs_is_resumed_where_it_was(fit, tmp_path, resumed_at):
    # Lightning leaves out the validation of an epoch that it resumes at its end, with what it draws
    options = {"limit_train_batches": 3, "max_epochs": 3, "enable_checkpointing": True, "evaluates": False}
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    _, whole, seen = fit(extra=[saver], **options)
    _, again, rest = fit(extra=[saver], ckpt_path=str(tmp_path / f"step={resumed_at}.ckpt"), **options)
    assert rest.batches == seen.batches[resumed_at:]
    assert torch.equal(weights(again), weights(whole))


@flag("limit_val_batches", "batches of a validation; 0 validates nothing")
def test_limit_val_batches(fit):
    assert fit(limit_val_batches=3)[2].validation_batches == 6
    assert fit(limit_val_batches=0.5)[2].validation_batches == 4
    assert fit(limit_val_batches=0)[2].validated == []


@flag("limit_test_batches", "batches of `trainer.test`")
@pytest.mark.parametrize("given", [2, 0.5])
def test_limit_test_batches(fit, given):
    trainer, module, _ = fit(limit_test_batches=given)
    whole = fit()[0].test(module, HFDataModule(None, None, None, rows(8)), verbose=False)
    assert trainer.test(module, HFDataModule(None, None, None, rows(16)), verbose=False) == whole


@flag("limit_predict_batches", "batches of `trainer.predict`")
@pytest.mark.parametrize("given", [2, 0.5])
def test_limit_predict_batches(fit, given):
    trainer, module, _ = fit(limit_predict_batches=given)
    assert len(trainer.predict(module, HFDataModule(None, None, None, rows(16)))) == 2


@flag("overfit_batches", "the same updates every epoch, in the data's order")
@pytest.mark.parametrize("given", [2, 0.25])
def test_overfit_batches(fit, given):
    _, _, seen = fit(overfit_batches=given, max_epochs=3)
    assert len(set(seen.batches)) == 2 and seen.batches == seen.batches[:2] * 3


# When it validates and logs ------------------------------------------------------------------------------------------
@flag("val_check_interval", "in updates, a number or a share of an epoch, or a time; with plain batches in batches")
@pytest.mark.parametrize(
    ("options", "moments"),
    [
        ({"val_check_interval": 2}, [2, 4, 6, 8]),
        ({"val_check_interval": 0.5}, [2, 4, 6, 8]),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, [3, 6]),
        ({"val_check_interval": 4, "plain": True}, [2, 4, 6, 8]),
    ],
)
def test_val_check_interval(fit, options, moments):
    assert fit(accumulate=2, **options)[2].validated == moments


def test_validations_at_a_time(fit):
    slow = LambdaCallback(on_train_batch_end=lambda *parts: time.sleep(0.2))
    seen = fit(val_check_interval={"seconds": 1}, check_val_every_n_epoch=None, extra=[slow])[2]
    assert 1 <= len(seen.validated) <= 4


@flag("check_val_every_n_epoch", "as in any module")
def test_check_val_every_n_epoch(fit):
    assert fit(check_val_every_n_epoch=2, max_epochs=4)[2].validated == [16, 32]


@flag("num_sanity_val_steps", "batches validated before training; they change no number of it")
def test_num_sanity_val_steps(fit):
    _, with_check, seen = fit(num_sanity_val_steps=-1)
    _, without, nothing = fit(num_sanity_val_steps=0)
    assert (seen.sanity, nothing.sanity) == (1, 0) and torch.equal(weights(with_check), weights(without))


@flag("log_every_n_steps", "in updates, of plain batches too")
@pytest.mark.parametrize("plain", [False, True])
def test_log_every_n_steps(fit, tmp_path, plain):
    logger = CSVLogger(tmp_path / "csv")
    fit(logger=logger, log_every_n_steps=3, accumulate=2, plain=plain, samples=48)
    assert [int(entry["step"]) for entry in logged(logger) if "loss" in entry] == [2, 5, 8, 11]


@flag("logger", "gets `loss`, `learning_rate`, `grad_norm`, `loss_epoch` and the metrics of evaluations")
def test_logger(fit, tmp_path):
    logger = CSVLogger(tmp_path / "csv")
    fit(logger=logger)
    found = {name for entry in logged(logger) for name in entry}
    assert {"loss", "learning_rate", "grad_norm", "loss_epoch", "eval_loss"} <= found


@flag("enable_autolog_hparams", "what `save_hyperparameters` keeps goes to the loggers, or does not")
@pytest.mark.parametrize("given", [True, False])
def test_enable_autolog_hparams(tmp_path, given):
    class Own(HFModule):
        def __init__(self, model, args, width):
            super().__init__(model, args)
            self.save_hyperparameters("width")

    logger = CSVLogger(tmp_path)
    trainer = pl.Trainer(
        max_steps=1, logger=logger, enable_autolog_hparams=given, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer.fit(Own(Classifier(), args, width=7), HFDataModule(None, rows(8)))
    assert (logger.experiment.hparams.get("width") == 7) is given


# Data ----------------------------------------------------------------------------------------------------------------
@flag("reload_dataloaders_every_n_epochs", "each epoch has the order that it would have without; so has a resumed one")
def test_reload_dataloaders_every_n_epochs(fit, tmp_path):
    _, once, expected = fit(max_epochs=3)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
    options = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3, "enable_checkpointing": True}
    _, reloaded, seen = fit(extra=[saver], **options)
    assert len(set(seen.batches)) == 24 and seen.batches == expected.batches
    assert torch.equal(weights(reloaded), weights(once))
    for step in (5, 10):
        _, again, rest = fit(extra=[saver], ckpt_path=str(tmp_path / f"step={step}.ckpt"), **options)
        assert rest.batches == seen.batches[step:] and torch.equal(weights(again), weights(once))


@flag("use_distributed_sampler", "for plain loaders; HFDataModule shares its samples out itself, as HF does")
@pytest.mark.parametrize("given", [True, False])
def test_use_distributed_sampler(fit, given):
    _, alone, _ = fit()
    trainer, module, _ = fit(use_distributed_sampler=given, strategy="ddp", devices=1)
    assert trainer.global_step == 16 and torch.equal(weights(module), weights(alone))
    sampler = fit(use_distributed_sampler=given, strategy="ddp", devices=1, plain=True)[0].train_dataloader.sampler
    assert isinstance(sampler, torch.utils.data.DistributedSampler) is given


# Gradients -----------------------------------------------------------------------------------------------------------
@flag("accumulate_grad_batches", "refused: `TrainingArguments(gradient_accumulation_steps=…)`")
def test_accumulate_grad_batches(fit):
    with pytest.raises(ArgumentError, match="gradient_accumulation_steps=2"):
        fit(accumulate_grad_batches=2)


@flag("gradient_clip_val", "refused: `TrainingArguments(max_grad_norm=…)`")
def test_gradient_clip_val(fit):
    with pytest.raises(ArgumentError, match=r"max_grad_norm=0\.5"):
        fit(gradient_clip_val=0.5)


@flag("gradient_clip_algorithm", "`norm` is what HF does; `value` is refused: a callback can clip so")
def test_gradient_clip_algorithm(fit):
    assert fit(gradient_clip_algorithm="norm")[0].global_step == 16
    with pytest.raises(ArgumentError, match=r"`gradient_clip_algorithm='value'`(.|\n)*clip_grad_value_"):
        fit(gradient_clip_algorithm="value")


@flag("detect_anomaly", "an operation whose gradient is NaN is an error that names it")
def test_detect_anomaly(fit):
    class Bad(Classifier):
        def forward(self, x, labels=None):
            out = super().forward(x, labels)
            return {**out, "loss": out["loss"] + torch.sqrt(self.outer.bias.sum() * 0)}

    with pytest.warns(UserWarning, match="Error detected in"), pytest.raises(RuntimeError, match="MulBackward0"):
        fit(detect_anomaly=True, model=Bad())


@flag("deterministic", "torch's deterministic algorithms, or warnings where there are none")
@pytest.mark.parametrize("given", [True, "warn"])
def test_deterministic(fit, given, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    states = []
    note = LambdaCallback(
        on_train_start=lambda *parts: states.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )
    )
    try:
        fit(deterministic=given, extra=[note])
    finally:
        torch.use_deterministic_algorithms(False)
    assert states == [(True, given == "warn")]


@flag("benchmark", "cuDNN measures which convolution is the fastest")
@pytest.mark.parametrize("given", [True, False])
def test_benchmark(fit, given):
    before, states = torch.backends.cudnn.benchmark, []
    note = LambdaCallback(on_train_start=lambda *parts: states.append(torch.backends.cudnn.benchmark))
    try:
        fit(benchmark=given, extra=[note])
    finally:
        torch.backends.cudnn.benchmark = before
    assert states == [given]


@flag("inference_mode", "evaluations run in torch's inference mode, or only without gradients; equal metrics")
def test_inference_mode(fit):
    modes, losses = [], []

    class Watched(Classifier):
        def forward(self, x, labels=None):
            if not self.training:
                modes.append(torch.is_inference_mode_enabled())
            return super().forward(x, labels)

    for given in (True, False):
        _, module, _ = fit()
        tester = pl.Trainer(inference_mode=given, accelerator="cpu", logger=False, enable_progress_bar=False)
        watched = HFModule(Watched(), module.steps.args)
        watched.model.load_state_dict(module.model.state_dict())
        losses.append(tester.test(watched, HFDataModule(None, None, None, rows(16)), verbose=False))
    assert set(modes[:2]) == {True} and set(modes[-2:]) == {False} and losses[0] == losses[1]


# What it shows and writes --------------------------------------------------------------------------------------------
@flag("profiler", "measures the run")
def test_profiler(fit, tmp_path):
    fit(profiler=SimpleProfiler(dirpath=tmp_path, filename="spent"))
    assert "run_training_batch" in (tmp_path / "fit-spent.txt").read_text()


@flag("callbacks", "Lightning's and HF's, in one list")
def test_callbacks(fit):
    assert len(fit()[2].batches) == 16


@flag(
    "enable_checkpointing", "a ModelCheckpoint at the end of each epoch; `save_strategy` of the arguments has no effect"
)
def test_enable_checkpointing(fit, tmp_path):
    fit(enable_checkpointing=True)
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["epoch=1-step=16.ckpt"]
    fit(enable_checkpointing=False, default_root_dir=tmp_path / "other")
    assert not list((tmp_path / "other").rglob("*.ckpt"))


@flag("default_root_dir", "where Lightning's loggers and checkpoints write; `output_dir` says nothing")
def test_default_root_dir(fit, tmp_path):
    fit(enable_checkpointing=True, default_root_dir=tmp_path / "here")
    assert len(list((tmp_path / "here").rglob("*.ckpt"))) == 1


@flag("enable_progress_bar", "a bar over the updates, with the loss")
def test_enable_progress_bar(fit, capsys):
    fit(enable_progress_bar=True, extra=[TQDMProgressBar(refresh_rate=1)])
    shown = capsys.readouterr()
    assert "16/16" not in shown.out + shown.err and "8/8" in shown.out + shown.err and "loss=" in shown.out + shown.err
    fit(enable_progress_bar=False)
    quiet = capsys.readouterr()
    assert "8/8" not in quiet.out + quiet.err


@flag("enable_model_summary", "the layers and their sizes when a fit begins")
def test_enable_model_summary(fit, capfd, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit(enable_model_summary=True)
    assert "Trainable params" in capfd.readouterr().out + caplog.text


@flag("barebones", "nothing is logged, shown or saved; the weights are the same")
def test_barebones(fit):
    _, alone, _ = fit()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*self.log")
        trainer, module, _ = fit(barebones=True)
    assert torch.equal(weights(module), weights(alone)) and not trainer.callback_metrics


@flag("model_registry", "as in any module: where checkpoints are uploaded to, where the package `litmodels` is")
def test_model_registry(fit):
    trainer, module, _ = fit(model_registry="someone/model", enable_checkpointing=True)
    assert trainer.global_step == 16
    with pytest.raises((FileNotFoundError, CheckpointError), match="registry"):
        trainer.test(module, HFDataModule(None, None, None, rows(8)), ckpt_path="registry")


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
