"""The twelve learning-rate schedules of HF, GreedyLR, and DeepSpeed's schedules.

A schedule of HF is a factor as a function of the update, and `LambdaLR` multiplies it with the base learning rate. The
arithmetic keeps upstream's order of operations, because parity is bit for bit. Scripts read a factor's keywords by
upstream's names.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hf_compat.errors import ArgumentError
from hf_compat.hf.enums import SchedulerType
from hf_compat.optim.optimizers import LayerWiseDummyOptimizer, LayerWiseDummyScheduler
from hf_compat.runtime.text import shown

# The result of `state_dict`, with numbers, strings and lists of numbers by name.
ScheduleState: TypeAlias = dict[str, Any]
# torch's own form of a parameter group.
Group: TypeAlias = dict[str, Any]
_COUNTERS = (
    "factor",
    "min_lrs",
    "max_lrs",
    "patience",
    "verbose",
    "cooldown",
    "warmup",
    "cooldown_counter",
    "warmup_counter",
    "mode",
    "threshold",
    "threshold_mode",
    "best",
    "num_bad_epochs",
    "num_good_epochs",
    "eps",
    "last_epoch",
    "smooth",
    "window_size",
    "reset_start",
    "reset_start_original",
    "_last_lr",
    "_init_lrs",
)


class RunningMean:
    """Mean of the last `window_size` values, kept as a running sum (so its rounding is upstream's)."""

    def __init__(self, window_size: int) -> None:
        self.window_size = window_size
        self.values: deque[float] = deque()
        self.sum = 0.0

    def add(self, value: float) -> float:
        """Take a value in and return the mean."""
        self.values.append(value)
        self.sum += value
        if len(self.values) > self.window_size:
            self.sum -= self.values.popleft()
        return self.sum / len(self.values)

    def state_dict(self) -> ScheduleState:
        """Return the state for `load_state_dict`."""
        return {"window_size": self.window_size, "values": list(self.values), "sum": self.sum}

    def load_state_dict(self, state: ScheduleState) -> None:
        """Take a state back."""
        self.window_size, self.sum = state["window_size"], state["sum"]
        self.values = deque(state["values"])


class GreedyLR:
    """Follow a metric both ways.

    Args:
        optimizer: The optimizer whose learning rates it sets.
        mode: `min` or `max`: which way the metric improves.
        factor: Learning rates are multiplied, or divided, by it; below 1.
        patience: Steps of one tendency that are waited for.
        threshold: Smaller changes do not count.
        threshold_mode: `abs` or `rel`: how `threshold` is meant.
        cooldown: Steps to wait after lowering.
        warmup: Steps to wait after raising.
        min_lr: Lowest learning rate: one number, or one for each parameter group.
        max_lr: Highest learning rate: one number, or one for each parameter group.
        eps: Smaller changes of the learning rate are not made.
        verbose: Print changes.
        smooth: Follow the running mean of the metric.
        window_size: Values in that mean.
        reset_start: Lowerings at the lowest learning rate before everything starts again.

    Raises:
        ValueError: A value outside its range.

    Mirrors:
        `transformers.optimization.GreedyLR`, 5.23: the same state too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | list[float] = 1e-3,
        max_lr: float | list[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        _check(optimizer, factor, mode, threshold_mode)
        self.optimizer = optimizer
        self.mode, self.factor, self.patience = mode, factor, patience
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.cooldown, self.warmup, self.eps, self.verbose = cooldown, warmup, eps, verbose
        self.smooth, self.window_size = smooth, window_size
        self.reset_start = self.reset_start_original = reset_start
        self.min_lrs = self._per_group(min_lr, "min_lrs")
        self.max_lrs = self._per_group(max_lr, "max_lrs")
        self._init_lrs = [group["lr"] for group in optimizer.param_groups]
        self._last_lr = list(self._init_lrs)
        self.last_epoch = 0
        self._forget()

    def _per_group(self, value: float | list[float], name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [value] * groups
        if len(value) != groups:
            raise ValueError(f"expected {groups} {name}, got {len(value)}")
        return list(value)

    def _forget(self) -> None:
        self.best = float("inf") if self.mode == "min" else float("-inf")
        self.num_bad_epochs = self.num_good_epochs = 0
        self.cooldown_counter = self.warmup_counter = 0
        self._mean = RunningMean(self.window_size) if self.smooth else None

    def step(self, metrics: float, epoch: int | None = None) -> None:
        """Take a value of the metric in and change the learning rates where it is time."""
        value = float(metrics)
        if self._mean is not None:
            value = self._mean.add(value)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = self.num_good_epochs = 0
        elif self.warmup_counter > 0:
            self.warmup_counter -= 1
            self.num_bad_epochs = self.num_good_epochs = 0
        else:
            self._count(value)
            if self.num_good_epochs > self.patience:
                for index, (group, highest) in enumerate(zip(self.optimizer.param_groups, self.max_lrs, strict=True)):
                    self._change(index, group, min(float(group["lr"]) / self.factor, highest))
                self.reset_start = self.reset_start_original
                self.warmup_counter, self.num_good_epochs = self.warmup, 0
            elif self.num_bad_epochs > self.patience:
                self._lower_lrs()
                self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _count(self, value: float) -> None:
        if self.is_better(value, self.best):
            self.best = value
            self.num_bad_epochs, self.num_good_epochs = 0, self.num_good_epochs + 1
        else:
            self.num_bad_epochs, self.num_good_epochs = self.num_bad_epochs + 1, 0

    def is_better(self, current: float, best: float) -> bool:
        """Return whether a value improves on the best by more than the threshold."""
        relative = self.threshold_mode == "rel"
        if self.mode == "min":
            return current < (best * (1.0 - self.threshold) if relative else best - self.threshold)
        return current > (best * (1.0 + self.threshold) if relative else best + self.threshold)

    def _lower_lrs(self) -> None:
        groups = self.optimizer.param_groups
        for index, (group, lowest) in enumerate(zip(groups, self.min_lrs, strict=True)):
            self._change(index, group, max(float(group["lr"]) * self.factor, lowest))
        if all(group["lr"] <= lowest for group, lowest in zip(groups, self.min_lrs, strict=True)):
            self.reset_start -= 1
            if self.reset_start <= 0:
                for group, lr in zip(self.optimizer.param_groups, self._init_lrs, strict=True):
                    group["lr"] = lr
                self.reset_start = self.reset_start_original
                self._forget()

    def _change(self, index: int, group: Group, new: float) -> None:
        old = float(group["lr"])
        # A learning rate outside its bounds is not moved against the tendency, hence no abs() here.
        grows = new > old
        if (new - old if grows else old - new) > self.eps and (new > old) == (self.num_good_epochs > self.patience):
            group["lr"] = new
            if self.verbose:
                print(f"Epoch {self.last_epoch}: learning rate of group {index} is now {new:.4e}.")  # noqa: T201 - asked for

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the groups."""
        return self._last_lr

    def state_dict(self) -> ScheduleState:
        """Return the state for `load_state_dict`."""
        state = {name: getattr(self, name) for name in _COUNTERS}
        if self._mean is not None:
            state["_streaming_avg"] = self._mean.state_dict()
        return state

    def load_state_dict(self, state_dict: ScheduleState) -> None:
        """Take a state back, learning rates included."""
        for name in _COUNTERS:
            if name in state_dict:
                setattr(self, name, state_dict[name])
        if "_streaming_avg" in state_dict:
            self._mean = RunningMean(self.window_size)
            self._mean.load_state_dict(state_dict["_streaming_avg"])
        if "_last_lr" in state_dict:
            for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
                group["lr"] = lr


def _check(optimizer: object, factor: float, mode: str, threshold_mode: str) -> None:
    if factor >= 1.0:
        raise ValueError(f"Factor should be < 1.0, got {factor}.")
    if mode not in ("min", "max"):
        raise ValueError(f"mode {mode} is unknown!")
    if threshold_mode not in ("rel", "abs"):
        raise ValueError(f"threshold mode {threshold_mode} is unknown!")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is not an Optimizer")


# The value of some option of a schedule, as `lr_scheduler_kwargs` gives it.
Option: TypeAlias = Any
Options: TypeAlias = dict[str, Option]
WSD_SHAPES = ("linear", "cosine", "1-sqrt")


def constant_with_warmup(update: int, *, num_warmup_steps: int) -> float:
    """Rise to 1, and stay."""
    return _warmup(update, num_warmup_steps) if update < num_warmup_steps else 1.0


def linear(update: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """Fall to 0 in a line."""
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    return max(0.0, float(num_training_steps - update) / float(max(1, num_training_steps - num_warmup_steps)))


def cosine(update: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5) -> float:
    """Fall to 0 along a cosine."""
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    return max(0.0, _half_cosine(_progress(update, num_warmup_steps, num_training_steps), num_cycles))


def cosine_with_min_lr(
    update: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float, min_lr_rate: float
) -> float:
    """Fall to `min_lr_rate` along a cosine."""
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    factor = _half_cosine(_progress(update, num_warmup_steps, num_training_steps), num_cycles)
    return max(0, factor * (1 - min_lr_rate) + min_lr_rate)


def cosine_with_restarts(update: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1) -> float:
    """Fall to 0 along a cosine, `num_cycles` times."""
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    progress = _progress(update, num_warmup_steps, num_training_steps)
    if progress >= 1.0:
        return 0.0
    within_cycle = (float(num_cycles) * progress) % 1.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * within_cycle)))


