"""Every case under transformers 5.23 and under hf_compat: equal to the last bit, or a row of docs/differences.md."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from cases import CASES
from compare import first_difference, same

RUNNER = Path(__file__).with_name("runner.py")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "differences.md"

# Case → (what differs, the heading of its row on the differences page).
DIFFERENCES = {
    "own_eval_loader": ({"log_history"}, "Evaluation on a loader of your own"),
    "resume_within_an_epoch": ({"log_history"}, "The loss that a resumed run reports"),
    "resume_at_an_epoch_end": ({"log_history"}, "The loss that a resumed run reports"),
    "resume_early_stopping": ({"log_history"}, "The loss that a resumed run reports"),
    "resume_last_ignoring_data": ({"log_history", "after"}, "The loss that a resumed run reports"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    runs = {}
    for api in ("transformers", "hf_compat"):
        (folder / api).mkdir()
        command = [sys.executable, str(RUNNER), api, str(folder / api)]
        with (folder / f"{api}.log").open("w") as log:
            runs[api] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    for api, process in runs.items():
        assert process.wait() == 0, (folder / f"{api}.log").read_text()[-3000:]

    def read(api: str, name: str) -> dict:
        error = folder / api / f"{name}.error"
        if error.exists():
            pytest.fail(f"{name} under {api}:\n{error.read_text()}")
        return pickle.loads((folder / api / f"{name}.pickle").read_bytes())

    return read


def differing(results, name: str) -> tuple[set[str], str]:
    theirs, ours = results("transformers", name), results("hf_compat", name)
    parts = {part for part in theirs if not same(theirs[part], ours[part])}
    return parts, first_difference(theirs, ours) if parts else ""


@pytest.mark.parametrize("name", [name for name in CASES if name not in DIFFERENCES])
def test_equals_transformers_bit_for_bit(results, name):
    parts, where = differing(results, name)
    assert not parts, where


@pytest.mark.parametrize("name", list(DIFFERENCES))
def test_differs_only_as_the_differences_page_says(results, name):
    expected, heading = DIFFERENCES[name]
    parts, where = differing(results, name)
    assert parts == expected, where
    assert heading in DOCS.read_text()


def test_counts(results, capsys):
    equal = [name for name in CASES if not differing(results, name)[0]]
    reasons = {heading for _, heading in DIFFERENCES.values()}
    with capsys.disabled():
        print(
            f"\nparity: {len(CASES)} configurations, {len(equal)} equal bit for bit, "
            f"{len(DIFFERENCES)} documented for {len(reasons)} reasons"
        )
    assert len(CASES) >= 60
    assert len(reasons) <= 3
    assert len(equal) == len(CASES) - len(DIFFERENCES)


def test_only_the_reported_loss_of_a_resumed_run_differs(results):
    for name, (_, heading) in DIFFERENCES.items():
        if heading != "The loss that a resumed run reports":
            continue
        theirs, ours = results("transformers", name)["log_history"], results("hf_compat", name)["log_history"]
        keep = [
            [{k: v for k, v in log.items() if k not in ("loss", "train_loss")} for log in logs]
            for logs in (theirs, ours)
        ]
        assert same(*keep), name


def test_the_oracle_is_the_documented_release():
    assert transformers.__version__.startswith("5.23.")
