"""What a rank exchanges in an update of a model whose layers are split, as the ranks become more.

    .venv/bin/python tests/sweeps/benchmarks/meshes.py

One process believes that it is rank 0 (see `ranks.py`). A Llama of two layers is split by torch's plan between 2 or 8
ranks, and `fsdp=True` shards what each has over all others. Collectives and their bytes are counted where torch
dispatches them: tensors that a rank gives.
"""

from __future__ import annotations

import collections
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import toy
from sweeps.benchmarks.ranks import pretend

NO_COLLECTIVES = ("wait_tensor", "wrap_tensor_autograd")


class Exchanged(TorchDispatchMode):
    """Counts collectives, by their kind."""

    def __init__(self) -> None:
        super().__init__()
        self.count: collections.Counter[str] = collections.Counter()
        self.given: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.partition("::")[2].strip("_").removesuffix("_base")
        if function.namespace in ("c10d", "_c10d_functional") and name not in NO_COLLECTIVES:
            tensors = [one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
            self.count[name] += 1
            self.given[name] += min(one.nbytes for one in tensors)
        return function(*args, **(kwargs or {}))


def count(ranks: int, split: int) -> None:
    pretend(ranks)
    from hf_compat import Trainer, TrainerCallback, TrainingArguments

    mode = Exchanged()

    class Second(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                mode.__enter__()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                mode.__exit__(None, None, None)

    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64, "intermediate_size": 128}
    model = toy.split_layers(toy.tiny_llama(**sizes), split, ranks // split)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, use_cpu=True, max_steps=2, per_device_train_batch_size=1, save_strategy="no", report_to="none",
            disable_tqdm=True, fsdp=ranks > split, logging_strategy="no",
        )  # fmt: skip
        Trainer(model, args, train_dataset=toy.blocks(ranks * 2), callbacks=[Second()]).train()
    told = ", ".join(f"{number} {name} ({mode.given[name]:,} bytes)" for name, number in sorted(mode.count.items()))
    print(f"| {ranks // split} × {split} | {told} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        count(*map(int, sys.argv[1:]))
    else:
        print("| models × processes of each | a rank's exchanges in an update |\n|---|---|", flush=True)
        for ranks in (8, 64, 512):
            for split in (2, 8):
                subprocess.run([sys.executable, __file__, str(ranks), str(split)], check=True)
