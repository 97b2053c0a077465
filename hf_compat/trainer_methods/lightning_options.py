"""The options of `lightning.Trainer` that are set beside the training arguments, and their checks."""

from __future__ import annotations

from collections import UserDict
from datetime import timedelta
from typing import TypedDict

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.profilers import Profiler

from hf_compat.errors import UnknownArgument, UnsupportedArgument
from hf_compat.hf.value_types import passing, read_options
from hf_compat.plan.argument_support import ELSEWHERE, EQUIVALENTS
from hf_compat.runtime.text import did_you_mean, shown


class LightningOptions(TypedDict, total=False):
    """Options of `lightning.Trainer` for `Trainer(lightning_options={…})`. They do not change any numbers.

    Attributes:
        profiler: `"simple"`, `"advanced"`, `"pytorch"`, `"xla"` or a Profiler. It measures fits and evaluations.
        detect_anomaly: Raise an error that names an operation whose gradient is NaN.
        benchmark: Let cuDNN find the fastest convolutions.
        enable_model_summary: Print the layers and their sizes at the start of a fit.
        max_time: Time limit of a `train()` (`"DD:HH:MM:SS"`, a timedelta, or a dict of its keywords). Training stops
            after the current update. Checkpoints store the used time.
        plugins: A CheckpointIO, or a list of one, which writes the files of Lightning's ModelCheckpoint.
    """

    profiler: str | Profiler | None
    detect_anomaly: bool
    benchmark: bool | None
    enable_model_summary: bool
    max_time: str | timedelta | dict[str, float] | None
    plugins: CheckpointIO | list[CheckpointIO] | None


class CheckedOptions(UserDict[str, object]):
    """Options that are checked when set, singly or together.

    Raises:
        UnknownArgument: `lightning.Trainer` has no such option.
        UnsupportedArgument: Another setting decides this. The message names it.
        ArgumentError: The option does not accept the value.
    """

    def __setitem__(self, name: str, value: object) -> None:
        if name not in _TAKES and name not in ELSEWHERE and name not in EQUIVALENTS:
            hint = did_you_mean(str(name), _TAKES, f"there are {', '.join(_TAKES)}.")
            raise UnknownArgument(
                f"`lightning_options` has an unknown name: `{shown(str(name), value)}`.\n\nHint: {hint}"
            )
        if name not in _TAKES:
            way = ELSEWHERE.get(name) or f"`TrainingArguments({_ARGUMENTS[name]})`"
            raise UnsupportedArgument(
                f"`{shown(name, value)}` cannot be set in `lightning_options`.\n\nHint: its counterpart here is {way}."
            )
        self.data |= read_options("lightning_options", _TAKES, {name: value})

    def __ior__(self, other: object) -> CheckedOptions:  # type: ignore[override,misc]  # UserDict's takes anything
        self.update(other)  # type: ignore[call-overload]
        return self


# The training arguments to use instead of an option.
_ARGUMENTS = {
    "max_epochs": "num_train_epochs=…",
    "max_steps": "max_steps=…",
    "accumulate_grad_batches": "gradient_accumulation_steps=…",
    "gradient_clip_val": "max_grad_norm=…",
    "log_every_n_steps": "logging_steps=…",
    "default_root_dir": "output_dir=…",
    "deterministic": "full_determinism=True",
    "precision": "bf16=True)` or `TrainingArguments(fp16=True",
    "val_check_interval": "eval_strategy='steps', eval_steps=…",
    "check_val_every_n_epoch": "eval_strategy='epoch'",
    "accelerator": "use_cpu=True",
    "enable_progress_bar": "disable_tqdm=True",
}


def _is_duration(value: object) -> bool:
    if value is None:
        return True
    try:
        return isinstance(value, (str, timedelta, dict)) and (Timer(value).time_remaining() or 0) > 0
    except (MisconfigurationException, TypeError):  # a malformed text, or a keyword that timedelta lacks
        return False


def _are_plugins(value: object) -> bool:
    plugins = value if isinstance(value, list) else [value]
    return value is None or (len(plugins) == 1 and isinstance(plugins[0], CheckpointIO))


_PROFILERS = ("simple", "advanced", "pytorch", "xla")
_SWITCH = passing("True or False", lambda value: value is None or isinstance(value, bool))
_TAKES = {
    "profiler": passing(
        f"a Profiler, or one of {', '.join(_PROFILERS)}",
        lambda value: value is None or isinstance(value, Profiler) or value in _PROFILERS,
    ),
    "detect_anomaly": _SWITCH,
    "benchmark": _SWITCH,
    "enable_model_summary": _SWITCH,
    "max_time": passing("a positive duration: 'DD:HH:MM:SS', a timedelta, or {'minutes': 5}", _is_duration),
    "plugins": passing("a CheckpointIO, as the arguments decide precision and processes", _are_plugins),
}
