"""Enums of values that HF arguments take, and names of trackers and their metrics."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import datetime
from enum import Enum, auto, nonmember
from typing import NoReturn, TypeVar

from hf_compat.errors import ArgumentError
from hf_compat.runtime.launch import environment
from hf_compat.runtime.text import brief, is_installed


class _LowerCase(Enum):
    """An enum whose `auto()` is the member's name in lower case."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[object]) -> str:
        return name.lower()


class ExplicitEnum(str, _LowerCase):  # no StrEnum, as str() gives Class.MEMBER in HF
    """A string enum whose failed look-up lists the allowed values.

    Mirrors:
        `transformers.utils.ExplicitEnum`. Members equal their string, so they also equal the members of the
        `transformers` enum of the same values.
    """

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        allowed = ", ".join(repr(member.value) for member in cls)
        raise ArgumentError(f"{brief(value)} is not a valid {cls.__name__}.\n\nHint: choose one of {allowed}.")


# What happens by updates or epochs. `{kind}_strategy` and `{kind}_steps` are its arguments.
INTERVAL_KINDS = ("logging", "eval", "save")


class IntervalStrategy(ExplicitEnum):
    """When to log or evaluate. Mirrors `transformers.IntervalStrategy`."""

    NO = auto()
    STEPS = auto()
    EPOCH = auto()


EvaluationStrategy = IntervalStrategy  # the name in 4.x, with the same members


class SaveStrategy(ExplicitEnum):
    """When to save. Mirrors `transformers.trainer_utils.SaveStrategy`."""

    NO = auto()
    STEPS = auto()
    EPOCH = auto()
    BEST = auto()


class HubStrategy(ExplicitEnum):
    """What to push to the Hub. Mirrors `transformers.trainer_utils.HubStrategy`."""

    END = auto()
    EVERY_SAVE = auto()
    CHECKPOINT = auto()
    ALL_CHECKPOINTS = auto()


class SchedulerType(ExplicitEnum):
    """Learning-rate schedules. Mirrors `transformers.SchedulerType`."""

    LINEAR = auto()
    COSINE = auto()
    COSINE_WITH_RESTARTS = auto()
    POLYNOMIAL = auto()
    CONSTANT = auto()
    CONSTANT_WITH_WARMUP = auto()
    INVERSE_SQRT = auto()
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    COSINE_WITH_MIN_LR = auto()
    COSINE_WARMUP_WITH_MIN_LR = auto()
    WARMUP_STABLE_DECAY = auto()
    GREEDY = auto()


class ParallelMode(_LowerCase):
    """How several devices are used. Mirrors `transformers.training_args.ParallelMode`."""

    NOT_PARALLEL = auto()
    NOT_DISTRIBUTED = auto()
    DISTRIBUTED = auto()
    SAGEMAKER_MODEL_PARALLEL = auto()
    SAGEMAKER_DATA_PARALLEL = auto()
    TPU = auto()


class DebugOption(ExplicitEnum):
    """Debug modes. Mirrors `transformers.debug_utils.DebugOption`."""

    UNDERFLOW_OVERFLOW = auto()
    TPU_METRICS_DEBUG = auto()


