"""Names of trackers and of what they show, and which of their runs a resumed training continues. HF words only."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from datetime import datetime
from typing import TypedDict, TypeVar, Unpack, cast

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

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

TRACKERS_NAME = "trackers.json"

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


class RunRecord(TypedDict, total=False):
    """What is remembered of a tracker's run.

    Attributes:
        logdir: Folder of a TensorBoard run.
        id: Identity of a wandb run.
        step: Update of the last log.
        logs: Logs of that update.
    """

    logdir: str
    id: str
    step: int
    logs: int


class RunMemory:
    """The run of a tracker that an output folder belongs to, so that a resumed training continues it.

    Args:
        folder: The output folder.
        tracker: Name of the tracker.
    """

    def __init__(self, folder: str, tracker: str) -> None:
        self.path = os.path.join(folder, TRACKERS_NAME)
        self.tracker = tracker

    def read(self) -> RunRecord:
        """Return the record of the run: empty where there was none, or, with a warning, where it cannot be read."""
        return self._records().get(self.tracker, {})

    def _records(self) -> dict[str, RunRecord]:
        try:
            with open(self.path, encoding="utf-8") as file:
                known = json.load(file)
            return {name: cast(RunRecord, dict(values)) for name, values in known.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            logger.warning("%s cannot be read (%s): trackers begin new runs.", self.path, error)
            return {}

    def write(self, **values: Unpack[RunRecord]) -> None:
        """Add to the record. A kill in the middle leaves the old one."""
        known = self._records()
        known[self.tracker] = {**known.get(self.tracker, {}), **values}
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        partial = f"{self.path}.tmp"
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=2)
        os.replace(partial, self.path)
