"""Numbers about runs against transformers' own functions."""

import re
import time
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from transformers import Trainer, trainer_utils

from hf_compat.errors import MetricError
from hf_compat.hf import metrics, search
from hf_compat.hf.metrics import (
    EvalPrediction,
    denumpify_detensorize,
    loggable,
    metrics_format,
    number_of_metric,
    plain_metrics,
    returned_metrics,
    speed_metrics,
)


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


@pytest.mark.filterwarnings("ignore:`log`")
@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (True, True),
        (None, None),
        (np.float64(0.5), 0.5),
        (np.array([[2]]), 2),
        (np.array([1, 2]), [1, 2]),
        (torch.tensor([0.5], requires_grad=True), 0.5),
        (torch.ones(2), [1.0, 1.0]),
        (torch.eye(2).to_sparse(), [[1.0, 0.0], [0.0, 1.0]]),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5),
        ({"a": np.int64(1), "b": [torch.tensor(2)]}, {"a": 1, "b": [2]}),
        ((1, np.int64(2)), (1, 2)),
        ({1: 2}, MetricError),
        ({"a": {1: 2}}, MetricError),
        (1j, MetricError),
        ({1, 2}, MetricError),
    ],
)
def test_a_metric_becomes_what_json_has(value, plain):
    if plain is MetricError:
        with pytest.raises(MetricError, match="cannot be logged"):
            plain_metrics({"m": value}, "evaluate")
        assert loggable({"m": value, "n": 1}) == {"n": 1}
    else:
        found = plain_metrics({"m": value}, "evaluate")["m"]
        assert (found, type(found)) == (plain, type(plain)) and loggable({"m": value}) == {"m": plain}


@pytest.mark.parametrize(("metrics", "text"), [([1], "not a mapping"), ({1: 2}, "not a string")])
def test_metrics_without_names_are_refused(metrics, text):
    with pytest.raises(MetricError, match=text):
        plain_metrics(metrics, "evaluate")


def test_arrays_of_several_elements_are_returned_as_they_are():
    metrics = {"tensor": torch.ones(2), "array": np.ones(2), "one": np.ones(1), "list": [np.int64(1)], "number": 2}
    found = returned_metrics(metrics, "evaluate")
    assert found["tensor"] is metrics["tensor"] and found["array"] is metrics["array"]
    assert {name: found[name] for name in ("one", "list", "number")} == {"one": 1.0, "list": [1], "number": 2}
    assert type(found["list"][0]) is int


@pytest.mark.parametrize(
    ("value", "number"), [(3, 3), (0.5, 0.5), (torch.tensor(2), 2), ("a", None), ([1, 2], None), (None, None)]
)
def test_a_metric_that_is_compared_is_a_number(value, number):
    if number is None:
        with pytest.raises(MetricError, match="is not a number"):
            number_of_metric(value, "m")
    else:
        assert number_of_metric(value, "m") == number


OTHER = object()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1, 1),
        (True, True),
        ("a", "a"),
        (None, None),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5]), 0.5),
        (torch.tensor([0.5, 1.0], requires_grad=True), [0.5, 1.0]),
        (torch.tensor([[0.0, 2.0]]).to_sparse(), [[0.0, 2.0]]),
        (np.float32(0.5), 0.5),
        (np.array([3]), 3),
        (np.array([3, 4]), [3, 4]),
        (np.array([]), []),
        (np.str_("a"), "a"),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5),
        ({"a": np.float32(0.5), "b": {"c": [torch.tensor(1)]}}, {"a": 0.5, "b": {"c": [1]}}),
        ((1, np.int64(2)), (1, 2)),
        ([1, (2.0,)], [1, (2.0,)]),
        ({1: 2}, OTHER),
        ({"a": {1: 2}}, OTHER),
        (object(), OTHER),
        ([object()], OTHER),
        ({1, 2}, OTHER),
        (1j, OTHER),
    ],
)
def test_a_metric_becomes_a_value_of_json(value, found):
    if found is OTHER:
        with pytest.raises(MetricError, match="`compute_metrics` returned"):
            metrics._plain_metric(value, "name", "compute_metrics")
    else:
        got = metrics._plain_metric(value, "name", "compute_metrics")
        assert got == found and type(got) is type(found)


@pytest.mark.parametrize(
    ("value", "name"),
    [([1, {"a": object()}], "'name[1].a'"), ({"b": (object(),)}, "'name.b[0]'"), (object(), "'name'")],
)
def test_the_place_of_a_bad_metric_is_named(value, name):
    with pytest.raises(MetricError, match=re.escape(f"as the metric {name}")):
        metrics._plain_metric(value, "name", "compute_metrics")


@pytest.mark.parametrize("extras", [{}, {"inputs": 3}, {"losses": 4}, {"inputs": 3, "losses": 4}])
def test_a_prediction_has_the_parts_of_upstreams(extras):
    ours, theirs = metrics.EvalPrediction(1, 2, **extras), trainer_utils.EvalPrediction(1, 2, **extras)
    assert list(ours) == list(theirs)
    for index in range(-1, 6):
        if 0 <= index < len(list(ours)):
            assert ours[index] == theirs[index]
        else:
            with pytest.raises(IndexError, match=f"has {len(list(ours))} parts, there is none at {index}"):
                ours[index]


def test_optuna_is_asked_for_the_space_of_upstream():
    asked = {}
    for api in (search, trainer_utils):
        trial = MagicMock()
        api.default_hp_space_optuna(trial)
        asked[api] = [tuple(call) for call in trial.mock_calls]
    ours, theirs = asked.values()
    assert len(ours) == 4 and ours == theirs
