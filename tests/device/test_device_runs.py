"""A sample of `device_matrix.py`, which runs all: on a pretended GPU both trainers give the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent))

import hf_compat
from helpers.pretended import pretended_device
from sweeps.device.device_matrix import run_apart, verdict
from sweeps.device.waits import APIS, CONFIGURATIONS, difference, waits

SAMPLE = [
    "fp16_overflow_adamw_torch_fused", "fp16_overflow_adamw_torch", "fp16_callback_steps", "fp16_overflow_resumed",
    "load_best", "tf32", "bf16_causal_lm",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    wanted = {item.callspec.params["name"] for item in request.session.items if hasattr(item, "callspec")
              and item.path == request.path and "name" in item.callspec.params}  # fmt: skip
    made = tmp_path_factory.mktemp("device")
    run_apart(made, (name for name in SAMPLE if name in wanted))
    return made


@pytest.mark.parametrize("name", SAMPLE)
def test_equals_transformers_on_a_device(folder, name):
    word, text = verdict(folder, name)
    assert word in ("equal", "explained"), text


def test_tf32_is_said_in_torchs_old_and_new_words(tmp_path):
    before = torch.backends.fp32_precision, torch.get_float32_matmul_precision()
    try:
        with pretended_device():
            for wanted, word in ((True, "tf32"), (False, "ieee")):
                hf_compat.TrainingArguments(tmp_path, tf32=wanted)
                assert torch.backends.cuda.matmul.fp32_precision == word
                assert torch.get_float32_matmul_precision() == ("high" if wanted else "highest")
                assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is wanted
    finally:
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision(before[1])
        torch.backends.fp32_precision = before[0]


@pytest.mark.parametrize(("name", "moment"), [("losses only", "evaluation"), ("plain", "update")])
def test_waits_no_more_often_than_transformers(name, moment):
    theirs, ours = (waits(difference(api, CONFIGURATIONS[name], moment, {})) for api in APIS)
    assert ours <= theirs
