"""Check types, shapes and ranges of state files before their owners take them over.

An optimizer or a schedule accepts almost anything and fails updates later, or never. So each content is checked field
by field, and a wrong one is a `CheckpointError`. Shapes of weights are read from headers, without the weights. The
reader of `trainer_state.json` is here too.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import safetensors
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_compat.checkpoint.files import STATE_FILE_BYTES, first_line, pinned, read_json
from hf_compat.checkpoint.reading import COMPILED, STATE_TYPES, Weights
from hf_compat.checkpoint.tensor_splits import splits_of
from hf_compat.errors import CheckpointError, CheckpointMismatch
from hf_compat.hf.state import INTERVALS, TrainerState
from hf_compat.runtime.inspection import package_of, uncompiled
from hf_compat.runtime.nested import move_to_device
from hf_compat.runtime.seeding import python_state
from hf_compat.runtime.text import brief

logger = logging.getLogger(__name__)

Group = Mapping[str, Any]  # of an optimizer's parameters: `params` and the options
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg")
_RATES = ("lr", "initial_lr", "weight_decay", "eps", "momentum", "dampening", "betas")
_NEED_MORE = (torch.optim.LBFGS, torch.optim.SparseAdam)  # a closure, sparse gradients
_WAYS = ("foreach", "fused", "capturable", "differentiable")  # how a step is computed: the state is the same


@dataclasses.dataclass(frozen=True, slots=True)
class FieldSpec:
    """What a field may hold."""

    expected: str  # what it holds, in words
    types: type | tuple[type, ...]  # its types. A truth value is a number only if `bool` is among them.
    within: tuple[float, float] | None = None  # the range of a number, or of a list's length. The end is not in it
    items: FieldSpec | None = None  # what each item of a list, or value of a mapping, has to be
    needed: Mapping[str, FieldSpec] | None = None  # what a mapping has to hold
    fits: Callable[[Any], object] | None = None  # what else has to hold

    def holds(self, value: Any) -> bool:
        types = self.types if isinstance(self.types, tuple) else (self.types,)
        if value is None or not isinstance(value, types) or (type(value) is bool and bool not in types):
            return value is None and NoneType in types
        items = list(value.values()) if isinstance(value, Mapping) else value
        items = items if isinstance(items, (list, tuple)) else None
        size = len(items) if items is not None else value if isinstance(value, (int, float)) else None
        if size is not None and self.within is not None and not self.within[0] <= size < self.within[1]:
            return False
        if items is not None and self.items is not None and not all(map(self.items.holds, items)):
            return False
        held = value if isinstance(value, Mapping) else {}
        for name, kind in (self.needed or {}).items():
            if name not in held or not kind.holds(held[name]):
                return False
        return self.fits is None or bool(self.fits(value))

    def or_none(self) -> FieldSpec:
        """The kind of values that may also be missing."""
        types = self.types if isinstance(self.types, tuple) else (self.types,)
        return dataclasses.replace(self, expected=f"{self.expected}, or null", types=(*types, NoneType))


def list_of(expected: str, items: FieldSpec) -> FieldSpec:
    """The kind of lists of such items."""
    return FieldSpec(f"a list of {expected}", (list, tuple), items=items)


def wrong_field(values: Mapping[str, object], kinds: Mapping[str, FieldSpec], where: str = "") -> str | None:
    """Say which value is not of its kind. Fields that are missing are left to the caller. `where` precedes a name."""
    for name, kind in kinds.items():
        if name in values and not kind.holds(values[name]):
            return f"`{where}{name}` is {brief(values[name], 60)}, not {kind.expected}"
    return None


_REALS = (int, float)
COUNT = FieldSpec("a whole number from 0 on", int, (0, 2**63))
AMOUNT = FieldSpec("a number from 0 on", _REALS, (0, math.inf))
NUMBER = FieldSpec("a number", _REALS)
SEED = FieldSpec("a seed", int, (0, 2**64))
FLAG = FieldSpec("true or false", bool)
TEXT = FieldSpec("text", str)
MAPPING = FieldSpec("a mapping", dict)
_NUMBERS = FieldSpec("numbers", Mapping, items=NUMBER)
_COUNT_OR_NONE_YET = FieldSpec("a whole number", int, (-1, 2**63))
# Capturable optimizers have rates in tensors.
_RATE = FieldSpec(
    "a number",
    (*_REALS, bool, torch.Tensor),
    (-sys.float_info.max, sys.float_info.max),
    fits=lambda value: not isinstance(value, torch.Tensor) or value.numel() == 1,
)
_RATE_OR_RATES = FieldSpec(
    "a number",
    (*_REALS, bool, torch.Tensor, list, tuple),
    items=_RATE,
    fits=lambda value: isinstance(value, (list, tuple)) or _RATE.holds(value),
)
_MOMENT = FieldSpec("a tensor of floating-point numbers", torch.Tensor, fits=torch.is_floating_point)

# What an optimizer holds: of a group of parameters, and of each parameter.
_FIELDS = FieldSpec("fields", Mapping)
_OPTIMIZER = {
    "param_groups": list_of("groups", _FIELDS),
    "state": FieldSpec("a mapping of parameters to their states", Mapping, items=_FIELDS),
}
_GROUP = {
    "params": list_of("parameters", FieldSpec("a parameter", (str, int), (0, 2**63))),
    **dict.fromkeys(_RATES, _RATE_OR_RATES),
    "betas": FieldSpec("a pair of numbers", (list, tuple), (2, math.inf), _RATE),
    **dict.fromkeys(("amsgrad", "nesterov", "maximize", "capturable", "differentiable"), FLAG),
    **dict.fromkeys(("foreach", "fused"), FLAG.or_none()),
}
# of Adafactor, which computes rates that are None
_COMPUTED_GROUP = {**_GROUP, **{name: _GROUP[name].or_none() for name in _RATES}}
_OF_PARAMETER = {
    "step": _RATE,
    **dict.fromkeys(MOMENTS, _MOMENT),
    "momentum_buffer": dataclasses.replace(_MOMENT, types=(torch.Tensor, NoneType)),  # SGD without momentum has none
}
_SCHEDULE = {
    **dict.fromkeys(("last_epoch", "_step_count"), _COUNT_OR_NONE_YET),
    **dict.fromkeys(("base_lrs", "_last_lr"), list_of("numbers", _RATE)),
    "lr_lambdas": list_of("states", FieldSpec("a state", (Mapping, NoneType))),
}
LOSSES = {
    **dict.fromkeys(("tr_loss", "total_loss"), NUMBER),
    **dict.fromkeys(("last_logged", "first_update", "nonfinite_steps"), _COUNT_OR_NONE_YET),
    "scalars": FieldSpec(
        "sums and weights",
        Mapping,
        needed=dict.fromkeys(("sums", "weights"), _NUMBERS),
        fits=lambda averages: len(averages) == 2 and averages["sums"].keys() == averages["weights"].keys(),
    ),
}
_STATE = {
    **dict.fromkeys(("global_step", "max_steps", "num_train_epochs", "num_input_tokens_seen"), COUNT),
    # an interval of 0 is right where a run does not count by updates
    **dict.fromkeys(("epoch", *INTERVALS, "total_flos"), AMOUNT),
    **dict.fromkeys(("train_batch_size", "best_global_step"), COUNT.or_none()),
    **dict.fromkeys(("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"), FLAG),
    "log_history": FieldSpec("a list of logs", list, items=MAPPING).or_none(),
    "best_metric": NUMBER.or_none(),
    "best_model_checkpoint": FieldSpec("a path", str).or_none(),
    "trial_name": TEXT.or_none(),
    "trial_params": MAPPING.or_none(),
    # exported states: one for each class, or a list of several
    "stateful_callbacks": FieldSpec(
        "states by class name",
        dict,
        fits=lambda held: all(
            isinstance(state, dict) and wrong_field(state, {"args": MAPPING, "attributes": MAPPING}) is None
            for one in held.values()
            for state in (one if isinstance(one, list) else [one])
        ),
    ).or_none(),
}


def refuse(path: str, problem: str | None) -> None:
    """Raise the error for a state that cannot be used, if there is a problem."""
    if problem is not None:
        raise CheckpointError(f"{path} cannot be used: {problem}.\n\nHint: resume from another checkpoint.")


def check_optimizer(
    path: str,
    content: object,
    optimizer: torch.optim.Optimizer | None = None,
    own_groups: Sequence[Group] | None = None,
) -> None:
    """Refuse a content that is not the state of an optimizer of torch, or that this one cannot step with.

    `own_groups` are the optimizer's as files have them, if it has others.
    """
    if not isinstance(content, Mapping):
        refuse(path, f"it holds {brief(content, 60)}, not the state of an optimizer")
        return
    wrong = wrong_field({**dict.fromkeys(_OPTIMIZER), **content}, _OPTIMIZER)
    refuse(path, wrong)
    groups, states, known = content["param_groups"], content["state"], set[object]()
    for index, group in enumerate(groups):
        kinds = _COMPUTED_GROUP if group.get("relative_step") is True else _GROUP
        refuse(path, wrong_field({"params": None, **group}, kinds, f"param_groups[{index}]."))
        known.update(group["params"])
    for index, kept in states.items():
        refuse(path, wrong_field(kept, _OF_PARAMETER, f"state[{index}]."))
        if index not in known:
            refuse(path, f"`state` has the parameter {brief(index, 60)}, which is in no group")
    own_groups = own_groups or ([] if optimizer is None else optimizer.param_groups)
    for own, group in zip(own_groups, groups, strict=False):
        _check_group(path, optimizer, own, group, states)


def _check_group(path: str, optimizer: Any, own: Group, group: Group, states: Mapping[object, Group]) -> None:
    """Refuse what a group, or the state of one of its parameters, lacks or has in another shape."""
    for name in _RATES:
        if optimizer.defaults.get(name) is not None and name not in group:
            refuse(path, f"`{name}` of a group is missing")
    is_torchs = type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, _NEED_MORE)
    foreign, lacking = sorted(group.keys() - own.keys()), sorted(own.keys() - group.keys() - {"initial_lr"})
    if foreign and lacking and not type(optimizer).__module__.startswith("torch.optim"):  # torch's add what they lack
        kind = type(optimizer).__name__
        refuse(path, f"its groups have {brief(foreign)} and lack {brief(lacking)}: it is of no {kind}")
    needed = list[str]()
    if is_torchs and states:
        # what an optimizer of this class keeps of a parameter after a step with these options
        known = group.keys() & inspect.signature(type(optimizer)).parameters.keys() - {"params", "lr", *_WAYS}
        parameter = torch.zeros(1, 1, requires_grad=True)
        parameter.grad = torch.zeros(1, 1)
        fresh = type(optimizer)([parameter], lr=1.0, **{name: group[name] for name in known})
        fresh.step()
        needed = sorted(fresh.state[parameter])
    for parameter, index in zip(own["params"], group["params"], strict=False):
        kept = states.get(index) or {}
        for name in needed if kept else ():
            if name not in kept:
                refuse(path, f"the state of a parameter lacks `{name}`")
        for name in MOMENTS if is_torchs else ():
            moment = kept.get(name)
            if isinstance(moment, torch.Tensor) and moment.shape != parameter.shape:
                shapes = f"{list(moment.shape)}, its parameter {list(parameter.shape)}"
                refuse(path, f"`{name}` of a parameter has the shape {shapes}")


def check_schedule(path: str, content: object, schedule: Any) -> None:
    """Refuse a content that is not the state of a schedule of torch, or lacks what this one continues from.

    Torch would begin it anew, raise a KeyError, or fail later. Groups that a callback has added since the schedule was
    made have rates of their own.
    """
    if not isinstance(content, Mapping):
        refuse(path, f"it holds {brief(content, 60)}, not fields")
        return
    refuse(path, wrong_field(content, _SCHEDULE))
    for name in ("last_epoch", "lr_lambdas"):
        if name in schedule.state_dict() and name not in content:
            refuse(path, f"`{name}` is missing")
    groups = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    if groups is None:
        return
    made_for = min(len(getattr(schedule, "lr_lambdas", groups)), len(groups))
    for name in ("base_lrs", "_last_lr"):
        if name in content and len(content[name]) != made_for:
            refuse(path, f"`{name}` is {brief(content[name], 60)}, and the optimizer has {made_for} groups")


def random_states_problem(states: object) -> str | None:
    """Say why generators do not take random states of ours or of `transformers`. Those in use stay as they are."""
    if not isinstance(states, Mapping):
        return "it has no random states" if states is None else f"it has {brief(states, 60)} in place of random states"
    try:
        random.Random().setstate(python_state(dict(states)))
        name, keys, *rest = states["numpy"]
        np.random.RandomState().set_state((name, np.asarray(keys).astype(np.uint32), *rest))
        torch.Generator().set_state(states["cpu"])
    except Exception as error:  # generators raise what they like
        return f"it has random states of {type(error).__name__}: {first_line(error)}"
    cuda = states.get("cuda")
    for one in cuda if isinstance(cuda, (list, tuple)) else [cuda]:
        if one is not None and not (isinstance(one, torch.Tensor) and one.dtype == torch.uint8):
            return "it has random states of `cuda` that are not bytes"
    return None


def settle_states(path: str, optimizer: torch.optim.Optimizer) -> None:
    """Give the values that an optimizer has loaded the devices and memory layouts of their parameters.

    Kernels walk all of them by one set of strides. A value with other strides trains other numbers, and one that
    repeats a number (stride 0) ends the process. Parameters without a state are warned of: they may have had no
    gradient yet, and their state starts anew.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            is_plain = type(value) is torch.Tensor and type(parameter) in (torch.Tensor, torch.nn.Parameter)
            if is_plain and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
            elif isinstance(value, DTensor) and isinstance(parameter, DTensor):  # a part of rows may be a view of them
                own, held = parameter.to_local(), value.to_local()
                if held.shape == own.shape and held.stride() != own.stride():
                    part = torch.empty_like(own, dtype=held.dtype).copy_(held)
                    state[key] = DTensor.from_local(
                        part, value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
                    )
            elif (type(value).__module__, type(value).__name__) in STATE_TYPES and hasattr(value, "__dict__"):
                vars(value).update(move_to_device(vars(value), parameter.device))  # torch moves plain tensors alone
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for group in optimizer.param_groups:
        parameters = group["params"]
        kept = list(filter(optimizer.state.get, parameters))
        if 0 < len(kept) < len(parameters):
            told = "%s has no state of the optimizer for %d of %d parameters of a group: theirs start anew."
            logger.warning(told, path, len(parameters) - len(kept), len(parameters))


