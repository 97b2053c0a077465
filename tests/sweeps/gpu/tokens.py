"""Tokens a second on a GPU: a bare loop, bare Lightning, transformers, hf_compat, and hf_compat with compiled updates.

    .venv/bin/python tests/sweeps/gpu/tokens.py [--models small large] [--rounds 3] [--updates 40]

The small model is bound by launches, the large one, of 1.1 · 10⁹ parameters, by computing. Both are Llamas made from
configurations, in bf16, with fused AdamW, clipping and a linear schedule. Contestants take turns, round by round. The
table has medians, and the ratio to transformers. With `--pretend` a tiny model runs on a pretended GPU: that shows that
the script runs to its end, and nothing about speed. Compiled code does not run there.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

warnings.filterwarnings("ignore")
FIRST = 8  # updates before the clock starts: compilation, and the allocator's first requests
LEARNING_RATE, MAX_NORM = 1e-4, 1.0
HEAD = ("| model | contestant | tokens a second | smallest to largest | × transformers |", "|---|---|---|---|---|")


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    words: int
    batch: int
    length: int

    def model(self) -> torch.nn.Module:
        import transformers

        config = transformers.LlamaConfig(
            num_hidden_layers=self.layers, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_attention_heads=self.heads, num_key_value_heads=max(self.heads // 8, 1), vocab_size=self.words,
            max_position_embeddings=self.length, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    def rows(self, updates: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.words, (updates * self.batch, self.length), generator=generator)
        return [{"input_ids": row, "labels": row} for row in ids]


SIZES = {
    "small": Size(layers=4, hidden=256, intermediate=1024, heads=8, words=8_000, batch=8, length=128),
    "large": Size(layers=22, hidden=2048, intermediate=5632, heads=32, words=32_000, batch=4, length=1024),
    "tiny": Size(layers=1, hidden=16, intermediate=32, heads=2, words=64, batch=2, length=8),
}


@dataclass
class Clock:
    """Notes the seconds from the end of one update to that of the last; the device has done its work at both."""

    updates: int
    times: list[float] = field(default_factory=list)
    ended: int = 0

    def tick(self) -> None:
        self.ended += 1
        if self.ended in (FIRST, FIRST + self.updates):
            torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        first, last = self.times
        return last - first


def _parts(model: torch.nn.Module, updates: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / updates, 0.0))


def _loader(rows: list[dict[str, torch.Tensor]], size: Size) -> torch.utils.data.DataLoader[Any]:
    import transformers

    collate = transformers.default_data_collator
    return torch.utils.data.DataLoader(rows, size.batch, shuffle=True, collate_fn=collate, pin_memory=True)


def bare_loop(size: Size, clock: Clock) -> None:
    """Train by hand."""
    updates = FIRST + clock.updates
    model = size.model().to("cuda").train()
    optimizer, schedule = _parts(model, updates)
    for batch in _loader(size.rows(updates), size):
        there = {name: value.to("cuda", non_blocking=True) for name, value in batch.items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**there).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.tick()


def bare_lightning(size: Size, clock: Clock) -> None:
    """Train by a LightningModule of a few lines."""
    import lightning.pytorch as pl

    updates = FIRST + clock.updates

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = size.model()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer, schedule = _parts(self.model, updates)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def configure_gradient_clipping(self, *_: object, **__: object) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), MAX_NORM)  # Lightning refuses a fused optimizer's

        def on_train_batch_end(self, *_: object) -> None:
            clock.tick()

    trainer = pl.Trainer(
        max_epochs=1, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), _loader(size.rows(updates), size))


def by_trainer(name: str, **values: Any) -> Callable[[Size, Clock], None]:
    """Train by a Trainer of a package, with these arguments."""

    def run(size: Size, clock: Clock) -> None:
        api = __import__(name)
        updates = FIRST + clock.updates

        class Watch(api.TrainerCallback):
            def on_step_end(self, *_: object, **__: object) -> None:
                clock.tick()

        with tempfile.TemporaryDirectory() as folder:
            args = api.TrainingArguments(
                folder, per_device_train_batch_size=size.batch, max_steps=updates, learning_rate=LEARNING_RATE,
                max_grad_norm=MAX_NORM, bf16=True, save_strategy="no", logging_strategy="no", report_to="none",
                disable_tqdm=True, **values,
            )  # fmt: skip
            api.Trainer(size.model(), args, train_dataset=size.rows(updates), callbacks=[Watch()]).train()

    return run


CONTESTANTS: dict[str, Callable[[Size, Clock], None]] = {
    "bare loop": bare_loop,
    "bare Lightning": bare_lightning,
    "transformers": by_trainer("transformers"),
    "hf_compat": by_trainer("hf_compat"),
    "hf_compat, compile_update": by_trainer("hf_compat", compile_update=True),
    "hf_compat, compile_update, CUDA graphs": by_trainer(
        "hf_compat", compile_update=True, torch_compile_mode="reduce-overhead"
    ),
}


def measured(size: Size, rounds: int, updates: int, names: list[str]) -> dict[str, list[float]]:
    """Return the tokens a second of each contestant, a number a round."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            clock = Clock(updates)
            CONTESTANTS[name](size, clock)
            found[name].append(updates * size.batch * size.length / clock.seconds)
            gc.collect()  # the next one finds the memory free
            torch.cuda.empty_cache()
    return found


def table(title: str, found: dict[str, list[float]]) -> Iterator[str]:
    """Write a row for each contestant."""
    theirs = statistics.median(found["transformers"])
    for name, numbers in found.items():
        median = statistics.median(numbers)
        extent = f"{min(numbers):,.0f} to {max(numbers):,.0f}"
        yield f"| {title} | {name} | {median:,.0f} | {extent} | {median / theirs:.3f} |"


def _chosen(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=("small", "large"), default=["small", "large"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=40, help="that are timed")
    parser.add_argument("--pretend", action="store_true", help="a tiny model on a pretended GPU")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    chosen = _chosen(words)
    if not chosen.pretend and not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device, so nothing was measured", file=sys.stderr)
        return 2
    names, models, device = list(CONTESTANTS), chosen.models, contextlib.nullcontext()
    if chosen.pretend:
        from helpers.pretended import pretended_device

        names, models, device = [name for name in names if "compile" not in name], ["tiny"], pretended_device()
    with device:
        print(f"On {torch.cuda.get_device_name(0)}:\n")
        print(*HEAD, sep="\n")
        for model in models:
            found = measured(SIZES[model], chosen.rounds, chosen.updates, names)
            print(*table(model, found), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
