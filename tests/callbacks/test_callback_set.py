"""Which Lightning callbacks work where, and what a fit replaces in them, without a fit."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from torch import nn

from hf_compat import TrainerCallback
from hf_compat.callbacks import callback_set as sets
from hf_compat.callbacks.loggers import LoggerCallback, reporting_callbacks
from hf_compat.errors import ArgumentError, CallbackError, MissingPackage

PLACES = (sets.IN_TRAINER, sets.IN_TRANSFORMERS, sets.WITH_MODULE, sets.WITH_DATA)


@pytest.mark.parametrize(
    ("make", "places"),
    [
        (lambda: GradientAccumulationScheduler({0: 2}), {sets.IN_TRAINER, sets.WITH_MODULE}),
        (BatchSizeFinder, {sets.IN_TRAINER, sets.WITH_DATA}),
        (LearningRateFinder, {sets.IN_TRAINER}),
        (lambda: pl.callbacks.BasePredictionWriter(), {sets.IN_TRAINER}),
        (lambda: StochasticWeightAveraging(0.1), {sets.IN_TRANSFORMERS}),
        (WeightAveraging, {sets.IN_TRANSFORMERS}),
        (RichProgressBar, {sets.IN_TRANSFORMERS}),
        (lambda: ThroughputMonitor(lambda batch: 1), {sets.IN_TRANSFORMERS}),
        (lambda: OnExceptionCheckpoint("."), {sets.IN_TRANSFORMERS}),
        (BackboneFinetuning, {sets.IN_TRANSFORMERS}),
        (Timer, set()),
    ],
)
def test_where_a_callback_is_refused(make, places):
    callback = make()
    for place in PLACES:
        try:
            sets.refuse(callback, place)
            was_refused = False
        except CallbackError as error:
            was_refused = True
            assert f"{type(callback).__name__} cannot work {place}" in str(error) and "Hint:" in str(error)
        assert was_refused is (place in places), place


@pytest.mark.parametrize("makes_updates", [False, True])
@pytest.mark.parametrize("with_data", [False, True])
@pytest.mark.parametrize("author", [False, True])
@pytest.mark.parametrize("kind", ["accumulation", "batch size", "backbone", "averaging", "timer"])
@pytest.mark.parametrize("early", [False, True])
def test_what_a_native_fit_refuses(makes_updates, with_data, author, kind, early):
    callback, refused = {
        "accumulation": (GradientAccumulationScheduler({0: 2}), makes_updates),
        "batch size": (BatchSizeFinder(), with_data),
        "backbone": (BackboneFinetuning(), makes_updates),
        "averaging": (StochasticWeightAveraging(0.1), author),
        "timer": (Timer(), False),
    }[kind]
    callback._early_exit = early
    module = pl.LightningModule()
    module.model, module.automatic_optimization = nn.Sequential(nn.BatchNorm1d(2)), not makes_updates
    callbacks = [Timer(), callback]
    try:
        sets.refuse_native(callbacks, module, with_data, author)
        was_refused = False
    except CallbackError:
        was_refused = True
    assert was_refused is refused
    # what a Tuner has added goes, as the trainer may fit again
    goes = refused and early and kind in ("accumulation", "batch size")
    assert (callback in callbacks) is not goes


@pytest.mark.parametrize(
    ("model", "trained", "callback", "refused"),
    [
        ({}, {}, BackboneFinetuning(), True),
        ({"backbone": nn.Linear(1, 1)}, {}, BackboneFinetuning(), False),
        ({"base_model": nn.Linear(1, 1)}, {}, BackboneFinetuning(), False),
        ({"backbone": "text"}, {}, BackboneFinetuning(), True),
        ({}, {"backbone": nn.Linear(1, 1)}, BackboneFinetuning(), False),
        ({}, {"backbone": "text"}, BackboneFinetuning(), True),
        ({}, {}, Timer(), False),
    ],
)
def test_a_backbone_is_looked_for(model, trained, callback, refused):
    held, outer = nn.Module(), nn.Module()
    for module, parts in ((held, model), (outer, trained)):
        for name, part in parts.items():
            setattr(module, name, part)
    if refused:
        with pytest.raises(CallbackError, match="Module has none"):
            sets.check_model_of(callback, held, outer)
    else:
        assert sets.check_model_of(callback, held, outer) is None
    expected = next((part for part in model.values() if isinstance(part, nn.Module)), None)
    assert sets.backbone_of(held) is expected
    held.__dict__["base_model"] = held  # as in a base model of transformers
    assert sets.backbone_of(held) is (expected if "backbone" in model else None)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(2), nn.LayerNorm(2)])
@pytest.mark.parametrize("callback", [StochasticWeightAveraging(0.1), WeightAveraging()])
def test_averages_and_batch_norms(norm, callback):
    is_refused = isinstance(norm, nn.BatchNorm1d) and isinstance(callback, StochasticWeightAveraging)
    try:
        sets.check_averaging_of(callback, nn.Sequential(nn.Linear(2, 2), norm))
        was_refused = False
    except CallbackError:
        was_refused = True
    assert was_refused is is_refused


class OwnCheckpoint(ModelCheckpoint):
    def on_train_batch_end(self, *args):
        """Save in another way."""


@pytest.mark.parametrize("makes_updates", [False, True])
@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_what_a_fit_replaces_and_gives_back(makes_updates, automatic, stage, monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(sets, "reset_weight_averaging", told.append)
    callbacks = [ModelCheckpoint(tmp_path), OwnCheckpoint(tmp_path), BackboneFinetuning(), Timer()]
    trainer = SimpleNamespace(callbacks=callbacks, state=SimpleNamespace(fn=stage))
    module, model = pl.LightningModule(), nn.Module()
    module.automatic_optimization, model.backbone = automatic, nn.Linear(1, 1)
    sets.prepare_lightning_callbacks(trainer, module, model, makes_updates)
    assert told == (callbacks if stage == "fit" else [])
    assert module.__dict__["backbone"] is model.backbone and "backbone" not in dict(module.named_children())
    replaced = makes_updates and not automatic
    assert ["on_train_batch_end" in vars(callback) for callback in callbacks] == [replaced, False, False, False]
    callbacks[3].on_train_batch_end = own = functools.partial(print, "own")
    sets.leave_lightning_callbacks(trainer)
    assert "on_train_batch_end" not in vars(callbacks[0]) and callbacks[3].on_train_batch_end is own


def test_a_backbone_of_the_module_stays():
    module, model = pl.LightningModule(), nn.Module()
    module.backbone, model.backbone = nn.Linear(1, 1), nn.Linear(1, 1)
    before = module.backbone
    trainer = SimpleNamespace(callbacks=[BackboneFinetuning()], state=SimpleNamespace(fn="fit"))
    sets.prepare_lightning_callbacks(trainer, module, model)
    assert module.backbone is before


def test_a_checkpoint_is_saved_as_in_automatic_optimization(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(
        ModelCheckpoint, "on_train_batch_end", lambda self, trainer, module, *rest: told.append((trainer, module, rest))
    )
    sets._save_as_in_automatic(ModelCheckpoint(tmp_path), "trainer", "module", "outputs", "batch", 3)
    ((trainer, module, rest),) = told
    assert trainer == "trainer" and module.automatic_optimization is True and rest == ("outputs", "batch", 3)


@pytest.mark.parametrize("callback", [BackboneFinetuning(), Timer()])
def test_parameters_of_a_resumed_finetuning_are_unfrozen(callback):
    frozen, other = nn.Parameter(torch.zeros(1), requires_grad=False), nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = SimpleNamespace(param_groups=[{"params": [frozen]}])
    sets.unfreeze_optimized(SimpleNamespace(callbacks=[Timer(), callback], optimizers=[optimizer]))
    assert frozen.requires_grad is isinstance(callback, BackboneFinetuning) and not other.requires_grad


class Uncalled(pl.Callback):
    def on_predict_start(self, *args):
        """Never called."""


class Called(pl.Callback):
    def on_train_start(self, *args):
        """Called."""


class Both(pl.Callback, TrainerCallback):
    """Of both families."""


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (Uncalled(), ["on_predict_start"]),
        (LambdaCallback(on_sanity_check_start=lambda *_: None), ["on_sanity_check_start"]),
        (LambdaCallback(on_train_start=lambda *_: None), []),
        (Called(), []),
        (Timer(), []),
        (RichProgressBar(), []),
        (Both(), None),
    ],
)
def test_hooks_that_are_never_called_are_told(callback, said, monkeypatch):
    told = []
    monkeypatch.setattr(sets, "warn_user", told.append)
    if said is None:
        with pytest.raises(CallbackError, match="both a Lightning and an HF callback"):
            sets.check_lightning_callback(callback, nn.Linear(1, 1))
        return
    sets.check_lightning_callback(callback, nn.Linear(1, 1))
    assert sets.hooks_of_user(callback, sets.NEVER_CALLED) == said
    assert len(told) == bool(said) and all(name in told[0] for name in said)


@pytest.mark.parametrize(
    ("report_to", "found", "error"),
    [
        ([], [], None),
        (None, [], None),
        (["tensorboard"], ["TensorBoardCallback"], None),
        (["wandb", "tensorboard"], ["WandbCallback", "TensorBoardCallback"], None),
        ([pl.loggers.CSVLogger(".")], ["LoggerCallback"], None),
        ([pl.loggers.CSVLogger("."), "tensorboard"], ["LoggerCallback", "TensorBoardCallback"], None),
        (["tensorbord"], None, ArgumentError),
        ([3], None, ArgumentError),
        (["comet_ml"], None, MissingPackage),
    ],
)
def test_the_callbacks_of_report_to(report_to, found, error):
    if error is not None:
        with pytest.raises(error, match="report_to"):
            reporting_callbacks(SimpleNamespace(report_to=report_to))
        return
    made = reporting_callbacks(SimpleNamespace(report_to=report_to))
    assert [type(one).__name__ for one in made] == found
    assert all(one.logger is report_to[0] for one in made[:1] if isinstance(one, LoggerCallback))
