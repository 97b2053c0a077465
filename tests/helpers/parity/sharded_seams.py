"""Two ranks that share a model out: each pair of strategy, data, updates, evaluations and calls meets once.

DeepSpeed's ZeRO runs under transformers, too. For FSDP 2 transformers wants a GPU, so its oracle is transformers under
DDP. Without clipping FSDP 2 adds up the same two gradients of each weight, and the numbers are equal to the last bit.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from safetensors.torch import load_file

from helpers import toy
from helpers.parity.seam_cases import BASE, EPOCHS, FACTORS, arguments_of, parts_of, resumed_at, rows

PARTS = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
STRATEGIES = {"fsdp_whole": {"fsdp": True}, "fsdp_parts": PARTS} | {f"zero_{stage}": {} for stage in (1, 2, 3)}
ROWS = rows(2, {"strategy": tuple(STRATEGIES), **FACTORS})


def run(row: dict[str, str], api, folder: Path) -> dict:
    """Train a row, and go on from its checkpoint with a new model if the row says so."""
    args = api.TrainingArguments(str(folder), **BASE["args"] | arguments_of(row) | sharding_of(row, api.__name__),
                                 ddp_backend="gloo")  # fmt: skip
    found = {"whole": trained(row, api, args)}
    if row["run"] == "resumed" and api.__name__ == "hf_compat":
        found["resumed"] = trained(row, api, args, f"{folder}/checkpoint-{resumed_at(row)}")
    return found


def sharding_of(row: dict[str, str], package: str) -> dict:
    """Return the arguments that share the model out."""
    values = {"num_train_epochs": EPOCHS, "max_grad_norm": 0.0}
    if row["strategy"].startswith("zero"):
        auto = dict.fromkeys(
            ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
        )
        zero = {"stage": int(row["strategy"][-1]), "stage3_gather_16bit_weights_on_model_save": True}
        return {**values, "deepspeed": {"zero_optimization": zero, **auto}}
    return {**values, **(STRATEGIES[row["strategy"]] if package == "hf_compat" else {})}


def trained(row: dict[str, str], api, args, checkpoint: str | None = None) -> dict:
    """Train, evaluate and save a model; its weights are read from the file."""
    api.set_seed(1)
    trainer = api.Trainer(toy.Classifier(), args, **parts_of(row, api.__name__))
    trainer.train(resume_from_checkpoint=checkpoint)
    found = {"log": [without_norm(log) for log in trainer.state.log_history]}
    if row["evaluated"] == "outside":
        found["evaluated"] = trainer.evaluate()
        found["predicted"] = list(trainer.predict(parts_of(row, "hf_compat")["eval_dataset"])[:2])
    saved = Path(args.output_dir) / f"saved_{checkpoint is not None}"
    trainer.save_model(str(saved))
    torch.distributed.barrier()
    return {**found, "weights": load_file(saved / "model.safetensors"), "random": torch.random.get_rng_state()}


def without_norm(log: dict) -> dict:
    """Leave out a norm: parts add it up in another order, and DDP has none where nothing is clipped."""
    return {name: value for name, value in log.items() if name != "grad_norm"}


SHARDED = {f"sharded_{name}": {"run": functools.partial(run, row)} for name, row in ROWS.items()}
