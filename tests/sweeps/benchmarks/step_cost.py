"""What a step costs around the model: a plain loop, a hand-written LightningModule, transformers and hf_compat.

    .venv/bin/python tests/sweeps/benchmarks/step_cost.py [rounds] [updates]

The toy model of the design notes (16 → 32 → 2, batch 4, fused AdamW, clipping at 1.0, linear schedule, one thread, a
log every 50 updates), so that what is measured is the trainer. Ratios are of the overhead: a step minus the plain
loop's.
"""

from __future__ import annotations

import itertools
import logging
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import nn

import hf_compat
from sweeps.benchmarks import small_model
from sweeps.benchmarks.measuring import Benchmark, measure, quiet
from sweeps.benchmarks.small_model import Toy

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
BATCH = 4


def samples(updates: int) -> list[dict]:
    return small_model.samples(updates * BATCH)


def loader(data):
    return torch.utils.data.DataLoader(
        data, batch_size=BATCH, shuffle=True, collate_fn=transformers.default_data_collator
    )


def optimizer_and_schedule(model, updates):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / updates)


def plain(data, updates: int, window: int = 1) -> None:
    model = Toy()
    optimizer, schedule = optimizer_and_schedule(model, updates)
    for index, batch in enumerate(loader(data), start=1):
        (model(**batch)["loss"] / window).backward()
        if index % window == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


class Module(pl.LightningModule):
    def __init__(self, updates: int):
        super().__init__()
        self.model, self.updates = Toy(), updates

    def training_step(self, batch, index):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        optimizer, schedule = optimizer_and_schedule(self.model, self.updates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def lightning_module(data, updates: int, window: int = 1) -> None:
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, accumulate_grad_batches=window,
    )  # fmt: skip
    trainer.fit(Module(updates), loader(data))


def hf_like(api):
    def run(data, updates: int, window: int = 1) -> None:
        with tempfile.TemporaryDirectory() as folder:
            args = api.TrainingArguments(
                folder, per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=1e-3, save_strategy="no",
                logging_steps=50, use_cpu=True, disable_tqdm=True, report_to="none",
                gradient_accumulation_steps=window,
            )  # fmt: skip
            api.Trainer(Toy(), args, train_dataset=data).train()

    return run


CONTENDERS = {
    "plain loop": plain,
    "LightningModule": lightning_module,
    "transformers": hf_like(transformers),
    "hf_compat": hf_like(hf_compat),
}
FEW = 50


def microseconds(run, updates: int, window: int) -> float:
    """Return what a micro-batch costs: the difference of a long and a short run."""
    times = []
    for count in (FEW, FEW + updates):
        data = samples(count * window)
        start = time.perf_counter()
        run(data, count, window)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / (updates * window) * 1e6


def benchmarks(updates: int = 1500) -> list[Benchmark]:
    """A step's overhead above a plain loop's, with accumulation 1 and 8."""

    def with_window(window: int) -> Benchmark:
        each = updates if window == 1 else updates // 4
        return Benchmark(
            name="overhead of a step" if window == 1 else f"overhead of a micro-batch, accumulation {window}",
            unit="µs each; ratios: of what stands above the plain loop",
            contestants={name: partial(microseconds, run, each, window) for name, run in CONTENDERS.items()},
            floor="plain loop",
            goal=0.40,
        )

    return [with_window(1), with_window(8)]


def calls_a_step(run) -> float:
    """Count Python calls of an update, builtins left out: they do not depend on what else the machine does."""
    counts = []
    for updates in (100, 300):
        data, calls = samples(updates), itertools.count()
        sys.setprofile(lambda frame, event, _, calls=calls: next(calls) if event == "call" else None)
        try:
            run(data, updates)
        finally:
            sys.setprofile(None)
        counts.append(next(calls))
    return (counts[1] - counts[0]) / 200


def main() -> None:
    rounds, updates = (int(argument) for argument in [*sys.argv[1:], 5, 1500][:2])
    for benchmark in benchmarks(updates):
        print(measure(benchmark, rounds).as_text(), flush=True)
    with quiet():
        calls = {name: calls_a_step(run) for name, run in CONTENDERS.items()}
    print("Python calls a step: " + ", ".join(f"{name} {count:.0f}" for name, count in calls.items()))


if __name__ == "__main__":
    main()
