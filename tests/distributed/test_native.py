"""HFModule and HFDataModule in a Lightning trainer of two processes: data is shared out, the model is one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, json
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import lightning.pytorch as pl
from helpers import toy
from hf_compat import DefaultFlowCallback, HFCallbackAdapter, HFDataModule, HFModule, TrainingArguments

devices, size = int(sys.argv[1]), int(sys.argv[2])
order = "random" if "by_arguments" in sys.argv else "sequential"
args = TrainingArguments("out", per_device_train_batch_size=size, use_cpu=True, learning_rate=1e-2,
                         train_sampling_strategy=order,
                         gradient_accumulation_steps=2, logging_steps=1)
adapter = HFCallbackAdapter(DefaultFlowCallback(), args=args)
losses, seen = [], []

class Watch(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        losses.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))
        seen.extend(float(x) for inputs in batch.micro_batches for x in inputs["x"][:, 0])

if "by_arguments" not in sys.argv:
    pl.seed_everything(1, verbose=False)
module = HFModule(toy.Classifier(dropout=0.0), args)
trainer = pl.Trainer(
    accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Watch(), adapter],
    use_distributed_sampler=False, num_sanity_val_steps=0,
)
trainer.fit(module, HFDataModule(args, train_dataset=toy.rows(32)))
total = sum(float(p.detach().sum()) for p in module.parameters())
parts = [None] * devices
if devices > 1:
    torch.distributed.all_gather_object(parts, (seen, total))
else:
    parts = [(seen, total)]
if trainer.is_global_zero:
    logged = [log["loss"] for log in adapter.state.log_history if "loss" in log]
    print("FOUND" + json.dumps([losses, parts, logged]), flush=True)
if devices > 1:
    torch.distributed.destroy_process_group()
"""


def run(folder, devices, size, *words):
    (folder / "script.py").write_text(SCRIPT.format(tests=str(Path(__file__).resolve().parents[1])))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "script.py", str(devices), str(size), *words],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    return json.loads(line[5:])


def test_two_processes_of_lightnings_own_launcher(tmp_path):
    one, two = run(tmp_path, 1, 4), run(tmp_path, 2, 2)
    (first, total), (second, other) = two[1]
    assert sorted(first + second) == sorted(one[1][0][0]) and not set(first) & set(second)
    assert total == other and total == pytest.approx(one[1][0][1], rel=1e-5)
    assert two[0] == pytest.approx(one[0], rel=1e-5)
    assert two[2] == pytest.approx(two[0], rel=1e-5), "the adapter logs the mean over the processes"


def test_without_a_seed_of_lightnings_the_ranks_share_out_one_order(tmp_path):
    (first, _), (second, _) = run(tmp_path, 2, 2, "by_arguments")[1]
    alone = run(tmp_path, 1, 4, "by_arguments")[1][0][0]
    assert sorted(first + second) == sorted(alone) and len(set(first + second)) == 32
    assert alone != sorted(alone)


STOPS = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import lightning.pytorch as pl
from torch.utils.data import DataLoader
from helpers import toy
from helpers.handwritten import HandWritten
from hf_compat import HFCallbackAdapter, HFDataModule, HFModule, TrainerCallback, TrainingArguments

def stop(callback, args, state, control, **kwargs):
    control.should_training_stop = trainer.global_rank == 1 and state.global_step == 2

args = TrainingArguments("out", per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
                         ddp_timeout=30)
if sys.argv[1] == "bare":
    module, data = HandWritten(toy.Classifier(dropout=0.0), 8), DataLoader(toy.rows(32), batch_size=4)
    callback = HFCallbackAdapter(type("Stops", (TrainerCallback,), dict(on_step_end=stop))(), args=args)
else:
    module, data = HFModule(toy.Classifier(dropout=0.0), args), HFDataModule(args, train_dataset=toy.rows(32))
    callback = type("Stops", (TrainerCallback,), dict(on_substep_end=stop))()
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, callbacks=[callback],
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                     use_distributed_sampler=sys.argv[1] == "bare")
trainer.fit(module, data)
print(f"RANK {{trainer.global_rank}} ended after {{trainer.global_step}}", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("place", ["bare", "within a window"])
def test_a_flag_that_one_rank_sets_ends_the_run_on_all(tmp_path, place):
    (tmp_path / "script.py").write_text(STOPS.format(tests=str(Path(__file__).resolve().parents[1])))
    done = subprocess.run([sys.executable, "-W", "ignore", "script.py", place], cwd=tmp_path, capture_output=True,
                          text=True, check=False, timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # the two write at once, and their lines may run into each other
    assert sorted(re.findall(r"RANK \d ended after \d+", done.stdout)) == [
        "RANK 0 ended after 2",
        "RANK 1 ended after 2",
    ]
