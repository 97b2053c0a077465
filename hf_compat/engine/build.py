"""Build a Lightning trainer from a plan and run a fit, without Lightning's announcements."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy

from hf_compat.engine.internals import (
    CarriedStop,
    carry_stop_iterations,
    forget_batch,
    interruptible,
    leave_resuming_to_the_caller,
    leave_signals_alone,
)
from hf_compat.engine.lean_evaluation import use_lean_evaluations
from hf_compat.engine.lean_loop import use_lean_loop
from hf_compat.engine.precision import ForwardPrecision
from hf_compat.engine.strategies import HFDDPStrategy, HFFSDP2Strategy, HFSingleDeviceStrategy, LaunchedEnvironment
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.runtime.launch import Launch

Places = tuple[tuple[str, int], ...]

_NAME = "entry_points"  # the function that Lightning calls with a group
_found: dict[str, tuple[Places, metadata.EntryPoints]] = {}


@contextlib.contextmanager
def searching_plugins_once() -> Iterator[None]:
    """Let trainers that are made within the context search a group of plugins again only after an installation."""
    own = getattr(registry, _NAME, None)
    if own is not metadata.entry_points:  # another release of Lightning, a test's stand-in, or we ourselves
        yield
        return
    setattr(registry, _NAME, plugins_of)
    try:
        yield
    finally:
        setattr(registry, _NAME, own)


def plugins_of(group: str) -> metadata.EntryPoints:
    """Return the plugins of a group, as `importlib.metadata.entry_points` does."""
    places, known = _places(), _found.get(group)
    if known is None or known[0] != places:
        known = _found[group] = (places, metadata.entry_points(group=group))
    return known[1]


def _places() -> Places:
    """Return the folders in which packages are found; those of installations with the time of their last change."""
    return tuple((path, _changed(path) if path.endswith("-packages") else 0) for path in sys.path)


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # a path that does not exist
        return 0


# Callbacks that Lightning would add by itself, and its switch for each.
_SWITCHED_ON: dict[type[pl.Callback], str] = {
    ProgressBar: "enable_progress_bar",
    ModelSummary: "enable_model_summary",
    Checkpoint: "enable_checkpointing",
}
# Loggers that announce devices and tips each time a trainer is made; a Trainer of ours makes one a call.
_CHATTY = ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda")


# Warnings of Lightning about its own code, or about what HF does on purpose; patterns of the messages.
EXPECTED = (
    # lightning 2.6.6 under torch 2.13; remove when lightning calls `is_leaf` itself
    r".*isinstance\(treespec, LeafSpec\).*",
    # the state after the update is what a checkpoint of ours, as of HF, holds
    ".*no pre-optimization state was saved.*",
    # what is logged is gathered already, and the same on every process
    ".*sync_dist=True.*",
    # HF's logging interval counts updates over epochs
    ".*smaller than the logging interval.*",
    # the module steps whatever schedule is in force, averaged weights' own too
    ".*SWA is currently only supported every epoch.*",
    # sentence-transformers evaluates by its evaluators alone, over a loader that gives nothing
    ".*Total length of `EvaluationBatches` across ranks is zero.*",
)


class _WarningsOnly(logging.Filter):
    """Leave out what is less than a warning; a changed level would empty what all loggers know of their levels."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Leave out Lightning's announcements, and the warnings that are expected; not its other warnings."""
    loggers, warnings_only = [logging.getLogger(name) for name in _CHATTY], _WarningsOnly()
    for logger in loggers:
        logger.addFilter(warnings_only)
    try:
        with warnings.catch_warnings():
            for message in EXPECTED:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(warnings_only)


class _NoProfiler(PassThroughProfiler):
    """Measure nothing, and spend nothing on it: Lightning enters some fifteen of these contexts a step."""

    _nothing = contextlib.nullcontext()

    def profile(self, action_name: str) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return self._nothing


def build_trainer(
    plan: LightningPlan,
    callbacks: list[pl.Callback],
    loggers: Sequence[Logger] = (),
    launch: Launch | None = None,
    **options: object,  # of `lightning.Trainer`
) -> pl.Trainer:
    """Build the trainer that a plan describes.

    Args:
        plan: What `plan.translate` made of the arguments.
        callbacks: Lightning callbacks; bars, summaries and checkpoints among them are switched on.
        loggers: What callbacks log to.
        launch: The place of this process among several.
        options: Further settings of `lightning.Trainer` that the plan leaves open.
    """
    has = {kind: any(isinstance(callback, kind) for callback in callbacks) for kind in _SWITCHED_ON}
    settings: dict[str, Any] = {
        **plan.trainer_settings(),
        "callbacks": callbacks,
        "logger": list(loggers) or False,
        "strategy": make_strategy(plan, launch),
        "profiler": _NoProfiler(),
        # switched on with the seed; Lightning would give cuBLAS another workspace than upstream does
        "deterministic": None,
        **{switch: has[kind] for kind, switch in _SWITCHED_ON.items()},
        **options,
    }
    with quietly(), searching_plugins_once():
        # a GPU may be left out on purpose
        warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
        trainer = pl.Trainer(**settings)
    if use_lean_loop(trainer):
        use_lean_evaluations(trainer)
    leave_signals_alone(trainer)
    leave_resuming_to_the_caller(trainer)
    carry_stop_iterations(trainer)
    return trainer


def make_strategy(plan: LightningPlan, launch: Launch | None) -> Strategy:
    """Make the strategy that a plan names."""
    device = torch.device(plan.device)
    scaler = torch.amp.GradScaler(device.type) if plan.precision == "16-mixed" else None
    precision = ForwardPrecision(plan.precision, scaler)
    if plan.strategy == "one_device" or launch is None:
        return HFSingleDeviceStrategy(device=device, precision_plugin=precision)
    if plan.strategy == "fsdp2":
        return HFFSDP2Strategy(launch, precision, plan.strategy_options["plan"], plan.precision)
    if plan.strategy == "deepspeed":
        from hf_compat.engine.strategies import DeepSpeedPrecision, HFDeepSpeedStrategy

        own = DeepSpeedPrecision(plan.precision, scaler)
        return HFDeepSpeedStrategy(launch, own, plan.strategy_options["config"])
    return HFDDPStrategy(
        cluster_environment=LaunchedEnvironment(launch), precision_plugin=precision, **dict(plan.strategy_options)
    )


class _NoBatches:
    """Validation data of a fit whose evaluations bring their own; without any, Lightning would not validate at all."""

    def __iter__(self) -> Iterator[object]:
        return iter(())


NO_BATCHES = _NoBatches()


def run_fit(
    trainer: pl.Trainer, module: pl.LightningModule, batches: Iterable[object], validation: Iterable[object]
) -> None:
    """Fit; signals do what they do without a trainer."""
    try:
        with interruptible(trainer), quietly():
            trainer.fit(module, train_dataloaders=batches, val_dataloaders=validation)
    except CarriedStop as carried:
        raise carried.error from None
    finally:
        forget_batch(trainer)


def run_evaluation(
    trainer: pl.Trainer, module: pl.LightningModule, batches: Iterable[object], is_prediction: bool
) -> None:
    """Evaluate or predict outside a fit; signals do what they do without a trainer."""
    run = trainer.test if is_prediction else trainer.validate
    try:
        with interruptible(trainer), quietly():
            run(module, dataloaders=batches, verbose=False)
    except CarriedStop as carried:
        raise carried.error from None
    finally:
        forget_batch(trainer)
