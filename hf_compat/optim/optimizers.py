"""Optimizers by HF's names: class and keywords, and which parameters decay. HF words and torch only."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_compat.errors import ArgumentError, UnsupportedArgument
from hf_compat.hf.enums import OptimizerNames
from hf_compat.optim.adafactor import Adafactor
from hf_compat.runtime.text import parse_bool

# Parameters that do not decay: those of these layers, and those whose names look like these.
NO_DECAY_LAYERS = (nn.LayerNorm,)
NO_DECAY_NAMES = tuple(
    re.compile(pattern) for pattern in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
)

Keywords = dict[str, Any]


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


def _adamw(args: Any, options: dict[str, str]) -> tuple[type, Keywords]:
    keywords: Keywords = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
        keywords["fused"] = True
    return torch.optim.AdamW, keywords


def _adafactor(args: Any, options: dict[str, str]) -> tuple[type, Keywords]:
    return Adafactor, {"scale_parameter": False, "relative_step": False}


def _with_options(
    optimizer: type, numbers: tuple[str, ...], switches: tuple[str, ...] = ()
) -> Callable[[Any, dict[str, str]], tuple[type, Keywords]]:
    def choose(args: Any, options: dict[str, str]) -> tuple[type, Keywords]:
        keywords: Keywords = {name: float(options[name]) for name in numbers if name in options}
        keywords |= {name: parse_bool(options[name], f"optim_args: {name}") for name in switches if name in options}
        return optimizer, keywords

    return choose


# Options that each optimizer takes from `optim_args`; the functions above take none, as in HF.
OPTIMIZERS: dict[OptimizerNames, tuple[Callable[[Any, dict[str, str]], tuple[type, Keywords]], tuple[str, ...]]] = {
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


def get_optimizer_cls_and_kwargs(args: Any, model: nn.Module | None = None) -> tuple[type, Keywords]:
    """Return the class and keywords that `optim` and `optim_args` ask for.

    Raises:
        UnsupportedArgument: An optimizer that is not here yet.
        ArgumentError: An option that this optimizer does not take.

    Mirrors:
        `transformers.Trainer.get_optimizer_cls_and_kwargs`, 5.23.

    Differs:
        A switch may be any truth value (`nesterov=on`), and a word that is none is refused: both are False there.
    """
    if args.optim not in OPTIMIZERS:
        names = ", ".join(name.value for name in OPTIMIZERS)
        raise UnsupportedArgument(
            f"`optim={args.optim.value!r}` is not supported yet.\n\n"
            f"Hint: use one of {names}, or pass `optimizers=(…)` or `optimizer_cls_and_kwargs=(…)` to the Trainer."
        )
    choose, known = OPTIMIZERS[args.optim]
    options = parse_optim_args(args.optim_args)
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        raise ArgumentError(
            f"`optim_args={args.optim_args!r}` has {', '.join(unknown)}, but `optim={args.optim.value!r}` {takes}.\n\n"
            "Hint: betas and epsilon of Adam are arguments of their own."
        )
    optimizer, keywords = choose(args, options)
    return optimizer, {"lr": args.learning_rate, **keywords}
