"""The summary of a run: its entries, in HF's order."""

from __future__ import annotations

import time

import pytest

from hf_compat.training_run.run import run_summary


def test_entries_and_rates():
    summary = run_summary(time.time() - 10, 200, 50, 3e9, 0.5)
    assert list(summary) == [
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
        "total_flos",
        "train_loss",
    ]
    assert summary["train_samples_per_second"] == pytest.approx(20, rel=0.05)
    assert summary["train_steps_per_second"] == pytest.approx(5, rel=0.05)
    assert (summary["total_flos"], summary["train_loss"]) == (3e9, 0.5)


def test_samples_that_are_not_known_have_no_rate():
    assert "train_samples_per_second" not in run_summary(time.time() - 1, None, 1, 0.0, 0.5)