def check_weights(
    where: str, weights: Weights, model: nn.Module, file: str = "its `state_dict`", adapter: str | None = None
) -> None:
    """Refuse weights of a file that a model, or an adapter of it, cannot take. Missing ones are warned of elsewhere.

    Raises:
        CheckpointMismatch: They are of another model.
    """
    model = uncompiled(model)
    # parts that override a method of torch, or have hooks before it, may take other weights
    others = [""] if _is_overridden(type(model).load_state_dict) else []
    for name, part in model.named_modules():
        if any(map(_is_overridden, (type(part)._load_from_state_dict, *part._load_state_dict_pre_hooks.values()))):
            others.append(f"{name}." if name else "")
    wrong, has_own, splits = list[str](), False, splits_of(model)
    for compiled_name, tensor in model.state_dict(keep_vars=True).items():
        is_elsewhere = not isinstance(tensor, torch.Tensor) or hasattr(tensor, "ds_shape")  # under DeepSpeed's ZeRO 3
        if is_elsewhere or compiled_name.startswith(tuple(others)):
            continue
        name, has_own = compiled_name.replace(COMPILED, ""), True
        held = weights.get(name if adapter is None else name.replace(f".{adapter}.", ".", 1), tensor)
        whole = tensor.shape if held is tensor else splits.whole_shape(name, tensor.shape)
        if held.shape != whole:
            wrong.append(f"`{name}` has the shape {list(held.shape)}, in the model {list(whole)}")
        elif held.is_floating_point() != tensor.is_floating_point():
            less = "" if held.is_floating_point() else "no "
            wrong.append(f"`{name}` holds {less}floating-point numbers, unlike the model's")
    if has_own and not weights:
        wrong = ["it holds no weights"]
    if wrong:
        raise CheckpointMismatch(
            f"{where} holds another model, and {file} does not fit the model: {'; '.join(wrong[:3])}.\n\n"
            "Hint: make the model as it was when this was saved, name a checkpoint of this model, or choose another "
            "`output_dir`."
        )


