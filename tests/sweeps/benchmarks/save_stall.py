"""How long training stands still for a checkpoint: transformers, hf_compat, and hf_compat with `async_save`.

.venv/bin/python tests/sweeps/benchmarks/save_stall.py [millions of parameters] [rounds]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import nn

import hf_compat
from sweeps.benchmarks.measuring import Benchmark, measure

warnings.filterwarnings("ignore")


class Big(nn.Module):
    """Layers of a million parameters, which note when a forward pass begins.

    Args:
        millions: How many layers.
        samples: Samples that go through the layers; 0 computes next to nothing.
        pause: Seconds of other work in a forward pass: what goes on in the background ends meanwhile.
        before: The updates whose forward pass pauses, counted from 0; None means all.
    """

    def __init__(self, millions: int, samples: int = 0, pause: float = 0.0, before: tuple[int, ...] | None = None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(millions))
        self.samples, self.pause, self.before = samples, pause, before
        self.begun: list[float] = []

    def forward(self, x, labels=None):
        self.begun.append(time.perf_counter())
        if self.before is None or len(self.begun) - 1 in self.before:
            time.sleep(self.pause)
        if not self.samples:
            return {"loss": sum(layer.weight[0].sum() for layer in self.layers) * 1e-6 + x.sum() * 0}
        hidden = torch.ones(self.samples, 1000)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return {"loss": hidden.mean()}


def moments(api, model: Big, saves: tuple[int, ...], heard: bool = False, **options) -> list[tuple[float, float]]:
    """Train, and return when each update's forward pass began, and when the update ended.

    Args:
        api: `transformers` or `hf_compat`.
        model: What is trained.
        saves: The updates after which a checkpoint is written.
        heard: Whether a callback has `on_save`: it may look at the checkpoint before training goes on.
        options: Further training arguments.
    """
    ended: list[float] = []

    class Timed(api.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step in saves
            ended.append(time.perf_counter())

    if heard:
        Timed.on_save = lambda self, *args, **kwargs: None
    updates = max(saves) + 1
    with tempfile.TemporaryDirectory() as folder:
        args = api.TrainingArguments(
            folder, max_steps=updates, save_strategy="steps", save_steps=10**9, save_total_limit=1, use_cpu=True,
            disable_tqdm=True, report_to="none",
            per_device_train_batch_size=1, logging_strategy="no", max_grad_norm=0.0, **options,
        )  # fmt: skip
        data = [{"x": torch.zeros(1), "labels": 0}] * updates
        api.Trainer(model, args, train_dataset=data, callbacks=[Timed()]).train()
    return list(zip(model.begun, ended, strict=True))


def stalls(api, millions: int, saves: int, pause: float = 0.0, **options) -> list[float]:
    """Return the seconds between the end of an update that is saved and the next forward pass, of several saves."""
    found = moments(api, Big(millions, pause=pause), tuple(range(1, saves + 1)), **options)
    return [begun - ended for (_, ended), (begun, _) in pairwise(found)]


def added(api, millions: int, pause: float = 0.0, **options) -> float:
    """Return by how many seconds a second save makes the next update end later, whose forward and backward compute."""
    found = moments(api, Big(millions, samples=32, pause=pause, before=(3,)), (3, 5), **options)
    ends = [ended for _, ended in found]
    return (ends[5] - ends[4]) - (ends[1] - ends[0])


def bare_write(millions: int, as_saved: bool = False) -> float:
    """Return the seconds that the system takes for as many bytes as model and AdamW's states, given by two threads.

    Each thread has a file: half of the bytes, or `as_saved` a third and two thirds. The system takes the bytes of one
    file one after another.
    """
    tensors = [torch.ones(1000, 1000).numpy().data for _ in range(3 * millions)]

    def write(path: str, own: list[memoryview]) -> None:
        with open(path, "wb", buffering=0) as file:
            for tensor in own:
                os.write(file.fileno(), tensor)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:
        start = time.perf_counter()
        first = millions if as_saved else len(tensors) // 2
        list(threads.map(write, (f"{folder}/1", f"{folder}/2"), (tensors[:first], tensors[first:])))
        return time.perf_counter() - start


def benchmarks(millions: int = 100) -> list[Benchmark]:
    """One save of a model and AdamW's states; a second one takes the memory of the first one's copies."""
    asynchronous: list[float] = []
    pause = millions / 20

    def take_async(which: int) -> float:
        if which == 0:
            asynchronous[:] = stalls(hf_compat, millions, 2, pause=pause, async_save=True)
        return asynchronous[which]

    contestants = {
        "bare write": lambda: bare_write(millions),
        "bare write of the two files": lambda: bare_write(millions, as_saved=True),
        "transformers": lambda: stalls(transformers, millions, 1)[0],
        "hf_compat": lambda: stalls(hf_compat, millions, 1)[0],
        "hf_compat, a callback hears of it": lambda: stalls(hf_compat, millions, 1, heard=True)[0],
        "hf_compat async, first": lambda: take_async(0),
        "hf_compat async, later": lambda: take_async(1),
    }
    until_the_next_ends = {
        "transformers": lambda: added(transformers, millions, pause),
        "hf_compat": lambda: added(hf_compat, millions, pause),
        "hf_compat async": lambda: added(hf_compat, millions, pause, async_save=True),
    }
    return [
        Benchmark(name=f"stall of a save of {millions} M parameters", unit="s", contestants=contestants, goal=0.5),
        Benchmark(
            name="the same save, until the next update has ended", unit="s", contestants=until_the_next_ends, goal=0.5
        ),
    ]


def main() -> None:
    millions, rounds = (int(argument) for argument in [*sys.argv[1:], 100, 5][:2])
    for benchmark in benchmarks(millions):
        print(measure(benchmark, rounds).as_text())


if __name__ == "__main__":
    main()
