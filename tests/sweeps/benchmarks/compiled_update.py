"""Time an update of small models: a plain loop, ours, ours under `torch_compile` and `compile_update`, transformers.

    .venv/bin/python tests/sweeps/benchmarks/compiled_update.py [rounds [updates]]

All contestants of a model take turns in one process. The table has the median of an update in µs, of the best round.
Updates with a graph to compile come first and are left out. A C++ compiler is needed.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sweeps.benchmarks.measuring import quiet
from sweeps.benchmarks.small_model import Toy, samples

BATCH, TOKENS, WARM = 4, 32, 20


def gpt2() -> nn.Module:
    import transformers

    size = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": TOKENS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))


def bert() -> nn.Module:
    import transformers

    size = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=256, **size))


def texts(count: int, classes: bool) -> list[dict[str, Any]]:
    tokens = torch.randint(256, (count, TOKENS), generator=torch.Generator().manual_seed(0))
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2 if classes else row}
        for row in tokens
    ]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[dict[str, Any]]]]] = {
    "toy": (Toy, samples),
    "tiny GPT-2": (gpt2, lambda count: texts(count, classes=False)),
    "tiny BERT": (bert, lambda count: texts(count, classes=True)),
}


def plain(model: nn.Module, data: list[dict[str, Any]], updates: int) -> list[float]:
    """Return when each update of a loop by hand has ended."""
    import transformers

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / updates)
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, collate_fn=transformers.default_data_collator)
    ends = []
    model.train()
    for batch in loader:
        model(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return ends


def trained(api: Any, model: nn.Module, data: list[dict[str, Any]], **values: Any) -> list[float]:
    """Return when each update of a Trainer has ended."""
    ends: list[float] = []

    class Clock(api.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        args = api.TrainingArguments(
            folder, per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=1e-3, save_strategy="no",
            logging_steps=100_000, use_cpu=True, disable_tqdm=True, report_to="none", **values,
        )  # fmt: skip
        api.Trainer(model, args, train_dataset=data, callbacks=[Clock()]).train()
    return ends


def main(rounds: int = 3, updates: int = 200) -> None:
    import transformers

    import hf_compat

    contestants: dict[str, Callable[[nn.Module, list[dict[str, Any]]], list[float]]] = {
        "plain loop": lambda model, data: plain(model, data, updates),
        "ours": lambda model, data: trained(hf_compat, model, data),
        "ours, torch_compile": lambda model, data: trained(hf_compat, model, data, torch_compile=True),
        "ours, compile_update": lambda model, data: trained(hf_compat, model, data, compile_update=True),
        "transformers": lambda model, data: trained(transformers, model, data),
    }
    print(f"| an update in µs | {' | '.join(contestants)} |\n|---|{'---|' * len(contestants)}")
    for title, (make, make_data) in MODELS.items():
        data = make_data(updates * BATCH)
        best: dict[str, float] = {}
        for _ in range(rounds):
            for name, run in contestants.items():
                torch.manual_seed(0)
                with quiet():
                    ends = run(make(), data)[WARM:]
                median = statistics.median([after - before for before, after in itertools.pairwise(ends)])
                best[name] = min(best.get(name, median), median)
        print(f"| {title} | {' | '.join(f'{best[name] * 1e6:,.0f}' for name in contestants)} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:]))