def polynomial(
    update: int, *, num_warmup_steps: int, num_training_steps: int, lr_end: float, power: float, lr_init: float
) -> float:
    """Fall to `lr_end`; LambdaLR multiplies by `lr_init`, so each learning rate is divided by it here."""
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    if update > num_training_steps:
        return lr_end / lr_init
    remaining = 1 - (update - num_warmup_steps) / (num_training_steps - num_warmup_steps)
    return ((lr_init - lr_end) * remaining**power + lr_end) / lr_init


def inverse_sqrt(update: int, *, num_warmup_steps: int, timescale: int) -> float:
    """Fall with the root of the updates."""
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    return 1.0 / math.sqrt((update + (timescale - num_warmup_steps)) / timescale)


def cosine_warmup_with_min_lr(
    update: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float,
    min_lr_rate: float,
    warmup_lr_rate: float | None,
) -> float:
    """Rise from `warmup_lr_rate`, one update ahead of the other schedules, then fall along a cosine."""
    if update < num_warmup_steps:
        if warmup_lr_rate is None:
            return (update + 1.0) / max(1.0, float(num_warmup_steps))
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * float(update) / max(1, float(num_warmup_steps) - 1)
    progress = (float(update) - num_warmup_steps + 1.0) / max(1.0, float(num_training_steps) - num_warmup_steps)
    factor = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
    return max(0, factor * (1 - min_lr_rate) + min_lr_rate)


