"""Lightning loggers as HF callbacks, and a Lightning logger that writes to HF's history.

`adopt` converts objects of `pytorch_lightning`, the other distribution of `lightning.pytorch`. Both packages hold the
same code under two names, and neither recognises the other's classes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import lightning
import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Checkpoint,
    EMAWeightAveraging,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment  # type: ignore[attr-defined]  # not listed

from hf_compat.callbacks.mlflow_runs import MLflowRuns, continuing
from hf_compat.callbacks.trackers import TensorBoardCallback, WandbCallback
from hf_compat.engine.internals import attach_data_module, given_data
from hf_compat.errors import ArgumentError, CallbackError, MissingPackage
from hf_compat.hf.callbacks import Args, Callback, Kwarg, TrainerCallback
from hf_compat.hf.enums import PACKAGES, numbers_of, rewrite_logs
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.interop.transformers_models import known_to_transformers, loaded, reporting_callback
from hf_compat.runtime.text import is_installed, missing_package

Candidate = TypeVar("Candidate")

_OTHER, _OURS = "pytorch_lightning", "lightning.pytorch"
_ADOPTED = (pl.Callback, Logger, pl.LightningDataModule)
# Their inherited code needs modules or plugins of its own distribution.
_TIED_TO_THEIR_DISTRIBUTION = (WeightAveraging, EMAWeightAveraging, ThroughputMonitor)
# Callbacks that Lightning adds by default if it recognises none.
_ADDED_BY_DEFAULT = (Checkpoint, ProgressBar, ModelSummary)


def is_of_other_distribution(candidate: object) -> bool:
    """Whether an object's class is one of `pytorch_lightning` or inherits from one."""
    return loaded(_OTHER) is not None and _shipped_class(type(candidate)) is not None


def adopt(candidate: Candidate) -> Candidate:
    """Make an object of `pytorch_lightning` an instance of `lightning.pytorch`, too. Others stay unchanged.

    Callbacks, loggers and data modules get a class that inherits from their own and from its namesake here. They keep
    their identity, and both distributions recognise them.

    Raises:
        CallbackError: The distributions have different versions, so that hooks may differ. Or the object inherits code
            that works in its own distribution only.
    """
    kind: type = type(candidate)
    if (
        isinstance(candidate, _ADOPTED)
        or not is_of_other_distribution(candidate)
        or not issubclass(_namesake_of(kind), _ADOPTED)
    ):
        return candidate
    theirs, ours = getattr(loaded(_OTHER), "__version__", "?"), lightning.__version__
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        raise CallbackError(
            f"{kind.__name__} is from {_OTHER} {theirs}, but the Trainer uses lightning {ours}.\n\n"
            f"Hint: import it from `{_OURS}`, which has the same classes."
        )
    twin = _namesake_of(kind)
    if twin in _TIED_TO_THEIR_DISTRIBUTION and _shipped_class(kind) is not kind:
        raise CallbackError(
            f"{kind.__name__} inherits from `{_OTHER}`'s {twin.__name__}, whose code needs modules and plugins of "
            f"{_OTHER}.\n\nHint: inherit from `{_OURS}.callbacks.{twin.__name__}` instead."
        )
    # In place, as the script holds this object and reads its results later. With a wrapper or a copy, `callback` would
    # no longer be `trainer.checkpoint_callback` (`tests/callbacks/test_other_distribution.py`).
    candidate.__class__ = _joined(kind)
    return candidate


def _shipped_class(kind: type) -> type | None:
    """The nearest class in the inheritance chain that `pytorch_lightning` ships."""
    return next((base for base in kind.__mro__ if f"{base.__module__}.".startswith(f"{_OTHER}.")), None)


def _namesake_of(kind: type) -> type:
    """The `lightning.pytorch` namesake of a class's nearest shipped base."""
    shipped = _shipped_class(kind)
    assert shipped is not None  # callers have checked it
    home = importlib.import_module(shipped.__module__.replace(_OTHER, _OURS, 1))
    twin: type = getattr(home, shipped.__name__)
    return twin


@functools.cache
def _joined(kind: type) -> type:
    """Make a class of both. Methods without an override come from `lightning.pytorch`, which compares them."""
    twin = _namesake_of(kind)
    root = next(base for base in _ADOPTED if issubclass(twin, base))
    empty = getattr(importlib.import_module(root.__module__.replace(_OURS, _OTHER, 1)), root.__name__)
    methods = {name: method for name, method in inspect.getmembers(root, inspect.isfunction) if name[0] != "_"}
    inherited = {name: method for name, method in methods.items() if getattr(kind, name) is getattr(empty, name)}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    bases = (twin, kind) if kind is _shipped_class(kind) else (kind, twin)  # a shipped class runs its namesake's code
    return type(kind)(kind.__name__, bases, {**names, **(inherited if bases[0] is kind else {})})


