"""Optimizers with states of 8 or 4 bits, or in paged memory: bitsandbytes' and torchao's."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn

from hf_compat.hf.enums import OptimizerNames
from hf_compat.hf.value_types import TRUTH_VALUE
from hf_compat.optim.entries import (
    BELOW_1,
    COUNT,
    FINITE,
    NOT_NEGATIVE,
    Chooser,
    ClassAndKeywords,
    ClassSource,
    Keywords,
    OptimizerClass,
    OptimizerEntry,
    OptimizerRequest,
    Option,
    with_adam,
)
from hf_compat.runtime.text import need

_log = logging.getLogger(__name__)
_MIB = 2**20

# betas and epsilon come from the arguments where these are not given
_ADEMAMIX_OPTIONS = {
    "beta1": Option(BELOW_1),
    "beta2": Option(BELOW_1),
    "beta3": Option(BELOW_1, 0.9999),
    "alpha": Option(FINITE, 5.0),
    "eps": Option(NOT_NEGATIVE),
    "t_alpha": Option(COUNT),
    "t_beta3": Option(COUNT),
}
_RMSPROP_OPTIONS = {
    "alpha": Option(BELOW_1),
    "eps": Option(NOT_NEGATIVE),
    "weight_decay": Option(NOT_NEGATIVE),
    "momentum": Option(NOT_NEGATIVE),
    "centered": Option(TRUTH_VALUE),
    "min_8bit_size": Option(COUNT),
}


def _bits(name: str) -> Keywords:
    return {"optim_bits": 8 if "8bit" in name else 32}


def _bits_and_pages(name: str) -> Keywords:
    return {**_bits(name), "is_paged": "paged" in name}


def _adamw(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return found, {**request.adam, **_bits_and_pages(request.name)}


def _lion(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return found, {"betas": request.adam["betas"], **_bits_and_pages(request.name)}


def _ademamix(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    options = {"beta1": request.args.adam_beta1, "beta2": request.args.adam_beta2, "eps": request.args.adam_epsilon}
    options |= request.options
    betas = tuple(float(options.pop(name)) for name in ("beta1", "beta2", "beta3"))
    return found, {"betas": betas, **options, **_bits_and_pages(request.name)}


def _rmsprop(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return found, {**request.options, **_bits(request.name)}


def _entry(name: str, choose: Chooser, options: Mapping[str, Option]) -> OptimizerEntry:
    return OptimizerEntry(
        source=ClassSource(modules=("bitsandbytes.optim",), name=name, install="bitsandbytes"),
        choose=choose,
        options=options,
        refused_with={"fsdp": "the kernels of bitsandbytes take no sharded parameters (DTensor)"},
    )


_ADAMW = _entry("AdamW", _adamw, {})
_LION = _entry("Lion", _lion, {})
_ADEMAMIX = _entry("AdEMAMix", _ademamix, _ADEMAMIX_OPTIONS)
_RMSPROP = _entry("RMSprop", _rmsprop, _RMSPROP_OPTIONS)


def _torchao(name: str) -> OptimizerEntry:
    modules = ("torchao.optim", "torchao.prototype.low_bit_optim")
    return OptimizerEntry(
        source=ClassSource(modules=modules, name=name, install="'torchao>=0.4.0'"),
        options={"block_size": Option(COUNT, 256), "bf16_stochastic_round": Option(TRUTH_VALUE, False)},
        choose=with_adam,
    )


LOW_BIT_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.ADAMW_TORCH_4BIT: _torchao("AdamW4bit"),
    OptimizerNames.ADAMW_TORCH_8BIT: _torchao("AdamW8bit"),
    OptimizerNames.ADAMW_BNB: _ADAMW,
    OptimizerNames.ADAMW_8BIT: _ADAMW,
    OptimizerNames.PAGED_ADAMW: _ADAMW,
    OptimizerNames.PAGED_ADAMW_8BIT: _ADAMW,
    OptimizerNames.ADEMAMIX: _ADEMAMIX,
    OptimizerNames.ADEMAMIX_8BIT: _ADEMAMIX,
    OptimizerNames.PAGED_ADEMAMIX: _ADEMAMIX,
    OptimizerNames.PAGED_ADEMAMIX_8BIT: _ADEMAMIX,
    OptimizerNames.LION: _LION,
    OptimizerNames.LION_8BIT: _LION,
    OptimizerNames.PAGED_LION: _LION,
    OptimizerNames.PAGED_LION_8BIT: _LION,
    OptimizerNames.RMSPROP_BNB: _RMSPROP,
    OptimizerNames.RMSPROP_8BIT: _RMSPROP,
    OptimizerNames.RMSPROP_32BIT: _RMSPROP,
}


def wants_embeddings_in_32_bit(optimizer_class: object, keywords: Keywords) -> bool:
    """Return whether an optimizer is one of bitsandbytes' with a state of 8 bits."""
    return "bitsandbytes" in str(optimizer_class) and keywords.get("optim_bits") == 8


def keep_embeddings_in_32_bit(model: nn.Module) -> None:
    """Tell bitsandbytes to keep the state of embeddings in 32 bits: their gradients are too sparse for 8.

    Mirrors:
        The end of `transformers.Trainer.create_optimizer`, 5.23.
    """
    manager = need("bitsandbytes", "bitsandbytes", "An optimizer of 8 bits").optim.GlobalOptimManager.get_instance()
    kept = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            kept += sum({weight.data_ptr(): weight.numel() for weight in module.parameters()}.values())
            _log.info("skipped %s: %sM params", module, kept / _MIB)
            manager.register_module_override(module, "weight", {"optim_bits": 32})
            _log.debug("bitsandbytes: will optimize %s in fp32", module)
    _log.info("skipped: %sM params", kept / _MIB)