def warmup_stable_decay(
    update: int,
    *,
    num_warmup_steps: int,
    num_stable_steps: int,
    num_decay_steps: int,
    warmup_type: str,
    decay_type: str,
    min_lr_ratio: float,
    num_cycles: float,
) -> float:
    """Rise for `num_warmup_steps`, stay for `num_stable_steps`, fall for `num_decay_steps`."""
    if update < num_warmup_steps:
        progress = _warmup(update, num_warmup_steps)
        if warmup_type == "linear":
            factor = progress
        else:
            if warmup_type == "cosine":
                factor = 0.5 * (1.0 - math.cos(math.pi * progress))
            else:
                factor = 1.0 - math.sqrt(1.0 - progress)
    elif update < num_warmup_steps + num_stable_steps:
        return 1.0
    elif update < num_warmup_steps + num_stable_steps + num_decay_steps:
        progress = float(update - num_warmup_steps - num_stable_steps) / float(max(1, num_decay_steps))
        if decay_type == "linear":
            factor = 1.0 - progress
        else:
            if decay_type == "cosine":
                factor = _half_cosine(progress, num_cycles)
            else:
                factor = 1.0 - math.sqrt(progress)
    else:
        return min_lr_ratio
    return max(0.0, factor * (1.0 - min_lr_ratio) + min_lr_ratio)


def _warmup(update: int, num_warmup_steps: int) -> float:
    return float(update) / float(max(1, num_warmup_steps))


def _progress(update: int, num_warmup_steps: int, num_training_steps: int) -> float:
    return float(update - num_warmup_steps) / float(max(1, num_training_steps - num_warmup_steps))


def _half_cosine(progress: float, num_cycles: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * progress))


def options_of_polynomial(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, lr_end: float = 1e-7, power: float = 1.0
) -> Options:
    """Add the learning rate that the optimizer begins with."""
    lr_init = optimizer.defaults["lr"]
    if not lr_init > lr_end:
        raise ArgumentError(f"`lr_end={lr_end}` must be smaller than the initial learning rate {lr_init}.")
    return {"lr_end": lr_end, "power": power, "lr_init": lr_init}


