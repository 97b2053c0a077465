"""What the plain contents of state files look like: types, shapes and ranges that every owner relies on.

An optimizer, a schedule and a random generator take over whatever they are given, and fail updates later, or never: a
learning rate that is text, a moment of another shape. So each content is looked at before it is handed over.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn

from hf_compat.checkpoint.files import first_line, short
from hf_compat.checkpoint.reading import COMPILED
from hf_compat.errors import CheckpointError

_RATES = ("lr", "initial_lr", "weight_decay", "eps", "momentum", "dampening", "betas")
_SECONDMOMENTS = {"exp_avg_sq", "exp_avg_sq_row", "exp_inf", "exp_avg_diff"}
_SWITCHES = ("amsgrad", "nesterov", "maximize", "foreach", "capturable", "differentiable", "fused")
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg")
Kept = Mapping[str, Any]  # of a parameter: each optimizer has its own values
_COUNTS = ("last_epoch", "_step_count")
_SCHEDULED_RATES = ("base_lrs", "_last_lr")


def check_optimizer(path: str, content: object) -> None:
    """Refuse what is no state of an optimizer of torch.

    Raises:
        CheckpointError: A part has another type, or rates and moments are no numbers of theirs.
    """
    wrong = _optimizer_problem(content)
    if wrong is not None:
        raise unfit(path, wrong)


def check_schedule(path: str, content: object) -> None:
    """Refuse what is no state of a schedule of torch.

    Raises:
        CheckpointError: A count or a rate is none.
    """
    if not isinstance(content, Mapping):
        raise unfit(path, f"it holds {short(content)}, not fields")
    for name in _COUNTS:
        if name in content and not _is_count(content[name]):
            raise unfit(path, f"`{name}` is {short(content[name])}, not a whole number")
    for name in _SCHEDULED_RATES:
        if name in content and not (_is_list(content[name]) and all(map(_is_rate, content[name]))):
            raise unfit(path, f"`{name}` is {short(content[name])}, not a list of numbers")
    functions = content.get("lr_lambdas", [])
    if not _is_list(functions) or not all(one is None or isinstance(one, Mapping) for one in functions):
        raise unfit(path, f"`lr_lambdas` is {short(functions)}, not a list of states")


def check_random_states(path: str, states: object) -> None:
    """Refuse random states that their generators do not take; the generators in use stay as they are.

    Args:
        path: The file.
        states: As `runtime.rng.read_rng` returns them, or as `transformers` writes them.

    Raises:
        CheckpointError: One is damaged.
    """
    wrong = "no random states" if states is None else random_states_problem(states)
    if wrong is not None:
        raise unfit(path, f"it holds {wrong}")


def random_states_problem(states: object) -> str | None:
    """Return what is wrong with random states; None, too, where none were kept."""
    if states is None:
        return None
    if not isinstance(states, Mapping):
        return f"{short(states)} in place of random states"
    try:
        version, numbers, gauss = states["python"]
        random.Random().setstate((version, tuple(numbers), gauss))
        name, keys, *rest = states["numpy"]
        np.random.RandomState().set_state((name, np.asarray(keys).astype(np.uint32), *rest))
        torch.Generator().set_state(states["cpu"])
    except Exception as error:  # generators raise what they like
        return f"random states of {type(error).__name__}: {first_line(error)}"
    cuda = states.get("cuda")
    devices = cuda if isinstance(cuda, (list, tuple)) else [cuda]
    if not all(one is None or (isinstance(one, torch.Tensor) and one.dtype == torch.uint8) for one in devices):
        return "random states of `cuda` that are no bytes"
    return None


def _optimizer_problem(content: object) -> str | None:
    if not isinstance(content, Mapping):
        return f"it holds {short(content)}, not the state of an optimizer"
    groups, states = content.get("param_groups"), content.get("state")
    if not _is_list(groups) or not all(isinstance(group, Mapping) for group in groups):
        return f"`param_groups` is {short(groups)}, not a list of groups"
    if not isinstance(states, Mapping) or not all(isinstance(kept, Mapping) for kept in states.values()):
        return "`state` is no mapping of parameters to their states"
    rates = [[name for name in _RATES if name in group] for group in groups]
    if any(names != rates[0] for names in rates):
        return f"the groups of `param_groups` have different rates: {', '.join(map(short, rates))}"
    found = [_group_problem(index, group) for index, group in enumerate(groups)]
    found += [_state_problem(index, kept) for index, kept in states.items()]
    return next(filter(None, found), None) or _states_problem(groups, states)


def _group_problem(index: int, group: Mapping[str, object]) -> str | None:
    where = f"param_groups[{index}]"
    parameters = group.get("params")
    if not _is_list(parameters) or not all(isinstance(one, str) or _is_count(one) for one in parameters):
        return f"`{where}.params` is {short(parameters)}, not a list of parameters"
    for name in _RATES:
        values = group.get(name, 0.0)
        if values is None and group.get("relative_step"):  # Adafactor works its rate out
            continue
        if name == "betas" and not (_is_list(values) and len(values) >= 2) and name in group:
            return f"`{where}.betas` is {short(values)}, not a pair of numbers"
        if not all(_is_rate(value) for value in (values if _is_list(values) else [values])):
            return f"`{where}.{name}` is {short(values)}, not a number"
    if "initial_lr" in group and "lr" not in group:
        return f"`{where}.lr` is missing"
    for name in _SWITCHES:
        if not isinstance(group.get(name), (bool, type(None))):
            return f"`{where}.{name}` is {short(group[name])}, not true or false"
    return None


def _state_problem(index: object, kept: Mapping[str, object]) -> str | None:
    where = f"state[{index}]"
    step = kept.get("step", 0)
    if not _is_rate(step):
        return f"`{where}.step` is {short(step)}, not a number"
    for name in MOMENTS:
        moment = kept.get(name)
        if name not in kept or (moment is None and name == "momentum_buffer"):  # SGD without momentum has none
            continue
        if not (isinstance(moment, torch.Tensor) and moment.is_floating_point()):
            return f"`{where}.{name}` is no tensor of floating-point numbers"
    return None


def _states_problem(groups: Sequence[Mapping[str, Sequence[object]]], states: Mapping[object, Kept]) -> str | None:
    known = {parameter for group in groups for parameter in group["params"]}
    unknown = [parameter for parameter in states if parameter not in known]
    if unknown:
        return f"`state` has the parameter {short(unknown[0])}, which is in no group"
    halves = [index for index, kept in states.items() if "exp_avg" in kept and not _SECONDMOMENTS & kept.keys()]
    if 0 < len(halves) < sum("exp_avg" in kept for kept in states.values()):
        return f"`state[{halves[0]}]` has no second moment, unlike others"
    uneven = [index for index, kept in states.items() if len(_moment_shapes(kept)) > 1]
    # of some optimizers no two moments are of one shape
    has_even = any(len(shapes) == 1 and shapes != {torch.Size([])} for shapes in map(_moment_shapes, states.values()))
    return f"the moments of `state[{uneven[0]}]` have different shapes" if uneven and has_even else None


def _moment_shapes(kept: Kept) -> set[torch.Size]:
    return {kept[name].shape for name in MOMENTS if isinstance(kept.get(name), torch.Tensor)}


def losses_problem(losses: Mapping[str, object]) -> str | None:
    """Return which entry of a loss log's state is none; what an earlier release did not write may be missing."""
    for name in ("tr_loss", "total_loss"):
        value = losses.get(name, 0.0)  # the first version wrote tensors
        if not isinstance(value, (int, float)) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            return name
    for name in ("last_logged", "first_update", "nonfinite_steps"):
        value = losses.get(name, 0)
        if not _is_count(value) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            return name
    averages = losses.get("scalars", {"sums": {}, "weights": {}})
    if not isinstance(averages, Mapping) or averages.keys() != {"sums", "weights"}:
        return "scalars"
    sums, weights = averages["sums"], averages["weights"]
    if not isinstance(sums, Mapping) or not isinstance(weights, Mapping) or sums.keys() != weights.keys():
        return "scalars"
    are_numbers = all(isinstance(value, (int, float, torch.Tensor)) for value in (*sums.values(), *weights.values()))
    return None if are_numbers else "scalars"


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 2**63


