"""Callbacks and loggers of `pytorch_lightning`, the other distribution, are refused at every entry point."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import pytorch_lightning as other

from helpers.toy import Classifier, rows
from hf_compat import HFCallbackAdapter, HFModule, LightningCallbackAdapter, Trainer, TrainingArguments
from hf_compat.errors import CallbackError


class Counts(other.Callback):
    """A user-defined callback."""


def trained_here(candidate, make_args):
    Trainer(Classifier(), make_args(), train_dataset=rows(16), callbacks=[candidate])


def added_later(candidate, make_args):
    Trainer(Classifier(), make_args(), train_dataset=rows(16)).add_callback(candidate)


def reported_to(candidate, make_args):
    Trainer(Classifier(), make_args(report_to=[candidate]), train_dataset=rows(16))


def natively(candidate, make_args):
    trainer = pl.Trainer(
        max_epochs=1, callbacks=[candidate], accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(HFModule(Classifier(), TrainingArguments(use_cpu=True)), rows(16))


def adapted(candidate, make_args):
    HFCallbackAdapter(candidate)


def adapted_the_other_way(candidate, make_args):
    LightningCallbackAdapter(candidate)


@pytest.mark.parametrize("door", [trained_here, added_later, natively, adapted, adapted_the_other_way])
def test_a_callback_is_refused_with_the_import_that_works(door, make_args):
    with pytest.raises(CallbackError, match=r"from lightning\.pytorch\.callbacks import EarlyStopping"):
        door(other.callbacks.EarlyStopping("eval_loss"), make_args)
    with pytest.raises(CallbackError, match=r"Counts inherits from Callback(.|\n)*from lightning\.pytorch\.callbacks"):
        door(Counts(), make_args)


@pytest.mark.parametrize("door", [trained_here, added_later, reported_to])
def test_a_logger_is_refused_with_the_import_that_works(door, make_args, tmp_path):
    with pytest.raises(CallbackError, match=r"from lightning\.pytorch\.loggers import CSVLogger"):
        door(other.loggers.CSVLogger(tmp_path), make_args)


def test_a_callback_of_lightning_is_refused_by_the_adapter_of_hf_callbacks():
    with pytest.raises(CallbackError, match=r"give it to lightning\.Trainer itself"):
        HFCallbackAdapter(pl.callbacks.EarlyStopping("eval_loss"))
