"""What a rank exchanges in an update of a model whose layers or sequences are shared, as the ranks become more.

    .venv/bin/python tests/sweeps/benchmarks/meshes.py [layers|sequences RANKS SHARING]

One process believes that it is rank 0 (see `ranks.py`), and 2 or 8 ranks share. A Llama of two layers is split by
torch's plan, and `fsdp=True` shards what each rank has over all others. Or DeepSpeed's Ulysses divides its sequences
under ZeRO 2. Collectives and their bytes are counted where torch dispatches them: tensors that a rank gives.
"""

from __future__ import annotations

import collections
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import toy
from sweeps.benchmarks.ranks import pretend

all_to_all_single = torch.distributed.all_to_all_single
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
            self.add(name, args)
        return function(*args, **(kwargs or {}))

    def add(self, name: str, args: tuple) -> None:
        tensors = [one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
        self.count[name] += 1
        self.given[name] += min(one.nbytes for one in tensors)

    def exchange(self, *args, **kwargs):
        """Count what DeepSpeed exchanges within an operator of its own, where torch shows nothing."""
        self.add("all_to_all_single", (args, kwargs))
        return all_to_all_single(*args, **kwargs)


def count(what: str, ranks: int, sharing: int) -> Exchanged:
    """Return what a rank exchanges in the second update of a model whose `what` is shared."""
    pretend(ranks)
    from hf_compat import Trainer, TrainerCallback, TrainingArguments

    mode = Exchanged()

    class Second(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                torch.distributed.all_to_all_single = mode.exchange
                mode.__enter__()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                mode.__exit__(None, None, None)

    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64, "intermediate_size": 128}
    model, data = toy.tiny_llama(**sizes, attn_implementation="sdpa"), toy.blocks(ranks * 2, length=16)
    if what == "layers":
        model, options = toy.split_layers(model, sharing, ranks // sharing), {"fsdp": ranks > sharing}
    else:
        data = [{**row, "position_ids": torch.arange(len(row["input_ids"]))} for row in data]
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        shared = ParallelismConfig(
            sp_size=sharing, sp_backend="deepspeed", sp_handler=handler, dp_replicate_size=ranks // sharing
        )
        options = {"deepspeed": {"zero_optimization": {"stage": 2}}, "parallelism_config": shared}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, use_cpu=True, max_steps=2, per_device_train_batch_size=1, save_strategy="no", report_to="none",
            disable_tqdm=True, logging_strategy="no", **options,
        )  # fmt: skip
        Trainer(model, args, train_dataset=data, callbacks=[Second()]).train()
    return mode


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ranks, sharing = map(int, sys.argv[2:])
        mode = count(sys.argv[1], ranks, sharing)
        told = ", ".join(f"{number} {name} ({mode.given[name]:,} bytes)" for name, number in sorted(mode.count.items()))
        print(f"| {sys.argv[1]} | {ranks // sharing} × {sharing} | {told} |")
    else:
        print("| shared | models × ranks of each | a rank's exchanges in an update |\n|---|---|---|", flush=True)
        for what, ranks, sharing in itertools.product(("layers", "sequences"), (8, 64, 512), (2, 8)):
            subprocess.run([sys.executable, __file__, what, str(ranks), str(sharing)], check=True)
