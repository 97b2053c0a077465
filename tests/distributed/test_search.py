"""A search with two processes: the same trials as transformers', pruned, stopped and failed together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.launching import TORCHRUN, start

JOB = Path(__file__).resolve().parents[1] / "helpers" / "jobs" / "search_job.py"


def ranks(folder: Path, api: str, what: str) -> list[dict]:
    folder.mkdir()
    done = start(folder, api, what, launcher=TORCHRUN, script=JOB)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.matrix
def test_two_processes_search_as_those_of_transformers(tmp_path):
    theirs, ours = ranks(tmp_path / "theirs", "transformers", "plain"), ranks(tmp_path / "ours", "hf_compat", "plain")
    assert ours == theirs
    assert len(ours[0]["seen"]) == 3 and ours[0]["best"] is not None and ours[1]["best"] is None
    assert ours[0]["folders"] == [f"out/t{number}/checkpoint-4" for number in range(3)]


@pytest.mark.parametrize(
    "what, updates", [("prunes", [4, 2, 4, 2]), pytest.param("stops", [4, 4], marks=pytest.mark.matrix)]
)
def test_two_processes_end_a_trial_and_a_search_together(tmp_path, what, updates):
    first, second = ranks(tmp_path / "ours", "hf_compat", what)
    assert [trial[2] for trial in first["seen"]] == updates
    assert [trial[:2] for trial in second["seen"]] == [trial[:2] for trial in first["seen"]]
    assert second["after"] == first["after"]


@pytest.mark.parametrize(
    "what, told",
    [
        pytest.param("fails_in_space", "rank 0: LookupError: no space", marks=pytest.mark.matrix),
        pytest.param("fails", "FileNotFoundError: no weights", marks=pytest.mark.matrix),
    ],
)
def test_two_processes_fail_together(tmp_path, what, told):
    first, second = ranks(tmp_path / "ours", "hf_compat", what)
    assert first["error"].endswith(told.removeprefix("rank 0: "))
    assert second["error"].endswith(told)
