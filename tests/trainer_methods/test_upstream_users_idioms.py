"""Idioms of public projects give the same losses, logs, metrics, weights and files under both engines, bit for bit.

A normal run has one cross for two cases in three, in turn. `python3 tests/run.py -m matrix` runs the others.
"""

from __future__ import annotations

import pytest
import transformers

import hf_compat
from helpers.parity.compare import first_difference, same
from helpers.upstream_user_runs import CASES, CROSSES, crosses_of, run

# Overrides of older releases, and loaders that are none of torch's: transformers 5.23 fails, or does not call them.
OURS_ALONE = {
    "both_made_at_once",
    "log_of_4_45",
    "sampler_of_4_51",
    "whole_copy_of_4_30",
    "whole_copy_of_log_and_save",
    ("several_tasks", "resume"),
}
# Early stopping counts its patience anew where a run goes on, under both engines: the resumed run ends later.
ENDS_LATER = {"stop_when_it_does_not_improve"}
ROWS = [(name, cross) for name in CASES for cross in crosses_of(name)]
SAMPLE = {(name, crosses_of(name)[i % len(crosses_of(name))]) for i, name in enumerate(CASES) if i % 3}
PARAMETERS = [pytest.param(*row, marks=() if row in SAMPLE else pytest.mark.matrix, id="-".join(row)) for row in ROWS]


@pytest.mark.parametrize("name, cross", PARAMETERS)
def test_equal_under_both_engines(tmp_path, name, cross):
    ours = run(hf_compat, name, cross, tmp_path / "ours")
    if not OURS_ALONE & {name, (name, cross)}:
        theirs = run(transformers, name, cross, tmp_path / "theirs")
        assert same(theirs, ours), first_difference(theirs, ours)
    assert ours["whole"]["logs"] and ours["whole"]["weights"]
    assert cross != "resume" or name in ENDS_LATER or ours["resumed"]["state"][:2] == ours["whole"]["state"][:2]


def test_every_cross_stands_in_the_sample():
    assert {cross for _, cross in SAMPLE} == set(CROSSES)
    assert len(CASES) >= 60 and len(ROWS) > 280
