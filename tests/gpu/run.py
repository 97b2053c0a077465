"""What only a machine with a GPU shows: throughput in bf16, float16's scaler, NCCL, FSDP, and what an update waits for.

    .venv/bin/python tests/gpu/run.py [--only NAME ...] [--rounds 3]

Prints a line a check. The exit status is 0 when all of them are good, 1 when one is not, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "benchmarks")]
warnings.filterwarnings("ignore")

import torch

NO_GPU = 2
# What makes the host wait for the device, by the names that torch's profiler gives them.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH", "aten::item",
         "aten::_local_scalar_dense")  # fmt: skip
UPDATES = 12


def count_synchronisations(names: Iterable[str]) -> Counter[str]:
    """Count the events of a trace that make the host wait for the device."""
    return Counter(wait for name in names for wait in WAITS if name.startswith(wait))


def model_and_rows(samples: int):
    import throughput

    torch.manual_seed(0)
    return throughput.gpt2(), throughput.rows(samples, causal=True)


def losses(api, **options) -> list[float]:
    """Train a small GPT-2 and return the losses that were logged."""
    model, rows = model_and_rows(UPDATES * 8)
    with tempfile.TemporaryDirectory() as folder:
        args = api.TrainingArguments(
            folder, max_steps=UPDATES, logging_steps=1, per_device_train_batch_size=8, save_strategy="no",
            report_to="none", disable_tqdm=True, **options,
        )  # fmt: skip
        trainer = api.Trainer(model, args, train_dataset=rows)
        trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def throughput_in_bf16(rounds: int) -> tuple[bool, str]:
    """Samples a second in bf16 are no fewer than transformers'."""
    import throughput
    import transformers

    import hf_compat

    took = {api.__name__: [] for api in (transformers, hf_compat)}
    for _ in range(rounds):
        for api in (transformers, hf_compat):
            took[api.__name__].append(throughput.seconds(api, throughput.gpt2, {"bf16": True, "use_cpu": False}, 60))
    ours, theirs = statistics.median(took["hf_compat"]), statistics.median(took["transformers"])
    return ours <= 1.05 * theirs, f"{ours / theirs:.3f} × transformers' seconds"


def scaler_of_float16(rounds: int) -> tuple[bool, str]:
    """Losses in float16, whose scaler skips updates, are transformers' own."""
    import transformers

    import hf_compat

    theirs, ours = losses(transformers, fp16=True), losses(hf_compat, fp16=True)
    return ours == theirs, f"{ours[-1]} and {theirs[-1]} after {UPDATES} updates"


def _in_one_launched_process(**options) -> tuple[bool, str]:
    """Train under a launcher's environment, in a process group of NCCL that has one process."""
    code = f"import run, hf_compat; print('LOSSES', run.losses(hf_compat, **{options!r}))"
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **place, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        return False, done.stderr.strip().rpartition("\n")[2]
    found = json.loads(done.stdout.rpartition("LOSSES")[2])
    return all(math.isfinite(loss) for loss in found), f"loss {found[-1]}"


def nccl(rounds: int) -> tuple[bool, str]:
    """A process group of NCCL trains."""
    return _in_one_launched_process(ddp_backend="nccl")


def fsdp(rounds: int) -> tuple[bool, str]:
    """A model that FSDP shards trains."""
    return _in_one_launched_process(fsdp="full_shard", ddp_backend="nccl")


def synchronisations(rounds: int) -> tuple[bool, str]:
    """Between logs an update waits for nothing: the counts of two runs, one longer, are the same."""
    import hf_compat

    few, many = (_waits_of(hf_compat, updates) for updates in (10, 30))
    more = many - few
    return not more, f"in 20 updates more: {dict(more) or 'none'}"


def _waits_of(api, updates: int) -> Counter[str]:
    model, rows = model_and_rows(updates * 8)
    with tempfile.TemporaryDirectory() as folder:
        args = api.TrainingArguments(
            folder, max_steps=updates, logging_steps=10**6, per_device_train_batch_size=8, save_strategy="no",
            report_to="none", disable_tqdm=True, bf16=True,
        )  # fmt: skip
        trainer = api.Trainer(model, args, train_dataset=rows)
        with torch.profiler.profile() as profile:
            trainer.train()
    return count_synchronisations(event.name for event in profile.events())


CHECKS: dict[str, Callable[[int], tuple[bool, str]]] = {
    check.__name__: check for check in (throughput_in_bf16, scaler_of_float16, nccl, fsdp, synchronisations)
}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device, so nothing was checked", file=sys.stderr)
        return NO_GPU
    good = True
    for name in chosen.only:
        is_good, found = CHECKS[name](chosen.rounds)
        good &= is_good
        print(f"{'good' if is_good else 'BAD '}  {name}: {found}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
