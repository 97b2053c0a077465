"""What it takes to begin: imports, and the time from `train()` to the end of the first update.

    .venv/bin/python tests/sweeps/benchmarks/startup_cost.py [rounds]

Imports are measured in processes of their own, by themselves: the interpreter's start is left out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

import hf_compat
from sweeps.benchmarks import step_cost
from sweeps.benchmarks.measuring import Benchmark, measure

warnings.filterwarnings("ignore")
FROM_TRANSFORMERS = "from transformers import Trainer"
EVERYTHING = "from transformers import Trainer, TrainingArguments"


def seconds_of_import(statement: str) -> float:
    """Return what a statement takes in a process of its own, which measures it itself."""
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def seconds_to_first_update(api, call: int) -> float:
    """Return the time from `train()` to the end of its first update.

    Args:
        api: transformers or hf_compat.
        call: Which call of `train` on the same Trainer is measured: 1 or 2.
    """
    ended: list[float] = []

    class Watch(api.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                ended.append(time.perf_counter())

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        args = api.TrainingArguments(
            folder, per_device_train_batch_size=step_cost.BATCH, max_steps=2, save_strategy="no", use_cpu=True,
            disable_tqdm=True, report_to="none",
        )  # fmt: skip
        trainer = api.Trainer(step_cost.Toy(), args, train_dataset=step_cost.samples(2), callbacks=[Watch()])
        for _ in range(call - 1):
            trainer.train()
        start = time.perf_counter()
        trainer.train()
        return ended[-1] - start


def seconds_of_small_evaluations(api, within_training: bool) -> float:
    """Return the time that an evaluation of 64 samples takes, the mean of 20.

    Args:
        api: transformers or hf_compat.
        within_training: Evaluate after each update, and take off what as many updates alone take; else call `evaluate`.
    """
    torch.manual_seed(0)
    count = 20
    with tempfile.TemporaryDirectory() as folder:

        def trainer(**values):
            args = api.TrainingArguments(
                folder, per_device_train_batch_size=step_cost.BATCH, max_steps=count, save_strategy="no", use_cpu=True,
                per_device_eval_batch_size=32, disable_tqdm=True, report_to="none", **values,
            )  # fmt: skip
            data = step_cost.samples(count)
            return api.Trainer(step_cost.Toy(), args, train_dataset=data, eval_dataset=step_cost.samples(64)[:64])

        def seconds_of(call) -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        if within_training:
            evaluating = seconds_of(trainer(eval_strategy="steps", eval_steps=1).train)
            return (evaluating - seconds_of(trainer().train)) / count
        evaluated = trainer()
        evaluated.evaluate()
        return seconds_of(lambda: [evaluated.evaluate() for _ in range(count)]) / count


def benchmarks() -> list[Benchmark]:
    """Imports, the first update of a first and of a second call, small evaluations."""
    apis = {"transformers": transformers, "hf_compat": hf_compat}
    imports = {
        "import hf_compat": (FROM_TRANSFORMERS, "import hf_compat", 0.05),
        "import Trainer and TrainingArguments": (EVERYTHING, EVERYTHING.replace("transformers", "hf_compat"), 1.0),
    }
    found = [
        Benchmark(
            name=name,
            unit="s",
            contestants={
                "transformers": partial(seconds_of_import, theirs),
                "hf_compat": partial(seconds_of_import, ours),
            },
            goal=goal,
        )
        for name, (theirs, ours, goal) in imports.items()
    ]
    for call, name in ((1, "train() to its first update"), (2, "a second train() to its first update")):
        contestants = {api: partial(seconds_to_first_update, module, call) for api, module in apis.items()}
        found.append(Benchmark(name=name, unit="s", contestants=contestants))
    for within, name in (
        (False, "evaluate() of 64 samples, called again"),
        (True, "an evaluation of 64 samples between two updates"),
    ):
        contestants = {api: partial(seconds_of_small_evaluations, module, within) for api, module in apis.items()}
        found.append(Benchmark(name=name, unit="s", contestants=contestants))
    return found


def main() -> None:
    rounds = int([*sys.argv[1:], 5][0])
    for benchmark in benchmarks():
        print(measure(benchmark, rounds).as_text(), flush=True)


if __name__ == "__main__":
    main()
