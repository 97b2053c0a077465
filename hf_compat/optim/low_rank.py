"""GaLore and APOLLO: gradients of chosen linear layers are projected to a low rank."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import nn

from hf_compat.errors import ArgumentError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import OptimizerNames
from hf_compat.hf.value_types import choice
from hf_compat.optim.entries import (
    COUNT,
    FINITE,
    Chooser,
    ClassAndKeywords,
    ClassSource,
    Keywords,
    OptimizerClass,
    OptimizerEntry,
    OptimizerRequest,
    Option,
)
from hf_compat.runtime.text import shown

_log = logging.getLogger(__name__)
# torch's own form: `params` and the options of these.
ParameterGroup: TypeAlias = dict[str, Any]

_PROJECTIONS = choice(("std", "reverse_std", "right", "left", "full"))
GALORE_OPTIONS = {
    "rank": Option(COUNT, 128),
    "update_proj_gap": Option(COUNT, 200),
    "scale": Option(FINITE, 0.25),
    "proj_type": Option(_PROJECTIONS, "std"),
}
APOLLO_OPTIONS = {
    "rank": Option(COUNT, 128),
    "proj": Option(choice(("random", "svd")), "random"),
    "scale_type": Option(choice(("channel", "tensor")), "channel"),
    "update_proj_gap": Option(COUNT, 200),
    "scale": Option(FINITE, 1.0),
    "proj_type": Option(_PROJECTIONS, "std"),
}

# Measured with two processes: FSDP 2 fails when it saves, ZeRO in the first update.
REFUSED_WITH = {
    "fsdp": "torch cannot save its projections from sharded parameters",
    "deepspeed": "ZeRO flattens the matrices that it projects",
}


def is_all_linear(targets: str | list[str]) -> bool:
    """Return whether `optim_target_modules` stands for every linear layer."""
    return isinstance(targets, str) and targets.replace("_", "-") == "all-linear"


def _matches(targets: str | list[str], name: str) -> tuple[bool, bool]:
    """Return whether a module is meant, and whether a regular expression says so (which may match others, too)."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None, targets != name
    if any(target in name for target in targets):
        return True, False
    found = any(re.fullmatch(target, name) for target in targets)
    return found, found


def check_targets(request: OptimizerRequest) -> None:
    """Refuse an `optim_target_modules` that is missing, is no regular expression, or matches nothing in the model.

    Raises:
        ArgumentError: One of these.
    """
    targets = _targets(request.args)
    for pattern in [targets] if isinstance(targets, str) else targets:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ArgumentError(
                f"`{shown('optim_target_modules', targets)}`: {pattern!r} is no regular expression: {error}.\n\n"
                "Hint: name modules, give a regular expression that matches whole names, or 'all-linear'."
            ) from error
    if request.model is not None:
        low_rank_groups(request, {}, warn=False)


def _targets(args: TrainingArguments) -> str | list[str]:
    if args.optim_target_modules is None:
        raise ArgumentError(
            f"`optim={OptimizerNames(args.optim).value!r}` needs `optim_target_modules`.\n\n"
            "Hint: name the linear layers to project, as a list or a regular expression, or set 'all-linear'."
        )
    return args.optim_target_modules


def low_rank_groups(request: OptimizerRequest, options: Keywords, warn: bool = True) -> list[ParameterGroup]:
    """Divide the model's parameters: those of the target layers get the options, the others none.

    Args:
        request: Its arguments say which layers are meant, its model has them.
        options: Options of the projected parameters' group.
        warn: Tell of modules that are named and are no linear layers.

    Returns:
        Two groups, in this order: all other parameters; the weights of the target layers.

    Raises:
        ArgumentError: There is no model, or it has no such layer.
    """
    targets = _targets(request.args)
    if request.model is None:
        raise ArgumentError(
            f"`optim={request.name!r}` chooses among a model's layers, and there is no model.\n\n"
            "Hint: pass the model as the second argument."
        )
    chosen = set(_target_weights(request.model, targets, request.name if warn else None))
    if not chosen:
        raise ArgumentError(
            f"`{shown('optim_target_modules', targets)}` matches no linear layer of the model, so "
            f"`optim={request.name!r}` has nothing to project.\n\n"
            "Hint: a text is a regular expression for a module's whole name; a list holds parts of names."
        )
    named = list(request.model.named_parameters())
    return [
        {"params": [parameter for name, parameter in named if name not in chosen]},
        {"params": [parameter for name, parameter in named if name in chosen], **options},
    ]


def _target_weights(model: nn.Module, targets: str | list[str], optimizer: str | None) -> Iterator[str]:
    for name, module in model.named_modules():
        found, by_expression = _matches(targets, name)
        if isinstance(module, nn.Linear):
            if found or is_all_linear(targets):
                yield f"{name}.weight"
        elif found and not by_expression and optimizer is not None:
            _log.warning("%s is not projected: %s works on linear layers only.", name, optimizer)


def _galore(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return found, {"params": low_rank_groups(request, request.options)}


def _galore_adafactor(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return found, {**_galore(request, found)[1], "scale_parameter": False, "relative_step": False}


def apollo_group_options(request: OptimizerRequest) -> Keywords:
    """Return the options of APOLLO's projected parameters: only these get the betas and epsilon of the arguments."""
    return {**request.options, **request.adam}


def _apollo(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return found, {"params": low_rank_groups(request, apollo_group_options(request))}


def _entry(class_name: str, options: Mapping[str, Option], choose: Chooser, device: str = "") -> OptimizerEntry:
    package = "galore" if class_name.startswith("GaLore") else "apollo"
    return OptimizerEntry(
        source=ClassSource(modules=(f"{package}_torch",), name=class_name, install=f"{package}-torch"),
        options=options,
        choose=choose,
        check=check_targets,
        needs_model=True,
        device=device,
        refused_with=REFUSED_WITH,
    )


LOW_RANK_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.GALORE_ADAMW: _entry("GaLoreAdamW", GALORE_OPTIONS, _galore),
    OptimizerNames.GALORE_ADAMW_8BIT: _entry("GaLoreAdamW8bit", GALORE_OPTIONS, _galore, device="a GPU"),
    OptimizerNames.GALORE_ADAFACTOR: _entry("GaLoreAdafactor", GALORE_OPTIONS, _galore_adafactor),
    OptimizerNames.APOLLO_ADAMW: _entry("APOLLOAdamW", APOLLO_OPTIONS, _apollo),
}
