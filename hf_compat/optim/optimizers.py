"""The table of optimizers by HF's names, with entries of the optimizers that are made with the model.

GaLore and APOLLO project the gradients of chosen linear layers to a low rank. Their layerwise forms, LOMO and AdaLomo
step within the backward pass, so the gradients of the whole model never exist together.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from hf_compat.errors import ArgumentError, InertArgumentWarning, UnsupportedArgument, warn_user
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import OptimizerNames
from hf_compat.hf.value_types import choice
from hf_compat.optim.plain_optimizers import (
    COUNT,
    FINITE,
    PLAIN_OPTIMIZERS,
    ClassAndKeywords,
    Keywords,
    OptimizerEntry,
    OptimizerRequest,
    Option,
    options_alone,
    read_options,
)
from hf_compat.runtime.text import shown


class LayerWiseDummyOptimizer(Optimizer):
    """One optimizer for torch, Lightning and callbacks in place of the optimizers of single parameters.

    Hooks step each parameter's optimizer. `step` and `zero_grad` do nothing.

    Args:
        optimizer_dict: Each parameter's optimizer.
        lr: The initial learning rate of a schedule.
        keywords: Ignored, as upstream.

    Mirrors:
        `transformers.trainer_pt_utils.LayerWiseDummyOptimizer`, 5.23.

    Differs:
        It owns the hooks that step, registers them once and removes them.
    """

    def __init__(
        self, optimizer_dict: Mapping[nn.Parameter, Optimizer] | None = None, lr: float = 1e-3, **keywords: object
    ) -> None:
        self.optimizer_dict = dict(optimizer_dict or {})
        self.schedulers: dict[nn.Parameter, LRScheduler] = {}
        self._handles: list[RemovableHandle] = []
        # draws a random number, as upstream, so that dropout draws the same numbers
        super().__init__([torch.randn(1, 1)], {"lr": lr})

    def attach_hooks(self) -> None:
        """Step every parameter as soon as it has its gradient. A second call does nothing."""
        if self._handles:
            return
        for parameter in self.optimizer_dict:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._step_one)  # type: ignore[no-untyped-call]  # torch's
                self._handles.append(handle)

    def remove_hooks(self) -> None:
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
        """Do nothing. Each step has removed its gradient."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run the closure of Lightning's automatic optimization. The hooks have stepped."""
        return None if closure is None else closure()


class LayerWiseDummyScheduler(LRScheduler):
    """One schedule in place of the schedules of single parameters. It shows the rate of the first one.

    Args:
        optimizer_dict: Each parameter's optimizer.
        lr: The rate if no parameter has an optimizer.
        keywords: Ignored, as upstream.

    Mirrors:
        `transformers.trainer_pt_utils.LayerWiseDummyScheduler`, 5.23.

    Differs:
        It has one rate for its one group. Since 2.9, torch refuses one rate for each parameter.
    """

    def __init__(
        self, optimizer_dict: Mapping[nn.Parameter, Optimizer] | None = None, *, lr: float, **keywords: object
    ) -> None:
        self.default_lr = lr
        stand_in = LayerWiseDummyOptimizer(optimizer_dict, lr=lr)
        stand_in._opt_called = True  # type: ignore[attr-defined]  # torch tests whether it has stepped
        super().__init__(stand_in, -1)

    def get_lr(self) -> list[float | torch.Tensor]:
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


def check_targets(request: OptimizerRequest) -> None:
    """Refuse `optim_target_modules` if it is missing, not a regular expression, or matches nothing in the model."""
    targets = _targets(request)
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


def _targets(request: OptimizerRequest) -> str | list[str]:
    if request.args.optim_target_modules is None:
        raise ArgumentError(
            f"`optim={request.name!r}` needs `optim_target_modules`.\n\n"
            "Hint: name the linear layers to project, as a list or a regular expression, or set 'all-linear'."
        )
    return request.args.optim_target_modules


def low_rank_groups(request: OptimizerRequest, options: Keywords, warn: bool = True) -> list[ParameterGroup]:
    """Divide the model's parameters into the weights of the target layers, which get the options, and the others."""
    targets = _targets(request)
    if request.model is None:
        raise ArgumentError(
            f"`optim={request.name!r}` chooses among a model's layers, and there is no model.\n\n"
            "Hint: pass the model as the second argument."
        )
    is_all_linear = isinstance(targets, str) and targets.replace("_", "-") == "all-linear"
    chosen = set()
    for name, module in request.model.named_modules():
        if isinstance(targets, str):
            by_name, by_expression = targets == name, re.fullmatch(targets, name) is not None
        else:
            by_name = any(target in name for target in targets)
            by_expression = any(re.fullmatch(target, name) for target in targets)
        if isinstance(module, nn.Linear) and (by_name or by_expression or is_all_linear):
            chosen.add(f"{name}.weight")
        elif by_name and warn and not isinstance(module, nn.Linear):
            # an expression may match other modules, too
            _log.warning("%s is not projected: %s works on linear layers only.", name, request.name)
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


