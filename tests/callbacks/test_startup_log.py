"""The lines that open a run name what it runs on, and how to use the rest of the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_compat import TrainingArguments, translate
from hf_compat.callbacks.startup_log import startup_lines
from hf_compat.plan.run_counts import make_run_counts


@pytest.mark.parametrize(("count", "is_said"), [(4, True), (1, False)])
def test_one_line_says_how_to_use_several_devices(tmp_path, monkeypatch, count, is_said):
    args = TrainingArguments(tmp_path, use_cpu=True)
    plan = replace(translate(args), device="cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    schedule = make_run_counts(args, micro_batches=3, num_examples=24, total_train_batch_size=8)
    said = [line for line in startup_lines(plan, schedule, 10, 0) if "--devices" in line]
    assert len(said) == is_said and (not is_said or f"one of {count} GPUs" in said[0])
