"""Each way in which an evaluation is not what it has to be is told, and nothing where it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_compat.engine import evaluation_contract
from hf_compat.engine.evaluation_contract import EvaluationFacts, most_rows, rows_of, tell_of_breaches


def forward(input_ids, span=None, attention_mask=None): ...


USUAL = {
    "is_prediction": False, "batches": 3, "expected_batches": 3, "samples": 12, "expected_rows": 12, "rows_read": 12,
    "rows": 12, "label_rows": 12, "dropped": 0, "drops_by_argument": False, "unsampled": 0, "way_to_order": None,
    "names": ("input_ids", "labels"), "removed": (), "label_names": ("labels",), "forward": forward, "has_loss": True,
    "weighs_batches_alike": False, "has_labels": True, "has_own_step": False, "has_metrics": True,
    "called_metrics": True, "loss_only": False,
}  # fmt: skip
NO_METRICS = {"called_metrics": False, "has_labels": False, "names": ("input_ids",)}


@pytest.fixture
def told(monkeypatch):
    found = []
    monkeypatch.setattr(evaluation_contract, "_tell", lambda what, way_out: found.append((what, way_out)))
    return found


@pytest.mark.parametrize(
    ("facts", "what", "way_out"),
    [
        ({}, None, None),
        # nothing was read
        ({"batches": 0, "samples": 0}, "the evaluation data set has no samples", "loaded or filtered"),
        ({"batches": 0, "samples": None, "is_prediction": True}, "the data set to predict has no samples", "loaded"),
        ({"batches": 0, "samples": 3}, "its loader gives no samples of the evaluation", "sampler"),
        ({"batches": 0, "samples": 3, "dropped": 3}, "left out the last 3 samples, as its loader", "drop_last=False"),
        ({"dropped": 2, "drops_by_argument": True}, "`dataloader_drop_last=True` drops", "drop_last = False"),
        # rows that are gone
        ({"rows_read": 11}, "has 11 rows of 12 samples, as the collator leaves out 1", "the collator give a row"),
        ({"rows_read": 4, "rows": 4, "label_rows": 4}, "has 4 rows of 12 samples", "collator"),
        ({"rows_read": 3, "rows": 3, "label_rows": 3}, None, None),  # a row a batch
        ({"rows_read": 13, "rows": 13, "label_rows": 13}, None, None),
        ({"rows_read": 11, "expected_rows": None}, None, None),
        ({"label_rows": 10, "rows": 10}, "left out 2 of 12 rows", "torch.utils.data.Subset"),
        ({"label_rows": 4}, "left out 8 of 12 rows", "Subset"),
        ({"label_rows": 3}, None, None),
        ({"label_rows": None, "rows": 10}, "has 10 rows of predictions for 12 samples", "preprocess_logits"),
        ({"rows": 4}, "has 4 rows of predictions", "preprocess_logits"),
        ({"rows": 3}, None, None),
        ({"rows": None}, None, None),
        # batches
        ({"batches": 2}, "got 2 batches, and the length of its loader says 3", "__len__"),
        ({"batches": 4}, None, None),
        ({"expected_batches": None}, None, None),
        # a prediction
        ({"is_prediction": True, "unsampled": 2}, "left out 2 samples, as its sampler", "another sampler"),
        ({"is_prediction": True, "way_to_order": "sort"}, "in the order of its sampler", "sort"),
        ({"unsampled": 2, "way_to_order": "sort"}, None, None),
        ({"is_prediction": True, **NO_METRICS, "has_loss": False}, None, None),
        # metrics and losses
        ({"weighs_batches_alike": True}, "has batches with more target tokens", "eval_loss_by_token"),
        ({**NO_METRICS, "loss_only": True}, "as `prediction_loss_only=True` keeps no", "leave"),
        ({"has_metrics": False, "called_metrics": False, "loss_only": True}, None, None),
        ({**NO_METRICS}, "did not call `compute_metrics`, as the batches have `input_ids`", "a column 'labels'"),
        ({"has_loss": False, "names": ("input_ids",), "has_labels": False}, "computed no loss, as the", "column"),
        ({"has_loss": False, "has_own_step": True}, None, None),
        ({**NO_METRICS, "has_loss": False}, "did not call `compute_metrics` and computed no loss, as", "column"),
        ({"called_metrics": False, "has_own_step": True}, "as `prediction_step` returned no", "return loss"),
        ({**NO_METRICS, "label_names": ()}, "as `label_names` is empty", "a column 'labels'"),
        ({**NO_METRICS, "label_names": ("a", "labels"), "names": ("a",)}, "expects `labels`", "label_names=['a']"),
        ({**NO_METRICS, "names": ("input_ids", "span")}, "did not call", "set `label_names=['span']`"),
        ({**NO_METRICS, "names": ("input_ids", "attention_mask")}, "did not call", "a column 'labels'"),
        ({**NO_METRICS, "names": ("input_ids", "other")}, "did not call", "a column 'labels'"),
        ({**NO_METRICS, "removed": ("target",)}, "did not call", "removes `target`"),
    ],
)  # fmt: skip
def test_each_breach_is_told(told, facts, what, way_out):
    tell_of_breaches(EvaluationFacts(**{**USUAL, **facts}))
    assert len(told) == (what is not None), told
    assert what is None or (what in told[0][0] and way_out in told[0][1]), told


def test_several_are_told_in_turn(told):
    facts = {"dropped": 1, "batches": 2, "rows_read": 11, "called_metrics": False, "has_own_step": True}
    tell_of_breaches(EvaluationFacts(**{**USUAL, **facts}))
    assert [what.split()[0] for what, _ in told] == ["left", "has", "got", "did"]


ROWS = np.zeros((3, 2))


@pytest.mark.parametrize(
    ("results", "rows", "most"),
    [
        (ROWS, 3, 3),
        (torch.zeros(4), 4, 4),
        (np.float32(1.0).reshape(()), None, None),
        (torch.tensor(1.0), None, None),
        ((ROWS, {"a": ROWS, "b": (ROWS,)}), 3, 3),
        ((ROWS, torch.zeros(4)), None, 4),
        ((ROWS, torch.tensor(1.0)), None, 3),
        ([ROWS, ROWS], None, 3),  # a list of batches
        ((), None, None),
        ({}, None, None),
        ("text", None, None),
    ],
)
def test_rows_of_joined_results(results, rows, most):
    assert (rows_of(results), most_rows(results)) == (rows, most)
