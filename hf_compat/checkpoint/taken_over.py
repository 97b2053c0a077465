"""What optimizers and schedules hold once they have taken over a state: all that their next step relies on.

What a state lacks shows only beside the object that took it over: its class, and how many groups it has.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping

import torch

from hf_compat.checkpoint.files import short
from hf_compat.checkpoint.forms import MOMENTS, unfit
from hf_compat.checkpoint.pickles import Plain

logger = logging.getLogger(__name__)

_NEED_MORE = (torch.optim.LBFGS, torch.optim.SparseAdam)  # a closure, sparse gradients
_WAYS = ("foreach", "fused", "capturable", "differentiable")  # how a step is worked out: the state is the same


def check_optimizer_took_over(path: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what an optimizer of torch has taken over and cannot step with; of other optimizers nothing is known.

    Values of a parameter's shape get the parameter's memory layout, in any optimizer. Parameters without a state are
    warned of: they may have had no gradient yet, and their state starts anew.

    Raises:
        CheckpointError: The state of a parameter lacks a value, or has a moment of another shape than the parameter.
    """
    for parameter, state in optimizer.state.items():
        # Kernels walk all of them by one set of strides. A value with other strides trains other numbers, and one
        # that repeats a number (stride 0) ends the process.
        for name, value in state.items():
            is_plain = type(value) is torch.Tensor and type(parameter) in (torch.Tensor, torch.nn.Parameter)
            if is_plain and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for group in optimizer.param_groups:
        states = [(parameter, optimizer.state.get(parameter)) for parameter in group["params"]]
        kept = [(parameter, state) for parameter, state in states if state]
        needed = _fresh_values(type(optimizer), group) if kept else set()
        for parameter, state in kept:
            wrong = _lacking(state, needed) or _uneven(state, parameter)
            if wrong is not None:
                raise unfit(path, wrong)
        if 0 < len(kept) < len(states):
            logger.warning(
                "%s has no state of the optimizer for %d of %d parameters of a group: theirs start anew.",
                path,
                len(states) - len(kept),
                len(states),
            )


def _fresh_values(kind: type[torch.optim.Optimizer], group: Mapping[str, object]) -> set[str]:
    """Return the names of the values that an optimizer keeps of a parameter, after a step with these options."""
    if issubclass(kind, _NEED_MORE):
        return set()
    known = inspect.signature(kind).parameters.keys() - {"params", "lr", *_WAYS}
    parameter = torch.zeros(1, 1, requires_grad=True)
    parameter.grad = torch.zeros(1, 1)
    options: dict[str, Plain] = {name: value for name, value in group.items() if name in known}
    make: Callable[..., torch.optim.Optimizer] = kind
    optimizer = make([parameter], lr=1.0, **options)
    optimizer.step()
    return {str(name) for name in optimizer.state[parameter]}


def _lacking(state: Mapping[str, object], needed: set[str]) -> str | None:
    missing = sorted(needed - state.keys())
    return f"the state of a parameter lacks `{missing[0]}`" if missing else None


def _uneven(state: Mapping[str, object], parameter: torch.Tensor) -> str | None:
    for name in MOMENTS:
        moment = state.get(name)
        if isinstance(moment, torch.Tensor) and moment.shape != parameter.shape:
            return f"`{name}` of a parameter has the shape {list(moment.shape)}, its parameter {list(parameter.shape)}"
    return None


def check_schedule_took_over(path: str, schedule: object) -> None:
    """Refuse rates, which a schedule has taken over, that are not one for each group that it was made for.

    Groups that a callback has added since have rates of their own.

    Raises:
        CheckpointError: There are fewer, or more.
    """
    groups = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    if groups is None:
        return
    made_for = min(len(getattr(schedule, "lr_lambdas", groups)), len(groups))
    for name in ("base_lrs", "_last_lr"):
        rates = getattr(schedule, name, None)
        if isinstance(rates, list) and len(rates) != made_for:
            raise unfit(path, f"`{name}` is {short(rates)}, and the optimizer has {made_for} groups")
