"""Peak memory and time of an evaluation with metrics: torchmetrics here, a metric function in transformers.

    python tests/sweeps/benchmarks/metrics_memory.py [SAMPLES …]

By default 100,000 and 1,000,000 samples x 50 classes, batches of 1,000. Each runs in a process of its own; memory is
what the process's resident set grew by from before the evaluation to its peak.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time

CLASSES, FEATURES, BATCH = 50, 8, 1000


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Peak(threading.Thread):
    """Look at the resident set every few milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.start_size = self.peak = resident()
        self.over = False

    def run(self):
        while not self.over:
            self.peak = max(self.peak, resident())
            time.sleep(0.002)


def evaluate(api_name: str, samples: int) -> dict[str, float]:
    import importlib

    import torch
    from torch import nn
    from torchmetrics.classification import MulticlassAccuracy

    torch.set_num_threads(1)
    api = importlib.import_module(api_name)

    class Rows(torch.utils.data.Dataset):
        """Samples that are made when they are read, a batch at a time: the data itself takes no memory."""

        def __len__(self):
            return samples

        def __getitems__(self, indices):
            generator = torch.Generator().manual_seed(indices[0])
            x = torch.randn(len(indices), FEATURES, generator=generator)
            return [(row, i % CLASSES) for row, i in zip(x, indices, strict=True)]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def forward(self, x, labels=None):
            logits = self.layer(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def collate(batch):
        return {"x": torch.stack([x for x, _ in batch]), "labels": torch.tensor([label for _, label in batch])}

    def accuracy(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    torch.manual_seed(0)
    metric = accuracy if api_name == "transformers" else MulticlassAccuracy(CLASSES, average="micro")
    with tempfile.TemporaryDirectory() as folder:
        args = api.TrainingArguments(
            folder,
            per_device_eval_batch_size=BATCH,
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
            remove_unused_columns=False,
        )
        trainer = api.Trainer(Model(), args, data_collator=collate, compute_metrics=metric)
        trainer.evaluate(torch.utils.data.Subset(Rows(), range(2 * BATCH)))  # imports and buffers
        peak = Peak()
        peak.start()
        began = time.perf_counter()
        metrics = trainer.evaluate(Rows())
        seconds = time.perf_counter() - began
        peak.over = True
    name = next(key for key in metrics if key.lower().endswith("accuracy"))
    return {"mib": (peak.peak - peak.start_size) / 2**20, "seconds": seconds, "accuracy": metrics[name]}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(evaluate(sys.argv[2], int(sys.argv[3]))))
        return
    for samples in map(int, sys.argv[1:] or (100_000, 1_000_000)):
        found = {}
        for api in ("hf_compat", "transformers"):
            command = [sys.executable, __file__, "--one", api, str(samples)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[api] = json.loads(done.stdout.splitlines()[-1])
        ours, theirs = found["hf_compat"], found["transformers"]
        assert abs(ours["accuracy"] - theirs["accuracy"]) < 1e-6
        print(
            f"{samples:>9,} samples: hf_compat {ours['mib']:6.1f} MiB, {ours['seconds']:6.1f} s | "
            f"transformers {theirs['mib']:7.1f} MiB, {theirs['seconds']:6.1f} s"
        )


if __name__ == "__main__":
    main()
