"""Whether `optim_args` and `lr_scheduler_kwargs` work: a small optimizer and its schedule are built and asked.

So an option that the schedule does not take, or one of a wrong type, is told before anything is loaded or trained.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings

import torch
from torch.optim.lr_scheduler import LambdaLR

from hf_compat.errors import ArgumentError, HfCompatError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.optim.lr_schedulers import get_scheduler
from hf_compat.optim.optimizers import check_request, entry_of, get_optimizer_cls_and_kwargs
from hf_compat.runtime.text import shown

# What builders and schedules of torch raise for values that they cannot use.
_UNUSABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# Of the run that a schedule is asked about: before and after the warmup, in the middle, at the end.
_WARMUP, _TOTAL = 10, 1000
_ASKED = (0, 5, 10, 500, 999)
# A metric that improves, stays, and gets worse.
_METRICS = (1.0, 0.5, 0.5, 2.0, 3.0)


def check_optimization(args: TrainingArguments) -> None:
    """Build the optimizer and the schedule that the arguments ask for, and ask the schedule for rates.

    Raises:
        ArgumentError: One of them does not work with its options; the message names the argument.
        MissingOptimizer: The optimizer's package is missing.
    """
    check_schedule(args, check_optimizer(args))


def check_optimizer(args: TrainingArguments, model: torch.nn.Module | None = None) -> torch.optim.Optimizer | None:
    """Return the optimizer that the arguments ask for, of two numbers: one that decays, one that does not.

    Args:
        args: The arguments.
        model: The model, where it is known: GaLore and others choose among its parameters.

    Returns:
        The optimizer; None where it can only be made of a whole model's parameters.

    Raises:
        ArgumentError: It does not take its options, or the model has nothing for it.
        MissingOptimizer: Its package is missing.
        UnsupportedArgument: Something that it cannot be combined with.
    """
    check_request(args, model)
    if entry_of(args).needs_model:
        return None
    try:
        kind, keywords = get_optimizer_cls_and_kwargs(args)
        return kind(_two_groups(), **keywords)
    except HfCompatError:
        raise
    except _UNUSABLE as error:
        numbers = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
        told = ", ".join(f"`{shown(name, getattr(args, name))}`" for name in ("optim", "optim_args", *numbers))
        raise ArgumentError(f"The optimizer cannot be made: {error}.\n\nHint: check {told}.") from error


def check_schedule(args: TrainingArguments, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Ask the schedule of the arguments for learning rates, at some updates.

    Args:
        args: The arguments.
        optimizer: Whose learning rate it sets; one of torch's with `learning_rate` where none is given.

    Raises:
        ArgumentError: The schedule does not take its options, or gives no learning rate with them.
    """
    if optimizer is None:
        optimizer = torch.optim.SGD(_two_groups(), lr=args.learning_rate)
    try:
        rates = _rates(args, optimizer)
    except HfCompatError as error:
        if "lr_scheduler_type" in str(error):
            raise
        raise _unusable(args, str(error)) from error
    except _UNUSABLE as error:
        raise _unusable(args, f"{type(error).__name__}: {error}") from error
    if not all(math.isfinite(rate) for rate in rates):
        raise _unusable(args, "it gives learning rates that are not finite")


def _unusable(args: TrainingArguments, why: str) -> ArgumentError:
    options = shown("lr_scheduler_kwargs", args.lr_scheduler_kwargs)
    return ArgumentError(
        f"`{shown('lr_scheduler_type', args.lr_scheduler_type)}` does not work with `{options}` and "
        f"`learning_rate={args.learning_rate}`: {why}.\n\nHint: check these three."
    )


def _two_groups() -> list[dict[str, object]]:
    return [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]


def _rates(args: TrainingArguments, optimizer: torch.optim.Optimizer) -> list[float]:
    options = dict(args.lr_scheduler_kwargs or {})  # type: ignore[arg-type]  # a dict once normalised
    # a schedule that follows a metric may print what it does
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        schedule = get_scheduler(args.lr_scheduler_type, optimizer, _WARMUP, _TOTAL, options)
        if isinstance(schedule, LambdaLR):
            return [float(factor(update)) for factor in schedule.lr_lambdas for update in _ASKED]
        for metric in _METRICS:
            schedule.step(metric)  # type: ignore[arg-type]  # it follows a metric
        return [float(group["lr"]) for group in optimizer.param_groups]
