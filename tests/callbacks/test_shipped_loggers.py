"""Every logger that Lightning ships, at both entry points, gets the losses, or an error names the missing package."""

from __future__ import annotations

import csv

import lightning.pytorch as pl
import pytest
from lightning.pytorch import loggers as pll

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule, Trainer, TrainerCallback, TrainingArguments
from hf_compat.errors import MissingPackage

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*no `val_dataloader`"),
]


class Own(pll.Logger):
    """A user-defined logger."""

    name, version = "own", 0

    def __init__(self):
        self.names = set()

    def log_metrics(self, metrics, step=None):
        self.names |= set(metrics)

    def log_hyperparams(self, params, *args, **kwargs): ...


def _csv_names(logger):
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        return set(next(csv.reader(file)))


def _board_names(logger):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return set(EventAccumulator(logger.log_dir).Reload().Tags()["scalars"])


def _wandb_names(logger):
    names = set(dict(logger.experiment.summary))
    logger.experiment.finish()
    return names


# By class: what makes one in a folder, and the names that it was given.
WORKS = {
    "Logger": (lambda folder: Own(), lambda logger: logger.names),
    "CSVLogger": (pll.CSVLogger, _csv_names),
    "TensorBoardLogger": (pll.TensorBoardLogger, _board_names),
    "WandbLogger": (lambda folder: pll.WandbLogger(save_dir=folder, offline=True), _wandb_names),
}
# By class: its package, and HF's name of the tracker where it has one.
MISSING = {
    "CometLogger": (pll.CometLogger, "comet_ml", "comet_ml"),
    "LitLogger": (pll.LitLogger, "litlogger", None),
    "MLFlowLogger": (pll.MLFlowLogger, "mlflow", "mlflow"),
}


@pytest.mark.parametrize("name", WORKS)
def test_it_gets_the_losses_natively(tmp_path, name):
    make, names_of = WORKS[name]
    logger = make(tmp_path)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=logger, log_every_n_steps=1,
                         enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False)  # fmt: skip
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True)
    trainer.fit(HFModule(Classifier(), args), HFDataModule(None, rows(16)))
    assert {"loss", "learning_rate", "grad_norm", "loss_epoch"} <= names_of(logger)


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("place", ["callbacks", "report_to"])
def test_it_gets_the_losses_in_our_trainer(make_args, tmp_path, name, place):
    make, names_of = WORKS[name]
    logger = make(tmp_path)
    args = make_args(num_train_epochs=1, logging_steps=1, **({"report_to": [logger]} if place == "report_to" else {}))
    Trainer(Classifier(), args, train_dataset=rows(16), callbacks=[logger] if place == "callbacks" else []).train()
    assert {"train/loss", "train/learning_rate", "train/grad_norm"} <= names_of(logger)


@pytest.mark.parametrize("name", MISSING)
def test_a_package_that_is_missing_is_named(make_args, name):
    make, package, tracker = MISSING[name]
    with pytest.raises(ModuleNotFoundError, match=package.replace("_", ".")):
        make()
    if tracker is not None:
        with pytest.raises(MissingPackage, match=rf"report_to='{tracker}'(.|\n)*pip install"):
            Trainer(Classifier(), make_args(report_to=[tracker]), train_dataset=rows(4))


def test_every_logger_of_lightning_is_here():
    assert {*WORKS, *MISSING} == set(pll.__all__)


class Ended(Own):
    """Records how its runs ended, and when values were logged."""

    def __init__(self):
        super().__init__()
        self.told = []

    def log_metrics(self, metrics, step=None):
        self.told.append("log")

    def finalize(self, status):
        self.told.append(status)


class Fails(TrainerCallback):
    def __init__(self, error):
        self.error = error

    def on_step_end(self, args, state, control, **kwargs):
        raise self.error


@pytest.mark.parametrize("place", ["callbacks", "report_to"])
@pytest.mark.parametrize("beside", [None, pl.callbacks.LambdaCallback])
def test_a_run_ends_with_its_training_and_goes_on_with_the_next(make_args, place, beside):
    logger = Ended()
    args = make_args(**({"report_to": [logger]} if place == "report_to" else {}), max_steps=2, logging_steps=1)
    callbacks = [*([logger] if place == "callbacks" else []), *([beside()] if beside else [])]
    trainer = Trainer(Classifier(), args, train_dataset=rows(16), eval_dataset=rows(8), callbacks=callbacks)
    for _ in range(2):
        logger.told.clear()
        trainer.train()
        assert logger.told[-2:] == ["log", "success"] and "failed" not in logger.told
    trainer.evaluate()
    assert "log" in logger.told[logger.told.index("success") :]


@pytest.mark.parametrize("error", [ValueError("a bad batch"), KeyboardInterrupt()])
def test_a_run_that_fails_is_told_so(make_args, error):
    logger = Ended()
    trainer = Trainer(Classifier(), make_args(), train_dataset=rows(16), callbacks=[logger, Fails(error)])
    with pytest.raises(type(error)):
        trainer.train()
    assert logger.told[-1] == "failed" and "success" not in logger.told


def test_a_logger_that_cannot_end_its_run_hides_no_error(make_args):
    class Broken(Ended):
        def finalize(self, status):
            raise ConnectionError("no server")

    trainer = Trainer(Classifier(), make_args(), train_dataset=rows(16), callbacks=[Broken(), Fails(ValueError("bad"))])
    with pytest.raises(ValueError, match="bad") as raised:
        trainer.train()
    assert "Broken could not end its run: ConnectionError: no server" in raised.value.__notes__
