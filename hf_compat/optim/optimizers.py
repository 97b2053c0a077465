"""The table of optimizers by HF's names, and the optimizers that are made with the model.

GaLore and APOLLO project the gradients of chosen linear layers to a low rank. Their layerwise forms, LOMO and AdaLomo
step within the backward pass, so the gradients of the whole model never exist together. Torch, Lightning and HF's
callbacks see one optimizer and one schedule for all layers.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from hf_compat.errors import ArgumentError, InertArgumentWarning, UnsupportedArgument
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import OptimizerNames
from hf_compat.hf.value_types import choice
from hf_compat.optim.plain_optimizers import (
    COUNT,
    FINITE,
    LOW_BIT_OPTIMIZERS,
    PACKAGE_OPTIMIZERS,
    SCHEDULE_FREE_OPTIMIZERS,
    TORCH_OPTIMIZERS,
    Chooser,
    ClassAndKeywords,
    ClassSource,
    Keywords,
    OptimizerClass,
    OptimizerEntry,
    OptimizerRequest,
    Option,
    read_options,
)
from hf_compat.runtime.text import shown


class LayerWiseDummyOptimizer(Optimizer):
    """Stand for the optimizers of single parameters; `step` and `zero_grad` do nothing.

    Args:
        optimizer_dict: Each parameter's optimizer.
        lr: The learning rate that a schedule begins with.
        keywords: Not used, as upstream.

    Mirrors:
        `transformers.trainer_pt_utils.LayerWiseDummyOptimizer`, 5.23.

    Differs:
        It owns the hooks that step, so that they are put on the parameters once, and taken off again.
    """

    def __init__(
        self, optimizer_dict: Mapping[nn.Parameter, Optimizer] | None = None, lr: float = 1e-3, **keywords: object
    ) -> None:
        self.optimizer_dict = dict(optimizer_dict or {})
        self.schedulers: dict[nn.Parameter, LRScheduler] = {}
        self._handles: list[RemovableHandle] = []
        # a random number, as upstream: dropout draws from the same place
        super().__init__([torch.randn(1, 1)], {"lr": lr})

    def attach_hooks(self) -> None:
        """Let every parameter be stepped once its gradient is there; nothing is done where the hooks are in place."""
        if self._handles:
            return
        for parameter in self.optimizer_dict:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._step_one)  # type: ignore[no-untyped-call]  # torch's
                self._handles.append(handle)

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _step_one(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        assert isinstance(parameter, nn.Parameter)  # a key of the dict
        optimizer = self.optimizer_dict[parameter]
        optimizer.step()
        optimizer.zero_grad()
        schedule = self.schedulers.get(parameter)
        if schedule is not None:
            schedule.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: each gradient is gone once its parameter was stepped."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run the closure only, which Lightning's automatic optimization steps by; the hooks have stepped."""
        return None if closure is None else closure()


class LayerWiseDummyScheduler(LRScheduler):
    """Stand for the schedules of single parameters; its rate is that of the first one.

    Args:
        optimizer_dict: Each parameter's optimizer.
        lr: The rate that is given where there is none.
        keywords: Not used, as upstream.

    Mirrors:
        `transformers.trainer_pt_utils.LayerWiseDummyScheduler`, 5.23.

    Differs:
        One rate for the one group that it has: from torch 2.9 on, torch refuses the list of all.
    """

    def __init__(
        self, optimizer_dict: Mapping[nn.Parameter, Optimizer] | None = None, *, lr: float, **keywords: object
    ) -> None:
        self.default_lr = lr
        stand_in = LayerWiseDummyOptimizer(optimizer_dict, lr=lr)
        stand_in._opt_called = True  # type: ignore[attr-defined]  # torch asks whether it has stepped: hooks have
        super().__init__(stand_in, -1)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of the first parameter."""
        assert isinstance(self.optimizer, LayerWiseDummyOptimizer)
        groups = chain.from_iterable(one.param_groups for one in self.optimizer.optimizer_dict.values())
        return [next((group["lr"] for group in groups), self.default_lr)]

    def _get_closed_form_lr(self) -> list[float | torch.Tensor]:
        return self.base_lrs


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
    """Whether `optim_target_modules` selects every linear layer."""
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
    """Refuse an `optim_target_modules` that is missing, is not a regular expression, or matches nothing in the model.

    Raises:
        ArgumentError: One of these.
    """
    targets = _targets(request.args)
    for pattern in [targets] if isinstance(targets, str) else targets:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ArgumentError(
                f"`{shown('optim_target_modules', targets)}`: {pattern!r} is not a regular expression: {error}.\n\n"
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
        warn: Warn of named modules that are not linear layers.

    Returns:
        Two groups, in this order: all other parameters; the weights of the target layers.

    Raises:
        ArgumentError: The model is missing, or has no such layer.
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


_DEFAULT_CLIPPING = 1.0


def check_in_backward(request: OptimizerRequest) -> None:
    """Refuse options that need gradients after the backward pass. Warn of options without effect.

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
    """Refuse the same without a warning, which the plan of the run gave already.

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


def _galore_layerwise(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return _layerwise(request, found, request.options)


def _adafactor_layerwise(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    # upstream leaves these out here, and the package then refuses the learning rate
    return _layerwise(request, found, request.options, {"scale_parameter": False, "relative_step": False})


def _apollo_layerwise(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return _layerwise(request, found, apollo_group_options(request))


def check_layerwise(request: OptimizerRequest) -> None:
    """Refuse options that upstream refuses (accumulation, several processes) or that fail there.

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
    OptimizerNames.GALORE_ADAMW_LAYERWISE: _of_each_parameter(OptimizerNames.GALORE_ADAMW, _galore_layerwise),
    OptimizerNames.GALORE_ADAMW_8BIT_LAYERWISE: _of_each_parameter(OptimizerNames.GALORE_ADAMW_8BIT, _galore_layerwise),
    OptimizerNames.GALORE_ADAFACTOR_LAYERWISE: _of_each_parameter(
        OptimizerNames.GALORE_ADAFACTOR, _adafactor_layerwise
    ),
    OptimizerNames.APOLLO_ADAMW_LAYERWISE: _of_each_parameter(OptimizerNames.APOLLO_ADAMW, _apollo_layerwise),
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
