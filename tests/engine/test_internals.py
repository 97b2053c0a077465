"""The single warning about a newer Lightning than `engine/internals.py` is written for."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import lightning
import lightning.pytorch as pl
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


def metric(name, on_step, on_epoch):
    return SimpleNamespace(meta=SimpleNamespace(name=name, on_step=on_step, on_epoch=on_epoch), has_reset=False)


@pytest.mark.parametrize(
    ("names", "skipped"), [(None, ["loss", "other"]), (["loss"], ["loss"]), ([], []), (["epoch", "both"], [])]
)
@pytest.mark.parametrize("has_results", [False, True])
def test_metrics_of_steps_are_skipped(names, skipped, has_results):
    kept = {name: metric(name, step, epoch) for name, step, epoch in
            (("loss", True, False), ("other", True, False), ("both", True, True), ("epoch", False, True))}  # fmt: skip
    internals.skip_step_metrics(SimpleNamespace(_results=kept if has_results else None), names)
    assert [name for name, one in kept.items() if one.has_reset] == (skipped if has_results else [])


@pytest.mark.parametrize(
    ("stage", "validating", "expected"), [("fit", True, True), ("fit", False, False), ("validate", True, False)]
)
def test_a_validation_within_a_fit(stage, validating, expected):
    trainer = SimpleNamespace(state=SimpleNamespace(fn=stage), validating=validating)
    assert internals.is_validating_within_fit(trainer) is expected


@pytest.mark.parametrize(("ready", "processed", "expected"), [(0, 0, False), (1, 0, True), (1, 1, False), (2, 1, True)])
def test_a_training_batch_is_under_way(ready, processed, expected):
    current = SimpleNamespace(ready=ready, processed=processed)
    loop = SimpleNamespace(batch_progress=SimpleNamespace(current=current))
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop))
    assert internals.is_training_batch(trainer) is expected


@pytest.mark.parametrize(
    ("training", "has_fetcher", "checks", "expected"),
    [(True, True, True, True), (False, True, True, False), (True, False, True, False), (True, True, False, False)],
)
def test_whether_lightning_validates_next(training, has_fetcher, checks, expected):
    loop = SimpleNamespace(_should_check_val_fx=lambda fetcher: fetcher == "fetcher" and checks)
    fit = SimpleNamespace(_data_fetcher="fetcher" if has_fetcher else None, epoch_loop=loop)
    assert internals.validates_after_this_batch(SimpleNamespace(fit_loop=fit, training=training)) is expected


@pytest.mark.parametrize("batches", [None, "given"])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_validation_is_run_within_a_fit(batches, enabled, fails):
    told = []

    def run():
        told.append((trainer.validating, loop.restarting))
        connector._first_loop_iter = "changed"
        if fails:
            raise ValueError("within")

    loop = SimpleNamespace(
        _data_source=SimpleNamespace(instance="own"), _combined_loader="own", restarting=True, run=run
    )
    connector = SimpleNamespace(_first_loop_iter="first")
    trainer = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=loop)), _logger_connector=connector,
        enable_validation=enabled, validating=False, training=False,
    )  # fmt: skip
    runs = batches is not None or enabled
    if fails and runs:
        with pytest.raises(ValueError, match="within"):
            internals.run_validation(trainer, batches)
    else:
        assert internals.run_validation(trainer, batches) is runs
    assert told == [(True, False)] * runs and trainer.training is runs and connector._first_loop_iter == "first"
    assert (loop._data_source.instance, loop._combined_loader) == (
        ("own", "own") if batches is None else ("given", None)
    )


@pytest.mark.parametrize(
    ("automatic", "own", "other", "expected"),
    [(True, 2, 5, 5), (True, 5, 2, 5), (True, 3, 3, 3), (False, 2, 5, 5), (False, 5, 2, 5)],
)
def test_steps_of_the_other_kind_of_optimization_count_on(automatic, own, other, expected):
    counts = {True: own, False: other} if automatic else {True: other, False: own}
    step, manual = {"total": {"completed": counts[True]}}, {"total": {"completed": counts[False]}}
    fit = {
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": step}},
        "epoch_loop.manual_optimization.optim_step_progress": manual,
    }
    module = SimpleNamespace(automatic_optimization=automatic)
    internals.count_on({"fit_loop": fit}, module)
    mine, theirs = (step, manual) if automatic else (manual, step)
    assert mine["total"]["completed"] == expected and theirs["total"]["completed"] == other
    assert mine["total"] is not theirs["total"]
    for lacking in ({}, {"fit_loop": {}}, {"fit_loop": {"epoch_loop.manual_optimization.optim_step_progress": manual}}):
        internals.count_on(lacking, module)
    assert mine["total"]["completed"] == expected


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("batches", [None, 9])
def test_a_fit_starts_at_a_position(done, batches):
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    internals.start_from(trainer, 3, 7, done, batches)
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    assert set(vars(fit.epoch_progress.current).values()) == {3} == set(vars(fit.epoch_progress.total).values())
    assert loop._batches_that_stepped == (6 if done else 7) and loop._restarting is (done > 0)
    total, current = vars(loop.batch_progress.total), vars(loop.batch_progress.current)
    assert set(total.values()) == ({batches or 7} if done else {0}) and set(current.values()) == {done}
    automatic = loop.automatic_optimization.optim_progress.optimizer.step.total
    for steps in (loop.manual_optimization.optim_step_progress.total, automatic):
        assert (steps.ready, steps.completed) == (7, 7)


def test_numbers_are_noted_for_callbacks():
    connector = SimpleNamespace(_callback_metrics={}, _logged_metrics={}, _progress_bar_metrics={})
    trainer = SimpleNamespace(_logger_connector=connector)
    internals.note_metrics(trainer, {"eval_loss": 2, "acc": 0.5, "epoch": 1.0, "text": "a", "flag": True, "none": None})
    found = {name: float(value) for name, value in connector._callback_metrics.items()}
    assert found == {"eval_loss": 2.0, "acc": 0.5, "flag": 1.0} and connector._logged_metrics.keys() == found.keys()
    assert connector._progress_bar_metrics == {"eval_loss": 2.0}
    internals.note_for_callbacks(trainer, "b", 0.25)
    assert float(connector._callback_metrics["b"]) == 0.25 and "b" not in connector._logged_metrics
