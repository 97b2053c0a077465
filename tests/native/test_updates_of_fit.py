"""How many updates a fit makes: by Lightning's count, the windows and the limits of the trainer."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest

from hf_compat.errors import ArgumentError, HfCompatWarning
from hf_compat.native import steps as native
from hf_compat.native.steps import NO_END, updates_of_fit


def fit(counted=100, automatic=False, loader=None, batches=10, epochs=3, most=-1, window=4, **values):
    usual = {"gradient_accumulation_steps": window, "warmup_steps": 0, "lr_scheduler_type": "linear"}
    trainer = SimpleNamespace(
        estimated_stepping_batches=counted, lightning_module=SimpleNamespace(automatic_optimization=automatic),
        train_dataloader=loader, num_training_batches=batches, max_epochs=epochs, max_steps=most,
    )  # fmt: skip
    return updates_of_fit(trainer, SimpleNamespace(args=SimpleNamespace(**{**usual, **values})))


@pytest.fixture
def accumulated(monkeypatch):
    found = []
    monkeypatch.setattr(native, "accumulate_batches", lambda trainer, batches: found.append(batches))
    return found


@pytest.mark.parametrize(
    ("facts", "updates"),
    [
        ({}, 3 * 3),  # three windows of four batches in ten
        ({"batches": 8}, 2 * 3),
        ({"window": 1}, 30),
        ({"most": 5}, 5),
        ({"most": 20}, 9),
        ({"most": 0}, 9),
        ({"epochs": -1, "most": 7}, 7),
        ({"epochs": -1}, NO_END),
        ({"epochs": 0}, NO_END),
        ({"batches": math.inf}, 100),
        ({"loader": object.__new__(native.Windows)}, 100),
        ({"automatic": True}, 100),
        ({"counted": 100.0, "automatic": True}, 100),
    ],
)
def test_the_updates_of_a_fit(accumulated, facts, updates):
    found = fit(**facts)
    assert found == updates and type(found) is int
    assert accumulated == ([4] if facts.get("automatic") else [])


@pytest.mark.parametrize("counted", [math.inf, -1])
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "no end to decay"),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 1}, "no end to decay"),
        ({"lr_scheduler_type": "constant"}, None),
        ({"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 5}, None),
    ],
)
def test_without_an_end_a_schedule_that_decays_is_told_of(counted, values, told):
    with pytest.warns(HfCompatWarning, match=told) if told else contextlib.nullcontext():
        assert fit(counted=counted, **values) == NO_END


def test_a_share_of_no_end_is_refused(accumulated):
    with pytest.raises(ArgumentError, match=r"`warmup_steps=0\.1` is a share of the run"):
        fit(counted=math.inf, warmup_steps=0.1)
    assert fit(counted=1, automatic=True, warmup_steps=0.1) == 1


def test_no_updates_are_no_updates(accumulated):
    assert fit(counted=0, automatic=True) == 0
