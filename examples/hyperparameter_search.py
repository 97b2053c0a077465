"""Hyperparameter search with optuna: one Trainer, trained again and again.

    python hyperparameter_search.py --output_dir FOLDER

Shows: a space of arguments and of the model's width, trials that are pruned after a bad evaluation, and a last training
with what the best trial found. `pip install -e '.[search]'` brings optuna.
"""

import argparse
from functools import partial

import optuna
import torch
from sklearn.datasets import load_wine

from hf_compat import Trainer, TrainingArguments


class Classifier(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(13, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))

    def forward(self, features, labels):
        logits = self.layers(features)
        return torch.nn.functional.cross_entropy(logits, labels), logits


def wines() -> list[dict]:
    data = load_wine()
    features = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0), dtype=torch.float32)
    return [{"features": row, "labels": int(label)} for row, label in zip(features, data.target, strict=True)]


def model_of(trial: optuna.Trial | None) -> Classifier:
    """Make a trial's model; when the Trainer is made there is no trial yet."""
    return Classifier() if trial is None else Classifier(trial.suggest_int("width", 4, 64, log=True))


def space(trial: optuna.Trial) -> dict:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [8, 16, 32]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/hyperparameter_search")
    values = {
        "output_dir": parser.parse_args().output_dir,
        "num_train_epochs": 3,
        "eval_strategy": "epoch",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    data = wines()
    make = partial(Trainer, train_dataset=data[::2], eval_dataset=data[1::2])
    best = make(args=TrainingArguments(**values), model_init=model_of).hyperparameter_search(
        space,
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=8,
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    found = dict(best.hyperparameters)
    width = found.pop("width")  # the model's; the others are arguments
    trainer = make(args=TrainingArguments(**values, **found), model_init=lambda: Classifier(width))
    trainer.train()
    print(f"best trial: {best.run_id} with {best.hyperparameters}")
    print(f"its loss: {best.objective:.4f}, trained again: {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
