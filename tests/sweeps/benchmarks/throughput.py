"""Seconds a thousand samples of real models: a small GPT-2 and a small BERT, under transformers and hf_compat.

    .venv/bin/python tests/sweeps/benchmarks/throughput.py [rounds] [name of a variant]

The models are made from configurations. Each variant changes one thing: accumulation, workers, bf16, compilation.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hf_compat
from sweeps.benchmarks.measuring import Benchmark, measure

warnings.filterwarnings("ignore")
BATCH, LENGTH, WORDS = 8, 64, 1000
VARIANTS: dict[str, dict] = {
    "plain": {},
    "accumulation 8": {"gradient_accumulation_steps": 8},
    "2 workers": {"dataloader_num_workers": 2},
    "bf16": {"bf16": True},
    "compiled": {"torch_compile": True},
}


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=128, vocab_size=WORDS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=128, intermediate_size=256, vocab_size=WORDS,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def rows(samples: int, causal: bool) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (samples, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row if causal else int(row[0]) % 2} for row in ids]


def seconds(api, make, variant: dict, updates: int) -> float:
    """Return the seconds that a thousand samples take, start and first updates left out."""
    began: list[float] = []
    first = 4

    class Watch(api.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == first:
                _wait_for_device()
                began.append(time.perf_counter())

    torch.manual_seed(0)
    window = variant.get("gradient_accumulation_steps", 1)
    data = rows((updates + first) * window * BATCH, make is gpt2)
    with tempfile.TemporaryDirectory() as folder:
        args = api.TrainingArguments(
            folder, per_device_train_batch_size=BATCH, max_steps=updates + first, save_strategy="no", logging_steps=50,
            disable_tqdm=True, report_to="none", **{"use_cpu": True, **variant},
        )  # fmt: skip
        api.Trainer(make(), args, train_dataset=data, callbacks=[Watch()]).train()
        _wait_for_device()
        took = time.perf_counter() - began[0]
    return took / (updates * window * BATCH) * 1000


def _wait_for_device() -> None:
    """Wait for a GPU, where one computes: what it has been told to do is not done yet."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def benchmarks(only: str | None = None) -> list[Benchmark]:
    """Every model with every variant."""
    found = []
    for make in (gpt2, bert):
        for name, variant in VARIANTS.items():
            if only is not None and name != only:
                continue
            updates = 40 // variant.get("gradient_accumulation_steps", 1)
            contestants = {
                api.__name__: partial(seconds, api, make, variant, updates) for api in (transformers, hf_compat)
            }
            title = f"{make.__name__}, {name}"
            found.append(Benchmark(name=title, unit="s a thousand samples", contestants=contestants))
    return found


def main() -> None:
    rounds, only = int([*sys.argv[1:], 5][0]), [*sys.argv[2:], None][0]
    for benchmark in benchmarks(only):
        print(measure(benchmark, rounds).as_text(), flush=True)


if __name__ == "__main__":
    main()
