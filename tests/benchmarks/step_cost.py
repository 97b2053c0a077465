"""What a step costs around the model: a plain loop, a hand-written LightningModule, transformers and hf_compat.

    .venv/bin/python tests/benchmarks/step_cost.py [rounds] [updates]

The toy model of the design notes (16 → 32 → 2, batch 4, fused AdamW, clipping at 1.0, linear schedule, one thread), so
that what is measured is the trainer. The four run in turn, round by round, in this one process; the medians of the
rounds are printed, and the ratio to transformers.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings

import lightning.pytorch as pl
import torch
import transformers
from torch import nn

import hf_compat

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
BATCH = 4


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 2)

    def forward(self, x, labels=None):
        logits = self.outer(torch.relu(self.inner(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(updates: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(updates * BATCH, 16, generator=generator)
    return [{"x": row, "labels": i % 2} for i, row in enumerate(x)]


def loader(data):
    return torch.utils.data.DataLoader(
        data, batch_size=BATCH, shuffle=True, collate_fn=transformers.default_data_collator
    )


def optimizer_and_schedule(model, updates):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / updates)


def plain(data, updates: int) -> None:
    model = Toy()
    optimizer, schedule = optimizer_and_schedule(model, updates)
    for batch in loader(data):
        model(**batch)["loss"].backward()
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


def lightning_module(data, updates: int) -> None:
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(Module(updates), loader(data))


def hf_like(api):
    def run(data, updates: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            args = api.TrainingArguments(
                folder, per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=1e-3, save_strategy="no",
                logging_strategy="no", use_cpu=True, disable_tqdm=True, report_to="none",
            )  # fmt: skip
            api.Trainer(Toy(), args, train_dataset=data).train()

    return run


CONTENDERS = {
    "plain loop": plain,
    "LightningModule": lightning_module,
    "transformers": hf_like(transformers),
    "hf_compat": hf_like(hf_compat),
}


def main() -> None:
    rounds, updates = (int(argument) for argument in [*sys.argv[1:], 5, 1500][:2])
    few, data = samples(50), samples(updates)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for run in CONTENDERS.values():  # imports, caches, allocators
        run(few, 50)
    for _ in range(rounds):
        for name, run in CONTENDERS.items():
            start = time.perf_counter()
            run(few, 50)
            setup = time.perf_counter() - start
            start = time.perf_counter()
            run(data, updates)
            took = time.perf_counter() - start - setup
            times[name].append(took / (updates - 50) * 1e6)
    reference = statistics.median(times["transformers"])
    print(f"{'':<16} {'µs a step':>10} {'× transformers':>15}   (medians of {rounds} rounds of {updates} updates)")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:<16} {median:>10.0f} {median / reference:>15.2f}")


if __name__ == "__main__":
    main()
