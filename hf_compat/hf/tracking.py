"""Names of trackers and of what they show."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import datetime
from typing import TypeVar

from hf_compat.runtime.launch import variable
from hf_compat.runtime.text import is_installed

# What `report_to` may name: the module that it needs, and what brings it.
PACKAGES = {
    "azure_ml": ("azureml.core", "azureml-core"),
    "clearml": ("clearml", "clearml"),
    "codecarbon": ("codecarbon", "codecarbon"),
    "comet_ml": ("comet_ml", "comet_ml"),
    "dagshub": ("dagshub", "dagshub mlflow"),
    "dvclive": ("dvclive", "dvclive"),
    "flyte": ("flytekit", "flytekit"),
    "kubeflow": ("transformers", "transformers"),
    "mlflow": ("mlflow", "mlflow"),
    "neptune": ("neptune", "neptune"),
    "swanlab": ("swanlab", "swanlab"),
    "tensorboard": ("tensorboard", "'hf-compat[tensorboard]'"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "'hf-compat[wandb]'"),
}
# `all` leaves these out: they do not track runs, or belong to a platform.
_ONLY_BY_NAME = ("flyte", "kubeflow")
# Switches by which users leave a tracker out of `all`: variable, value, tracker.
_SWITCHES = (
    ("WANDB_DISABLED", "true", "wandb"),
    ("WANDB_MODE", "disabled", "wandb"),
    ("COMET_MODE", "disabled", "comet_ml"),
    ("DISABLE_MLFLOW_INTEGRATION", "true", "mlflow"),
)

Value = TypeVar("Value")

# What describes the whole run, not a step.
SUMMARY_KEYS = (
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "train_loss",
    "total_flos",
)


def available_trackers() -> list[str]:
    """Return what `report_to="all"` means here: every tracker that is installed and not switched off.

    Mirrors:
        `transformers.integrations.get_available_reporting_integrations`, 5.23.

    Differs:
        `WANDB_DISABLED=true`, of 4.x, still leaves wandb out.
    """
    off = {name for key, value, name in _SWITCHES if (variable(key) or "").lower() in (value, "1")}
    found = [n for n, (module, _) in PACKAGES.items() if n not in _ONLY_BY_NAME and is_installed(module)]
    return [name for name in found if name not in off]


def with_platforms_tracker(trackers: list[str]) -> list[str]:
    """Return trackers with the one that a job on Kubeflow, which sets KUBEFLOW_TRAINER_SERVER_URL, reports to.

    Mirrors:
        `transformers.TrainingArguments`, 5.23: `DISABLE_KUBEFLOW_INTEGRATION=TRUE` leaves it out.
    """
    is_there = is_installed(PACKAGES["kubeflow"][0])
    is_off = variable("DISABLE_KUBEFLOW_INTEGRATION", "").upper() == "TRUE"
    return trackers if is_off or not is_there or "kubeflow" in trackers else [*trackers, "kubeflow"]


def rewrite_logs(logs: Mapping[str, Value]) -> dict[str, Value]:
    """Give logs the names that trackers show: `eval_loss` → `eval/loss`, `loss` → `train/loss`.

    Mirrors:
        `transformers.integrations.rewrite_logs`, 5.23.
    """
    renamed = {}
    for name, value in logs.items():
        part, _, rest = name.partition("_")
        renamed[f"{part}/{rest}" if part in ("eval", "test") and rest else f"train/{name}"] = value
    return renamed


def numbers_of(logs: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers among logs."""
    return {name: value for name, value in logs.items() if isinstance(value, (int, float))}


def default_logdir() -> str:
    """Return `runs/<time>_<host>`, as torch's `SummaryWriter` names its folders."""
    return os.path.join("runs", f"{datetime.now().strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}")
