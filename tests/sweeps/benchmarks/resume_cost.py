"""What it costs to resume early and late in an epoch: at update 10 and at update 100,000.

    .venv/bin/python tests/sweeps/benchmarks/resume_cost.py [late update]

Map-style data, and an iterable that knows its own position (`datasets`), under both trainers. One run saves at both
updates; then the time from `train(resume_from_checkpoint=…)` to the end of the next update is taken.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings

import datasets
import torch
import transformers
from torch import nn

import hf_compat

warnings.filterwarnings("ignore")
datasets.disable_progress_bars()
torch.set_num_threads(1)
BATCH, EARLY = 2, 10


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x, labels=None):
        return {"loss": (self.weight * x.sum()).sum()}


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)]), "labels": index % 3}


def stream(count: int):
    columns = {"x": [[float(i)] for i in range(count)], "labels": [i % 3 for i in range(count)]}
    return datasets.Dataset.from_dict(columns).to_iterable_dataset()


def arguments(api, folder: str, updates: int):
    return api.TrainingArguments(
        folder, per_device_train_batch_size=BATCH, max_steps=updates, save_steps=10**9, logging_strategy="no",
        use_cpu=True, disable_tqdm=True, report_to="none", lr_scheduler_type="constant", max_grad_norm=0.0, optim="sgd",
    )  # fmt: skip


def measure(api, data, late: int) -> dict[int, float]:
    class Save(api.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step in (EARLY, late)

    class Stop(api.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop, control.should_save = True, False

    with tempfile.TemporaryDirectory() as folder:
        updates = late + 5
        api.Trainer(
            Tiny(), arguments(api, folder, updates), train_dataset=data(updates * BATCH), callbacks=[Save]
        ).train()
        found = {}
        for update in (EARLY, late):
            taken = []
            for _ in range(3):
                args, rows = arguments(api, folder, updates), data(updates * BATCH)
                trainer = api.Trainer(Tiny(), args, train_dataset=rows, callbacks=[Stop])
                start = time.perf_counter()
                trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{update}")
                taken.append(time.perf_counter() - start)
            found[update] = statistics.median(taken)
        return found


def main() -> None:
    late = int([*sys.argv[1:], 100_000][0])
    print(f"{'':<32} {'update ' + str(EARLY):>10} {'update ' + str(late):>14} {'ratio':>7}   (seconds, medians of 3)")
    for name, data in (("map-style", Rows), ("datasets iterable", stream)):
        for api in (hf_compat, transformers):
            early, late_seconds = measure(api, data, late).values()
            label = f"{name}, {api.__name__}"
            print(f"{label:<32} {early:>10.3f} {late_seconds:>14.3f} {late_seconds / early:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