def options_of_inverse_sqrt(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int | None, timescale: int | None = None
) -> Options:
    """Choose how slowly the rate falls: as slowly as it has risen."""
    return {"timescale": timescale or num_warmup_steps or 10_000}


def options_with_min_lr(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Options:
    """Make a share of the lowest learning rate."""
    if (min_lr is None) == (min_lr_rate is None):
        raise ArgumentError(
            f"`lr_scheduler_kwargs` has `min_lr={min_lr}` and `min_lr_rate={min_lr_rate}`.\n\n"
            "Hint: this schedule needs exactly one of them."
        )
    rate = min_lr / optimizer.defaults["lr"] if min_lr is not None else min_lr_rate
    return {"num_cycles": num_cycles, "min_lr_rate": rate}


def options_of_cosine_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Options:
    """Make a share of the lowest learning rate."""
    shared = options_with_min_lr(optimizer, num_warmup_steps, num_training_steps, num_cycles, min_lr, min_lr_rate)
    return {**shared, "warmup_lr_rate": warmup_lr_rate}


def options_of_warmup_stable_decay(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int | None,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
) -> Options:
    """Count the updates between warmup and decay."""
    for name, shape in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if shape not in WSD_SHAPES:
            raise ArgumentError(f"`{name}={shape!r}` is not known.\n\nHint: choose one of {WSD_SHAPES}.")
    if num_stable_steps is None:
        if num_training_steps is None:
            raise ArgumentError("Either `num_training_steps` or `num_stable_steps` must be specified.")
        num_stable_steps = num_training_steps - num_warmup_steps - num_decay_steps
    return {
        **{"num_stable_steps": num_stable_steps, "num_decay_steps": num_decay_steps},
        **{"warmup_type": warmup_type, "decay_type": decay_type},
        **{"min_lr_ratio": min_lr_ratio, "num_cycles": num_cycles},
    }


# Name → the factor, and the function that converts the user's options where the factor needs it.
FACTORS: dict[SchedulerType, tuple[Callable[..., float], Callable[..., Options] | None]] = {
    SchedulerType.LINEAR: (linear, None),
    SchedulerType.COSINE: (cosine, None),
    SchedulerType.COSINE_WITH_RESTARTS: (cosine_with_restarts, None),
    SchedulerType.POLYNOMIAL: (polynomial, options_of_polynomial),
    SchedulerType.CONSTANT_WITH_WARMUP: (constant_with_warmup, None),
    SchedulerType.INVERSE_SQRT: (inverse_sqrt, options_of_inverse_sqrt),
    SchedulerType.COSINE_WITH_MIN_LR: (cosine_with_min_lr, options_with_min_lr),
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: (cosine_warmup_with_min_lr, options_of_cosine_warmup),
    SchedulerType.WARMUP_STABLE_DECAY: (warmup_stable_decay, options_of_warmup_stable_decay),
}
NEEDS_TOTAL = frozenset(FACTORS) - {
    SchedulerType.CONSTANT_WITH_WARMUP,
    SchedulerType.INVERSE_SQRT,
    SchedulerType.WARMUP_STABLE_DECAY,
}


def get_scheduler(
    name: str | SchedulerType,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Option] | None = None,
) -> LRScheduler | GreedyLR:
    """Build a learning-rate schedule by its name.

    Args:
        name: One of `SchedulerType`.
        optimizer: The optimizer whose learning rates it sets.
        num_warmup_steps: Updates of linear warmup; most schedules need it.
        num_training_steps: Updates of the run; most schedules need it.
        scheduler_specific_kwargs: Further options (`num_cycles`, `min_lr` …).

    Returns:
        A `torch.optim.lr_scheduler.LRScheduler`, or `GreedyLR`. With a layerwise optimizer, each parameter gets its own
        schedule, and the result steps all of them.

    Raises:
        ArgumentError: A needed count is missing, or an option is unknown or contradictory.

    Mirrors:
        `transformers.get_scheduler`, 5.23.
    """
    if isinstance(optimizer, LayerWiseDummyOptimizer):
        for parameter, own in optimizer.optimizer_dict.items():
            schedule = make_schedule(name, own, num_warmup_steps, num_training_steps, scheduler_specific_kwargs)
            if follows_metric(schedule) or not isinstance(schedule, LRScheduler):
                raise ArgumentError(
                    f"The schedule {SchedulerType(name).value!r} follows a metric, and the optimizers of a layerwise "
                    "one step in the backward pass.\n\nHint: choose another `lr_scheduler_type`."
                )
            optimizer.schedulers[parameter] = schedule
        return LayerWiseDummyScheduler(optimizer.optimizer_dict, lr=optimizer.defaults["lr"])
    return make_schedule(name, optimizer, num_warmup_steps, num_training_steps, scheduler_specific_kwargs)


