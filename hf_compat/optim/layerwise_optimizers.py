"""Layerwise GaLore and APOLLO: the optimizers of `low_rank.py`, one for each parameter. HF words and torch only."""

from __future__ import annotations

from dataclasses import replace

from hf_compat.errors import ArgumentError, UnsupportedArgument
from hf_compat.hf.enums import OptimizerNames
from hf_compat.optim.entries import (
    Chooser,
    ClassAndKeywords,
    Keywords,
    OptimizerClass,
    OptimizerEntry,
    OptimizerRequest,
)
from hf_compat.optim.in_backward import check_in_backward, refuse_in_backward
from hf_compat.optim.layerwise import LayerWiseDummyOptimizer
from hf_compat.optim.low_rank import LOW_RANK_OPTIMIZERS, apollo_group_options, check_targets, low_rank_groups


def _layerwise(
    request: OptimizerRequest, found: OptimizerClass, of_group: Keywords, of_all: Keywords | None = None
) -> ClassAndKeywords:
    """Make an optimizer of each parameter; the first group's options are none, the second's `of_group`."""
    refuse_layerwise(request)
    groups = low_rank_groups(request, of_group)
    keywords: Keywords = {"lr": request.args.learning_rate, **(of_all or {})}
    optimizers = {one: found([{**group, "params": [one]}], **keywords) for group in groups for one in group["params"]}
    return LayerWiseDummyOptimizer, {"optimizer_dict": optimizers, "params": groups}


def _galore(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return _layerwise(request, found, request.options)


def _galore_adafactor(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    # upstream leaves these out here, and the package then refuses the learning rate
    return _layerwise(request, found, request.options, {"scale_parameter": False, "relative_step": False})


def _apollo(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return _layerwise(request, found, apollo_group_options(request))


def check_layerwise(request: OptimizerRequest) -> None:
    """Refuse what upstream refuses (accumulation, several processes) and what is known to fail there.

    Raises:
        ArgumentError: Gradients are to be accumulated, or no layer is meant.
        UnsupportedArgument: They are to be exchanged, or scaled.
    """
    refuse_layerwise(request)
    check_in_backward(request)
    check_targets(request)


def refuse_layerwise(request: OptimizerRequest) -> None:
    """Refuse several processes and accumulation, as upstream where it makes the optimizers.

    Raises:
        ArgumentError: Gradients are to be accumulated.
        UnsupportedArgument: They are to be exchanged, or scaled.
    """
    args = request.args
    if args.world_size > 1:
        raise UnsupportedArgument(
            f"Layer-wise {request.name} does not support DDP: each parameter is stepped before gradients are exchanged "
            f"between the {args.world_size} processes.\n\n"
            f"Hint: train in one process, or use `optim={request.name.removesuffix('_layerwise')!r}`."
        )
    if args.gradient_accumulation_steps != 1:
        raise ArgumentError(
            f"Layerwise {request.name} does not support gradient accumulation, and "
            f"`gradient_accumulation_steps={args.gradient_accumulation_steps}`: each parameter is stepped as soon as "
            "its gradient is there.\n\n"
            f"Hint: set it to 1, or use `optim={request.name.removesuffix('_layerwise')!r}`."
        )
    refuse_in_backward(request)


def _of_each_parameter(whole: OptimizerNames, choose: Chooser) -> OptimizerEntry:
    """Return the entry of an optimizer that is made once for each parameter: class, options and device stay."""
    return replace(LOW_RANK_OPTIMIZERS[whole], choose=choose, check=check_layerwise, refused_with={})


LAYERWISE_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.GALORE_ADAMW_LAYERWISE: _of_each_parameter(OptimizerNames.GALORE_ADAMW, _galore),
    OptimizerNames.GALORE_ADAMW_8BIT_LAYERWISE: _of_each_parameter(OptimizerNames.GALORE_ADAMW_8BIT, _galore),
    OptimizerNames.GALORE_ADAFACTOR_LAYERWISE: _of_each_parameter(OptimizerNames.GALORE_ADAFACTOR, _galore_adafactor),
    OptimizerNames.APOLLO_ADAMW_LAYERWISE: _of_each_parameter(OptimizerNames.APOLLO_ADAMW, _apollo),
}
