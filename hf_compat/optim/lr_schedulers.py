"""The learning-rate schedules of HF, and DeepSpeed's.

A schedule of HF is a factor as a function of the update, which `LambdaLR` multiplies with the base learning rate. The
factors keep upstream's order of operations, because parity is bit for bit. Scripts read their keywords by upstream's
names. The less common schedules are made by transformers.
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

from hf_compat.errors import ArgumentError, warn_user
from hf_compat.hf.arguments_rules import METRIC_SCHEDULES
from hf_compat.hf.enums import SchedulerType
from hf_compat.hf.value_types import plain
from hf_compat.interop.releases import of_transformers
from hf_compat.optim.prepared import unwrap_optimizer
from hf_compat.optim.stepping import LayerWiseDummyOptimizer, LayerWiseDummyScheduler
from hf_compat.runtime.inspection import delegated
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
    progress = float(update - num_warmup_steps) / float(max(1, num_training_steps - num_warmup_steps))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * progress)))


def _warmup(update: int, num_warmup_steps: int) -> float:
    return float(update) / float(max(1, num_warmup_steps))


# Schedules that need no transformers → the factor.
FACTORS: dict[SchedulerType, Callable[..., float]] = {
    SchedulerType.LINEAR: linear,
    SchedulerType.COSINE: cosine,
    SchedulerType.CONSTANT_WITH_WARMUP: constant_with_warmup,
}
# The other schedules → transformers' function that makes them.
OF_TRANSFORMERS = {
    SchedulerType.COSINE_WITH_RESTARTS: "get_cosine_with_hard_restarts_schedule_with_warmup",
    SchedulerType.POLYNOMIAL: "get_polynomial_decay_schedule_with_warmup",
    SchedulerType.INVERSE_SQRT: "get_inverse_sqrt_schedule",
    SchedulerType.COSINE_WITH_MIN_LR: "get_cosine_with_min_lr_schedule_with_warmup",
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    SchedulerType.WARMUP_STABLE_DECAY: "get_wsd_schedule",
}
_WITHOUT_TOTAL = (
    SchedulerType.CONSTANT_WITH_WARMUP,
    SchedulerType.INVERSE_SQRT,
    SchedulerType.WARMUP_STABLE_DECAY,
)


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
        `transformers.get_scheduler`.
    """
    if isinstance(optimizer, LayerWiseDummyOptimizer):
        for parameter, own in optimizer.optimizer_dict.items():
            schedule = make_schedule(name, own, num_warmup_steps, num_training_steps, scheduler_specific_kwargs)
            if follows_metric(schedule) or not isinstance(schedule, LRScheduler):
                raise ArgumentError(
                    f"The schedule '{SchedulerType(name).value}' follows a metric, and the optimizers of a layerwise "
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
    kind = SchedulerType(plain(name))
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
            raise _unknown_option(kind, follower, options, error) from error
    if num_warmup_steps is None:
        raise ArgumentError(f"The schedule '{kind.value}' requires `num_warmup_steps`, please provide that argument.")
    if num_training_steps is None and kind not in _WITHOUT_TOTAL:
        raise ArgumentError(f"The schedule '{kind.value}' requires `num_training_steps`, please provide that argument.")
    counts = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    own = FACTORS.get(kind)
    taker: Callable[..., Any] = own or of_transformers(
        "optimization", OF_TRANSFORMERS[kind], f"`lr_scheduler_type='{kind.value}'`"
    )
    # Upstream ignores options of the constant schedule with warmup. Here they are an error.
    try:
        takes = inspect.signature(taker)
        for name in counts.keys() - takes.parameters.keys():
            del counts[name]
        bound = takes.bind(0 if own else optimizer, **counts, **options)
        bound.apply_defaults()  # scripts read all of them off the schedule
        if own is None:
            made: LRScheduler = taker(*bound.args, **bound.kwargs)
            return made
    except (TypeError, ValueError) as error:
        raise _unknown_option(kind, taker, options, error) from error
    return LambdaLR(optimizer, partial(own, **bound.kwargs))


def _unknown_option(
    kind: SchedulerType, taker: Callable[..., object], options: Options, error: TypeError | ValueError
) -> ArgumentError:
    given = ("update", "optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")  # by the trainer
    names = [name for name in inspect.signature(taker).parameters if name not in given]
    return ArgumentError(
        f"`lr_scheduler_type='{kind.value}'` does not work with `{shown('lr_scheduler_kwargs', options)}`: {error}.\n\n"
        f"Hint: the options of this schedule are: {', '.join(names) or 'none'}."
    )


def follows_metric(scheduler: object) -> bool:
    """Whether a schedule steps with a metric after evaluations, instead of after updates."""
    return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


def is_schedule_of(scheduler: object, optimizer: object) -> bool:
    """Whether Lightning can hold a schedule: it is that of the optimizer, and has a state."""
    return getattr(scheduler, "optimizer", None) is optimizer and hasattr(scheduler, "state_dict")


def tell_of_other_optimizer(schedule: object, optimizer: object) -> None:
    """Warn of a schedule that sets the rates of another optimizer than the one that trains."""
    own = getattr(schedule, "optimizer", None)
    trained = {id(group) for group in getattr(optimizer, "param_groups", ())}  # of which a wrapper has the same ones
    if isinstance(own, Optimizer) and trained.isdisjoint(map(id, own.param_groups)):
        its, trained_one = (type(unwrap_optimizer(one)).__name__ for one in (own, optimizer))
        warn_user(
            f"The schedule ({type(schedule).__name__}) is one of another optimizer ({its}) than the one that trains "
            f"({trained_one}), whose learning rates stay as they are.\n\n"
            "Hint: pass both in `optimizers`, the schedule made of that optimizer."
        )


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

    step: Callable[[], None] = delegated("scheduler.step")
    state_dict: Callable[[], State] = delegated("scheduler.state_dict")
    load_state_dict: Callable[[State], None] = delegated("scheduler.load_state_dict")

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]
