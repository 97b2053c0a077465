"""HFModule in a trainer of the user's own: what the arguments and the trainer both say has to agree."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import pytest

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.errors import ArgumentError, InertArgumentWarning


def fit(tmp_path, trainer=None, **values):
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True, **values)
    options = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
               "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1,
               "default_root_dir": tmp_path}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", InertArgumentWarning)
        ours = pl.Trainer(**{**options, **(trainer or {})})
        ours.fit(HFModule(Classifier(), args), HFDataModule(args, train_dataset=rows(8)))
    return ours


@pytest.mark.parametrize(
    ("values", "trainer", "shown"),
    [
        ({"num_train_epochs": 5}, {}, ["num_train_epochs=5", "max_epochs=1"]),
        ({"max_steps": 3}, {"max_steps": 4, "max_epochs": -1}, ["max_steps=3", "max_steps=4"]),
        ({"bf16": True}, {}, ["bf16=True", "precision='32-true'"]),
        ({"max_steps": 3}, {}, ["max_steps=3", "max_steps=-1", "`lightning.Trainer(max_steps=3)`"]),
        (
            {"num_train_epochs": 2},
            {"max_epochs": None},
            ["num_train_epochs=2", "max_epochs=1000` of lightning.Trainer (its default)", "max_epochs=2"],
        ),
        ({"num_train_epochs": 2}, {"max_epochs": -1, "max_time": "00:00:00:01"}, ["num_train_epochs=2", "=-1"]),
    ],
)
def test_a_setting_with_two_values_is_an_error_that_shows_both(tmp_path, values, trainer, shown):
    with pytest.raises(ArgumentError) as raised:
        fit(tmp_path, trainer, **values)
    assert all(part in str(raised.value) for part in shown)


def test_updates_end_a_run_whatever_its_epochs(tmp_path):
    assert fit(tmp_path, {"max_steps": 3, "max_epochs": -1}, num_train_epochs=9).global_step == 3


def test_what_agrees_trains(tmp_path):
    assert fit(tmp_path, {"precision": "bf16-mixed"}, bf16=True, num_train_epochs=1).global_step == 2


def test_what_the_trainer_decides_is_warned_about(tmp_path):
    with pytest.raises(InertArgumentWarning, match=r"`save_strategy` \(a ModelCheckpoint\)"):
        fit(tmp_path, save_strategy="epoch")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"async_save": True}, r"`async_save` \(a ModelCheckpoint\)"),
        ({"output_store": "memory://run"}, r"`output_store` \(default_root_dir"),
    ],
)
def test_so_are_arguments_of_ours(tmp_path, values, told):
    with pytest.raises(InertArgumentWarning, match=told):
        fit(tmp_path, **values)