def adopt_callbacks_of(trainer: pl.Trainer) -> None:
    """Convert the callbacks of a plain `lightning.Trainer`, and remove the defaults that they replace."""
    given: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    foreign = [callback for callback in given if is_of_other_distribution(callback)]
    new = [adopt(callback) for callback in foreign if not isinstance(callback, pl.Callback)]
    kinds = tuple(kind for kind in _ADDED_BY_DEFAULT if any(isinstance(callback, kind) for callback in new))
    kept = [c for c in given if c in foreign or not isinstance(c, kinds)]
    last = [callback for callback in kept if isinstance(callback, Checkpoint)]
    trainer.callbacks = [*(c for c in kept if c not in last), *last]  # type: ignore[attr-defined]


def adopt_data_of(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Attach a foreign data module, which a plain `lightning.Trainer` has mistaken for a loader."""
    given = given_data(trainer)
    data = adopt(given) if is_of_other_distribution(given) else None
    if isinstance(data, pl.LightningDataModule):
        attach_data_module(trainer, module, data)


# Trackers implemented here with HF's keys. The others use transformers' integrations, or Lightning's loggers.
_OWN = {"tensorboard": TensorBoardCallback, "wandb": WandbCallback}
_MLFLOW = ("mlflow", "dagshub")
_LIGHTNING = {
    "mlflow": ("MLFlowLogger", "run_name"),
    "comet_ml": ("CometLogger", "name"),
    "neptune": ("NeptuneLogger", "name"),
}


def reporting_callbacks(args: Args) -> list[Callback]:
    """Make the callbacks of `report_to`.

    Raises:
        MissingPackage: A tracker's package is not installed.
        ArgumentError: An entry is not a tracker.
    """
    return [_reporting_callback(adopt(wanted), args.run_name) for wanted in args.report_to or []]


def _reporting_callback(wanted: str | Logger, name: str | None) -> Callback:
    if isinstance(wanted, Logger):
        return LoggerCallback(wanted)
    if wanted not in PACKAGES:
        raise ArgumentError(f"`report_to` has {wanted!r}.\n\nHint: name a tracker or pass a Lightning logger.")
    module, install = PACKAGES[wanted]
    if not is_installed(module):
        raise missing_package(module, install, f"`report_to={wanted!r}`")
    if wanted in _OWN:
        return known_to_transformers(_OWN[wanted])()
    theirs = reporting_callback(wanted)
    if theirs is not None:
        return continuing(theirs)() if wanted in _MLFLOW else theirs()
    # without transformers, Lightning's own logger
    if wanted not in _LIGHTNING:
        raise MissingPackage(
            f"`report_to={wanted!r}` needs the integration of transformers, which is not installed.\n\n"
            "Hint: pip install 'hf-compat[transformers]', or pass a Lightning logger."
        )
    from lightning.pytorch import loggers

    kind, keyword = _LIGHTNING[wanted]
    return LoggerCallback(getattr(loggers, kind)(**{keyword: name}))


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


def experiment_of(callbacks: Iterable[Callback], args: Args, state: TrainerState) -> object:
    """The writer of the first tracker among the callbacks, or None."""
    found = [callback for callback in callbacks if hasattr(callback, "experiment")]
    if found and not state.is_world_process_zero:
        return DummyExperiment()
    return found[0].experiment(args, state) if found else None


class HistoryLogger(Logger):
    """A Lightning logger that passes logged values (learning rates, device statistics) to HF's logs.

    Args:
        log: Called with the numbers and the step.
        experiment: Finds the writer of the run's first tracker, such as wandb's run.
    """

    def __init__(
        self, log: Callable[[Mapping[str, float], int | None], None], experiment: Callable[[], object] | None = None
    ) -> None:
        self._log = log
        self._experiment = experiment

    @property
    def experiment(self) -> object:
        """The writer of the run's first tracker, or None. On other ranks a dummy that ignores all calls."""
        return None if self._experiment is None else self._experiment()

    @property
    def name(self) -> str:
        """The logger's name, empty so that ModelCheckpoint's default folder is `checkpoints` in the output folder."""
        return ""

    @property
    def version(self) -> str:
        """The run's version, empty like the name."""
        return ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Pass numbers on to HF's logs."""
        self._log(metrics, step)

    def log_hyperparams(self, params: dict[str, object] | Namespace, *args: object, **kwargs: object) -> None:
        """Do nothing, as HF's own files hold the arguments."""