class OptimizerNames(ExplicitEnum):
    """Every optimizer name of HF. `optim/optimizers.py` has them all. Mirrors `OptimizerNames`."""

    # Members of 4.x, which are texts here: arguments take them, and name their successors
    ADAMW_HF = nonmember("adamw_hf")
    ADAMW_APEX_FUSED = nonmember("adamw_apex_fused")

    ADAMW_TORCH = auto()
    ADAMW_TORCH_FUSED = auto()
    ADAMW_TORCH_XLA = auto()
    ADAMW_TORCH_NPU_FUSED = auto()
    ADAFACTOR = auto()
    ADAMW_ANYPRECISION = auto()
    ADAMW_TORCH_4BIT = auto()
    ADAMW_TORCH_8BIT = auto()
    ADEMAMIX = auto()
    SGD = auto()
    ADAGRAD = auto()
    ADAMW_BNB = "adamw_bnb_8bit"
    ADAMW_8BIT = auto()
    ADEMAMIX_8BIT = auto()
    LION_8BIT = auto()
    LION = "lion_32bit"
    PAGED_ADAMW = "paged_adamw_32bit"
    PAGED_ADAMW_8BIT = auto()
    PAGED_ADEMAMIX = "paged_ademamix_32bit"
    PAGED_ADEMAMIX_8BIT = auto()
    PAGED_LION = "paged_lion_32bit"
    PAGED_LION_8BIT = auto()
    RMSPROP = auto()
    RMSPROP_BNB = auto()
    RMSPROP_8BIT = "rmsprop_bnb_8bit"
    RMSPROP_32BIT = "rmsprop_bnb_32bit"
    GALORE_ADAMW = auto()
    GALORE_ADAMW_8BIT = auto()
    GALORE_ADAFACTOR = auto()
    GALORE_ADAMW_LAYERWISE = auto()
    GALORE_ADAMW_8BIT_LAYERWISE = auto()
    GALORE_ADAFACTOR_LAYERWISE = auto()
    LOMO = auto()
    ADALOMO = auto()
    GROKADAMW = auto()
    SCHEDULE_FREE_RADAM = auto()
    SCHEDULE_FREE_ADAMW = auto()
    SCHEDULE_FREE_SGD = auto()
    APOLLO_ADAMW = auto()
    APOLLO_ADAMW_LAYERWISE = auto()
    STABLE_ADAMW = auto()


# Optimizers of ours, which transformers lacks. `optim/optimizers.py` has an entry for each.
OWN_OPTIMIZERS: tuple[str, ...] = ()

# Tracker of `report_to` → the module that it needs and the package that installs it.
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
    "tensorboard": ("tensorboard", "[tensorboard]"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "[wandb]"),
}
# Variable, value and tracker of each switch that excludes a tracker from `all`.
_SWITCHES = (
    ("WANDB_DISABLED", "true", "wandb"),
    ("WANDB_MODE", "disabled", "wandb"),
    ("COMET_MODE", "disabled", "comet_ml"),
    ("DISABLE_MLFLOW_INTEGRATION", "true", "mlflow"),
)

Value = TypeVar("Value")

# These describe the whole run, not a step.
SUMMARY_KEYS = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")


def available_trackers() -> list[str]:
    """List the trackers of `report_to="all"`, which are installed and not switched off.

    Mirrors:
        `transformers.integrations.get_available_reporting_integrations`.

    Differs:
        `WANDB_DISABLED=true`, of 4.x, still leaves wandb out.
    """
    off = {name for key, value, name in _SWITCHES if (environment.get(key) or "").lower() in (value, "1")}
    off |= {"flyte", "kubeflow"}  # they do not track runs, or belong to a platform
    return [name for name, (module, _) in PACKAGES.items() if name not in off and is_installed(module)]


def with_platforms_tracker(trackers: list[str]) -> list[str]:
    """Add the tracker of a job on Kubeflow, which sets KUBEFLOW_TRAINER_SERVER_URL.

    Mirrors:
        `transformers.TrainingArguments`. `DISABLE_KUBEFLOW_INTEGRATION=TRUE` leaves it out.
    """
    is_there = is_installed(PACKAGES["kubeflow"][0])
    is_off = environment.get("DISABLE_KUBEFLOW_INTEGRATION", "").upper() == "TRUE"
    return trackers if is_off or not is_there or "kubeflow" in trackers else [*trackers, "kubeflow"]


def rewrite_logs(logs: Mapping[str, Value]) -> dict[str, Value]:
    """Give logs the names that trackers show: `eval_loss` → `eval/loss`, `loss` → `train/loss`.

    Mirrors:
        `transformers.integrations.rewrite_logs`.
    """
    renamed = {}
    for name, value in logs.items():
        part, _, rest = name.partition("_")
        renamed[f"{part}/{rest}" if part in ("eval", "test") and rest else f"train/{name}"] = value
    return renamed


def numbers_of(logs: Mapping[str, object]) -> dict[str, float]:
    """The numbers among logs."""
    return {name: value for name, value in logs.items() if isinstance(value, (int, float))}


def default_logdir() -> str:
    """Name a folder `runs/<time>_<host>`, as torch's `SummaryWriter` does."""
    return os.path.join("runs", f"{datetime.now().strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}")
