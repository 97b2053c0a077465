"""Count the Python calls of common runs: a plain loop, hf_compat, transformers and Lightning. One table, no timing.

    .venv/bin/python tests/sweeps/benchmarks/counts.py [row …]

A count does not depend on what else the machine does. Functions of torch, of the trainers, of the toy model and
builtins count equally. `tests/engine/test_counts.py` holds our column to its bounds.
"""

from __future__ import annotations

import gc
import itertools
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sweeps.benchmarks.measuring import quiet
from sweeps.benchmarks.small_model import Toy, samples

BATCH = 4
CALLS = ("call", "c_call")
WIDE = (100, 1_000, 10_000)
CLASSES, TOKENS, SAMPLES = 16, 128, 15_625  # predictions of 122 MiB
SHUFFLED = 10_000_000


class Wide(nn.Module):
    """A model of many tensors, all of which have a gradient."""

    def __init__(self, tensors: int):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(tensors // 2)))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Tagger(nn.Module):
    """A class for each token, of samples of different lengths."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, CLASSES)

    def forward(self, x, labels=None):
        logits = self.head(x)
        return {"loss": logits.mean(), "logits": logits}


def calls_of(act: Callable[[], object]) -> int:
    """Count the functions that `act` calls on this thread: Python's and builtins', resumed generators included."""
    calls = itertools.count()
    gc.collect()
    gc.disable()  # finalizers would run at any time
    with quiet():  # wandb puts Python code into each write to a terminal, once a run of it has begun
        sys.setprofile(lambda frame, event, argument: next(calls) if event in CALLS else None)
        try:
            act()
        finally:
            sys.setprofile(None)
            gc.enable()
    return next(calls)


def per_update(run: Callable[[int], object], few: int = 2, many: int = 6) -> float:
    """Count the calls of one update: the difference of a long and a short run."""
    run(few)
    return (calls_of(partial(run, many)) - calls_of(partial(run, few))) / (many - few)


def optimizer_and_schedule(model: nn.Module, updates: int) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / updates)


class PlainLoop:
    """A training loop by hand."""

    def train(self, make_model: Callable[[], nn.Module], updates: int, window: int = 1) -> None:
        import transformers

        model, data = make_model(), samples(updates * window * BATCH)
        optimizer, schedule = optimizer_and_schedule(model, updates)
        loader = torch.utils.data.DataLoader(
            data, batch_size=BATCH, shuffle=True, collate_fn=transformers.default_data_collator
        )
        for index, batch in enumerate(loader, start=1):
            (model(**batch)["loss"] / window).backward()
            if index % window == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    def arrow_batches(self, rows: Any) -> Any:
        import transformers

        return torch.utils.data.DataLoader(
            rows, batch_size=BATCH, shuffle=True, collate_fn=transformers.default_data_collator
        )

    def bytes_of_shuffling(self) -> float:
        return _bytes_a_sample(torch.utils.data.RandomSampler(range(SHUFFLED)))


class Lightning:
    """A LightningModule as its documentation writes it."""

    def train(self, make_model: Callable[[], nn.Module], updates: int, window: int = 1) -> None:
        import lightning.pytorch as pl
        import transformers

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = make_model()

            def training_step(self, batch, index):
                return self.model(**batch)["loss"]

            def configure_optimizers(self):
                optimizer, schedule = optimizer_and_schedule(self.model, updates)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        loader = torch.utils.data.DataLoader(
            samples(updates * window * BATCH), BATCH, shuffle=True, collate_fn=transformers.default_data_collator
        )
        pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, gradient_clip_val=1.0, accumulate_grad_batches=window,
        ).fit(Module(), loader)  # fmt: skip


class LikeHF:
    """`Trainer` of transformers, or ours."""

    def __init__(self, api: Any):
        self.api = api

    def trainer(self, model: nn.Module, updates: int, window: int = 1, **more: Any) -> Any:
        folder = tempfile.mkdtemp(dir=FOLDER.name)
        args = self.api.TrainingArguments(
            folder,
            **{
                "per_device_train_batch_size": BATCH, "num_train_epochs": 1, "learning_rate": 1e-3,
                "save_strategy": "no", "logging_steps": 10_000, "use_cpu": True, "disable_tqdm": True,
                "report_to": "none", "gradient_accumulation_steps": window, **more,
            },
        )  # fmt: skip
        data = samples(updates * window * BATCH)
        return self.api.Trainer(model, args, train_dataset=data, eval_dataset=samples(8))

    def train(self, make_model: Callable[[], nn.Module], updates: int, window: int = 1) -> None:
        self.trainer(make_model(), updates, window).train()

    def first_train(self) -> int:
        """Count a `train()` of one update, in a process that has trained before."""
        self.train(Toy, 1)
        return calls_of(self.trainer(Toy(), 1).train)

    def second_train(self) -> int:
        """Count the `train()` of a Trainer that has trained."""
        trainer = self.trainer(Toy(), 1)
        trainer.train()
        return calls_of(trainer.train)

    def new_trainer(self) -> int:
        self.train(Toy, 1)
        return calls_of(lambda: self.trainer(Toy(), 1))

    def evaluation(self) -> int:
        trainer = self.trainer(Toy(), 1)
        trainer.evaluate()
        return calls_of(trainer.evaluate)

    def evaluation_of_sets(self, sets: int = 100) -> int:
        """Count an evaluation of many sets of 8 samples."""
        trainer = self.trainer(Toy(), 1)
        trainer.eval_dataset = {f"set_{number}": samples(8) for number in range(sets)}
        trainer.evaluate()
        return calls_of(trainer.evaluate)

    def a_save(self) -> int:
        """Count a save: the difference of three saves and one, in runs of three updates."""

        def run(every: int) -> None:
            self.trainer(Toy(), 3, save_strategy="steps", save_steps=every).train()

        run(1)
        return (calls_of(partial(run, 1)) - calls_of(partial(run, 3))) // 2

    def memory_of_predictions(self) -> float:
        """Measure the peak memory, in MiB, that `predict` of tokens' classes takes above the data."""
        lengths = torch.randint(
            TOKENS // 2, TOKENS + 1, (SAMPLES,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        data = [{"x": torch.zeros(length, 1), "labels": torch.zeros(length, dtype=torch.long)} for length in lengths]
        trainer = self.trainer(Tagger(), 1, per_device_eval_batch_size=8)
        trainer.data_collator = _pad
        trainer.predict(data[:64])
        before = peak_mib(reset=True)
        trainer.predict(data)
        return peak_mib() - before

    def arrow_batches(self, rows: Any) -> Any:
        trainer = self.trainer(Toy(), 1)
        trainer.train_dataset = rows
        return trainer.get_train_dataloader()

    def bytes_of_shuffling(self) -> float:
        trainer = self.trainer(Toy(), 1)
        trainer.train_dataset = range(SHUFFLED)
        return _bytes_a_sample(trainer.get_train_dataloader().batch_sampler.sampler)


def _bytes_a_sample(sampler: Any) -> float:
    """Measure the peak memory of a pass over a sampler, after a first index."""
    next(iter(sampler))
    before = peak_mib(reset=True)
    for _ in sampler:
        pass
    return (peak_mib() - before) * 2**20 / SHUFFLED


def calls_of_arrow_batches(contestant: Any) -> float:
    """Count the calls of a batch of an Arrow set: the difference of a long and a short pass."""
    from datasets import Dataset

    def make(batches: int) -> Any:
        rows = samples(batches * BATCH)
        columns = {key: [torch.as_tensor(row[key]).tolist() for row in rows] for key in rows[0]}
        return Dataset.from_dict(columns).with_format("torch")

    sets = {batches: make(batches) for batches in (2, 6)}

    def run(batches: int) -> None:
        for _ in contestant.arrow_batches(sets[batches]):
            pass

    return per_update(run)


def _pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        key: nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True, padding_value=-100)
        for key in rows[0]
    }


