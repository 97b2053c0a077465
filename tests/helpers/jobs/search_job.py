"""A search with several processes: `search_job.py FOLDER transformers|hf_compat WHAT`. Ranks write what they saw."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import optuna
import torch

from helpers import toy

folder, api_name, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
api = importlib.import_module(api_name)
seen: list = []


class Recorder(api.TrainerCallback):
    def on_train_end(self, args, state, control, **kwargs):
        losses = [log[key] for log in state.log_history for key in ("loss", "eval_loss") if key in log]
        seen.append([state.trial_name, state.trial_params, state.global_step, losses])


def model_init(trial):
    if what == "fails" and trial is not None and trial.number == 1:
        raise FileNotFoundError("no weights")
    return toy.Classifier(dropout=0.1 if trial is None else trial.params.get("dropout", 0.1))


def space(trial):
    if what == "fails_in_space":
        raise LookupError("no space")
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8]),
        "dropout": trial.suggest_float("dropout", 0.0, 0.5),
    }


args = api.TrainingArguments(
    str(folder / "out"),
    max_steps=4,
    eval_strategy="steps",
    eval_steps=2,
    logging_steps=1,
    save_strategy="steps",
    save_steps=4,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    ddp_backend="gloo",
)
data = toy.rows(32)
trainer = api.Trainer(
    args=args, model_init=model_init, train_dataset=data, eval_dataset=data[:12], callbacks=[Recorder()]
)
options: dict = {"n_trials": 3}
if what == "prunes":
    options = {"n_trials": 4, "pruner": optuna.pruners.ThresholdPruner(upper=0.0, n_warmup_steps=2)}
    pruned = options["pruner"].prune
    options["pruner"].prune = lambda study, trial: trial.number % 2 == 1 and pruned(study, trial)
if what == "stops":  # long before the trials that were asked for
    options = {"n_trials": 9, "callbacks": [lambda study, trial: trial.number == 1 and study.stop()]}
error = None
try:
    best = trainer.hyperparameter_search(
        space,
        lambda metrics: metrics["eval_loss"],
        hp_name=lambda trial: f"t{trial.number}",
        sampler=optuna.samplers.TPESampler(seed=4),
        **options,
    )
except Exception as caught:
    if "fails" not in what:
        raise
    best, error = None, f"{type(caught).__name__}: {caught}"
rank = args.process_index
after = [args.learning_rate, args.per_device_train_batch_size]
found = {"best": best, "seen": seen, "after": after, "error": error, "objective": getattr(trainer, "objective", None)}
found["folders"] = sorted(str(path.relative_to(folder)) for path in (folder / "out").glob("*/*"))
(folder / f"rank{rank}.json").write_text(json.dumps(found))
if torch.distributed.is_initialized() and error is None:
    torch.distributed.barrier()
