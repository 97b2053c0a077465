"""`generate` on two CPU processes, among which the parameters are spread: it gives the tokens of whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.test_strategies import STRATEGIES, words_of
from helpers.launching import result

JOB = Path(__file__).resolve().parents[1] / "helpers" / "jobs" / "seq2seq_job.py"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What is generated under DDP, where each process has all parameters (tests/distributed/test_parity.py)."""
    return result(tmp_path_factory.mktemp("whole") / "out", script=JOB)


def test_generations_end_at_different_places(whole):
    lengths = {sum(token != 0 for token in row) for row in whole["before"]}
    assert len(lengths) > 1 and whole["before"] != whole["after"] and len(whole["after"]) == 8


@pytest.mark.parametrize("name", ["FSDP 2", pytest.param("DeepSpeed ZeRO 3", marks=pytest.mark.matrix)])
def test_tokens_are_those_of_whole_parameters(name, tmp_path, whole):
    assert name in STRATEGIES
    found = result(tmp_path / "out", *words_of(name, tmp_path), script=JOB)
    assert [found[key] for key in ("before", "within", "after")] == [whole[k] for k in ("before", "within", "after")]
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-4)
