"""Check types, shapes and ranges of state files before their owners take them over.

An optimizer or a schedule accepts almost anything and fails updates later, or never. So each content is checked field
by field. Shapes of weights are read from headers, without the weights. The reader of `trainer_state.json` is here too.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import safetensors
import torch
from torch import nn

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.files import STATE_FILE_BYTES, check_regular, first_line, read_json, short
from hf_compat.checkpoint.reading import COMPILED, Contents, shard_names
from hf_compat.errors import CheckpointError
from hf_compat.hf.state import TrainerState

logger = logging.getLogger(__name__)

Kept = Mapping[str, Any]  # of a parameter: each optimizer has its own values
Kind = tuple[str, Callable[[object], bool]]  # in words, and whether a value is of it

_LARGEST_COUNT = 2**63
_SECONDMOMENTS = {"exp_avg_sq", "exp_avg_sq_row", "exp_inf", "exp_avg_diff"}
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg")
_RATES = ("lr", "initial_lr", "weight_decay", "eps", "momentum", "dampening", "betas")
_NEED_MORE = (torch.optim.LBFGS, torch.optim.SparseAdam)  # a closure, sparse gradients
_WAYS = ("foreach", "fused", "capturable", "differentiable")  # how a step is worked out: the state is the same


def wrong_field(values: Mapping[str, object], kinds: Mapping[str, Kind], where: str = "") -> str | None:
    """Return in words which value is not of its kind; fields that are missing are left to the caller.

    Args:
        values: The fields.
        kinds: Of those that are known.
        where: What stands before a field's name.
    """
    for name, (expected, fits) in kinds.items():
        if name in values and not fits(values[name]):
            return f"`{where}{name}` is {short(values[name])}, not {expected}"
    return None


def or_none(kind: Kind) -> Kind:
    """Return the kind of values that may also be missing."""
    expected, fits = kind
    return f"{expected}, or null", lambda value: value is None or fits(value)


def list_of(expected: str, fits: Callable[[Any], bool]) -> Kind:
    """Return the kind of lists of what fits."""
    return f"a list of {expected}", lambda value: _is_list(value) and all(map(fits, value))


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; truth values are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether a value is a whole number from the least on that fits 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _LARGEST_COUNT


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_scalar(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _is_rate(value: object) -> bool:
    """Return whether a value is a finite number; a tensor may hold one, as capturable optimizers have it."""
    return _is_scalar(value) or (isinstance(value, (int, float)) and abs(value) < math.inf)


def _is_moment(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _are_averages(value: object) -> bool:
    if not isinstance(value, Mapping) or value.keys() != {"sums", "weights"}:
        return False
    sums, weights = value["sums"], value["weights"]
    are_alike = isinstance(sums, Mapping) and isinstance(weights, Mapping) and sums.keys() == weights.keys()
    return are_alike and all(isinstance(one, (int, float, torch.Tensor)) for one in (*sums.values(), *weights.values()))


COUNT: Kind = ("a whole number from 0 on", is_count)
AMOUNT: Kind = ("a number from 0 on", lambda value: is_number(value) and 0 <= value < math.inf)
NUMBER: Kind = ("a number", is_number)
SEED: Kind = ("a seed", lambda value: isinstance(value, int) and is_count(value >> 1))
FLAG: Kind = ("true or false", lambda value: isinstance(value, bool))
TEXT: Kind = ("text", lambda value: isinstance(value, str))
MAPPING: Kind = ("a mapping", lambda value: isinstance(value, dict))

# What an optimizer holds: of a group of parameters, and of each parameter.
_GROUP: dict[str, Kind] = {
    "params": list_of("parameters", lambda one: isinstance(one, str) or is_count(one)),
    **dict.fromkeys(_RATES, ("a number", lambda value: all(map(_is_rate, value if _is_list(value) else [value])))),
    "betas": ("a pair of numbers", lambda value: _is_list(value) and len(value) >= 2 and all(map(_is_rate, value))),
    **dict.fromkeys(
        ("amsgrad", "nesterov", "maximize", "foreach", "capturable", "differentiable", "fused"),
        ("true or false", lambda value: value is None or isinstance(value, bool)),
    ),
}
_OF_PARAMETER: dict[str, Kind] = {
    "step": ("a number", _is_rate),
    **dict.fromkeys(MOMENTS, ("a tensor of floating-point numbers", _is_moment)),
    # SGD without momentum has none
    "momentum_buffer": ("a tensor of floating-point numbers", lambda value: value is None or _is_moment(value)),
}
_SCHEDULE: dict[str, Kind] = {
    **dict.fromkeys(("last_epoch", "_step_count"), ("a whole number", lambda value: is_count(value, -1))),
    **dict.fromkeys(("base_lrs", "_last_lr"), list_of("numbers", _is_rate)),
    "lr_lambdas": list_of("states", lambda one: one is None or isinstance(one, Mapping)),
}
# What the log of losses holds; the first version wrote tensors.
LOSSES: dict[str, Kind] = {
    **dict.fromkeys(("tr_loss", "total_loss"), ("a number", lambda v: isinstance(v, (int, float)) or _is_scalar(v))),
    **dict.fromkeys(
        ("last_logged", "first_update", "nonfinite_steps"),
        ("a whole number", lambda value: is_count(value, -1) or _is_scalar(value)),
    ),
    "scalars": ("sums and weights", _are_averages),
}


def unfit(path: str, what: str) -> CheckpointError:
    """Return the error for a state that nothing can go on with."""
    return CheckpointError(f"{path} cannot be used: {what}.\n\nHint: resume from another checkpoint.")


def check_optimizer(path: str, content: object) -> None:
    """Refuse what is no state of an optimizer of torch.

    Raises:
        CheckpointError: A part has another type, or rates and moments are no numbers of theirs.
    """
    wrong = _optimizer_problem(content)
    if wrong is not None:
        raise unfit(path, wrong)


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
    for index, group in enumerate(groups):
        # Adafactor works rates out that are None
        given = {name: value for name, value in group.items() if value is not None or not group.get("relative_step")}
        wrong = wrong_field({"params": None, **given}, _GROUP, f"param_groups[{index}].")
        if wrong is None and "initial_lr" in group and "lr" not in group:
            wrong = f"`param_groups[{index}].lr` is missing"
        if wrong is not None:
            return wrong
    wrongs = (wrong_field(kept, _OF_PARAMETER, f"state[{index}].") for index, kept in states.items())
    return next(filter(None, wrongs), None) or _states_problem(groups, states)


def _states_problem(groups: Sequence[Mapping[str, Sequence[object]]], states: Mapping[object, Kept]) -> str | None:
    known = {parameter for group in groups for parameter in group["params"]}
    unknown = [parameter for parameter in states if parameter not in known]
    if unknown:
        return f"`state` has the parameter {short(unknown[0])}, which is in no group"
    halves = [index for index, kept in states.items() if "exp_avg" in kept and not _SECONDMOMENTS & kept.keys()]
    if 0 < len(halves) < sum("exp_avg" in kept for kept in states.values()):
        return f"`state[{halves[0]}]` has no second moment, unlike others"
    shapes = {
        index: {kept[name].shape for name in MOMENTS if isinstance(kept.get(name), torch.Tensor)}
        for index, kept in states.items()
    }
    uneven = [index for index, found in shapes.items() if len(found) > 1]
    # of some optimizers no two moments are of one shape
    has_even = any(len(found) == 1 and found != {torch.Size([])} for found in shapes.values())
    return f"the moments of `state[{uneven[0]}]` have different shapes" if uneven and has_even else None


def check_schedule(path: str, content: object) -> None:
    """Refuse what is no state of a schedule of torch.

    Raises:
        CheckpointError: A count or a rate is none.
    """
    if not isinstance(content, Mapping):
        raise unfit(path, f"it holds {short(content)}, not fields")
    wrong = wrong_field(content, _SCHEDULE)
    if wrong is not None:
        raise unfit(path, wrong)


def check_random_states(path: str, states: object) -> None:
    """Refuse random states that their generators do not take; the generators in use stay as they are.

    Args:
        path: The file.
        states: As `runtime.seeding.read_rng` returns them, or as `transformers` writes them.

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
            wrong = _lacking(state, needed, parameter)
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
    options: dict[str, Any] = {name: value for name, value in group.items() if name in known}
    make: Callable[..., torch.optim.Optimizer] = kind
    optimizer = make([parameter], lr=1.0, **options)
    optimizer.step()
    return {str(name) for name in optimizer.state[parameter]}


