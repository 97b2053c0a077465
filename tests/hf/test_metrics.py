"""Numbers about runs against transformers' own functions."""

import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import Trainer, trainer_utils

from hf_compat.hf.metrics import EvalPrediction, denumpify_detensorize, metrics_format, speed_metrics


class Scores(NamedTuple):
    f1: object
    names: object


METRICS = [
    {"a": np.float32(0.5), "b": [np.int64(1), torch.tensor(2)], "c": (torch.ones(2).sum(), "x", None)},
    [np.bool_(True), {"d": {"e": torch.tensor([3.0])}}],
    np.float64(2.5),
]


@pytest.mark.parametrize("metrics", METRICS, ids=range(len(METRICS)))
def test_python_numbers_are_transformers(metrics):
    ours, theirs = denumpify_detensorize(metrics), trainer_utils.denumpify_detensorize(metrics)
    assert repr(ours) == repr(theirs)


def test_longer_tensors_stay_and_named_tuples_keep_their_type():
    kept = denumpify_detensorize(Scores(np.float32(0.5), torch.ones(2)))
    assert type(kept) is Scores and type(kept.f1) is float and torch.equal(kept.names, torch.ones(2))


def test_the_human_form_is_transformers():
    metrics = {"train_runtime": 3723.456, "before_mem_gpu": 5 << 20, "total_flos": 7 << 30, "loss": 1 / 3, "steps": 4}
    assert metrics_format(dict(metrics)) == Trainer.metrics_format(dict(metrics))


def test_speeds(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 110.0)
    counts = {"num_samples": 7, "num_steps": 3, "num_tokens": 11}
    assert speed_metrics("train", 100.0, **counts) == trainer_utils.speed_metrics("train", 100.0, **counts)
    assert speed_metrics("eval", 110.0, num_samples=7) == {"eval_runtime": 0.0}


@pytest.mark.parametrize("extras", [{}, {"inputs": 3}, {"losses": 4}, {"inputs": 3, "losses": 4}])
def test_parts_of_predictions_are_upstreams(extras):
    found = []
    for kind in (trainer_utils.EvalPrediction, EvalPrediction):
        made, parts = kind(1, 2, **extras), []
        for index in range(-1, 5):
            try:
                parts.append(made[index])
            except IndexError:
                parts.append(None)
        found.append((parts, list(made)))
    assert found[0] == found[1]
