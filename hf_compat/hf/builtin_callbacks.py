"""HF's callbacks for the default flow, progress, printing and early stopping."""

from __future__ import annotations

import math
from typing import Any, Protocol

from tqdm import tqdm

from hf_compat.errors import UnmetRequirement
from hf_compat.hf.callbacks import Args, Kwarg, TrainerCallback
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.hf.state import ExportableState, ExportedState, TrainerControl, TrainerState
from hf_compat.runtime.console import SharedLogger, progress_bar
from hf_compat.runtime.inspection import has_length
from hf_compat.runtime.signals import StopSignals

logger = SharedLogger(__name__, "transformers.trainer_callback")


def eval_metric_name(metric_for_best_model: str) -> str:
    """Add `eval_` to a metric's name if it is missing."""
    return metric_for_best_model if metric_for_best_model.startswith("eval_") else f"eval_{metric_for_best_model}"


class DefaultFlowCallback(TrainerCallback):
    """Set the flags for logging, evaluation and saving, by the arguments' strategies.

    Mirrors:
        `transformers.DefaultFlowCallback`, 5.23. With `steps` the last update is evaluated and saved, too.
    """

    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> TrainerControl:
        step = state.global_step
        is_last = step >= state.max_steps
        if args.logging_strategy == IntervalStrategy.STEPS and step % state.logging_steps == 0:
            control.should_log = True
        if args.logging_first_step and step == 1:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.STEPS and args.eval_delay <= step:
            control.should_evaluate |= is_last or step % state.eval_steps == 0
        if args.save_strategy == SaveStrategy.STEPS:
            control.should_save |= is_last or (state.save_steps > 0 and step % state.save_steps == 0)
        control.should_training_stop |= is_last
        return control

    def on_epoch_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> TrainerControl:
        control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
        control.should_evaluate |= args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= state.epoch
        control.should_save |= args.save_strategy == SaveStrategy.EPOCH
        return control


