"""What an update, a log, an evaluation and a save wait for and launch on a pretended GPU, under both trainers.

    .venv/bin/python tests/sweeps/device/waits.py [NAME …] [--kinds]
    .venv/bin/python tests/sweeps/device/waits.py --real       # counted by torch's profiler on the GPU of this machine

Prints the table of `docs/benchmarks.md`. The exit status is 1 where ours waits more often than transformers, or
launches more kernels an update. Each cell is the difference of two runs, so that what a run does once is not in it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from helpers import toy
from helpers.pretended import pretended_device

APIS = ("transformers", "hf_compat")
Counts = collections.Counter
CONFIGURATIONS: dict[str, dict] = {
    "plain": {},
    "accumulation of 4": {"gradient_accumulation_steps": 4},
    "bf16": {"bf16": True},
    "fp16, fused AdamW": {"fp16": True},
    "fp16, AdamW": {"fp16": True, "optim": "adamw_torch"},
    "SGD": {"optim": "sgd"},
    "Adafactor": {"optim": "adafactor"},
    "no clipping": {"max_grad_norm": 0.0},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "checkpointed activations": {"gradient_checkpointing": True},
    "tokens counted": {"include_num_input_tokens_seen": "all"},
    "non-blocking copies": {"accelerator_config": {"non_blocking": True}},
    "no filter of NaN": {"logging_nan_inf_filter": False},
    "predictions moved every 2": {"eval_accumulation_steps": 2},
    "losses only": {"prediction_loss_only": True},
}
# What is done more in the second run: its options, and how often.
MOMENTS: dict[str, tuple[dict, dict, int]] = {
    "update": ({"max_steps": 2}, {"max_steps": 6}, 4),
    "log": ({"max_steps": 6}, {"max_steps": 6, "logging_steps": 1}, 6),
    "evaluation": ({"max_steps": 6}, {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2}, 3),
    "save": ({"max_steps": 6}, {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}, 3),
    "evaluate()": ({"max_steps": 2}, {"max_steps": 2, "evaluations": 3}, 3),
}
# What a configuration does not change is measured once.
MOMENTS_OF = {
    "plain": tuple(MOMENTS),
    "fp16, fused AdamW": tuple(MOMENTS),
    "bf16": ("update", "evaluation"),
    "predictions moved every 2": ("evaluation", "evaluate()"),
    "losses only": ("evaluation", "evaluate()"),
}

# What torch's profiler calls a wait of the host, and a kernel.
REAL_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
REAL_KERNELS = ("cudaLaunchKernel", "cuLaunchKernel")


@contextlib.contextmanager
def counting(is_real: bool) -> Iterator[Counts[str]]:
    """Count waits and kernels within the context: of a pretended device, or by the profiler."""
    counts: Counts[str] = Counts()
    if not is_real:
        with pretended_device() as machine:
            yield counts
        counts.update(machine.count)
        return
    with torch.profiler.profile() as profile:
        yield counts
    for event in profile.events():
        counts.update(f"wait:{event.name}" for name in REAL_WAITS if event.name == name)
        counts["kernels"] += event.name.startswith(REAL_KERNELS)


def run(api_name: str, options: dict, is_real: bool = False) -> Counts[str]:
    """Train a small GPT-2 on a GPU, and return what was counted."""
    api = importlib.import_module(api_name)
    given = {name: value for name, value in options.items() if name != "evaluations"}
    with tempfile.TemporaryDirectory() as folder, counting(is_real) as counts:
        api.set_seed(1)
        basic = {"per_device_train_batch_size": 4, "logging_steps": 1000, "save_strategy": "no", "report_to": "none",
                 "disable_tqdm": True, "per_device_eval_batch_size": 4}  # fmt: skip
        args = api.TrainingArguments(folder, **{**basic, **given})
        metrics = {"compute_metrics": lambda p: {"n": len(p.predictions)}}
        extra = {} if options.get("prediction_loss_only") else metrics
        trainer = api.Trainer(
            toy.tiny_gpt2(), args, train_dataset=toy.blocks(200), eval_dataset=toy.blocks(16), **extra
        )
        trainer.train()
        for _ in range(options.get("evaluations", 0)):
            trainer.evaluate()
    return counts


def difference(api: str, options: dict, moment: str, known: dict, is_real: bool = False) -> dict[str, float]:
    """What one more update, log, evaluation or save costs, by kind."""
    less, more, times = MOMENTS[moment]

    def counted(further: dict) -> Counts[str]:
        key = (api, *sorted(further.items()))
        if key not in known:
            known[key] = run(api, {**options, **further}, is_real)
        return known[key]

    a, b = counted(less), counted(more)
    return {kind: (b[kind] - a[kind]) / times for kind in {*a, *b} if b[kind] != a[kind]}


def waits(found: dict[str, float]) -> float:
    return sum(number for kind, number in found.items() if kind.startswith("wait:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join(CONFIGURATIONS))
    parser.add_argument("--real", action="store_true", help="on the GPU of this machine")
    parser.add_argument("--kinds", action="store_true", help="show each kind of wait")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in APIS:  # while no device is there
        _ = importlib.import_module(name).Trainer
    above = 0
    print("| waits (kernels) | " + " | ".join(f"{moment}: transformers, ours" for moment in MOMENTS) + " |")
    print("|---|" + "---|" * len(MOMENTS))
    for name in chosen.names or CONFIGURATIONS:
        known: dict = {}
        cells = []
        for moment in MOMENTS:
            if moment not in MOMENTS_OF.get(name, ("update",)):
                cells.append("")
                continue
            theirs, ours = (difference(api, CONFIGURATIONS[name], moment, known, chosen.real) for api in APIS)
            is_above = waits(ours) > waits(theirs) or (moment == "update" and ours["kernels"] > theirs["kernels"])
            above += is_above
            cells.append(f"{_shown(theirs)}, {_shown(ours)}{' **above**' if is_above else ''}")
            if chosen.kinds:
                for kind in sorted({*theirs, *ours}):
                    print(f"    {name}: {moment}: {kind}: {theirs.get(kind, 0):g} {ours.get(kind, 0):g}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print(f"above transformers: {above} cells")
    return 1 if above else 0


def _shown(found: dict[str, float]) -> str:
    return f"{waits(found):g} ({found.get('kernels', 0):g})"


if __name__ == "__main__":
    sys.exit(main())