def _low_rank(
    class_name: str,
    options: Mapping[str, Option],
    group_options: Callable[[OptimizerRequest], Keywords] = options_alone,
    further: Keywords | None = None,
    device: str = "",
) -> OptimizerEntry:
    package = "galore" if class_name.startswith("GaLore") else "apollo"
    return OptimizerEntry(
        f"{package}_torch.{class_name}",
        f"{package}-torch",
        options=options,
        keywords=lambda request: {"params": low_rank_groups(request, group_options(request)), **(further or {})},
        check=check_targets,
        needs_model=True,
        device=device,
        # Measured with two processes: FSDP 2 fails when it saves, ZeRO in the first update.
        refused_with={
            "fsdp": "torch cannot save its projections from sharded parameters",
            "deepspeed": "ZeRO flattens the matrices that it projects",
        },
    )


LOW_RANK_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.GALORE_ADAMW: _low_rank("GaLoreAdamW", GALORE_OPTIONS),
    OptimizerNames.GALORE_ADAMW_8BIT: _low_rank("GaLoreAdamW8bit", GALORE_OPTIONS, device="a GPU"),
    # The layerwise form gets these keywords, too. Upstream leaves them out, and the package refuses the learning rate.
    OptimizerNames.GALORE_ADAFACTOR: _low_rank(
        "GaLoreAdafactor", GALORE_OPTIONS, further={"scale_parameter": False, "relative_step": False}
    ),
    # Only the projected parameters get the betas and the epsilon of the arguments.
    OptimizerNames.APOLLO_ADAMW: _low_rank(
        "APOLLOAdamW", APOLLO_OPTIONS, lambda request: {**request.options, **request.adam}
    ),
}


def refuse_in_backward(request: OptimizerRequest) -> None:
    """Refuse arguments that need gradients after the backward pass."""
    args, name = request.args, request.name
    why = f"`optim={name!r}` updates each parameter in the backward pass"
    whole = name.removesuffix("_layerwise")
    if whole != name and args.world_size > 1:
        raise UnsupportedArgument(
            f"Layer-wise {name} does not support DDP: each parameter is stepped before gradients are exchanged "
            f"between the {args.world_size} processes.\n\nHint: train in one process, or use `optim={whole!r}`."
        )
    if whole != name and args.gradient_accumulation_steps != 1:
        raise ArgumentError(
            f"Layerwise {name} does not support gradient accumulation, and "
            f"`gradient_accumulation_steps={args.gradient_accumulation_steps}`: each parameter is stepped as soon as "
            f"its gradient is there.\n\nHint: set it to 1, or use `optim={whole!r}`."
        )
    if args.mixed_precision == "fp16":
        raise UnsupportedArgument(f"{why}, where gradients are still scaled for `fp16=True`.\n\nHint: `bf16=True`.")
    if args.world_size > 1:
        raise UnsupportedArgument(
            f"{why}, before gradients are exchanged: it cannot train in {args.world_size} processes.\n\n"
            "Hint: train in one process, or choose another optimizer."
        )


def check_in_backward(request: OptimizerRequest) -> None:
    """Refuse what `refuse_in_backward` refuses, and warn of arguments without effect."""
    refuse_in_backward(request)
    args = request.args
    is_inert = {"max_grad_norm": args.max_grad_norm not in (0, 1.0), "weight_decay": args.weight_decay != 0}
    for name in filter(is_inert.get, is_inert):
        warn_user(
            f"`{name}={getattr(args, name)}` has no effect: `optim={request.name!r}` updates each parameter in the "
            "backward pass, as in transformers.",
            InertArgumentWarning,
        )


def check_layerwise(request: OptimizerRequest) -> None:
    """Refuse what either kind of optimizer refuses."""
    check_in_backward(request)
    check_targets(request)


LAYERWISE_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames(f"{whole.value}_layerwise"): replace(
        entry, check=check_layerwise, is_layerwise=True, refused_with={}
    )
    for whole, entry in LOW_RANK_OPTIMIZERS.items()
}


