"""Train, and count what waits: reads of a device's value by the CPU, and collectives that are not the strategy's own.

    python sync_job.py FOLDER plain|accumulation|unclipped …      (alone, or under a launcher with several processes)

Two runs of different lengths log as often as each other; their difference, over the updates, is what an update does.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.runtime.collectives import GATHER
from hf_compat.training_run.loss_log import LossLog

SETTINGS: dict[str, dict] = {
    "plain": {}, "accumulation": {"gradient_accumulation_steps": 2}, "unclipped": {"max_grad_norm": 0.0},
}  # fmt: skip
COLLECTIVES = (
    "all_reduce", "all_gather", GATHER, "all_gather_object", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "reduce", "scatter", "monitored_barrier", "send", "recv",
)  # fmt: skip
# what makes the CPU wait for a device: `item()`, `bool()` of a tensor, shapes that depend on values
WAITING = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default", "aten.equal.default")


def in_backward() -> bool:
    """Whether autograd's engine is at work: what DDP's hooks do in it, on the CPU, is torch's own."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        frame = frame.f_back
    return frame is not None


class Reads(TorchDispatchMode):
    """Count the operations that read a value back."""

    def __init__(self, counts: collections.Counter) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function) in WAITING and not in_backward():
            self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def counted(name: str, counts: collections.Counter):
    function = getattr(dist, name)

    def call(*args, **kwargs):
        counts[name] += 1
        return function(*args, **kwargs)

    return call


def count(folder: str, updates: int, settings: dict) -> collections.Counter:
    torch.manual_seed(0)
    args = TrainingArguments(
        folder, max_steps=updates, logging_steps=updates // 2, per_device_train_batch_size=4, use_cpu=True,
        disable_tqdm=True, report_to="none", save_strategy="no", **settings,
    )  # fmt: skip
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(4096, seed=0))
    counts: collections.Counter = collections.Counter()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    for name in COLLECTIVES:
        setattr(dist, name, counted(name, counts))
    try:
        with Reads(counts):
            trainer.train()
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    return counts


def main() -> None:
    folder, found = sys.argv[1], {}
    # reading a loss on the CPU waits for nothing, so it is done there; what is shown is what a device would do
    LossLog._READ_AT_ONCE = ()
    for name in sys.argv[2:]:
        count(folder, 4, SETTINGS[name])
        few, many = (count(folder, updates, SETTINGS[name]) for updates in (8, 24))
        each = {kind: (many[kind] - few[kind]) / 16 for kind in sorted({*few, *many})}
        found[name] = {"an update": each, "a run": few}
    if os.environ.get("RANK", "0") == "0":
        Path(folder).mkdir(exist_ok=True, parents=True)
        (Path(folder) / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
