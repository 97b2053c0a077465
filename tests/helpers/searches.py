"""Searches that tests share: data, spaces, a Trainer of either package, and what a trial leaves."""

from __future__ import annotations

from pathlib import Path

import optuna
import torch

from helpers import toy
from hf_compat.checkpoint.reading import is_ours_alone

TIMED = ("_runtime", "_per_second")


def samples(count: int = 40) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, generator=generator)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return [{"x": one, "labels": label} for one, label in zip(x, labels, strict=True)]


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make_model(trial=None):
    return toy.Classifier(dropout=0.1 if trial is None else trial.suggest_float("dropout", 0.0, 0.5))


def space(trial) -> dict:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8]),
        "seed": trial.suggest_int("seed", 1, 40),
        "gradient_accumulation_steps": trial.suggest_int("gradient_accumulation_steps", 1, 2),
    }


def rate(trial) -> dict:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}


def loss(metrics) -> float:
    return metrics["eval_loss"]


def make_trainer(api, folder, *, trainer=None, model_init=make_model, callbacks=(), options=None, **arguments):
    chosen = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"} | arguments
    args = api.TrainingArguments(
        str(folder), report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1, **chosen
    )
    return (trainer or api.Trainer)(
        args=args,
        model_init=model_init,
        train_dataset=samples(),
        eval_dataset=samples(16),
        compute_metrics=accuracy,
        callbacks=list(callbacks),
        **(options or {}),
    )


def search(trainer, **options):
    defaults = {"hp_space": space, "compute_objective": loss, "n_trials": 3}
    chosen = defaults | {"sampler": optuna.samplers.TPESampler(seed=3)} | options
    return trainer.hyperparameter_search(backend="optuna", **chosen)


def recorder(api, seen: list):
    """Return a callback that keeps what a trial's state holds at its end."""

    class Recorder(api.TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            logs = [{k: v for k, v in log.items() if not k.endswith(TIMED)} for log in state.log_history]
            for log in logs:
                log.pop("nonfinite_steps", None)
            best = state.best_model_checkpoint and Path(state.best_model_checkpoint).name
            seen.append((state.trial_name, state.trial_params, state.global_step, logs, best, state.total_flos))

    return Recorder()


def files(folder) -> list[str]:
    found = (path for path in Path(folder).rglob("*") if path.is_file() and not is_ours_alone(path.name))
    return sorted(str(path.relative_to(folder)) for path in found)


def name_of(trial) -> str:
    return f"t{trial.number}"


SAVES = {"save_strategy": "steps", "save_steps": 2}
