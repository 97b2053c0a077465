"""`TrainerCallback`, the handler that calls a list of them, and HF's own callbacks.

`docs/how_it_works.md` has the order of the events.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from tqdm import tqdm

from hf_compat.errors import CallbackError, UnmetRequirement
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.hf.log_table import LogTable, prints_table
from hf_compat.hf.state import CONTROL_FLAGS, ExportableState, ExportedState, TrainerControl, TrainerState
from hf_compat.runtime.console import SharedLogger, progress_bar
from hf_compat.runtime.inspection import accepted_parameters, delegated, has_length
from hf_compat.runtime.text import brief

logger = SharedLogger(__name__, "transformers.trainer_callback")

# Only methods with such a parameter get these keywords. HF's callbacks do not get them.
REQUESTABLE_KWARGS = ("trainer", "loss", "inputs", "outputs")

# The model, the optimizer, loaders, logs and other keywords, in the user's types.
Kwarg: TypeAlias = Any
Args: TypeAlias = TrainingArguments
Answer = TrainerControl | Mapping[str, bool] | None
# A `TrainerCallback`, or any object with a method for an event.
Callback: TypeAlias = Any
Method = TypeVar("Method", bound=Callable[..., Answer])


class Event(NamedTuple):
    """An event. The handler, the bridge and both adapters are made from these rows."""

    name: str  # name of the callbacks' method
    # Lightning's hooks at the same moment. Each of them fires the event. Without any, code fires it.
    hooks: tuple[str, ...]
    clears: tuple[str, ...]  # flags that are cleared before the event
    gives: str | None  # `logs` or `metrics`, which the handler's method takes by position
    # Values of ours, which the code that fires the event passes by keyword. Only methods that name one get it.
    offers: tuple[str, ...]


EVENTS: dict[str, Event] = {}


def event(
    *hooks: str, clears: tuple[str, ...] = (), gives: str | None = None, offers: tuple[str, ...] = ()
) -> Callable[[Method], Method]:
    """Declare the event of a method. `Event` describes the arguments."""

    def declare(method: Method) -> Method:
        EVENTS[method.__name__] = Event(method.__name__, hooks, clears, gives, offers)
        return method

    return declare


class TrainerCallback:
    """Base of callbacks, with an empty method for each event.

    A method gets `args`, `state` and `control`. By keyword it gets `model`, `processing_class` (also as `tokenizer`),
    `optimizer`, `lr_scheduler`, `train_dataloader` and `eval_dataloader`, and the event's `logs` or `metrics`.
    A method without `**kwargs` gets only the keywords that it names.

    A method that names `trainer`, `loss`, `inputs` or `outputs` gets these too. They are the trainer, and the loss (as
    `training_step` returned it), inputs and model outputs of the last micro-batch, all detached. Before the first
    micro-batch they are None.

    It may return nothing, the control, or a mapping of flags such as `{"should_training_stop": True}`.

    Mirrors:
        `transformers.TrainerCallback`.

    Differs:
        A method may return a mapping of flags, and may name `trainer`, `loss`, `inputs` and `outputs`.
    """

    @event()
    def on_init_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """After the trainer was built."""

    @event("on_train_start", clears=("should_training_stop",))
    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """Before the first epoch."""

    @event()
    def on_train_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """After the last epoch, the summary and the loading of the best model."""

    @event("on_train_epoch_start", clears=("should_epoch_stop",))
    def on_epoch_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """Before an epoch's first batch is read."""

    @event("on_train_epoch_end")
    def on_epoch_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """After an epoch's last update."""

    @event("on_train_batch_start", clears=("should_log", "should_evaluate", "should_save"))
    def on_step_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """Before an update, with its micro-batches read."""

    @event("on_before_optimizer_step")
    def on_pre_optimizer_step(
        self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg
    ) -> Answer:
        """After clipping, before the optimizer's step."""

    @event()
    def on_optimizer_step(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """After the optimizer's step, before the gradients are zeroed."""

    @event()
    def on_substep_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """After a micro-batch that is not the last of its update."""

    @event("on_train_batch_end")
    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """After an update."""

    @event(clears=("should_evaluate",), gives="metrics")
    def on_evaluate(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """After an evaluation, with its `metrics`."""

    @event(gives="metrics")
    def on_predict(
        self,
        args: Args,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Kwarg,
    ) -> Answer:
        """After a prediction, with its `metrics`."""

    @event(clears=("should_save",))
    def on_save(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """After a checkpoint was written."""

    @event(clears=("should_log",), gives="logs")
    def on_log(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """After a training log (with `loss`), an evaluation or the summary of the run was logged as `logs`."""

    @event("on_validation_batch_end", "on_test_batch_end")
    def on_prediction_step(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """After a batch of an evaluation or prediction."""

    @event()
    def on_push_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """Before a push to the Hub."""


EMPTY = {event: getattr(TrainerCallback, event) for event in EVENTS}
_FAMILIES = frozenset({"transformers", "hf_compat"})


def _family(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def is_callback_of(callback: Callback, kind: type) -> bool:
    """Whether a callback is of a class, or of the other family's class of the same name.

    `transformers.PrinterCallback` and `hf_compat.PrinterCallback` do the same job, so each name stands for both.
    """
    if isinstance(callback, kind):
        return True
    others = _FAMILIES - {_family(kind)} if _family(kind) in _FAMILIES else frozenset()
    return any(base.__name__ == kind.__name__ and _family(base) in others for base in type(callback).__mro__)


def callback_kind(callback: Callback) -> type | str:
    """The key of callbacks that do the same job, which is their class or their common name."""
    kind = type(callback)
    return kind.__name__ if _family(kind) in _FAMILIES else kind


def _calling(row: Event) -> Callable[..., TrainerControl]:
    """Make the handler's method of an event."""

    def fire(
        self: CallbackHandler, args: Args, state: TrainerState, control: TrainerControl, *given: Kwarg, **kwargs: Kwarg
    ) -> TrainerControl:
        for flag in row.clears:
            setattr(control, flag, False)
        if given and row.gives is not None:
            kwargs[row.gives], given = given[0], given[1:]
        return self.call_event(row.name, args, state, control, *given, **kwargs)

    fire.__name__, fire.__qualname__ = row.name, f"CallbackHandler.{row.name}"
    return fire


_WithoutMethods: Any = TrainerCallback  # the handler's methods take and return other types


class CallbackHandler(_WithoutMethods):
    """Call a list of callbacks in order, with the arguments that each one names.

    Mirrors:
        `transformers.trainer_callback.CallbackHandler`.
    """

    def __init__(
        self,
        callbacks: Iterable[Callback | type],
        model: nn.Module | None,
        processing_class: object,
        optimizer: Optimizer | None,
        lr_scheduler: object,
    ) -> None:
        self.callbacks: list[Callback] = []
        for callback in callbacks:
            self.add_callback(callback)
        # an empty handler gets its callbacks later
        kinds = {base.__name__ for callback in self.callbacks for base in type(callback).__mro__}
        if kinds and "DefaultFlowCallback" not in kinds:
            logger.warning(
                "There is no DefaultFlowCallback among the callbacks: nothing logs, evaluates or saves as the "
                f"arguments say, nor ends the training. The callbacks are:\n{self.callback_list}\n\n"
                "Hint: add it before training, `trainer.add_callback(DefaultFlowCallback)`."
            )
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: DataLoader[Any] | Iterable[Any] | None = None
        self.eval_dataloader: DataLoader[Any] | Iterable[Any] | None = None
        self.requestable_kwargs: dict[str, Kwarg] = dict.fromkeys(REQUESTABLE_KWARGS)
        # ids of the callbacks to call now. None calls all. Lightning callbacks run between some of them.
        self.active_ids: set[int] | None = None
        # called before a callback, to finish copies of values that the callback may change
        self.before_heard: Callable[[], None] | None = None

    tokenizer: object = delegated("processing_class")  # its name before 4.46

    def requested_kwargs(self) -> set[str]:
        """Find out which of `trainer`, `loss`, `inputs` and `outputs` a callback's method names."""
        named: set[str] = set()
        for callback in self.callbacks:
            for event, empty in EMPTY.items():
                method = getattr(callback, event, None)
                if method is not None and getattr(method, "__func__", None) is not empty:
                    named |= accepted_parameters(method).names
        return named.intersection(REQUESTABLE_KWARGS)

    @property
    def callback_list(self) -> str:
        """The callbacks' class names, one on each line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def add_callback(self, callback: Callback | type) -> None:
        """Append a callback, or an instance of a callback class.

        Raises:
            CallbackError: It has no method for any event.
        """
        instance = callback() if isinstance(callback, type) else callback
        if not any(callable(getattr(instance, event, None)) for event in EVENTS):
            raise CallbackError(
                f"{brief(callback)} is not a callback, because it has no method for any event.\n\n"
                f"Hint: inherit TrainerCallback, or write one of {', '.join(EVENTS)}."
            )
        if callback_kind(instance) in {callback_kind(other) for other in self.callbacks}:
            logger.warning(
                f"There is a {type(instance).__name__} among the callbacks already. Both are called. "
                f"The callbacks are:\n{self.callback_list}"
            )
        self.callbacks.append(instance)

    def pop_callback(self, callback: Callback | type) -> Callback | None:
        """Remove the first callback that is `callback` or of that class. It is None if there is none."""
        for found in self.callbacks:
            if is_callback_of(found, callback) if isinstance(callback, type) else found == callback:
                self.callbacks.remove(found)
                return found
        return None

    def remove_callback(self, callback: Callback | type) -> None:
        """Remove a callback.

        Raises:
            ValueError: The instance is not in the list.
        """
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(f"{brief(callback)} is not among the callbacks")

    def hearing(self, event: str) -> list[object]:
        """The callbacks that have a method of their own for an event."""
        hearing = []
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None and getattr(method, "__func__", None) is not EMPTY.get(event):
                hearing.append(callback)
        return hearing

    def call_event(
        self, event: str, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg
    ) -> TrainerControl:
        """Call an event, which may be a script's own, of every callback. The result is the control to use next."""
        empty = EMPTY.get(event)
        visible: dict[str, Kwarg] | None = None
        offered: dict[str, Kwarg] = {}
        for callback in self.callbacks:  # no copy, as upstream: a callback that an event adds hears the event
            if self.active_ids is not None and id(callback) not in self.active_ids:
                continue
            method = getattr(callback, event, None)
            # Skip the base class's empty methods, because calling them on every step costs time.
            if method is None or getattr(method, "__func__", None) is empty:
                continue
            if visible is None:
                if self.before_heard is not None:
                    self.before_heard()
                row = EVENTS.get(event)
                if row is not None and row.offers:
                    offered = {name: kwargs.pop(name) for name in row.offers if name in kwargs}
                visible = {
                    "model": self.model,
                    "tokenizer": self.processing_class,
                    "processing_class": self.processing_class,
                    "optimizer": self.optimizer,
                    "lr_scheduler": self.lr_scheduler,
                    "train_dataloader": self.train_dataloader,
                    "eval_dataloader": self.eval_dataloader,
                    **kwargs,
                }
            accepted, known = accepted_parameters(method), {**visible, **self.requestable_kwargs, **offered}
            given = visible.copy() if accepted.takes_any_keyword else {}
            for name in accepted.names & known.keys():
                given[name] = known[name]
            answer = method(args, state, control, **given)
            if answer is not None and answer is not control:
                control = _apply_answer(answer, control, callback, event)
        return control


for _row in EVENTS.values():
    setattr(CallbackHandler, _row.name, _calling(_row))


def _apply_answer(answer: Answer, control: TrainerControl, callback: Callback, event: str) -> TrainerControl:
    if isinstance(answer, Mapping):
        unknown = set(answer) - CONTROL_FLAGS
        if unknown:
            raise CallbackError(
                f"{type(callback).__name__}.{event} returned {brief(dict(answer))}. {brief(sorted(unknown))} are not "
                f"flags.\n\nHint: the flags are {', '.join(sorted(CONTROL_FLAGS))}."
            )
        for name, value in answer.items():
            setattr(control, name, bool(value))
        return control
    if answer is not None and all(hasattr(answer, name) for name in CONTROL_FLAGS):
        return answer
    raise CallbackError(
        f"{type(callback).__name__}.{event} returned {brief(answer)}.\n\n"
        "Hint: return nothing, the control, or a mapping of its flags."
    )


def eval_metric_name(metric_for_best_model: str) -> str:
    """Add `eval_` to a metric's name if it is missing."""
    return metric_for_best_model if metric_for_best_model.startswith("eval_") else f"eval_{metric_for_best_model}"


class DefaultFlowCallback(TrainerCallback):
    """Set the flags for logging, evaluation and saving, by the arguments' strategies.

    Mirrors:
        `transformers.DefaultFlowCallback`. With `steps` the last update is evaluated and saved, too.
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

    On a terminal, logs are lines of a table, and elsewhere dicts. `log_format` chooses.

    Args:
        max_str_len: Longer strings in logs are not shown.

    Mirrors:
        `transformers.ProgressCallback`.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.training_bar: tqdm[None] | None = None
        self.prediction_bar: tqdm[None] | None = None
        self.max_str_len = max_str_len
        self.current_step = 0
        self.table = LogTable()

    def on_train_begin(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if state.is_world_process_zero:
            self.training_bar = self.make_bar(state.max_steps, state.global_step)
            self.table = LogTable()
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
        if prints_table(args):
            for line in self.table.lines(state.global_step, kwargs["logs"]):
                self.training_bar.write(line)
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


class JITCheckpointCallback(TrainerCallback):
    """Save after the update and end the training if a script sets `jit_manager.is_checkpoint_requested`.

    A Trainer with `enable_jit_checkpoint=True` adds it, and obeys signals itself. The callback is its `jit_manager`.

    Mirrors:
        `transformers.trainer_jit_checkpoint.JITCheckpointCallback`, which saves within the update.
    """

    def __init__(self) -> None:
        # not that of transformers' class, behind which ours may stand: it sets `jit_manager`
        self.trainer: Any = None  # the Trainer whose signals count
        self.is_scripts = False  # whether a script has made the request

    @property
    def jit_manager(self) -> Self:
        """The object that a script sets the request on."""
        return self

    @property
    def is_checkpoint_requested(self) -> bool:
        """Whether the current update will be the last, and saved. A script may set it."""
        return self.is_scripts or self.trainer.stop_signals.received is not None

    @is_checkpoint_requested.setter
    def is_checkpoint_requested(self, wanted: bool) -> None:
        self.is_scripts = wanted

    def on_step_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        if self.is_scripts:
            self.is_scripts = False
            control.should_save = control.should_training_stop = True


class PrinterCallback(TrainerCallback):
    """Print the logs, as lines of a table on a terminal. Mirrors `transformers.PrinterCallback`.

    Differs:
        Transformers' class prints dicts on a terminal, too, as ours does with `log_format="dict"`.
    """

    @functools.cached_property  # a subclass may have an `__init__` of its own
    def table(self) -> LogTable:
        """The lines so far."""
        return LogTable()

    def on_log(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        logs = kwargs["logs"]
        logs.pop("total_flos", None)
        if not state.is_local_process_zero:
            return
        if prints_table(args):
            print(*self.table.lines(state.global_step, logs), sep="\n")  # noqa: T201 - its job
        else:
            print({key: f"{v:.4g}" if isinstance(v, float) else v for key, v in logs.items()})  # noqa: T201 - its job


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stop when the tracked metric has not improved for some evaluations.

    Args:
        early_stopping_patience: Evaluations without improvement before stopping.
        early_stopping_threshold: Smaller improvements do not count.

    Raises:
        UnmetRequirement: At the start of training, when a metric or an evaluation is missing.

    Mirrors:
        `transformers.EarlyStoppingCallback`.
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