def _of_whole_model(request: OptimizerRequest) -> Keywords:
    if request.model is None:
        raise ArgumentError(
            f"`optim={request.name!r}` puts hooks on a model's parameters, and there is no model.\n\n"
            "Hint: pass the model as the second argument."
        )
    refuse_in_backward(request)
    return {"model": request.model}


def check_adalomo(request: OptimizerRequest) -> None:
    """Refuse a run without CUDA, where the package keeps its averages even if the model is on the CPU."""
    check_in_backward(request)
    found = LOMO_OPTIMIZERS[OptimizerNames.ADALOMO].load("AdaLomo")
    if found.__module__.startswith("lomo_optim.") and not torch.cuda.is_available():
        raise UnsupportedArgument(
            f"`optim={request.name!r}` keeps its averages on a CUDA GPU, and there is none.\n\nHint: `optim='lomo'`."
        )


LOMO_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    name: OptimizerEntry(
        f"lomo_optim.{class_name}",
        "lomo-optim",
        keywords=_of_whole_model,
        check=check,
        needs_model=True,
    )
    for name, class_name, check in (
        (OptimizerNames.LOMO, "Lomo", check_in_backward),
        (OptimizerNames.ADALOMO, "AdaLomo", check_adalomo),
    )
}

OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    **PLAIN_OPTIMIZERS,
    **LOW_RANK_OPTIMIZERS,
    **LOMO_OPTIMIZERS,
    **LAYERWISE_OPTIMIZERS,
}

# Parameters of these layers and with these names do not decay.
NO_DECAY_LAYERS = (nn.LayerNorm,)
NO_DECAY_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE | re.ASCII)


def get_decay_parameter_names(model: nn.Module) -> list[str]:
    """List the parameters that weight decay is applied to, which are all but biases and norms.

    Mirrors:
        `transformers.Trainer.get_decay_parameter_names`, 5.23.
    """
    names: list[str] = []
    for child_name, child in model.named_children():
        if not isinstance(child, NO_DECAY_LAYERS):
            names += [f"{child_name}.{name}" for name in get_decay_parameter_names(child)]
    names += model._parameters
    return [name for name in names if not NO_DECAY_NAMES.search(name)]


def check_request(args: TrainingArguments, model: nn.Module | None = None) -> None:
    """Refuse what is known to fail before the optimizer is made."""
    entry = OPTIMIZERS[OptimizerNames(args.optim)]
    request = OptimizerRequest(args, model, read_options(args, entry))
    entry.load(f"`optim={request.name!r}`")
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
    if entry.check is not None:
        entry.check(request)
    if args.optim_target_modules is not None and entry.check not in (check_targets, check_layerwise):
        warn_user(
            f"`{shown('optim_target_modules', args.optim_target_modules)}` has no effect: `optim={request.name!r}` "
            "trains every parameter alike; GaLore and APOLLO take it.",
            InertArgumentWarning,
        )


def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> ClassAndKeywords:
    """The optimizer's class and keywords for `optim` and `optim_args`.

    Args:
        args: The run's arguments.
        model: The model. Some optimizers (GaLore, APOLLO, LOMO) choose among its parameters.

    Returns:
        The class and its keywords. `params`, `model` or `optimizer_dict` among them replace the parameter groups.

    Raises:
        ArgumentError: The optimizer does not take an option, or cannot work with the arguments.
        MissingOptimizer: Its package is missing.
        UnsupportedArgument: It cannot be combined with another argument.

    Mirrors:
        `transformers.Trainer.get_optimizer_cls_and_kwargs`, 5.23.

    Differs:
        A switch may be any truth value (`nesterov=on`, `kahan_sum=false`), and other words are refused. There,
        `nesterov=on` is false and `kahan_sum=false` true. Numbers of `optim_args` are numbers for every optimizer.
        There, `block_size=128` and the options of `rmsprop_bnb` reach the optimizer as text, and fail.
    """
    entry = OPTIMIZERS[OptimizerNames(args.optim)]
    request = OptimizerRequest(args, model, read_options(args, entry))
    found = entry.load(f"`optim={request.name!r}`")
    if not entry.is_layerwise:
        return found, {"lr": args.learning_rate, **entry.keywords(request)}
    refuse_in_backward(request)
    keywords = {"lr": args.learning_rate, **entry.keywords(request)}
    groups: list[ParameterGroup] = keywords.pop("params")
    optimizers = {one: found([{**group, "params": [one]}], **keywords) for group in groups for one in group["params"]}
    return LayerWiseDummyOptimizer, {"lr": args.learning_rate, "optimizer_dict": optimizers, "params": groups}