def _is_overridden(method: Callable[..., object]) -> bool:
    method = getattr(method, "hook", method)  # torch wraps a hook that takes the module
    return package_of(method) not in ("torch", "lightning", "hf_compat")


def weight_names(path: str) -> set[str]:
    """Read the names of the weights in a safetensors file, under which an uncompiled model has them."""
    # it compares the header with the file's size
    with pinned(path) as opened, safetensors.safe_open(opened, framework="pt") as file:
        return {name.replace(COMPILED, "") for name in file.keys()}  # noqa: SIM118 - no mapping


def read_trainer_state(path: str | os.PathLike[str], where_missing: Mapping[str, float] | None = None) -> TrainerState:
    """Read a state of ours or of `transformers`. What one of a `.ckpt` may leave open is in `where_missing`."""
    content = read_json(path, STATE_FILE_BYTES)
    values: dict[str, Any] = content if isinstance(content, dict) else {}
    if not isinstance(content, dict):
        wrong: str | None = "it holds no fields"
    elif unknown := sorted(values.keys() - TrainerState.__dataclass_fields__.keys()):
        wrong = f"it has fields that are not known: {', '.join(map(repr, unknown))}"
    else:
        # every release writes `global_step`, and nothing can be worked out without it
        wrong = wrong_field(values, _STATE) or (None if "global_step" in values else "`global_step` is missing")
    if wrong is not None:
        raise CheckpointError(
            f"{os.fspath(path)} is not a readable trainer state: {wrong}.\n\nHint: resume from another checkpoint."
        )
    return TrainerState(**{**(where_missing or {}), **values})
