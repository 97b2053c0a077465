"""Exceptions and warning categories of hf_compat.

Each exception also inherits the type that `transformers` raises at the same place: an `except` written for it matches.
"""

from __future__ import annotations

import functools
import sys
import warnings

_LONGEST_LINE = 1000


def cut_lines(message: str) -> str:
    """Cut the middle out of long lines. Another package's error in a message may hold a user's value as a whole.

    `brief` in `runtime/text.py` cuts the values that a message itself shows.
    """
    if len(message) <= _LONGEST_LINE:
        return message
    lines = message.split("\n")
    return "\n".join(
        line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE * 2 // 3]} … {line[-_LONGEST_LINE // 4 :]}"
        for line in lines
    )


class HfCompatError(Exception):
    """Root of every error that hf_compat raises on purpose."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*(cut_lines(one) if isinstance(one, str) else one for one in args), **kwargs)


class ArgumentError(HfCompatError, ValueError):
    """An argument has a value, or a combination of values, that cannot be trained with."""


class UnmetRequirement(ArgumentError, AssertionError):
    """A callback's requirement on the arguments is not met."""


class UnknownArgument(HfCompatError, TypeError):
    """A keyword that no release of `TrainingArguments` or `Trainer` knows."""


class AbsentName(HfCompatError, AttributeError):
    """Upstream's class has this attribute and ours has not. The message says what to use instead."""


class UnsupportedArgument(HfCompatError, NotImplementedError, ValueError):
    """An argument was set away from its default and its machinery is not here (yet)."""


class DataError(HfCompatError, ValueError):
    """A data set, its columns or its batches cannot be trained or evaluated on."""


class NonFiniteNumber(HfCompatError, ValueError):
    """A number that the user has had watched is NaN or infinite."""


class LossError(HfCompatError, ValueError):
    """The model gave no usable loss."""


class OverrideError(HfCompatError, TypeError):
    """A method that a subclass overrides returned something that the trainer cannot work with."""


class CheckpointError(HfCompatError, ValueError):
    """A checkpoint folder is missing, incomplete or does not fit."""


class MissingCheckpoint(CheckpointError, FileNotFoundError):
    """There is nothing at the path of a checkpoint, or of one of its files."""


class UnreadableCheckpoint(CheckpointError, RuntimeError):
    """A file that was to be a checkpoint is none, or is damaged."""


class UnreadObjects(CheckpointError):
    """A checkpoint holds objects, and reading them runs the code of their classes."""


class CheckpointMismatch(CheckpointError, RuntimeError):
    """A checkpoint is whole, and this run cannot go on from it: another model, another number of processes."""


class CheckpointWriteError(HfCompatError, OSError):
    """A checkpoint could not be written; the message names path and cause. Earlier checkpoints are as they were."""


class OutputFolderError(HfCompatError, OSError):
    """The output folder cannot be written to, or another run saves into it."""


class StoreError(HfCompatError, OSError):
    """An object store has refused something or cannot be reached, or a run's files are not in it at the end."""


class HubError(HfCompatError, OSError):
    """The Hub has refused something, or cannot be reached. It is also of huggingface_hub's class, where that raised."""


class CallbackError(HfCompatError, TypeError):
    """A callback returned something, or is something, that the trainer cannot work with."""


class MissingMetric(HfCompatError, KeyError):
    """The metric named by `metric_for_best_model` is not among the evaluation metrics."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MetricError(HfCompatError, TypeError, ValueError):
    """A metric is something that cannot be logged, saved or compared; the message names it."""


class MissingPackage(HfCompatError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""


class MissingOptimizer(MissingPackage, ValueError):
    """An optimizer's package is missing or too old; the message has the line that installs it."""


class SearchError(HfCompatError, RuntimeError, ValueError):
    """A hyperparameter search cannot run, or has come to nothing."""


class MissingSearchBackend(SearchError, MissingPackage):
    """The package that a hyperparameter search runs on is not installed; the message says how to get it."""


class ScriptError(HfCompatError, RuntimeError):
    """A user's script failed by itself, left early, or never trained; `status` is the exit status that it had."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class MigrationError(HfCompatError, ValueError):
    """A source cannot be migrated: it is not what its name says, or cannot be read or written."""


class ProcessError(HfCompatError, RuntimeError):
    """Another process of the run has failed."""


class HfCompatWarning(UserWarning):
    """Something was translated with a difference worth knowing."""


class InertArgumentWarning(HfCompatWarning):
    """An argument was set that has no effect in this run; the message says why."""


# Packages whose frames are between a warning and the user's line.
_BETWEEN = frozenset((
    *("argparse", "contextlib", "dataclasses", "functools", "jsonargparse"),
    *("hf_compat", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"),
))  # fmt: skip


def warn_user(message: str, category: type[Warning] = HfCompatWarning) -> None:
    """Warn at the innermost line of the user's. Python 3.12 has `skip_file_prefixes` for it."""
    message = cut_lines(message)
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN
        or (frame.f_code.co_filename, frame.f_code.co_name) == ("<string>", "__init__")  # a dataclass's
    ):
        frame = frame.f_back
    place = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"))
    warnings.warn_explicit(message, category, *place, registry=frame.f_globals.setdefault("__warningregistry__", {}))


def warn_inert(setting: str, why: str) -> None:
    """Warn about a setting, `name=value`, that has no effect."""
    warn_user(f"`{setting}` has no effect: {why}.", InertArgumentWarning)


@functools.lru_cache(maxsize=256)
def warn_once(message: str, category: type[Warning] = HfCompatWarning) -> None:
    """Warn about something once, not at every step."""
    warn_user(message, category)