def _is_rate(value: object) -> bool:
    """Return whether a value is a finite number; a tensor may hold one, as capturable optimizers have it."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and abs(value) < math.inf


def unfit(path: str, what: str) -> CheckpointError:
    """Return the error for a state that nothing can go on with."""
    return CheckpointError(f"{path} cannot be used: {what}.\n\nHint: resume from another checkpoint.")


def check_weights(where: str, weights: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Refuse weights that a model cannot take.

    Raises:
        CheckpointError: One has another shape, or another kind of number.
    """
    stored = {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in weights.items()}
    wrong = misfits(stored, weights_that_torch_loads(model).items())
    if wrong:
        raise CheckpointError(f"{where} does not fit the model: {'; '.join(wrong[:3])}.")


def weights_that_torch_loads(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that a checkpoint has to hold as the model has them, under names of an uncompiled model.

    A part that overrides `load_state_dict` or `_load_from_state_dict`, or has hooks before it, may take others. So may
    parameters whose parts lie elsewhere (DeepSpeed's ZeRO 3).
    """
    model = getattr(model, "_orig_mod", model)
    if _is_overridden(type(model).load_state_dict):
        return {}
    own = tuple(f"{name}." if name else "" for name, part in model.named_modules() if _loads_by_itself(part))
    return {
        name.replace(COMPILED, ""): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "ds_shape") and not (own and name.startswith(own))
    }


def _loads_by_itself(part: nn.Module) -> bool:
    hooks = (getattr(hook, "hook", hook) for hook in part._load_state_dict_pre_hooks.values())
    return any(map(_is_overridden, (type(part)._load_from_state_dict, *hooks)))


def _is_overridden(method: Callable[..., object]) -> bool:
    return (getattr(method, "__module__", None) or "").partition(".")[0] not in ("torch", "lightning", "hf_compat")


def misfits(stored: Mapping[str, tuple[Sequence[int], bool]], own: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """List the weights that have another shape or kind of number than a model's.

    Args:
        stored: Name → shape, and whether its numbers are floating-point numbers.
        own: The model's weights.
    """
    found = []
    for name, tensor in own:
        shape, is_float = stored.get(name, (tensor.shape, tensor.is_floating_point()))
        if list(shape) != list(tensor.shape):
            found.append(f"`{name}` has the shape {list(shape)}, in the model {list(tensor.shape)}")
        elif is_float != tensor.is_floating_point():
            found.append(f"`{name}` holds {'' if is_float else 'no '}floating-point numbers, unlike the model's")
    return found
