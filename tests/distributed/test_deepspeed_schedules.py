"""The section `scheduler` of a DeepSpeed configuration: DeepSpeed's own schedules, as under transformers' Trainer."""

from __future__ import annotations

import json
from pathlib import Path

from launching import TORCHRUN, start

JOB = Path(__file__).resolve().parent / "deepspeed_job.py"
AUTO = dict.fromkeys(("warmup_num_steps", "total_num_steps", "warmup_min_lr", "warmup_max_lr"), "auto")
ONE_CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}
# (the section, the stage of ZeRO, further arguments)
ROWS = [
    ({"type": "WarmupDecayLR", "params": AUTO}, 1, {"warmup_steps": 2}),
    ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_type": "linear"}}, 2, {"warmup_steps": 3}),
    ({"type": "WarmupCosineLR", "params": dict.fromkeys(("warmup_num_steps", "total_num_steps"), "auto")}, 3,
     {"warmup_steps": 3}),
    ({"type": "OneCycle", "params": ONE_CYCLE}, 2, {"gradient_accumulation_steps": 2}),
    ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2}}, 2, {}),
]  # fmt: skip


def test_every_schedule_of_deepspeed_gives_transformers_numbers_and_resumes(tmp_path):
    found = {}
    for package in ("transformers", "hf_compat"):
        folder = tmp_path / package
        folder.mkdir()
        launcher = [*TORCHRUN, str(JOB)]
        done = start(folder, json.dumps(ROWS), launcher=launcher, script=package)
        assert done.returncode == 0, done.stderr[-4000:]
        found[package] = json.loads((folder / "found.json").read_text())
    *ours, resumed = found["hf_compat"]
    assert ours == found["transformers"] and len(ours) == len(ROWS) and all(len(logs) == 6 for logs in ours)
    assert resumed == ours[0]