def make_schedule(
    name: str | SchedulerType,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Option] | None = None,
) -> LRScheduler | GreedyLR:
    """Build a schedule of an optimizer's own groups; `get_scheduler` says what it is given."""
    kind = SchedulerType(getattr(name, "value", name))
    options = scheduler_specific_kwargs or {}
    if kind == SchedulerType.CONSTANT:
        return LambdaLR(optimizer, lambda _: 1)
    if kind == SchedulerType.REDUCE_ON_PLATEAU:
        with _naming_options(kind, ReduceLROnPlateau, options):
            return ReduceLROnPlateau(optimizer, **options)
    if kind == SchedulerType.GREEDY:
        with _naming_options(kind, GreedyLR, options):
            return GreedyLR(optimizer, **options)
    if num_warmup_steps is None:
        raise ArgumentError(f"The schedule {kind.value!r} requires `num_warmup_steps`, please provide that argument.")
    if num_training_steps is None and kind in NEEDS_TOTAL:
        raise ArgumentError(f"The schedule {kind.value!r} requires `num_training_steps`, please provide that argument.")
    factor, make_options = FACTORS[kind]
    counts = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    # The constant schedule with warmup takes no options upstream and leaves them unread; here they are an error.
    with _naming_options(kind, make_options or factor, options):
        if make_options is not None:
            options = make_options(optimizer, **counts, **options)
        takes = inspect.signature(factor)
        needed = {name: count for name, count in counts.items() if name in takes.parameters}
        bound = takes.bind(0, **needed, **options)
    bound.apply_defaults()  # scripts read all of them off the schedule
    return LambdaLR(optimizer, partial(factor, **bound.kwargs))


@contextlib.contextmanager
def _naming_options(kind: SchedulerType, taker: Callable[..., object], options: Options) -> Iterator[None]:
    """Raise an error that names the options which a schedule takes, where it does not take the given ones."""
    try:
        yield
    except TypeError as error:
        given = ("update", "optimizer", "num_warmup_steps", "num_training_steps")  # by the trainer
        names = [name for name in inspect.signature(taker).parameters if name not in given]
        raise ArgumentError(
            f"`lr_scheduler_type={kind.value!r}` does not work with `{shown('lr_scheduler_kwargs', options)}`: {error}."
            f"\n\nHint: the options of this schedule are: "
            f"{', '.join(names) or 'none'}."
        ) from error


def follows_metric(scheduler: object) -> bool:
    """Return whether a schedule is stepped with a metric after evaluations, not after updates."""
    return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


State = dict[str, object]  # DeepSpeed's own


class DeepSpeedSchedule:
    """A schedule of DeepSpeed that the training steps, once an update, as DeepSpeed's engine does.

    Args:
        section: The section: `type`, and `params` without an `auto`.
        optimizer: Whose rates it sets.

    Raises:
        ArgumentError: DeepSpeed refuses the section.

    Mirrors:
        `accelerate.utils.DeepSpeedSchedulerWrapper`, 1.15.
    """

    def __init__(self, section: Mapping[str, object], optimizer: torch.optim.Optimizer) -> None:
        kind = getattr(importlib.import_module("deepspeed.runtime.lr_schedules"), str(section["type"]))
        try:
            self.scheduler = kind(optimizer, **cast(State, section.get("params") or {}))
        except (TypeError, ValueError, AssertionError) as error:
            raise ArgumentError(
                f"The DeepSpeed configuration's section `scheduler` does not work: {section['type']} says: {error}.\n\n"
                "Hint: mend its `params`, or leave the section out and set `lr_scheduler_type`."
            ) from error
        self.optimizer = optimizer

    def step(self) -> None:
        """Set the rates of the next update."""
        self.scheduler.step()

    def get_last_lr(self) -> list[float]:
        """The rates in force, one for each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> State:
        """What DeepSpeed keeps of it."""
        state: State = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: State) -> None:
        """Continue from a state."""
        self.scheduler.load_state_dict(state_dict)
