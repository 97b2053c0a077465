"""Optimizers by HF's names: class and keywords, and which parameters decay. HF words and torch only."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from hf_compat.errors import ArgumentError, UnsupportedArgument
from hf_compat.hf.argument_values import read_as
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import OptimizerNames
from hf_compat.hf.value_types import number
from hf_compat.optim.adafactor import Adafactor
from hf_compat.runtime.text import parse_bool

# Parameters that do not decay: those of these layers, and those whose names look like these.
NO_DECAY_LAYERS = (nn.LayerNorm,)
NO_DECAY_NAMES = tuple(
    re.compile(pattern) for pattern in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
)

# An optimizer's options, of types that differ by optimizer.
Keywords: TypeAlias = dict[str, Any]
ClassAndKeywords: TypeAlias = tuple[type[torch.optim.Optimizer], Keywords]
# From the arguments and the options in `optim_args` to an optimizer's class and keywords.
Chooser = Callable[[TrainingArguments, dict[str, str]], ClassAndKeywords]


def get_decay_parameter_names(model: nn.Module) -> list[str]:
    """List the parameters that weight decay is applied to: all but biases and norms.

    Mirrors:
        `transformers.Trainer.get_decay_parameter_names`, 5.23.
    """
    names: list[str] = []
    for child_name, child in model.named_children():
        if isinstance(child, NO_DECAY_LAYERS):
            continue
        full_names = (f"{child_name}.{name}" for name in get_decay_parameter_names(child))
        names.extend(name for name in full_names if _decays(name))
    names.extend(name for name in model._parameters if _decays(name))
    return names


def _decays(name: str) -> bool:
    return not any(pattern.search(name.lower()) for pattern in NO_DECAY_NAMES)


def parse_optim_args(optim_args: str | None) -> dict[str, str]:
    """Split `key=value,key=value`.

    Raises:
        ArgumentError: A part without an equals sign.
    """
    parsed = {}
    for part in (optim_args or "").replace(" ", "").split(","):
        key, equals, value = part.partition("=")
        if part and not equals:
            raise ArgumentError(
                f"`optim_args={optim_args!r}` has the part {part!r}.\n\nHint: write key=value,key=value."
            )
        if part:
            parsed[key] = value
    return parsed


def _adamw(args: TrainingArguments, options: dict[str, str]) -> ClassAndKeywords:
    keywords: Keywords = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
        keywords["fused"] = True
    return torch.optim.AdamW, keywords


def _adafactor(args: TrainingArguments, options: dict[str, str]) -> ClassAndKeywords:
    return Adafactor, {"scale_parameter": False, "relative_step": False}


def _number(text: str, name: str) -> float:
    return float(str(read_as(f"optim_args: {name}", number(), text)))


def _with_options(
    optimizer: type[torch.optim.Optimizer], numbers: tuple[str, ...], switches: tuple[str, ...] = ()
) -> Chooser:
    def choose(args: TrainingArguments, options: dict[str, str]) -> ClassAndKeywords:
        keywords: Keywords = {name: _number(options[name], name) for name in numbers if name in options}
        keywords |= {name: parse_bool(options[name], f"optim_args: {name}") for name in switches if name in options}
        return optimizer, keywords

    return choose


# Options that each optimizer takes from `optim_args`; the functions above take none, as in HF.
OPTIMIZERS: dict[OptimizerNames, tuple[Chooser, tuple[str, ...]]] = {
    OptimizerNames.ADAMW_TORCH: (_adamw, ()),
    OptimizerNames.ADAMW_TORCH_FUSED: (_adamw, ()),
    OptimizerNames.ADAFACTOR: (_adafactor, ()),
    OptimizerNames.SGD: (
        _with_options(torch.optim.SGD, ("momentum", "dampening", "weight_decay"), ("nesterov",)),
        ("momentum", "dampening", "weight_decay", "nesterov"),
    ),
    OptimizerNames.ADAGRAD: (
        _with_options(torch.optim.Adagrad, ("lr_decay", "weight_decay", "eps")),
        ("lr_decay", "weight_decay", "eps"),
    ),
    OptimizerNames.RMSPROP: (
        _with_options(torch.optim.RMSprop, ("momentum", "alpha", "eps", "weight_decay"), ("centered",)),
        ("momentum", "alpha", "eps", "weight_decay", "centered"),
    ),
}


def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> ClassAndKeywords:
    """Return the class and keywords that `optim` and `optim_args` ask for.

    Raises:
        UnsupportedArgument: An optimizer that is not here yet.
        ArgumentError: An option that this optimizer does not take.

    Mirrors:
        `transformers.Trainer.get_optimizer_cls_and_kwargs`, 5.23.

    Differs:
        A switch may be any truth value (`nesterov=on`), and a word that is none is refused: both are False there.
    """
    name = OptimizerNames(args.optim)
    if name not in OPTIMIZERS:
        names = ", ".join(known.value for known in OPTIMIZERS)
        raise UnsupportedArgument(
            f"`optim={name.value!r}` is not supported yet.\n\n"
            f"Hint: use one of {names}, or pass `optimizers=(…)` or `optimizer_cls_and_kwargs=(…)` to the Trainer."
        )
    choose, known = OPTIMIZERS[name]
    options = parse_optim_args(args.optim_args)
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        raise ArgumentError(
            f"`optim_args={args.optim_args!r}` has {', '.join(unknown)}, but `optim={name.value!r}` {takes}.\n\n"
            "Hint: betas and epsilon of Adam are arguments of their own."
        )
    optimizer, keywords = choose(args, options)
    return optimizer, {"lr": args.learning_rate, **keywords}