class ProgressCallback(TrainerCallback):
    """Show training and evaluation as progress bars, in a terminal or a notebook, and write the logs above them.

    Args:
        max_str_len: Longer strings in logs are not shown.

    Mirrors:
        `transformers.ProgressCallback`, 5.23.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.training_bar: tqdm[None] | None = None
        self.prediction_bar: tqdm[None] | None = None
        self.max_str_len = max_str_len
        self.current_step = 0

    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if state.is_world_process_zero:
            self.training_bar = self.make_bar(state.max_steps, state.global_step)
        self.current_step = state.global_step

    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_prediction_step(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        loader: Any = kwargs.get("eval_dataloader")
        if not state.is_world_process_zero or not has_length(loader):
            return
        if self.prediction_bar is None:
            self.prediction_bar = self.make_bar(len(loader), leave=self.training_bar is None)
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        self._close_prediction_bar()

    def on_predict(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:  # type: ignore[override]  # metrics are among kwargs
        self._close_prediction_bar()

    def on_log(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if self.training_bar is None:
            return
        shown = {key: self._short(value) for key, value in kwargs["logs"].items() if key != "total_flos"}
        self.training_bar.write(str(shown))

    def on_train_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        self.close()

    def make_bar(self, total: int, initial: int = 0, leave: bool = True) -> tqdm[None]:
        """Make a bar of `total` updates or batches, of which `initial` are done. `leave` keeps it at the end."""
        return progress_bar(total=total, initial=initial, leave=leave)

    def close(self) -> None:
        """Close both bars. The trainer calls this when an error ends the run."""
        self._close_prediction_bar()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None

    def _short(self, value: object) -> object:
        if isinstance(value, float):
            return f"{value:.4g}"
        if isinstance(value, str) and len(value) > self.max_str_len:
            return f"[{len(value)} characters; `max_str_len={self.max_str_len}` hides them]"
        return value


class TakesSignals(Protocol):
    """The part of the Trainer that `JITCheckpointCallback` uses."""

    args: Args
    stop_signals: StopSignals


class CheckpointRequest:
    """Whether a signal or a script requests a checkpoint and the end of the training.

    Mirrors:
        The public part of `transformers.trainer_jit_checkpoint.CheckpointManager`, 5.23.
    """

    def __init__(self, trainer: TakesSignals) -> None:
        self.trainer = trainer
        self.is_scripts = False

    @property
    def is_checkpoint_requested(self) -> bool:
        """Whether the current update will be the last, and saved. A script may set it."""
        return self.is_scripts or self.trainer.stop_signals.received is not None

    @is_checkpoint_requested.setter
    def is_checkpoint_requested(self, wanted: bool) -> None:
        self.is_scripts = wanted


class JITCheckpointCallback(TrainerCallback):
    """Save after the update and end the training if a script sets `jit_manager.is_checkpoint_requested`.

    A Trainer with `enable_jit_checkpoint=True` adds it. The Trainer itself obeys signals.

    Mirrors:
        `transformers.trainer_jit_checkpoint.JITCheckpointCallback`, 5.23, which saves within the update.
    """

    def __init__(self) -> None:
        self.trainer: TakesSignals | None = None
        self.jit_manager: CheckpointRequest | None = None

    def set_trainer(self, trainer: TakesSignals) -> None:
        """Set the Trainer whose signals count."""
        self.trainer = trainer
        self.jit_manager = CheckpointRequest(trainer) if trainer.args.enable_jit_checkpoint else None

    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if self.jit_manager is not None and self.jit_manager.is_scripts:
            self.jit_manager.is_scripts = False
            control.should_save = control.should_training_stop = True


class PrinterCallback(TrainerCallback):
    """Print the logs. Mirrors `transformers.PrinterCallback`, 5.23."""

    def on_log(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        logs = kwargs["logs"]
        logs.pop("total_flos", None)
        if state.is_local_process_zero:
            print({key: f"{v:.4g}" if isinstance(v, float) else v for key, v in logs.items()})  # noqa: T201 - its job


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stop when the tracked metric has not improved for some evaluations.

    Args:
        early_stopping_patience: Evaluations without improvement before stopping.
        early_stopping_threshold: Smaller improvements do not count.

    Raises:
        UnmetRequirement: At the start of training, when a metric or an evaluation is missing.

    Mirrors:
        `transformers.EarlyStoppingCallback`, 5.23.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def check_metric_value(self, args: Args, state: TrainerState, control: TrainerControl, metric_value: float) -> None:
        """Reset the count after an improvement, and otherwise add 1."""
        best = state.best_metric
        if best is None or (
            (metric_value > best if args.greater_is_better else metric_value < best)
            and abs(metric_value - best) > (self.early_stopping_threshold or 0.0)
        ):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback without load_best_model_at_end=True keeps the last model, not the best."
            )
        missing = {}
        if args.metric_for_best_model is None:
            missing["metric_for_best_model to be defined"] = '`metric_for_best_model="loss"`'
        if args.eval_strategy == IntervalStrategy.NO:
            missing["an eval_strategy of steps or epoch"] = '`eval_strategy="epoch"`'
        if missing:
            raise UnmetRequirement(
                f"EarlyStoppingCallback requires {' and '.join(missing)}.\n\n"
                f"Hint: set {' and '.join(missing.values())}, say."
            )

    def on_evaluate(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        metrics = kwargs.get("metrics") or {}
        assert args.metric_for_best_model is not None  # on_train_begin has checked it
        name = eval_metric_name(args.metric_for_best_model)
        value = metrics.get(name)
        if value is None:
            logger.warning(f"Early stopping follows {name}, which this evaluation did not return.")
            return
        if math.isnan(value):
            logger.warning(f"Early stopping follows {name}, which is NaN. It does not count as an improvement.")
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> ExportedState:
        """Export patience, threshold and the count so far."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }
