"""Two ranks, every pair of data, metric, update, evaluation and call: equal to transformers bit for bit."""

from __future__ import annotations

import pytest

from helpers.parity.compare import first_difference, same
from helpers.parity.native_seams import NATIVE_ROWS, expected_of
from helpers.parity.seam_cases import PAIRS, TRIPLES, resumed_at
from helpers.two_sides import run_both

pytestmark = pytest.mark.timeout(1800)  # the first test waits for every row


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in (*PAIRS, *TRIPLES) if name in asked]
    natively = [f"native_{name}" for name in names if name in NATIVE_ROWS]
    return run_both(tmp_path_factory.mktemp("seams"), {"transformers": names, "hf_compat": [*names, *natively]})


def resumed_of(theirs: dict) -> dict:
    """Return what a resumed run has to give; docs/differences.md says where it is more than transformers' own."""
    resumed, whole = theirs["after"]["resumed"], theirs["after"]["whole"]
    (position,) = (number for number, log in enumerate(resumed["log"]) if "train_loss" in log)
    mean = whole["log"][position]["train_loss"]  # "The loss that a resumed run reports"
    log = [{**log, "train_loss": mean} if "train_loss" in log else log for log in resumed["log"]]
    return {**resumed, "log": log}


def rows_of(names):
    return [name if name in PAIRS else pytest.param(name, marks=pytest.mark.matrix) for name in names]


@pytest.mark.parametrize("name", rows_of({**PAIRS, **TRIPLES}))
def test_both_ranks_equal_transformers_bit_for_bit(results, name):
    row = {**PAIRS, **TRIPLES}[name]
    for rank in (0, 1):
        theirs, ours = results("transformers", name, rank), results("hf_compat", name, rank)
        if row["run"] == "resumed":
            own, whole = resumed_of(theirs), theirs["after"]["whole"]
            assert same(own, whole) != (row["data"] == "dispatched"), first_difference(own, whole)
            theirs["after"]["resumed"] = whole  # "The order of samples in a resumed run"
            theirs["random"] = whole["random"]
        assert same(theirs, ours), f"rank {rank}: {first_difference(theirs, ours)}"


@pytest.mark.parametrize("name", rows_of(NATIVE_ROWS))
def test_a_module_in_lightnings_trainer_equals_transformers_on_both_ranks(results, name):
    row = NATIVE_ROWS[name]
    for rank in (0, 1):
        theirs, ours = results("transformers", name, rank), results("hf_compat", f"native_{name}", rank)
        expected = {"whole": expected_of(row, theirs)}
        if row["run"] == "resumed":
            expected["resumed"] = expected_of(row, theirs, first=resumed_at(row))
        assert same(expected, ours), f"rank {rank}: {first_difference(expected, ours)}"
