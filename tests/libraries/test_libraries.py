"""A sample of `python tests/sweeps/libraries/run.py`: the cases whose packages the tests have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[1] / "sweeps" / "libraries" / "run.py"


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_a_teacher_and_two_adapters_train_as_under_transformers(tmp_path):
    words = [str(RUN), "--folder", str(tmp_path), "optimum-shape", "peft-two"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.split()[-4:] == ["optimum-shape", "equal", "peft-two", "equal"]


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_two_processes_train_as_under_torchrun(tmp_path):
    names = ["sft", "seq2seq", "seq2seq-beams", "seq2seq-best"]
    words = [str(RUN), "--folder", str(tmp_path), "--devices", "2", *names]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(" equal\n") == 3  # what differs in the last one is known