def peak_mib(reset: bool = False) -> float:
    """Read this process's peak memory, on Linux. With `reset` it begins anew, and is what is used now."""
    if reset:  # the kernel starts to count the peak anew
        Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


FOLDER = tempfile.TemporaryDirectory()
Count = Callable[[], float]


def _contestants() -> dict[str, Any]:
    import transformers

    import hf_compat

    return {
        "plain loop": PlainLoop(), "hf_compat": LikeHF(hf_compat), "transformers": LikeHF(transformers),
        "Lightning": Lightning(),
    }  # fmt: skip


def rows() -> dict[str, dict[str, Count]]:
    """List what is counted, of whom."""
    everyone = _contestants()
    like_hf = {name: everyone[name] for name in ("hf_compat", "transformers")}
    loops = {name: everyone[name] for name in ("plain loop", "hf_compat", "transformers")}

    def updates(of: dict[str, Any], model: Callable[[], nn.Module], window: int = 1) -> dict[str, Count]:
        return {
            name: partial(per_update, lambda count, one=one: one.train(model, count, window))
            for name, one in of.items()
        }

    found = {
        "an update (4 tensors)": updates(everyone, Toy),
        "eight micro-batches and an update": updates(everyone, Toy, 8),
    }
    for tensors in WIDE:
        found[f"an update of {tensors:,} tensors"] = updates(loops, partial(Wide, tensors))
    for name, method in {
        "`train()` of one update": "first_train",
        "a second `train()`": "second_train",
        "a Trainer": "new_trainer",
        "evaluation of 8 samples": "evaluation",
        "evaluation of 100 sets": "evaluation_of_sets",
        "a save": "a_save",
    }.items():
        found[name] = {contestant: getattr(one, method) for contestant, one in like_hf.items()}
    found["`train()` of one update"]["plain loop"] = lambda: calls_of(partial(PlainLoop().train, Toy, 1))
    found["a batch of an Arrow set"] = {name: partial(calls_of_arrow_batches, one) for name, one in loops.items()}
    for title, method, of in (
        ("tokens' predictions, MiB (alone: 122)", "memory_of_predictions", like_hf),
        ("shuffling 10⁷ samples, bytes a sample", "bytes_of_shuffling", loops),
    ):
        found[title] = {name: partial(_in_own_process, name, method) for name in of}
    return found


def _in_own_process(contestant: str, method: str) -> float:
    """Measure memory in a process that has freed nothing yet."""
    command = [sys.executable, __file__, "--memory", contestant, method]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.rpartition("PEAK")[2])


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        print("PEAK", getattr(_contestants()[sys.argv[2]], sys.argv[3])())
        return
    names = ("plain loop", "hf_compat", "transformers", "Lightning")
    print(f"| Python calls | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for title, counts in rows().items():
        if not sys.argv[1:] or any(word in title for word in sys.argv[1:]):
            with quiet():
                found = {name: f"{count():,.0f}" for name, count in counts.items()}
            print(f"| {title} | {' | '.join(found.get(name, '') for name in names)} |", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    main()
