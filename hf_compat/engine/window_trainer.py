"""`WindowTrainer`: the `lightning.Trainer` for a `WindowModule`. Uses private attributes of Lightning 2.6.

Lightning's own trainer installs signal handlers, exits on Ctrl-C and announces devices. Scripts written for HF's
Trainer expect none of this.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call

from hf_compat.engine import loops
from hf_compat.engine.internals import do_nothing
from hf_compat.engine.loops import CarriedStop, EvaluationPart, LeanEpochLoop, LeanEvaluationLoop, carrying_stops
from hf_compat.engine.strategies import (
    DeepSpeedPrecision,
    ForwardPrecision,
    HFDDPStrategy,
    HFDeepSpeedStrategy,
    HFFSDP2Strategy,
    HFSingleDeviceStrategy,
    LaunchedEnvironment,
)
from hf_compat.plan.translate import LightningPlan
from hf_compat.runtime.launch import Launch

logger = logging.getLogger(__name__)

# Callbacks that Lightning would add by default, with the switch for each.
_SWITCHED_ON: dict[type[pl.Callback], str] = {
    ProgressBar: "enable_progress_bar",
    ModelSummary: "enable_model_summary",
    Checkpoint: "enable_checkpointing",
}
# Loggers that announce devices and tips for each new trainer.
_CHATTY = ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda")

# Patterns of Lightning's warnings about its own code, or about intended behaviour of HF.
EXPECTED = (
    # lightning 2.6.6 under torch 2.13. Remove when lightning calls `is_leaf` itself
    r".*isinstance\(treespec, LeafSpec\).*",
    # like HF, our checkpoints hold the state after the update
    ".*no pre-optimization state was saved.*",
    # logged values are already gathered and equal on every rank
    ".*sync_dist=True.*",
    # HF's logging interval counts updates across epochs
    ".*smaller than the logging interval.*",
    # the module steps the active schedule, including that of averaged weights
    ".*SWA is currently only supported every epoch.*",
    # sentence-transformers runs its own evaluators and passes an empty loader
    ".*Total length of `EvaluationBatches` across ranks is zero.*",
)


class _WarningsOnly(logging.Filter):
    """Drop records below warnings. Changing a logger's level would clear the level caches of all loggers."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence Lightning's announcements and expected warnings. Its other warnings remain."""
    warnings_only = _WarningsOnly()
    for name in _CHATTY:
        logging.getLogger(name).addFilter(warnings_only)
    try:
        with warnings.catch_warnings():
            for message in EXPECTED:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for name in _CHATTY:
            logging.getLogger(name).removeFilter(warnings_only)


class _NoProfiler(PassThroughProfiler):
    """Skip profiling without any cost. Lightning enters about fifteen of these contexts a step."""

    profile = contextlib.nullcontext  # type: ignore[assignment]


class WindowTrainer(pl.Trainer):
    """The trainer for a plan.

    Args:
        plan: The result of `plan.translate`.
        callbacks: Lightning callbacks. Progress bars, summaries and checkpoints among them are switched on.
        loggers: Loggers for callbacks.
        launch: Rank and number of this run's processes.
        options: Other settings of `lightning.Trainer` that the plan does not set.
    """

    def __init__(
        self,
        plan: LightningPlan,
        callbacks: list[pl.Callback],
        loggers: Sequence[Logger] = (),
        launch: Launch | None = None,
        **options: Any,  # of `lightning.Trainer`
    ) -> None:
        device = torch.device(plan.device)
        scaler = torch.amp.GradScaler(device.type) if plan.precision == "16-mixed" else None
        precision = ForwardPrecision(plan.precision, scaler)
        strategy: Strategy
        if plan.strategy == "one_device" or launch is None:
            strategy = HFSingleDeviceStrategy(device=device, precision_plugin=precision)
        elif plan.strategy == "fsdp2":
            strategy = HFFSDP2Strategy(launch, precision, plan.strategy_options["plan"], plan.precision)
        elif plan.strategy == "deepspeed":
            own = DeepSpeedPrecision(plan.precision, scaler)
            strategy = HFDeepSpeedStrategy(launch, own, plan.strategy_options["config"])
        else:
            environment = LaunchedEnvironment(launch)
            strategy = HFDDPStrategy(
                cluster_environment=environment, precision_plugin=precision, **dict(plan.strategy_options)
            )
        settings: dict[str, Any] = {
            **plan.trainer_settings(),
            "callbacks": callbacks,
            "logger": list(loggers) or False,
            "strategy": strategy,
            "profiler": _NoProfiler(),
            # the seed sets it already, and Lightning would choose another cuBLAS workspace than upstream
            "deterministic": None,
        }
        for kind, switch in _SWITCHED_ON.items():
            settings[switch] = False
            for callback in callbacks:
                settings[switch] |= isinstance(callback, kind)
        with quietly():
            # the user may choose the CPU on purpose
            warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
            super().__init__(**{**settings, **options})
        if not loops.IS_KNOWN:
            installed = lightning.__version__
            logger.info("hf_compat does not support the loops of Lightning %s, so steps are slower.", installed)
        self._sigint_handler: Any = None  # Python's handler of Ctrl-C, as returned by `signal.getsignal`
        # Lightning's SIGTERM handler exits with status 0, and every update exchanges whether it was called.
        # Remove it when a trainer has a setting for it.
        self._signal_connector.register_signal_handlers = do_nothing  # type: ignore[method-assign]
        # Don't search for checkpoints beside an OnExceptionCheckpoint or in a SLURM job. Remove it when `fit` accepts a
        # value for "none".
        self._checkpoint_connector._parse_ckpt_path = do_nothing  # type: ignore[method-assign]
        # Lightning gives a GPU's cached memory back at the begin and end of each command, so the batches after it wait
        # for new memory. Remove it when a trainer has a setting for it.
        self._checkpoint_connector.resume_end = do_nothing  # type: ignore[method-assign]  # besides, it loads nothing
        if isinstance(self.accelerator, CUDAAccelerator):
            self.accelerator.setup = self.accelerator.teardown = do_nothing  # type: ignore[method-assign]
        # Every training step sets the model's mode. Remove it when a module can declare this.
        self.fit_loop._warn_if_modules_in_eval_mode = do_nothing  # type: ignore[method-assign]
        theirs = self.fit_loop.epoch_loop
        self.fit_loop.epoch_loop = LeanEpochLoop(self, theirs.min_steps, theirs.max_steps)
        self.fit_loop.epoch_loop.val_loop = theirs.val_loop
        for holder, name in ((self.fit_loop.epoch_loop, "val_loop"), (self, "validate_loop"), (self, "test_loop")):
            own = getattr(holder, name)
            lean = LeanEvaluationLoop(self, own._trainer_fn, own._stage, own.verbose, own.inference_mode)
            setattr(holder, name, lean)
        manual, fit = self.fit_loop.epoch_loop.manual_optimization, self.fit_loop
        for owner, name in ((manual, "advance"), (fit, "on_advance_start"), (fit, "on_advance_end")):
            setattr(owner, name, carrying_stops(getattr(owner, name)))

    def run_command(self, command: Callable[..., object], module: pl.LightningModule, **data: object) -> None:
        """Run a command of this trainer (`fit`, `validate`, `test`) with loaders, and raise its errors unchanged.

        After Ctrl-C Lightning ignores the signal and exits with status 1. Scripts and notebooks written for HF catch
        KeyboardInterrupt and continue. Remove it when a trainer raises it.
        """
        self._sigint_handler = signal.getsignal(signal.SIGINT)
        if command != self.fit:  # no gradients are cleared, as a script may have computed them itself
            self._run_stage = (self.test_loop if command == self.test else self.validate_loop).run  # type: ignore[method-assign]
        try:
            with quietly():
                command(module, **data)
        except CarriedStop as carried:
            raise carried.error from None
        except (SystemExit, ValueError) as ended:
            if not isinstance(ended.__context__, KeyboardInterrupt):
                raise
            if threading.current_thread() is threading.main_thread() and self._sigint_handler is not None:
                signal.signal(signal.SIGINT, self._sigint_handler)
            raise ended.__context__ from None
        finally:
            vars(self).pop("_run_stage", None)
            # After an error the results still hold the batch, whose memory belongs to loader workers. Remove it when
            # Lightning releases it at teardown.
            training = self.fit_loop.epoch_loop
            for loop in (training, training.val_loop, self.validate_loop, self.test_loop):
                loop._results.batch = None

    @contextlib.contextmanager
    def as_part(self, part: EvaluationPart) -> Iterator[None]:
        """Present the next evaluation, within a fit or not, to callbacks as one part of an evaluation."""
        loop = self.fit_loop.epoch_loop.val_loop if self.state.fn == "fit" else self.validate_loop
        assert isinstance(loop, LeanEvaluationLoop)  # the constructor made them
        outer, loop.part = loop.part, part
        try:
            yield
        finally:
            loop.part = outer

    def _run(self, *args: Any, **kwargs: Any) -> Any:  # as Lightning's own method
        try:
            return super()._run(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            self._sigint_handler = signal.getsignal(signal.SIGINT)  # a callback may have installed another one
            # Lightning's own handling sets a signal handler, which only the main thread may do
            if threading.current_thread() is not threading.main_thread():
                call._interrupt(self, interrupt)
                self._teardown()
            raise


class _NoBatches:
    """Validation data for a fit whose evaluations use their own. Without any, Lightning would never validate."""

    def __iter__(self) -> Iterator[object]:
        return iter(())


NO_BATCHES = _NoBatches()
