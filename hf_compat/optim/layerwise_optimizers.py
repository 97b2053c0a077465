"""Optimizers that step within the backward pass: layerwise GaLore and APOLLO, LOMO and AdaLomo."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from hf_compat.errors import ArgumentError, InertArgumentWarning, UnsupportedArgument
from hf_compat.hf.enums import OptimizerNames
from hf_compat.optim.entries import (
    Chooser,
    ClassAndKeywords,
    ClassSource,
    Keywords,
    OptimizerClass,
    OptimizerEntry,
    OptimizerRequest,
)
from hf_compat.optim.layerwise import LayerWiseDummyOptimizer
from hf_compat.optim.low_rank import LOW_RANK_OPTIMIZERS, apollo_group_options, check_targets, low_rank_groups

_DEFAULT_CLIPPING = 1.0


def check_in_backward(request: OptimizerRequest) -> None:
    """Refuse what needs the gradients after the backward pass; warn of what clips or decays nothing.

    Raises:
        UnsupportedArgument: Gradients are to be scaled, or exchanged between processes.
    """
    refuse_in_backward(request)
    args = request.args
    found = []
    if args.max_grad_norm not in (0, _DEFAULT_CLIPPING):
        found.append(f"max_grad_norm={args.max_grad_norm}")
    if args.weight_decay:
        found.append(f"weight_decay={args.weight_decay}")
    for setting in found:
        warnings.warn(
            f"`{setting}` has no effect: {_reason(request)}, as in transformers.", InertArgumentWarning, stacklevel=6
        )


def refuse_in_backward(request: OptimizerRequest) -> None:
    """Refuse the same, without a warning: for who has been warned when the run was planned.

    Raises:
        UnsupportedArgument: Gradients are to be scaled, or exchanged between processes.
    """
    args, why = request.args, _reason(request)
    if args.mixed_precision == "fp16":
        raise UnsupportedArgument(f"{why}, where gradients are still scaled for `fp16=True`.\n\nHint: `bf16=True`.")
    if args.world_size > 1:
        raise UnsupportedArgument(
            f"{why}, before gradients are exchanged: it cannot train in {args.world_size} processes.\n\n"
            "Hint: train in one process, or choose another optimizer."
        )


def _reason(request: OptimizerRequest) -> str:
    return f"`optim={request.name!r}` updates each parameter in the backward pass"


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


def _of_whole_model(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    if request.model is None:
        raise ArgumentError(
            f"`optim={request.name!r}` puts hooks on a model's parameters, and there is no model.\n\n"
            "Hint: pass the model as the second argument."
        )
    refuse_in_backward(request)
    return found, {"model": request.model}


def _check_adalomo(request: OptimizerRequest) -> None:
    """Refuse a run without CUDA, on which the package keeps its averages whatever the model is on."""
    check_in_backward(request)
    if _ADALOMO.load("AdaLomo").__module__.startswith("lomo_optim.") and not torch.cuda.is_available():
        raise UnsupportedArgument(
            f"`optim={request.name!r}` keeps its averages on a CUDA GPU, and there is none.\n\nHint: `optim='lomo'`."
        )


_LOMO = ClassSource(modules=("lomo_optim",), name="Lomo", install="lomo-optim")
_ADALOMO = ClassSource(modules=("lomo_optim",), name="AdaLomo", install="lomo-optim")

LOMO_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.LOMO: OptimizerEntry(
        source=_LOMO, choose=_of_whole_model, check=check_in_backward, needs_model=True
    ),
    OptimizerNames.ADALOMO: OptimizerEntry(
        source=_ADALOMO, choose=_of_whole_model, check=_check_adalomo, needs_model=True
    ),
}
