"""Run one case of a public project under one engine, and record its results."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import transformers

from helpers import (
    toy,
    upstream_user_callbacks,  # noqa: F401 - adds its cases
)
from helpers.upstream_user_trainers import CASES
from hf_compat.checkpoint.reading import is_ours_alone

#: What each case is crossed with: changes of the arguments, and what is done around `train`.
CROSSES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "resume": {"gradient_accumulation_steps": 2},
    "two evaluations": {"eval_on_start": True},
    "best": {"load_best_model_at_end": True, "save_total_limit": 1},
}
ARGUMENTS = {
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-2,
    "max_steps": 8,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 4,
    "seed": 7,
}
TIMED = ("_runtime", "_per_second", "_preparation_time", "nonfinite_steps")


def timeless(value):
    """Remove durations, and keys that only our logs have."""
    if isinstance(value, dict):
        return {name: timeless(part) for name, part in value.items() if not str(name).endswith(TIMED)}
    return [timeless(part) for part in value] if isinstance(value, (list, tuple)) else value


def crosses_of(name):
    return [cross for cross in CROSSES if cross in CASES[name](transformers).get("crosses", CROSSES)]


def make_trainer(api, parts, cross, folder):
    values = ARGUMENTS | CROSSES[cross] | parts.get("arguments", {})
    if cross == "best" and "metric" in parts:
        values |= {"metric_for_best_model": parts["metric"]}
    args = api.TrainingArguments(output_dir=str(folder), **values)
    torch.manual_seed(3)
    built = parts["build"]() if "build" in parts else {"model": parts.get("model", toy.Classifier)()}
    keywords = {"train_dataset": parts.get("train", lambda: toy.rows(44))(), "eval_dataset": toy.rows(18, 1)}
    keywords |= {"callbacks": parts.get("callbacks"), "data_collator": parts.get("collator"), **built}
    return parts.get("trainer", api.Trainer)(args=args, **(keywords | parts.get("keywords", {})))


def trained(api, name, cross, folder, resume=None):
    parts = CASES[name](api)
    api.set_seed(11)
    trainer = make_trainer(api, parts, cross, folder)
    if "before" in parts:
        parts["before"](trainer)
    found = {}
    if cross == "two evaluations":
        found["first"] = timeless(trainer.evaluate())
    output = trainer.train(resume_from_checkpoint=resume)
    found["output"] = None if output is None else timeless([output.global_step, output.training_loss, output.metrics])
    if "after" in parts:
        parts["after"](trainer)
    if cross == "two evaluations":
        found["last"] = timeless([trainer.evaluate(), trainer.predict(toy.rows(5, 2)).metrics])
    found |= {"logs": timeless(trainer.state.log_history), "seen": parts.get("seen", [])}
    found["weights"] = {n: t.clone() for n, t in torch.nn.Module.state_dict(trainer.model).items()}
    if trainer.optimizer is not None:
        found["groups"] = [len(group["params"]) for group in trainer.optimizer.param_groups]
    best = trainer.state.best_model_checkpoint
    found["state"] = [
        trainer.state.global_step,
        trainer.state.epoch,
        trainer.state.best_metric,
        best and Path(best).name,
    ]
    found["read"] = [Path(folder, file).read_text() for file in parts.get("read", [])]
    return found


def run(api, name, cross, folder):
    """Train a case under an engine, and resume it if the cross says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {"whole": trained(api, name, cross, folder)}
        if cross == "resume":
            found["resumed"] = trained(api, name, cross, folder, resume=str(Path(folder, "checkpoint-4")))
            leave_out_sums(found["resumed"])
    files = (path for path in Path(folder).rglob("*") if path.is_file() and not is_ours_alone(path.name))
    return found | {"files": sorted(str(path.relative_to(folder)) for path in files)}


def leave_out_sums(found):
    """Remove the mean loss of a resumed run, which differs as docs/differences.md explains."""
    found["output"] = None if found["output"] is None else found["output"][:1]
    for log in found["logs"]:
        log.pop("train_loss", None)
