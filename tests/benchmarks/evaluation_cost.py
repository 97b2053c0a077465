"""What it costs to evaluate many samples with a metric function: transformers and hf_compat, in turn.

.venv/bin/python tests/benchmarks/evaluation_cost.py [samples] [classes]
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings

import torch
import transformers
from torch import nn

import hf_compat

warnings.filterwarnings("ignore")
torch.set_num_threads(1)


class Lookup(nn.Module):
    """A model that costs next to nothing, so that what is measured is the evaluation loop."""

    def __init__(self, classes: int):
        super().__init__()
        self.linear = nn.Linear(1, classes)

    def forward(self, x, labels=None):
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(rows):
    indices = torch.tensor(rows)
    return {"x": indices.float().unsqueeze(1) / len(rows), "labels": indices % 7}


def seconds(api, samples: int, classes: int) -> tuple[float, dict]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        args = api.TrainingArguments(
            folder, per_device_eval_batch_size=32, use_cpu=True, disable_tqdm=True, report_to="none",
            remove_unused_columns=False,
        )  # fmt: skip
        trainer = api.Trainer(
            Lookup(classes),
            args,
            eval_dataset=list(range(samples)),
            data_collator=collate,
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        )
        start = time.perf_counter()
        metrics = trainer.evaluate()
        return time.perf_counter() - start, {k: metrics[k] for k in ("eval_loss", "eval_accuracy")}


def main() -> None:
    samples, classes = (int(argument) for argument in [*sys.argv[1:], 100_000, 50][:2])
    for api in (transformers, hf_compat):  # imports, caches
        seconds(api, 1000, classes)
    results = {api.__name__: seconds(api, samples, classes) for api in (transformers, hf_compat)}
    reference, metrics = results["transformers"]
    print(f"{'':<14} {'seconds':>8} {'× transformers':>15}   ({samples:,} samples × {classes} classes)")
    for name, (took, found) in results.items():
        assert found == metrics, (found, metrics)
        print(f"{name:<14} {took:>8.2f} {took / reference:>15.3f}")


if __name__ == "__main__":
    main()
