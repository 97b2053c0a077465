"""One of two processes that train together, on a pretended GPU each. gloo takes the place of NCCL.

    RANK=0 WORLD_SIZE=2 … .venv/bin/python tests/sweeps/device/two_gpus.py transformers NAME FOLDER

Writes what the process saw to `FOLDER/API-NAME-RANK.pickle`. `test_two_gpus.py` starts and compares the processes.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import warnings
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import accelerate
import peft  # noqa: F401
import torch

from helpers import toy
from helpers.pretended import pretended_device
from helpers.traced import tracing

CONFIGURATIONS: dict[str, dict] = {
    "resumed": {"save_steps": 2},
    "bf16_accumulated": {"bf16": True, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    "fp16_non_blocking": {"fp16": True, "accelerator_config": {"non_blocking": True}, "logging_steps": 1},
}


def run(api_name: str, name: str, folder: Path) -> dict:
    """Train, resume where a checkpoint was written, evaluate, and prepare a second model."""
    api, options = importlib.import_module(api_name), CONFIGURATIONS[name]
    api.set_seed(3)
    usual = {"max_steps": 6, "logging_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", "seed": 3,
             "report_to": "none", "disable_tqdm": True, "ddp_backend": "gloo", "learning_rate": 1e-2}  # fmt: skip
    saves = {"save_strategy": "steps"} if "save_steps" in options else {}
    args = api.TrainingArguments(str(folder / f"{api_name}-{name}"), **{**usual, **saves, **options})
    trainer = api.Trainer(toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(20, 5))
    trainer.train()
    if saves:
        trainer.train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-4")
    logs = [
        {key: log[key] for key in ("loss", "grad_norm", "eval_loss") if key in log} for log in trainer.state.log_history
    ]
    second = trainer.accelerator.prepare(torch.nn.Linear(2, 2))
    return {
        "device": str(args.device),
        "current": torch.cuda.current_device(),
        "logs": logs,
        "evaluated": trainer.evaluate()["eval_loss"],
        "weights": {key: value.cpu() for key, value in trainer.model.state_dict().items()},
        "devices": sorted({str(value.device) for value in trainer.model.parameters()}),
        "second": (type(second).__name__, second.device_ids, str(next(second.parameters()).device)),
        "backend": accelerate.PartialState().backend,
        "distributed_type": str(trainer.accelerator.distributed_type),
    }


def main() -> None:
    api_name, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _ = importlib.import_module(api_name).Trainer
    with tracing(), pretended_device(count=2):
        found = run(api_name, name, folder)
    (folder / f"{api_name}-{name}-{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # the group's end would wait for a process that left by an error


if __name__ == "__main__":
    main()
