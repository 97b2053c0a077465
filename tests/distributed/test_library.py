"""A Trainer whose model saves and loads itself, as sentence-transformers' does, where parameters are spread."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.launching import result

JOB = Path(__file__).resolve().parents[1] / "helpers" / "jobs" / "library_job.py"
SHARDS = "fsdp_config={'state_dict_type': 'SHARDED_STATE_DICT'}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process that trains on the whole batch."""
    words = ("per_device_train_batch_size=4", "per_device_eval_batch_size=16")
    return result(tmp_path_factory.mktemp("alone") / "run", *words, launcher=(), script=JOB)


@pytest.mark.parametrize("words", [["fsdp=True"], pytest.param(["fsdp=True", SHARDS], marks=pytest.mark.matrix)])
def test_a_model_in_parts_saves_and_loads_itself_whole(tmp_path, alone, words):
    folder = tmp_path / "run"
    found = result(folder, *words, script=JOB)
    assert found["first"] == pytest.approx(alone["first"], abs=1e-5)
    assert found["again"] == found["first"]
    saved = load_file(folder / "final" / "0.safetensors")
    best = load_file(folder / found["best"] / "0.safetensors")
    assert found["best"] == alone["best"] != "checkpoint-6"
    assert saved.keys() == best.keys() and all(saved[name].equal(best[name]) for name in saved)
    assert json.loads((folder / "final" / "modules.json").read_text()) == ["Listed"]
