"""A training run for tests with several processes, started by a launcher.

    job.py FOLDER [name=value …]

`model`, `samples` and `eval_samples` choose what is trained; `resume`, `raise_at` and `exit_at` what happens; all else
is a training argument. With `split`, two processes share each layer, as `from_pretrained` (`loaded`) or torch
(`planned`) splits it; further pairs read other batches. The first process writes `result.json` (log history, digest of
the weights, order of the samples).
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

torch.set_num_threads(1)
from helpers import toy
from hf_compat import Trainer, TrainerCallback, TrainingArguments, get_last_checkpoint, set_seed

BASE = {
    "per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1,
    "save_strategy": "steps", "save_steps": 2, "use_cpu": True, "disable_tqdm": True, "gradient_accumulation_steps": 2,
}  # fmt: skip


class Fail(TrainerCallback):
    def __init__(self, raise_at, exit_at, once):
        self.raise_at, self.exit_at, self.once = raise_at, exit_at, once

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == self.raise_at:
            raise ValueError("a mistake on rank 1")
        marker = Path(args.output_dir) / "has_failed"
        if args.process_index == 1 and state.global_step == self.exit_at and not (self.once and marker.exists()):
            marker.touch()
            os._exit(7)


MODELS = {
    "Classifier": toy.Classifier,
    "plain": lambda: toy.Classifier(dropout=0.0),
    "gpt2": lambda: toy.tiny_gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "llama": toy.tiny_llama,
}


def split_when_loaded(model, folder, models):
    from transformers.distributed import DistributedConfig

    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, fsdp_size=models))


def digest(folder):
    """Of the weights that were saved last: a model may be in parts."""
    return hashlib.sha256((folder / "final" / "model.safetensors").read_bytes()).hexdigest()


def value(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main():
    folder, *words = sys.argv[1:]
    given = {name: value(text) for name, text in (word.split("=", 1) for word in words)}
    resume, samples, evaluated = given.pop("resume", None), given.pop("samples", 40), given.pop("eval_samples", 9)
    model_name, stream = given.pop("model", "Classifier"), given.pop("stream", False)
    split = given.pop("split", None)
    fail = Fail(given.pop("raise_at", None), given.pop("exit_at", None), given.pop("once", False))
    (Path(folder) / "pids").mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")
    (Path(folder) / "pids" / rank).write_text(str(os.getpid()))
    args = TrainingArguments(folder, **{**BASE, **given})
    set_seed(5)
    model = MODELS[model_name]()
    if split is not None:
        models = int(os.environ["WORLD_SIZE"]) // 2
        is_planned, own = split == "planned", Path(folder) / f"base_{rank}"
        model = toy.split_layers(model, 2, models) if is_planned else split_when_loaded(model, own, models)
    is_text = model_name in ("gpt2", "llama")
    rows = toy.blocks(samples) if is_text else toy.rows(samples)
    data = toy.SizedStream(rows) if stream else rows
    evaluation = toy.blocks(evaluated, seed=4) if is_text else toy.rows(evaluated, seed=4)
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=evaluation, callbacks=[fail])
    if resume == "auto":  # as scripts do that may be started again
        resume = get_last_checkpoint(folder) is not None
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(Path(folder) / "final"))
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        timed = ("_runtime", "_per_second")
        logs = [{k: v for k, v in log.items() if not k.endswith(timed)} for log in trainer.state.log_history]
        result = {"logs": logs, "weights": digest(Path(folder)), "steps": trainer.state.global_step}
        result["eval_loss"] = metrics["eval_loss"]
        (Path(folder) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
