"""What it costs to evaluate many samples with a metric function: transformers and hf_compat, in turn.

.venv/bin/python tests/sweeps/benchmarks/evaluation_cost.py [samples] [classes]
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import nn
from torch.utils.data import DataLoader

import hf_compat
from sweeps.benchmarks.measuring import Benchmark, measure, quiet

warnings.filterwarnings("ignore")


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


def plain_loop(samples: int, classes: int) -> tuple[float, dict]:
    """Evaluate by hand: the same loader, model and metrics, and nothing else; no trainer can cost less."""
    torch.manual_seed(0)
    model, loader = Lookup(classes).eval(), DataLoader(list(range(samples)), batch_size=32, collate_fn=collate)
    start = time.perf_counter()
    losses, logits, labels = [], [], []
    with torch.no_grad():
        for batch in loader:
            outputs = model(**batch)
            losses.append(outputs["loss"].repeat(32))
            logits.append(outputs["logits"])
            labels.append(batch["labels"])
    joined, expected = torch.cat(logits).numpy(), torch.cat(labels).numpy()
    accuracy = float((joined.argmax(-1) == expected).mean())
    loss = torch.cat(losses).numpy().mean().item()
    return time.perf_counter() - start, {"eval_loss": loss, "eval_accuracy": accuracy}


def benchmarks(samples: int = 100_000, classes: int = 50) -> list[Benchmark]:
    """An evaluation with a metric function; both have to find the same metrics."""
    expected: dict = {}

    def seconds_of(evaluate) -> float:
        took, found = evaluate(samples, classes)
        assert expected.setdefault("metrics", found) == found, (found, expected)
        return took

    return [
        Benchmark(
            name=f"evaluation of {samples:,} samples × {classes} classes",
            unit="s",
            contestants={
                "plain loop": partial(seconds_of, plain_loop),
                **{api.__name__: partial(seconds_of, partial(seconds, api)) for api in (transformers, hf_compat)},
            },
            goal=0.06,
            rounds=3,  # transformers' time grows with the square
        )
    ]


def exponent(classes: int = 50) -> float:
    """Return the exponent by which our time grows between 10⁵ and 10⁶ samples, of the shortest of several runs."""
    few, many = (
        min(seconds(hf_compat, samples, classes)[0] for _ in range(runs)) for samples, runs in ((10**5, 5), (10**6, 3))
    )
    return math.log10(many / few)


def peak_mebibytes(api_name: str, samples: int, classes: int) -> float:
    """Return what an evaluation adds to the peak of a process of its own; on Linux."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import evaluation_cost as e\n"
        "def peak():  # of `resource`, a process has its parent's\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('VmHWM')) / 1024\n"
        "api = getattr(e, sys.argv[2]); e.seconds(api, 1000, int(sys.argv[4]))\n"
        "before = peak()\n"
        "e.seconds(api, int(sys.argv[3]), int(sys.argv[4]))\n"
        "print('PEAK', peak() - before)"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), api_name, str(samples), str(classes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.rpartition("PEAK")[2])


def main() -> None:
    samples, classes = (int(argument) for argument in [*sys.argv[1:], 100_000, 50][:2])
    for benchmark in benchmarks(samples, classes):
        print(measure(benchmark).as_text(), flush=True)
    with quiet():
        grows = exponent(classes)
    print(f"hf_compat's time grows with the samples to the power of {grows:.2f} (10⁵ to 10⁶)", flush=True)
    peaks = {name: peak_mebibytes(name, 3 * samples, classes) for name in ("transformers", "hf_compat")}
    print(f"peak memory of {3 * samples:,}: " + ", ".join(f"{name} {peak:,.0f} MiB" for name, peak in peaks.items()))


if __name__ == "__main__":
    main()
