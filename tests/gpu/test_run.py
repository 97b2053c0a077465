"""The checks for a GPU, as far as a machine without one can try them."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = Path(__file__).resolve().parents[1] / "sweeps" / "gpu" / "run.py"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(RUN))


def test_without_a_gpu_nothing_is_checked_and_nothing_is_good(run, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run["main"](["--only", "nccl"]) == run["NO_GPU"] == 2
    assert "no GPU" in capsys.readouterr().err


def test_an_unknown_check_is_refused():
    done = subprocess.run([sys.executable, str(RUN), "--only", "speed"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "invalid choice: 'speed'" in done.stderr


def test_a_check_that_fails_is_bad_and_one_that_cannot_be_made_is_left_out(run, monkeypatch, capsys):
    def fails(rounds):
        raise ValueError("no kernel\nfor this")

    def cannot(rounds):
        raise run["LeftOut"]("there is one GPU")

    checks = {"nccl": fails, "fsdp": cannot, "synchronisations": lambda rounds: (True, "none")}
    monkeypatch.setitem(run["main"].__globals__, "CHECKS", checks)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run["main"](["--only", "fsdp", "synchronisations"]) == 0
    assert run["main"](["--only", "nccl", "synchronisations"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "left out  fsdp: there is one GPU" and said[1].startswith("good")
    assert said[2] == "BAD       nccl: ValueError: no kernel"


def test_losses_are_found_among_what_a_process_prints(run):
    assert run["losses_in"]("Training …\nLOSSES [1.5, NaN]\n[W] a warning at exit")[0] == 1.5


def test_one_gpu_makes_no_group_of_nccl(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert run["outcome"](run["nccl"], 1)[0] == "left out"


def test_waits_are_counted_in_a_trace(run):
    with torch.profiler.profile() as profile:
        for number in range(3):
            (torch.ones(2).sum() + number).item()
        torch.ones(2).mul(2)
    found = run["count_synchronisations"](event.name for event in profile.events())
    assert found["aten::item"] == found["aten::_local_scalar_dense"] == 3 and found["cudaStreamSynchronize"] == 0
    names = ["cudaStreamSynchronize", "Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pageable -> Device)"]
    assert run["count_synchronisations"](names) == {"cudaStreamSynchronize": 1, "Memcpy DtoH": 1}


def test_one_table_has_what_both_devices_wait_for(run):
    head = "| waits (kernels) | update: transformers, ours | save: transformers, ours |\n|---|---|---|\n"
    rows = run["side_by_side"](f"{head}| plain | 5 (2), 3 (1) | 9 (0), 4 (0) |\n| bf16 | 5 (2), 3 (2) |  |\nabove: 0",
                               f"said\n{head}| plain | 6 (2), 4 (1) | 8 (0), 3 (0) |\n")  # fmt: skip
    assert rows[2:] == [
        "| plain | update | 5 (2), 3 (1) | 6 (2), 4 (1) |",
        "| plain | save | 9 (0), 4 (0) | 8 (0), 3 (0) |",
        "| bf16 | update | 5 (2), 3 (2) | not measured |",
    ]


def test_the_losses_that_are_compared_are_those_that_were_logged(run):
    import hf_compat

    found = run["losses"](hf_compat, use_cpu=True)
    assert len(found) == run["UPDATES"] and all(isinstance(loss, float) for loss in found)


@pytest.fixture
def tokens(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(RUN.parent / "tokens.py"))


def test_tokens_a_second_are_measured_to_the_end_on_a_pretended_gpu(tokens, capsys):
    assert tokens["main"](["--pretend", "--rounds", "1", "--updates", "2"]) == 0
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines() if row.startswith("| tiny | ")]
    assert [row[1] for row in rows] == ["bare loop", "bare Lightning", "transformers", "hf_compat"]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows) and rows[2][4] == "1.000 |"


def test_without_a_gpu_no_tokens_are_measured(tokens, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tokens["main"]([]) == 2 and "no GPU" in capsys.readouterr().err
