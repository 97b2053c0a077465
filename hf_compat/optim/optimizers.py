"""Optimizers by HF's names: the table of all, class and keywords, and which parameters decay."""

from __future__ import annotations

import re
import warnings

from torch import nn

from hf_compat.errors import InertArgumentWarning, UnsupportedArgument
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import OptimizerNames
from hf_compat.optim.entries import ClassAndKeywords, OptimizerEntry, OptimizerRequest, read_options
from hf_compat.optim.model_optimizers import LAYERWISE_OPTIMIZERS, LOMO_OPTIMIZERS, LOW_RANK_OPTIMIZERS
from hf_compat.optim.plain_optimizers import (
    LOW_BIT_OPTIMIZERS,
    PACKAGE_OPTIMIZERS,
    SCHEDULE_FREE_OPTIMIZERS,
    TORCH_OPTIMIZERS,
)
from hf_compat.runtime.text import shown

# Parameters that do not decay: those of these layers, and those whose names look like these.
NO_DECAY_LAYERS = (nn.LayerNorm,)
NO_DECAY_NAMES = tuple(
    re.compile(pattern) for pattern in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
)


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


_LOW_RANK = ("galore", "apollo")

OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    **TORCH_OPTIMIZERS,
    **LOW_BIT_OPTIMIZERS,
    **LOW_RANK_OPTIMIZERS,
    **PACKAGE_OPTIMIZERS,
    **SCHEDULE_FREE_OPTIMIZERS,
    **LOMO_OPTIMIZERS,
    **LAYERWISE_OPTIMIZERS,
}


def entry_of(args: TrainingArguments) -> OptimizerEntry:
    """Return the entry of the optimizer that the arguments name."""
    return OPTIMIZERS[OptimizerNames(args.optim)]


def check_request(args: TrainingArguments, model: nn.Module | None = None) -> None:
    """Refuse what is known to fail before the optimizer is made: its package, its options, its own conditions.

    Raises:
        ArgumentError: An option that it does not take, or arguments that it cannot work with.
        MissingOptimizer: Its package is missing.
        UnsupportedArgument: A device that it does not run on, or something that it cannot be combined with.
    """
    entry = entry_of(args)
    request = OptimizerRequest(args, model, read_options(args, entry))
    entry.source.load(f"`optim={request.name!r}`")
    if entry.device and args.device.type == "cpu":
        raise UnsupportedArgument(
            f"`optim={request.name!r}` needs {entry.device}, and this run is on the CPU.\n\n"
            "Hint: use another optimizer; or run where there is one, without `use_cpu`."
        )
    for strategy, why in entry.refused_with.items():
        if getattr(request.args, strategy):
            raise UnsupportedArgument(
                f"`optim={request.name!r}` does not train with `{strategy}`: {why}.\n\n"
                f"Hint: use another optimizer; or leave `{strategy}` out, and several processes train with DDP."
            )
    entry.check(request)
    if args.optim_target_modules is not None and not request.name.startswith(_LOW_RANK):
        warnings.warn(
            f"`{shown('optim_target_modules', args.optim_target_modules)}` has no effect: `optim={request.name!r}` "
            "trains every parameter alike; GaLore and APOLLO take it.",
            InertArgumentWarning,
            stacklevel=5,
        )


def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> ClassAndKeywords:
    """Return the class and keywords that `optim` and `optim_args` ask for.

    Args:
        args: The run's arguments.
        model: The model; some optimizers (GaLore, APOLLO, LOMO) choose among its parameters.

    Returns:
        The class, and its keywords; `params`, `model` or `optimizer_dict` among them stand for the parameter groups.

    Raises:
        ArgumentError: An option that this optimizer does not take, or arguments that it cannot work with.
        MissingOptimizer: Its package is missing.
        UnsupportedArgument: Something that it cannot be combined with.

    Mirrors:
        `transformers.Trainer.get_optimizer_cls_and_kwargs`, 5.23.

    Differs:
        A switch may be any truth value (`nesterov=on`, `kahan_sum=false`), and a word that is none is refused: there
        `nesterov=on` is false and `kahan_sum=false` true. Numbers of `optim_args` are numbers for every optimizer:
        there `block_size=128` and the options of `rmsprop_bnb` reach the optimizer as text, and fail.
    """
    entry = entry_of(args)
    request = OptimizerRequest(args, model, read_options(args, entry))
    found = entry.source.load(f"`optim={request.name!r}`")
    chosen, keywords = entry.choose(request, found)
    return chosen, {"lr": args.learning_rate, **keywords}
