"""What trackers are told, under which names, and where a run goes on. HF words only."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from datetime import datetime
from typing import Any

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
# Not taken by `all`: they are not trackers of runs, or belong to a platform.
_ONLY_BY_NAME = ("flyte", "kubeflow")
# Switches by which users leave a tracker out of `all`: variable, value, tracker.
_SWITCHES = (
    ("WANDB_DISABLED", "true", "wandb"),
    ("WANDB_MODE", "disabled", "wandb"),
    ("COMET_MODE", "disabled", "comet_ml"),
    ("DISABLE_MLFLOW_INTEGRATION", "true", "mlflow"),
)

logger = logging.getLogger(__name__)

TRACKERS_NAME = "trackers.json"

# What belongs to the whole run, not to a step.
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


def rewrite_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Give logs the names that trackers show: `eval_loss` → `eval/loss`, `loss` → `train/loss`.

    Mirrors:
        `transformers.integrations.rewrite_logs`, 5.23.
    """
    renamed = {}
    for name, value in logs.items():
        part, _, rest = name.partition("_")
        renamed[f"{part}/{rest}" if part in ("eval", "test") and rest else f"train/{name}"] = value
    return renamed


def numbers_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among logs."""
    return {name: value for name, value in logs.items() if isinstance(value, (int, float))}


def default_logdir() -> str:
    """Return `runs/<time>_<host>`, as torch's `SummaryWriter` names its folders."""
    return os.path.join("runs", f"{datetime.now().strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}")


class RunMemory:
    """Which run of a tracker belongs to an output folder, so that a resumed training goes on in it.

    Args:
        folder: The output folder.
        tracker: Name of the tracker.
    """

    def __init__(self, folder: str, tracker: str) -> None:
        self.path = os.path.join(folder, TRACKERS_NAME)
        self.tracker = tracker

    def read(self) -> dict[str, Any]:
        """Return what is known: nothing where there was no run; a file that cannot be read is warned about."""
        return dict(self._known().get(self.tracker, {}))

    def _known(self) -> dict[str, Any]:
        try:
            with open(self.path, encoding="utf-8") as file:
                known = json.load(file)
            return {name: dict(values) for name, values in known.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            logger.warning("%s cannot be read (%s): trackers begin new runs.", self.path, error)
            return {}

    def write(self, **values: Any) -> None:
        """Add to what is known; whole or not at all."""
        known = self._known()
        known[self.tracker] = {**known.get(self.tracker, {}), **values}
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        partial = f"{self.path}.tmp"
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=2)
        os.replace(partial, self.path)
