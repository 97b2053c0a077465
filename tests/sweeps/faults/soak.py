"""A long run, watched: does anything grow that should not?

    python tests/sweeps/faults/soak.py UPDATES

Three calls of `train` on one Trainer share the updates, with evaluations, saves under `save_total_limit`, logging, two
loader workers and saves in the background. The first fifth warms up; the growth of what is left is given per 1,000
updates. The history of the logs may grow. The status is 1 if descriptors, threads, processes, temporary files or
callbacks do.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from helpers import toy
from helpers.leftovers import children, descriptors, temporary_files
from hf_compat import Trainer, TrainerCallback, TrainingArguments

CALLS = 3
SAMPLES = 50
COUNTED = ("descriptors", "threads", "processes", "temporary files", "callbacks")


def memory_mib() -> float:
    """Return the memory that this process holds, in MiB."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) / 1024


def sample(trainer: Trainer, updates: int) -> dict[str, float]:
    gc.collect()
    return {
        "updates": updates,
        "memory, MiB": memory_mib(),
        "descriptors": len(descriptors()),
        "threads": threading.active_count(),
        "processes": len(children()),
        "temporary files": len(temporary_files()),
        "objects": len(gc.get_objects()),
        "callbacks": len(trainer.callback_handler.callbacks),
        "log entries": len(trainer.state.log_history),
    }


class Watch(TrainerCallback):
    """Take samples at the same place of an epoch's cycle of evaluations and saves."""

    def __init__(self, trainer: Trainer, every: int):
        self.trainer, self.every, self.done, self.samples = trainer, every, 0, []

    def on_step_end(self, args, state, control, **kwargs):
        self.done += 1
        if self.done % self.every == 0:
            self.samples.append(sample(self.trainer, self.done))


def run(updates: int, folder: str) -> list[dict[str, float]]:
    """Train `updates` in all; return the samples."""
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=updates // CALLS,
        logging_steps=50,
        eval_strategy="steps",
        eval_steps=200,
        save_strategy="steps",
        save_steps=200,
        save_total_limit=2,
        dataloader_num_workers=2,
        async_save=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(2000), eval_dataset=toy.rows(20))
    watch = Watch(trainer, max(updates // SAMPLES, 1))
    trainer.add_callback(watch)
    for _ in range(CALLS):
        trainer.train()
    return watch.samples


def growth(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return the growth per 1,000 updates after the first fifth: the slope of the line through the samples."""
    kept = samples[len(samples) // 5 :]
    x = torch.tensor([one["updates"] for one in kept], dtype=torch.float64) / 1000
    x = x - x.mean()
    return {
        name: float((x * torch.tensor([one[name] for one in kept], dtype=torch.float64)).sum() / (x * x).sum())
        for name in kept[0]
        if name != "updates"
    }


def grown(samples: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Return what grew: its most in the second fifth, and its least in the last. What comes and goes is no growth."""
    fifth = len(samples) // 5
    early, late = samples[fifth : 2 * fifth], samples[-fifth:]
    bounds = {name: (max(one[name] for one in early), min(one[name] for one in late)) for name in COUNTED}
    return {name: (most, least) for name, (most, least) in bounds.items() if least > most + 1}


def main() -> int:
    updates = int(sys.argv[1])
    torch.set_num_threads(1)
    begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = str(Path(folder) / "temporary")
        Path(tempfile.tempdir).mkdir()
        samples = run(updates, str(Path(folder) / "out"))
    print(f"{'':16}  {'at 20 %':>10}  {'at the end':>10}  growth per 1,000 updates")
    for name, slope in growth(samples).items():
        print(f"{name:16}  {samples[len(samples) // 5][name]:10.1f}  {samples[-1][name]:10.1f}  {slope:+.3f}")
    print(f"{updates} updates in {CALLS} calls, {time.time() - begun:.0f} s; grown: {grown(samples) or 'nothing'}")
    return int(bool(grown(samples)))


if __name__ == "__main__":
    sys.exit(main())
