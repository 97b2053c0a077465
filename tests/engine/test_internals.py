"""The single warning about a newer Lightning than `engine/internals.py` is written for."""

from __future__ import annotations

import warnings

import lightning
import pytest

from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.engine import internals
from hf_compat.errors import HfCompatWarning, warn_once


@pytest.fixture(autouse=True)
def nothing_warned_of_yet():
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


def warnings_of_lightning(version, monkeypatch, tmp_path):
    monkeypatch.setattr(lightning, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8), eval_dataset=toy.rows(8))
        trainer.evaluate()
        trainer.train()
        trainer.train()
    return [str(w.message) for w in caught if w.category is HfCompatWarning and "internals" in str(w.message)]


@pytest.mark.parametrize("version", ["2.7.0", "2.10.1", "2.7.0.dev20261201", "3.0.0rc1"])
def test_a_newer_minor_release_is_warned_of_once(version, monkeypatch, tmp_path):
    (message,) = warnings_of_lightning(version, monkeypatch, tmp_path)
    assert version in message and internals.WRITTEN_FOR in message


@pytest.mark.parametrize("version", ["2.6.6", "2.6.99", "2.5.0"])
def test_another_patch_of_the_same_release_is_not(version, monkeypatch, tmp_path):
    assert warnings_of_lightning(version, monkeypatch, tmp_path) == []


def test_the_tests_run_with_the_release_that_it_was_written_for():
    assert lightning.__version__.split(".")[:2] == internals.WRITTEN_FOR.split(".")[:2]
