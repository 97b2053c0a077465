"""What transformers' loggers say in a patched process, where scripts and their tests listen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    done = subprocess.run(
        [sys.executable, str(HERE / "patched_words.py"), str(folder / "out")],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("HEARD")]
    return json.loads(line[5:])


@pytest.mark.parametrize(
    ("moment", "words"),
    [("duplicate", "Own"), ("no flow", "DefaultFlowCallback"), ("early stopping", "load_best_model_at_end=True")],
)
def test_callbacks_warn_on_the_logger_of_transformers_callbacks(heard, moment, words):
    (warning,) = heard[moment]
    assert words in warning


def test_what_is_as_it_should_be_is_not_warned_of(heard):
    assert heard["ordinary"] == [] and heard["unpatched"] == []


def test_states_of_callbacks_that_are_not_there_are_the_last_warning_of_a_resume(heard):
    assert "EarlyStoppingCallback" in heard["absent"][-1]


def test_a_resume_with_other_arguments_names_both_values(heard):
    said = [line.strip() for line in heard["differs"]]
    assert "save_steps: 1 (from args) != 2 (from trainer_state.json)" in said
    assert "logging_steps: 3 (from args) != 500 (from trainer_state.json)" in said
    assert "per_device_train_batch_size: 2 (from args) != 4 (from trainer_state.json)" in said


def test_a_run_at_level_info_opens_with_its_counts(heard):
    begin = heard["info"].index("***** Running training *****")
    assert heard["info"][begin + 1].split() == ["Num", "examples", "=", "8"]


def test_the_checkpoint_on_a_signal_is_found_by_its_callbacks_class(heard):
    assert heard["jit"] == [1, True, False]
