"""The twelve learning-rate schedules of HF.

Each schedule is a factor as a function of the update, which `LambdaLR` multiplies with the base learning rate. The
arithmetic keeps upstream's order of operations, since parity is bit for bit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hf_compat.errors import ArgumentError
from hf_compat.hf.enums import SchedulerType
from hf_compat.optim.greedy_lr import GreedyLR
from hf_compat.optim.layerwise import LayerWiseDummyOptimizer, LayerWiseDummyScheduler
from hf_compat.runtime.text import shown

Factor = Callable[[int], float]
Built = TypeVar("Built")
# The value of some option of a schedule, as `lr_scheduler_kwargs` gives it.
Option: TypeAlias = Any
WSD_SHAPES = ("linear", "cosine", "1-sqrt")


def _warmup(update: int, num_warmup_steps: int) -> float:
    return float(update) / float(max(1, num_warmup_steps))


def _progress(update: int, num_warmup_steps: int, num_training_steps: int) -> float:
    return float(update - num_warmup_steps) / float(max(1, num_training_steps - num_warmup_steps))


def _constant_with_warmup(update: int, *, num_warmup_steps: int) -> float:
    return _warmup(update, num_warmup_steps) if update < num_warmup_steps else 1.0


def _linear(update: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    return max(0.0, float(num_training_steps - update) / float(max(1, num_training_steps - num_warmup_steps)))


def _half_cosine(progress: float, num_cycles: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * progress))


def _cosine(
    update: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5, min_lr_rate: float = 0.0
) -> float:
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    factor = _half_cosine(_progress(update, num_warmup_steps, num_training_steps), num_cycles)
    return max(0, factor * (1 - min_lr_rate) + min_lr_rate)


def _cosine_with_restarts(update: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1) -> float:
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    progress = _progress(update, num_warmup_steps, num_training_steps)
    if progress >= 1.0:
        return 0.0
    within_cycle = (float(num_cycles) * progress) % 1.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * within_cycle)))


def _polynomial(
    update: int, *, num_warmup_steps: int, num_training_steps: int, lr_end: float, power: float, lr_init: float
) -> float:
    # LambdaLR multiplies by lr_init, so each learning rate is divided by it here.
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    if update > num_training_steps:
        return lr_end / lr_init
    remaining = 1 - (update - num_warmup_steps) / (num_training_steps - num_warmup_steps)
    return ((lr_init - lr_end) * remaining**power + lr_end) / lr_init


def _inverse_sqrt(update: int, *, num_warmup_steps: int, timescale: int) -> float:
    if update < num_warmup_steps:
        return _warmup(update, num_warmup_steps)
    return 1.0 / math.sqrt((update + (timescale - num_warmup_steps)) / timescale)


def _cosine_warmup_with_min_lr(
    update: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float,
    min_lr_rate: float,
    warmup_lr_rate: float | None,
) -> float:
    # This schedule is one update ahead of the others: its first update already has a learning rate above 0.
    if update < num_warmup_steps:
        if warmup_lr_rate is None:
            return (update + 1.0) / max(1.0, float(num_warmup_steps))
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * float(update) / max(1, float(num_warmup_steps) - 1)
    progress = (float(update) - num_warmup_steps + 1.0) / max(1.0, float(num_training_steps) - num_warmup_steps)
    factor = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
    return max(0, factor * (1 - min_lr_rate) + min_lr_rate)


def _warmup_stable_decay(
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


def _make_polynomial(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, lr_end: float = 1e-7, power: float = 1.0
) -> Factor:
    lr_init = optimizer.defaults["lr"]
    if not lr_init > lr_end:
        raise ArgumentError(f"`lr_end={lr_end}` must be smaller than the initial learning rate {lr_init}.")
    return partial(
        _polynomial,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_training_steps,
        lr_end=lr_end,
        power=power,
        lr_init=lr_init,
    )


def _min_lr_rate(optimizer: Optimizer, min_lr: float | None, min_lr_rate: float | None) -> float:
    if (min_lr is None) == (min_lr_rate is None):
        raise ArgumentError(
            f"`lr_scheduler_kwargs` has `min_lr={min_lr}` and `min_lr_rate={min_lr_rate}`.\n\n"
            "Hint: this schedule needs exactly one of them."
        )
    return min_lr / optimizer.defaults["lr"] if min_lr is not None else min_lr_rate  # type: ignore[return-value]  # one is set


def _make_cosine_with_min_lr(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Factor:
    rate = _min_lr_rate(optimizer, min_lr, min_lr_rate)
    return partial(
        _cosine,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_training_steps,
        num_cycles=num_cycles,
        min_lr_rate=rate,
    )


def _make_cosine_warmup_with_min_lr(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Factor:
    return partial(
        _cosine_warmup_with_min_lr,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_training_steps,
        num_cycles=num_cycles,
        min_lr_rate=_min_lr_rate(optimizer, min_lr, min_lr_rate),
        warmup_lr_rate=warmup_lr_rate,
    )


def _make_inverse_sqrt(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, timescale: int | None = None
) -> Factor:
    return partial(_inverse_sqrt, num_warmup_steps=num_warmup_steps, timescale=timescale or num_warmup_steps or 10_000)


def _make_warmup_stable_decay(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int | None,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
) -> Factor:
    for name, shape in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if shape not in WSD_SHAPES:
            raise ArgumentError(f"`{name}={shape!r}` is not known.\n\nHint: choose one of {WSD_SHAPES}.")
    if num_stable_steps is None:
        if num_training_steps is None:
            raise ArgumentError("Either `num_training_steps` or `num_stable_steps` must be specified.")
        num_stable_steps = num_training_steps - num_warmup_steps - num_decay_steps
    return partial(
        _warmup_stable_decay,
        num_warmup_steps=num_warmup_steps,
        num_stable_steps=num_stable_steps,
        num_decay_steps=num_decay_steps,
        warmup_type=warmup_type,
        decay_type=decay_type,
        min_lr_ratio=min_lr_ratio,
        num_cycles=num_cycles,
    )


def _make_linear(optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int) -> Factor:
    return partial(_linear, num_warmup_steps=num_warmup_steps, num_training_steps=num_training_steps)


def _make_cosine(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5
) -> Factor:
    return partial(
        _cosine, num_warmup_steps=num_warmup_steps, num_training_steps=num_training_steps, num_cycles=num_cycles
    )


def _make_cosine_with_restarts(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1
) -> Factor:
    return partial(
        _cosine_with_restarts,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_training_steps,
        num_cycles=num_cycles,
    )


def _make_constant_with_warmup(optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int | None) -> Factor:
    return partial(_constant_with_warmup, num_warmup_steps=num_warmup_steps)


FACTORS: dict[SchedulerType, Callable[..., Factor]] = {
    SchedulerType.LINEAR: _make_linear,
    SchedulerType.COSINE: _make_cosine,
    SchedulerType.COSINE_WITH_RESTARTS: _make_cosine_with_restarts,
    SchedulerType.POLYNOMIAL: _make_polynomial,
    SchedulerType.CONSTANT_WITH_WARMUP: _make_constant_with_warmup,
    SchedulerType.INVERSE_SQRT: _make_inverse_sqrt,
    SchedulerType.COSINE_WITH_MIN_LR: _make_cosine_with_min_lr,
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: _make_cosine_warmup_with_min_lr,
    SchedulerType.WARMUP_STABLE_DECAY: _make_warmup_stable_decay,
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
        A `torch.optim.lr_scheduler.LRScheduler`, or `GreedyLR`. Of a layerwise optimizer each parameter gets a schedule
        of its own, and what is returned stands for all.

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
        return LambdaLR(optimizer, _one)
    if kind == SchedulerType.REDUCE_ON_PLATEAU:
        return _with_options(kind, ReduceLROnPlateau, optimizer, **options)
    if kind == SchedulerType.GREEDY:
        return _with_options(kind, GreedyLR, optimizer, **options)
    if num_warmup_steps is None:
        raise ArgumentError(f"The schedule {kind.value!r} requires `num_warmup_steps`, please provide that argument.")
    if num_training_steps is None and kind in NEEDS_TOTAL:
        raise ArgumentError(f"The schedule {kind.value!r} requires `num_training_steps`, please provide that argument.")
    # The constant schedule with warmup takes no options upstream and leaves them unread; here they are an error.
    factor = _with_options(kind, FACTORS[kind], optimizer, num_warmup_steps, num_training_steps, **options)
    return LambdaLR(optimizer, factor)


def _one(_: int) -> float:
    return 1


def _with_options(
    kind: SchedulerType, build: Callable[..., Built], *args: Optimizer | int | None, **options: Option
) -> Built:
    try:
        return build(*args, **options)
    except TypeError as error:
        raise ArgumentError(
            f"`lr_scheduler_type={kind.value!r}` does not work with `{shown('lr_scheduler_kwargs', options)}`: {error}."
            f"\n\nHint: the options of this schedule are: {_keywords_of(build)}."
        ) from error


def _keywords_of(build: Callable[..., object]) -> str:
    given = ("optimizer", "num_warmup_steps", "num_training_steps")  # by the trainer
    return ", ".join(name for name in inspect.signature(build).parameters if name not in given) or "none"


def follows_metric(scheduler: object) -> bool:
    """Return whether a schedule is stepped with a metric after evaluations, not after updates."""
    return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"
