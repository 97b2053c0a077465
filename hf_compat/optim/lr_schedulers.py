"""The learning-rate schedules of HF, and DeepSpeed's.

A schedule of HF is a factor as a function of the update, which `LambdaLR` multiplies with the base learning rate. The
factors keep upstream's order of operations, because parity is bit for bit. Scripts read their keywords by upstream's
names.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hf_compat.errors import ArgumentError
from hf_compat.hf.arguments_rules import METRIC_SCHEDULES
from hf_compat.hf.enums import SchedulerType
from hf_compat.interop.releases import of_transformers
from hf_compat.optim.optimizers import LayerWiseDummyOptimizer, LayerWiseDummyScheduler
from hf_compat.runtime.text import shown

State = dict[str, object]  # a schedule's own


class Schedule(Protocol):
    """A schedule that is not torch's own class, as transformers' GreedyLR."""

    def step(self, metrics: float) -> None: ...

    def get_last_lr(self) -> list[float]: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state_dict: State) -> None: ...


# A value of `lr_scheduler_kwargs`.
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
    """Fall to `lr_end`. LambdaLR multiplies by `lr_init`, which therefore divides each rate here."""
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    if update > num_training_steps:
        return lr_end / lr_init
    remaining = 1 - (update - num_warmup_steps) / (num_training_steps - num_warmup_steps)
    return ((lr_init - lr_end) * remaining**power + lr_end) / lr_init


def inverse_sqrt(update: int, *, num_warmup_steps: int, timescale: int) -> float:
    """Fall with the square root of the updates."""
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
    warmup_lr_rate: float | None = None,
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
        elif warmup_type == "cosine":
            factor = 0.5 * (1.0 - math.cos(math.pi * progress))
        else:
            factor = 1.0 - math.sqrt(1.0 - progress)
    elif update < num_warmup_steps + num_stable_steps:
        return 1.0
    elif update < num_warmup_steps + num_stable_steps + num_decay_steps:
        progress = float(update - num_warmup_steps - num_stable_steps) / float(max(1, num_decay_steps))
        if decay_type == "linear":
            factor = 1.0 - progress
        elif decay_type == "cosine":
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
    """Let the rate fall as slowly as it has risen, unless `timescale` is given."""
    return {"timescale": timescale or num_warmup_steps or 10_000}


def options_with_min_lr(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    **further: Option,
) -> Options:
    """Turn `min_lr` into a share of the initial learning rate."""
    if (min_lr is None) == (min_lr_rate is None):
        raise ArgumentError(
            f"`lr_scheduler_kwargs` has `min_lr={min_lr}` and `min_lr_rate={min_lr_rate}`.\n\n"
            "Hint: this schedule needs exactly one of them."
        )
    rate = min_lr / optimizer.defaults["lr"] if min_lr is not None else min_lr_rate
    return {"num_cycles": num_cycles, "min_lr_rate": rate, **further}


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
        "num_stable_steps": num_stable_steps,
        "num_decay_steps": num_decay_steps,
        "warmup_type": warmup_type,
        "decay_type": decay_type,
        "min_lr_ratio": min_lr_ratio,
        "num_cycles": num_cycles,
    }


# Name → the factor, and the function that converts the user's options if the factor needs it.
FACTORS: dict[SchedulerType, tuple[Callable[..., float], Callable[..., Options] | None]] = {
    SchedulerType.LINEAR: (linear, None),
    SchedulerType.COSINE: (cosine, None),
    SchedulerType.COSINE_WITH_RESTARTS: (cosine_with_restarts, None),
    SchedulerType.POLYNOMIAL: (polynomial, options_of_polynomial),
    SchedulerType.CONSTANT_WITH_WARMUP: (constant_with_warmup, None),
    SchedulerType.INVERSE_SQRT: (inverse_sqrt, options_of_inverse_sqrt),
    SchedulerType.COSINE_WITH_MIN_LR: (cosine_with_min_lr, options_with_min_lr),
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: (cosine_warmup_with_min_lr, options_with_min_lr),
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
) -> LRScheduler | Schedule:
    """Build a learning-rate schedule by its name.

    Args:
        name: One of `SchedulerType`.
        optimizer: The optimizer whose learning rates it sets.
        num_warmup_steps: Updates of linear warmup. Most schedules need them.
        num_training_steps: Updates of the run. Most schedules need them.
        scheduler_specific_kwargs: Further options (`num_cycles`, `min_lr` …).

    Returns:
        A schedule of torch, or transformers' `GreedyLR`. With a layerwise optimizer, each parameter
        gets its own schedule, and the result steps all of them.

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
) -> LRScheduler | Schedule:
    """Build a schedule of an optimizer's own groups, from the arguments of `get_scheduler`."""
    kind = SchedulerType(getattr(name, "value", name))
    options = scheduler_specific_kwargs or {}
    if kind == SchedulerType.CONSTANT:
        return LambdaLR(optimizer, lambda _: 1)
    if kind in METRIC_SCHEDULES:
        follower: type = ReduceLROnPlateau
        if kind == SchedulerType.GREEDY:
            follower = of_transformers("optimization", "GreedyLR", "`lr_scheduler_type='greedy'`")
        try:
            schedule: LRScheduler | Schedule = follower(optimizer, **options)
            return schedule
        except TypeError as error:
            raise _unknown_option(kind, (follower,), options, error) from error
    if num_warmup_steps is None:
        raise ArgumentError(f"The schedule {kind.value!r} requires `num_warmup_steps`, please provide that argument.")
    if num_training_steps is None and kind in NEEDS_TOTAL:
        raise ArgumentError(f"The schedule {kind.value!r} requires `num_training_steps`, please provide that argument.")
    factor, make_options = FACTORS[kind]
    counts = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    # Upstream ignores options of the constant schedule with warmup. Here they are an error.
    try:
        keywords = options if make_options is None else make_options(optimizer, **counts, **options)
        takes = inspect.signature(factor)
        needed = {name: count for name, count in counts.items() if name in takes.parameters}
        bound = takes.bind(0, **needed, **keywords)
    except TypeError as error:
        takers = (factor,) if make_options is None else (make_options, factor)
        raise _unknown_option(kind, takers, options, error) from error
    bound.apply_defaults()  # scripts read all of them off the schedule
    return LambdaLR(optimizer, partial(factor, **bound.kwargs))


def _unknown_option(
    kind: SchedulerType, takers: tuple[Callable[..., object], ...], options: Options, error: TypeError
) -> ArgumentError:
    # by the trainer, or without a name
    given = ("update", "optimizer", "num_warmup_steps", "num_training_steps", "lr_init", "further")
    taken = dict.fromkeys(name for taker in takers for name in inspect.signature(taker).parameters)
    names = [name for name in taken if name not in given]
    return ArgumentError(
        f"`lr_scheduler_type={kind.value!r}` does not work with `{shown('lr_scheduler_kwargs', options)}`: {error}.\n\n"
        f"Hint: the options of this schedule are: {', '.join(names) or 'none'}."
    )


def follows_metric(scheduler: object) -> bool:
    """Whether a schedule steps with a metric after evaluations, instead of after updates."""
    return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


class DeepSpeedSchedule:
    """A schedule of DeepSpeed that the training steps once an update, as DeepSpeed's engine does.

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
        self.scheduler.step()

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> State:
        state: State = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: State) -> None:
        self.scheduler.load_state_dict(state_dict)
