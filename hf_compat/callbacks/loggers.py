"""Lightning loggers as HF callbacks, and a Lightning logger that writes to HF's history."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping

from lightning.pytorch.loggers import Logger

from hf_compat.callbacks.trackers import MLflowRuns, TensorBoardCallback, WandbCallback
from hf_compat.errors import ArgumentError, CallbackError, MissingPackage
from hf_compat.hf.callbacks import Args, Callback, Kwarg, TrainerCallback
from hf_compat.hf.enums import PACKAGES, numbers_of, rewrite_logs
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.interop.transformers_models import known_to_transformers, reporting_callback
from hf_compat.runtime.text import brief, is_installed, missing_package, pip_install

_OTHER = "pytorch_lightning"


def refuse_other_distribution(candidate: object) -> None:
    """Refuse an object of `pytorch_lightning`, which holds the same code under another name.

    Neither distribution recognises the classes of the other one.

    Raises:
        CallbackError: The object's class is of the other distribution, or inherits from it.
    """
    kind = type(candidate)
    shipped = next((base for base in kind.__mro__ if base.__module__.partition(".")[0] == _OTHER), None)
    if shipped is not None:
        home = re.sub(rf"^{_OTHER}(\.(callbacks|loggers))?.*", r"lightning.pytorch\1", shipped.__module__)
        is_own = kind is not shipped
        raise CallbackError(
            f"{kind.__name__} {f'inherits from {shipped.__name__}' if is_own else 'is a class'} of `{_OTHER}`, and the "
            f"Trainer runs on `lightning`, which does not know it.\n\n"
            f"Hint: `from {home} import {shipped.__name__}`. Both have the same classes."
        )


# Trackers implemented here with HF's keys. The others use transformers' integrations.
_OWN = {"tensorboard": TensorBoardCallback, "wandb": WandbCallback}
_MLFLOW = ("mlflow", "dagshub")


def reporting_callbacks(args: Args) -> list[Callback]:
    """Make the callbacks of `report_to`.

    Raises:
        MissingPackage: A tracker's package is not installed.
        ArgumentError: An entry is not a tracker.
    """
    callbacks: list[Callback] = []
    for wanted in args.report_to or []:
        refuse_other_distribution(wanted)
        if isinstance(wanted, Logger):
            callbacks.append(LoggerCallback(wanted))
            continue
        if wanted not in PACKAGES:
            raise ArgumentError(f"`report_to` has {brief(wanted)}.\n\nHint: name a tracker or pass a Lightning logger.")
        module, install = PACKAGES[wanted]
        if not is_installed(module):
            raise missing_package(module, install, f"`report_to={brief(wanted)}`")
        kind = known_to_transformers(_OWN[wanted]) if wanted in _OWN else reporting_callback(wanted)
        if kind is None:
            raise MissingPackage(
                f"`report_to={brief(wanted)}` needs the integration of transformers, which is not installed.\n\n"
                f"Hint: {pip_install('[transformers]')}, or pass a Lightning logger."
            )
        if wanted in _MLFLOW:
            kind = type(kind.__name__, (MLflowRuns, kind), {"__module__": MLflowRuns.__module__})
        callbacks.append(kind())
    return callbacks


class LoggerCallback(TrainerCallback):
    """Log to a Lightning logger, under HF's names such as `train/loss`, `eval/loss` and `train/global_step`."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if state.is_world_process_zero:
            to_dict = getattr(getattr(kwargs.get("model"), "config", None), "to_dict", None)
            described = to_dict() if callable(to_dict) else {}
            self.logger.log_hyperparams({**described, **args.to_sanitized_dict()})

    def on_log(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if state.is_world_process_zero:
            logs = {**rewrite_logs(numbers_of(kwargs["logs"])), "train/global_step": state.global_step}
            self.logger.log_metrics(logs, step=state.global_step)
            self.logger.save()

    def on_predict(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:  # type: ignore[override]  # metrics are among kwargs
        if state.is_world_process_zero:
            self.logger.log_metrics(rewrite_logs(numbers_of(kwargs["metrics"])), step=state.global_step)

    def on_train_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if state.is_world_process_zero:
            self.logger.save()
            self.logger.finalize("success")


def mark_as_failed(callbacks: Iterable[Callback], error: BaseException) -> None:
    """Mark the trackers' runs as failed, as Lightning does. MLflow shows this status, or `KILLED` after a signal."""
    status = "KILLED" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "FAILED"
    for callback in callbacks:
        try:
            if isinstance(callback, LoggerCallback):
                callback.logger.finalize("failed")
            elif isinstance(callback, MLflowRuns):
                callback.finalize(status)
        except Exception as other:  # from any tracker's client. The training's own error is raised instead
            tracker = callback.logger if isinstance(callback, LoggerCallback) else callback
            error.add_note(f"{type(tracker).__name__} could not end its run: {type(other).__name__}: {other}")


class HistoryLogger(Logger):
    """A Lightning logger that passes logged values (learning rates, device statistics) and their step to HF's logs."""

    name = version = ""  # ModelCheckpoint's default folder then is `checkpoints` in the output folder

    def __init__(
        self, log: Callable[[Mapping[str, float], int | None], None], experiment: Callable[[], object] | None = None
    ) -> None:
        self._log = log
        self._experiment = experiment

    @property
    def experiment(self) -> object:
        """The writer of the run's first tracker, or None. On other ranks a dummy that ignores all calls."""
        return None if self._experiment is None else self._experiment()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Pass numbers on to HF's logs."""
        self._log(metrics, step)

    def log_hyperparams(self, params: dict[str, object] | Namespace, *args: object, **kwargs: object) -> None:
        """Do nothing, as HF's own files hold the arguments."""
