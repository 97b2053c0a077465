"""How long training stands still for a checkpoint: transformers, hf_compat, and hf_compat with `async_save`.

.venv/bin/python tests/benchmarks/save_stall.py [millions of parameters] [rounds]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
import transformers
from measuring import Benchmark, measure
from torch import nn

import hf_compat

warnings.filterwarnings("ignore")


class Big(nn.Module):
    def __init__(self, millions: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(millions))

    def forward(self, x, labels=None):
        return {"loss": sum(layer.weight[0].sum() for layer in self.layers) * 1e-6 + x.sum() * 0}


def stalls(api, millions: int, saves: int, pause: float = 0.0, **options) -> list[float]:
    """Return the seconds between an update's end and the next one's beginning, with a save in between.

    Args:
        api: `transformers` or `hf_compat`.
        millions: Millions of parameters.
        saves: How many saves, one after each update.
        pause: Seconds of other work after each save: what goes on in the background ends meanwhile.
        options: Further training arguments.
    """
    found: list[float] = []

    class Timed(api.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step <= saves
            self.start = time.perf_counter()

        def on_step_begin(self, args, state, control, **kwargs):
            if 0 < state.global_step <= saves:
                found.append(time.perf_counter() - self.start)
                time.sleep(pause if state.global_step < saves else 0.0)

    with tempfile.TemporaryDirectory() as folder:
        args = api.TrainingArguments(
            folder, max_steps=saves + 1, save_strategy="steps", save_steps=10**9, save_total_limit=1, use_cpu=True,
            disable_tqdm=True, report_to="none",
            per_device_train_batch_size=1, logging_strategy="no", max_grad_norm=0.0, **options,
        )  # fmt: skip
        data = [{"x": torch.zeros(1), "labels": 0}] * (saves + 1)
        api.Trainer(Big(millions), args, train_dataset=data, callbacks=[Timed()]).train()
    return found[:saves]


def bare_write(millions: int) -> float:
    """Return the seconds that the system takes for as many bytes, given by two threads: model, and AdamW's states."""
    tensors = [torch.ones(1000, 1000).numpy().data for _ in range(3 * millions)]

    def write(path: str, own: list[memoryview]) -> None:
        with open(path, "wb", buffering=0) as file:
            for tensor in own:
                os.write(file.fileno(), tensor)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:
        start = time.perf_counter()
        halves = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        list(threads.map(write, (f"{folder}/1", f"{folder}/2"), halves))
        return time.perf_counter() - start


def benchmarks(millions: int = 100) -> list[Benchmark]:
    """One save of a model and AdamW's states; a second one takes the memory of the first one's copies."""
    asynchronous: list[float] = []

    def take_async(which: int) -> float:
        if which == 0:
            asynchronous[:] = stalls(hf_compat, millions, 2, pause=millions / 20, async_save=True)
        return asynchronous[which]

    contestants = {
        "bare write": lambda: bare_write(millions),
        "transformers": lambda: stalls(transformers, millions, 1)[0],
        "hf_compat": lambda: stalls(hf_compat, millions, 1)[0],
        "hf_compat async, first": lambda: take_async(0),
        "hf_compat async, later": lambda: take_async(1),
    }
    return [Benchmark(name=f"stall of a save of {millions} M parameters", unit="s", contestants=contestants, goal=0.5)]


def main() -> None:
    millions, rounds = (int(argument) for argument in [*sys.argv[1:], 100, 5][:2])
    for benchmark in benchmarks(millions):
        print(measure(benchmark, rounds).as_text())


if __name__ == "__main__":
    main()
