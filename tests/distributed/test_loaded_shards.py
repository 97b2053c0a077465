"""Models that `from_pretrained` has sharded train as under transformers. Here they are saved and resumed as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from helpers.launching import TORCHRUN, result

JOB = Path(__file__).resolve().parents[1] / "helpers" / "jobs" / "loaded_job.py"
FOUR = [*TORCHRUN[:-1], "4"]


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        pytest.param(TORCHRUN, [], id="shards"),
        pytest.param(FOUR, [], id="copies of shards", marks=pytest.mark.matrix),
        pytest.param(TORCHRUN, ["bf16=True"], id="bf16", marks=pytest.mark.matrix),
    ],
)
def test_it_trains_as_under_transformers_and_resumes(tmp_path, launcher, words):
    theirs = result(tmp_path, "theirs", *words, launcher=launcher, script=JOB)
    ours = result(tmp_path, "ours", *words, launcher=launcher, script=JOB)
    assert ours == theirs
    checkpoint = tmp_path / "ours" / "checkpoint-3"
    assert result(tmp_path, "ours", *words, f"resume={str(checkpoint)!r}", launcher=launcher, script=JOB) == ours
    weights = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert type(weights).__name__ == "LlamaForCausalLM" and weights.config.architectures == ["LlamaForCausalLM"]