def _lacking(state: Kept, needed: set[str], parameter: torch.Tensor) -> str | None:
    missing, own = sorted(needed - state.keys()), list(parameter.shape)
    if missing:
        return f"the state of a parameter lacks `{missing[0]}`"
    for name in MOMENTS:
        moment = state.get(name)
        if isinstance(moment, torch.Tensor) and list(moment.shape) != own:
            return f"`{name}` of a parameter has the shape {list(moment.shape)}, its parameter {own}"
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


Shapes = dict[str, tuple[list[int], bool]]  # by weight: its shape, and whether it has floating-point numbers


def weight_shapes(path: str) -> Shapes:
    """Read the entries of each weight in the header of a safetensors file.

    Raises:
        CheckpointError: The file is damaged, or lies about its weights.
    """
    check_regular(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:  # it compares the header with the file's size
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return {
                name: (list(one.get_shape()), one.get_dtype().startswith(("F", "BF"))) for name, one in slices.items()
            }
    except Exception as error:  # safetensors raises what it likes
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def misfitting_weights(
    folder: str, model: torch.nn.Module, adapter: str | None = None, subfolder: str = ""
) -> Iterator[str]:
    """Yield what is wrong with a folder's safetensors for a model; weights that are missing are warned of elsewhere.

    Args:
        folder: The checkpoint.
        model: The model.
        adapter: The name of the adapter that the folder holds, for a model of PEFT.
        subfolder: Where in the folder that adapter is.
    """
    compared = [(_plain(name, adapter), tensor) for name, tensor in weights_that_torch_loads(model).items()]
    contents = Contents(folder)
    try:
        for name in _files(contents, adapter, subfolder):
            stored = {_plain(key, None): facts for key, facts in weight_shapes(contents.need(name)).items()}
            if not stored and compared:
                yield f"{name} holds no weights"
            for wrong in misfits(stored, compared)[:3]:
                yield f"{name} does not fit the model: {wrong}"
    except CheckpointError as error:
        yield first_line(error).removesuffix(".")


def stored_names(folder: str) -> set[str]:
    """Return the names of the weights in a folder's safetensors."""
    contents = Contents(folder)
    return {key for name in _files(contents, None, "") for key in weight_shapes(contents.need(name))}


def missing_adapter_weights(folder: str, model: torch.nn.Module, adapter: str, subfolder: str = "") -> list[str]:
    """List an adapter's weights that a folder does not hold: PEFT leaves them as they are and says nothing."""
    contents = Contents(folder)
    files = _files(contents, adapter, subfolder)
    stored = {_plain(key, None) for name in files for key in weight_shapes(contents.need(name))}
    own = [_plain(name, adapter) for name in model.state_dict() if f".{adapter}." in name and ".lora_" in name]
    return [name for name in own if name not in stored] if stored else []


def _plain(name: str, adapter: str | None) -> str:
    name = name.replace(COMPILED, "")
    return name if adapter is None else name.replace(f".{adapter}.", ".", 1)


def _files(contents: Contents, adapter: str | None, subfolder: str) -> list[str]:
    """List the safetensors files of which a folder's weights consist."""
    before = f"{subfolder}/" if subfolder else ""
    single = names.ADAPTER_SAFE_WEIGHTS_NAME if adapter is not None else names.SAFE_WEIGHTS_NAME
    if contents.find(before + single) is not None:
        return [before + single]
    index = contents.find(names.SAFE_WEIGHTS_INDEX_NAME) if adapter is None else None
    return [] if index is None else shard_names(index)


def read_trainer_state(path: str | os.PathLike[str], where_missing: Mapping[str, float] | None = None) -> TrainerState:
    """Read a state that this package or `transformers` wrote.

    Args:
        path: The file.
        where_missing: Values of fields that the file may leave open, as one that was made of a `.ckpt` does.

    Raises:
        CheckpointError: The file cannot be read, or a field has a value that no run writes, or is missing; the message
            names it.
    """
    values = read_json(path, STATE_FILE_BYTES)
    if not isinstance(values, dict):
        raise _wrong(path, "it holds no fields")
    known = {field.name for field in dataclasses.fields(TrainerState)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise _wrong(path, f"it has fields that are not known: {', '.join(map(repr, unknown))}")
    missing = [f"`{name}` is missing" for name in _NEEDED if name not in values]
    wrong = wrong_field(values, _KINDS) or next(iter(missing), None)
    if wrong is not None:
        raise _wrong(path, wrong)
    return TrainerState(**{**(where_missing or {}), **values})


def _wrong(path: str | os.PathLike[str], what: str) -> CheckpointError:
    text = f"{os.fspath(path)} is not a readable trainer state: {what}."
    return CheckpointError(f"{text}\n\nHint: resume from another checkpoint.")


def _is_history(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(log, dict) for log in value)


def _are_states(value: object) -> bool:
    """Return whether a value has exported states by class name: one for each class, or a list of several."""
    if not isinstance(value, dict):
        return False
    found = [state for one in value.values() for state in (one if isinstance(one, list) else [one])]
    return all(isinstance(state, dict) and _is_exported(state) for state in found)


def _is_exported(state: Mapping[str, object]) -> bool:
    return all(isinstance(state.get(part, {}), dict) for part in ("args", "attributes"))


_KINDS: dict[str, Kind] = {
    "epoch": AMOUNT,
    "global_step": COUNT,
    "max_steps": COUNT,
    "logging_steps": AMOUNT,  # 0 is right where a run does not log by updates
    "eval_steps": AMOUNT,
    "save_steps": AMOUNT,
    "train_batch_size": or_none(COUNT),
    "num_train_epochs": COUNT,
    "num_input_tokens_seen": COUNT,
    "total_flos": AMOUNT,
    "log_history": or_none(("a list of logs", _is_history)),
    "best_metric": or_none(NUMBER),
    "best_global_step": or_none(COUNT),
    "best_model_checkpoint": or_none(("a path", TEXT[1])),
    "is_local_process_zero": FLAG,
    "is_world_process_zero": FLAG,
    "is_hyper_param_search": FLAG,
    "trial_name": or_none(TEXT),
    "trial_params": or_none(MAPPING),
    "stateful_callbacks": or_none(("states by class name", _are_states)),
}
_NEEDED = ("global_step",)  # what every release writes, and nothing can be worked out without
