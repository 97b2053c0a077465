"""Checkpoints of an earlier version go on, each to the end of the uninterrupted run, bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path

import pytest

from helpers.old_runs import FORMS, SAVED_AT, SEVERAL, digest, run
from helpers.parity.compare import first_difference, same

HERE = Path(__file__).resolve().parent
SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "old_runs.py"
EXPECTED = json.loads((HERE / "old_checkpoints" / "expected.json").read_text())


def train(form: str, folder: Path, *checkpoint: str) -> dict:
    """Train a form with today's code."""
    if form not in SEVERAL:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run("hf_compat", form, folder, *checkpoint)
    launcher = ["-m", "hf_compat.cli.main", "run", "--devices", "2"]
    command = [sys.executable, *launcher, str(SCRIPT), "hf_compat", form, str(folder), *checkpoint]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads((folder / "result.pickle").read_bytes())


def unpack(form: str, folder: Path) -> str:
    with tarfile.open(HERE / "old_checkpoints" / f"{form}.tar.xz") as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        return str(folder / archive.getnames()[0])


def comparable(form: str, logs: list[dict]) -> list[dict]:
    """Leave out what an adapter's resumed run does not log as the uninterrupted one.

    Lightning does not validate again after the batch that its checkpoint was written in.
    """
    return [log for log in logs if log["step"] > SAVED_AT[form]] if form == "adapter" else logs


def close(mine, theirs):
    """Equal but for what another processor's arithmetic may change in the last digits."""
    return len(mine) == len(theirs) and all(
        log == pytest.approx(reference, rel=1e-4) for log, reference in zip(mine, theirs, strict=True)
    )


def test_every_form_has_a_checkpoint():
    assert list(EXPECTED) == list(FORMS)
    kept = {path.name.removesuffix(".tar.xz") for path in (HERE / "old_checkpoints").glob("*.tar.xz")}
    assert kept == set(FORMS)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=pytest.mark.matrix) if form in ("ddp", "fsdp", "fsdp_sharded") else form
        for form in FORMS
    ],
)
def test_it_goes_on_to_the_end_of_the_uninterrupted_run(tmp_path, form):
    expected = EXPECTED[form]
    whole = train(form, tmp_path / "whole")
    logs = whole["logs"]
    assert close(logs, expected["logs"]), first_difference(expected["logs"], logs)
    resumed = train(form, tmp_path / "resumed", unpack(form, tmp_path / "old"))
    theirs, mine = comparable(form, expected["logs"]), comparable(form, resumed["logs"])
    assert close(mine, theirs), first_difference(theirs, mine)
    total = float(sum(tensor.double().sum() for tensor in resumed["weights"].values()))
    assert total == pytest.approx(expected["weights_sum"], rel=1e-4)
    if digest(whole["weights"]) == expected["weights_sha256"]:  # this processor computes as the one that wrote it
        assert same(resumed["weights"], whole["weights"]), first_difference(whole["weights"], resumed["weights"])
        theirs = comparable(form, whole["logs"])
        assert same(mine, theirs), first_difference(theirs, mine)
