"""The table of optimizers by HF's names. An optimizer's package is imported only when its name is requested.

GaLore and APOLLO project the gradients of chosen linear layers to a low rank. Their layerwise forms, LOMO and AdaLomo
step within the backward pass, so the gradients of the whole model never exist together.
"""

from __future__ import annotations

import copy
import logging
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from hf_compat.errors import ArgumentError, MissingOptimizer, UnsupportedArgument, warn_once, warn_user
from hf_compat.hf.argument_values import optimizer, read_as
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import OptimizerNames
from hf_compat.hf.rows import ROWS
from hf_compat.hf.value_types import Range, ValueType, choice, number, or_none, plain, truth_value, whole_number
from hf_compat.optim.stepping import LayerWiseDummyOptimizer
from hf_compat.runtime.meshes import ParameterGroup
from hf_compat.runtime.text import brief, did_you_mean, need, pip_install, shown

# Names and types differ by optimizer.
Keywords: TypeAlias = dict[str, Any]
OptimizerClass: TypeAlias = type[torch.optim.Optimizer]
ClassAndKeywords: TypeAlias = tuple[OptimizerClass, Keywords]
KeywordsOf: TypeAlias = "Callable[[OptimizerRequest], Keywords]"

_NOT_GIVEN = object()
FINITE = number()
NOT_NEGATIVE = number(Range(low=0))
BELOW_1 = number(Range(low=0, high=1, excludes_high=True))
COUNT = whole_number(Range(low=1))


@dataclass(frozen=True, slots=True)
class Option:
    """The type of one option of `optim_args`, and its default if it is not the optimizer's own."""

    kind: ValueType
    default: object = _NOT_GIVEN


@dataclass(frozen=True, slots=True)
class OptimizerRequest:
    """A request for one optimizer."""

    args: TrainingArguments
    name: str  # in `optim`
    model: nn.Module | None  # None if it is not known yet
    options: Keywords  # of `optim_args`, with the table's defaults
    adam: Keywords  # `betas` and `eps`, which every Adam takes

    @property
    def whole_model(self) -> nn.Module:
        """The model, for optimizers that are made with it."""
        if self.model is None:
            raise ArgumentError(
                f"`optim={brief(self.name)}` is made for a model's parameters, and there is no model.\n\n"
                "Hint: pass the model as the second argument."
            )
        return self.model


def options_alone(request: OptimizerRequest) -> Keywords:
    """Pass the options of `optim_args`."""
    return dict(request.options)


def with_adam(request: OptimizerRequest) -> Keywords:
    """Pass the betas and the epsilon of the arguments, and the options."""
    return {**request.adam, **request.options}


def with_adam_and_decay(request: OptimizerRequest) -> Keywords:
    """Add the weight decay, for optimizers that do not read it from their groups alone."""
    return {**request.adam, "weight_decay": request.args.weight_decay, **request.options}


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """One optimizer name."""

    path: str  # of its class
    install: str = ""  # an argument of `pip_install`; a class of ours needs none
    _: KW_ONLY
    options: Mapping[str, Option] = field(default_factory=dict)  # that `optim_args` may set
    keywords: KeywordsOf = options_alone  # of the class. A missing `lr` is added
    projects: bool = False  # the gradients of `optim_target_modules`
    in_backward: bool = False  # each parameter is updated in the backward pass
    # Numbers of its states for each trained parameter. None if they depend on a rank. Those of factored matrices are 0.
    states: int | None = None
    adds_states: tuple[str, ...] = ()  # options that add one such number each, unless they are 0 or false
    device: str = ""  # that its kernels need, if a CPU is not enough
    refused_with: Mapping[str, str] = field(default_factory=dict)  # `fsdp` or `deepspeed`, and why not

    def load(self, for_what: str) -> OptimizerClass:
        """Import the class for a feature, which the error names first."""
        module, _, name = self.path.rpartition(".")
        try:
            found: OptimizerClass = pkgutil.resolve_name(f"{module}:{name}")
            return found
        except (AttributeError, ImportError) as error:
            package = module.partition(".")[0]
            raise MissingOptimizer(
                f"{for_what} needs {name} of the package {package}, which cannot be imported: "
                f"{error}.\n\nHint: {pip_install(self.install)}",
                name=package,
            ) from error


def read_request(args: TrainingArguments, model: nn.Module | None) -> tuple[OptimizerEntry, OptimizerRequest]:
    """Find the entry of `optim`, and read `optim_args`, written `key=value,key=value`, as its options."""
    name = str(plain(args.optim))
    # transformers' own arguments may have another
    optim = name if name in OPTIMIZERS else str(plain(read_as("optim", optimizer, name)))
    entry = OPTIMIZERS[optim]
    given: dict[str, str] = {}
    for part in (args.optim_args or "").replace(" ", "").split(","):
        key, equals, value = part.partition("=")
        if part and not (equals and key):
            raise ArgumentError(
                f"`optim_args={brief(args.optim_args)}` has the part {brief(part)}.\n\nHint: write key=value,key=value."
            )
        if given.get(key, value) != value:
            raise ArgumentError(f"`optim_args={brief(args.optim_args)}` has {key} twice.\n\nHint: write it once.")
        if part:
            given[key] = value
    for name in given:
        if name in entry.options:
            continue
        takes = f"takes {', '.join(entry.options)}" if entry.options else "takes no options"
        others = "the learning rate, the weight decay, and the betas and epsilon of Adam are arguments of their own."
        raise ArgumentError(
            f"`optim_args={brief(args.optim_args)}` has {name}, but `optim={brief(optim)}` "
            f"{takes}.\n\nHint: {did_you_mean(name, entry.options, others)}"
        )
    read: Keywords = {}
    for name, option in entry.options.items():
        if name in given:
            read[name] = read_as(f"optim_args: {name}", option.kind, given[name])
        elif option.default is not _NOT_GIVEN:
            read[name] = option.default
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return entry, OptimizerRequest(args, optim, model, read, adam)


def _torchs(
    name: str, states: int, keywords: KeywordsOf = options_alone, adds_states: tuple[str, ...] = (), **options: Option
) -> OptimizerEntry:
    path = f"torch.optim.{name}"
    return OptimizerEntry(path, "torch", keywords=keywords, options=options, states=states, adds_states=adds_states)


def _ademamix(request: OptimizerRequest) -> Keywords:
    args = request.args
    options = {"beta1": args.adam_beta1, "beta2": args.adam_beta2, "eps": args.adam_epsilon, **request.options}
    betas = tuple(float(options.pop(name)) for name in ("beta1", "beta2", "beta3"))
    return {"betas": betas, **options}


def _bitsandbytes(name: str, states: int, keywords: KeywordsOf, **options: Option) -> OptimizerEntry:
    """The name of a request holds the bits of the state and says whether it is paged."""
    return OptimizerEntry(
        f"bitsandbytes.optim.{name}",
        "bitsandbytes",
        keywords=lambda request: {
            **keywords(request),
            "optim_bits": 8 if "8bit" in request.name else 32,
            **({} if name == "RMSprop" else {"is_paged": "paged" in request.name}),
        },
        options=options,
        states=states,
        refused_with={"fsdp": "the kernels of bitsandbytes take no sharded parameters (DTensor)"},
    )


def _torchao(name: str) -> OptimizerEntry:
    return OptimizerEntry(
        f"torchao.optim.{name}",
        "'torchao>=0.11.0'",
        options={"block_size": Option(COUNT, 256), "bf16_stochastic_round": Option(truth_value, False)},
        keywords=with_adam,
        states=2,
    )


def _warmed_up(request: OptimizerRequest) -> Keywords:
    adam = {} if request.name.endswith("sgd") else request.adam  # SGD has no betas
    steps = request.args.warmup_steps
    if 0 < steps < 1:
        warn_once(
            f"`warmup_steps={steps}`: `optim='{request.name}'` warms up itself and takes this for updates, not for a "
            f"share of the run, as in transformers: its first step is {1 / steps:g} times `learning_rate`.\n\n"
            "Hint: give a number of updates."
        )
    return {**adam, "weight_decay": request.args.weight_decay, "warmup_steps": steps, **request.options}


def _schedule_free(name: str) -> OptimizerEntry:
    is_radam = name.startswith("RAdam")  # which warms up without a number of updates
    return OptimizerEntry(
        f"schedulefree.{name}",
        "schedulefree>=1.4.0" if is_radam else "schedulefree",
        options={"weight_lr_power": Option(FINITE, 2.0), "r": Option(FINITE, 0.0)},
        keywords=with_adam_and_decay if is_radam else _warmed_up,
        states=1 if name.startswith("SGD") else 2,
    )


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
        projects=True,
        device=device,
        # Measured with two processes: FSDP 2 fails when it saves, ZeRO in the first update.
        refused_with={
            "fsdp": "torch cannot save its projections from sharded parameters",
            "deepspeed": "ZeRO flattens the matrices that it projects",
        },
    )


def _lomo(name: str) -> OptimizerEntry:
    return OptimizerEntry(
        f"lomo_optim.{name}",
        "lomo-optim",
        keywords=lambda request: {"model": request.whole_model},
        in_backward=True,
        states=0,
    )


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
_DTYPES = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "float", "half", "double")
}
_DTYPE_NAME = choice(_DTYPES)
_DTYPE = ValueType(_DTYPE_NAME.expected, lambda value: _DTYPES[str(_DTYPE_NAME.read(value))], takes_text=True)
_POSITIVE, _SHARE, _SWITCH = Option(NOT_NEGATIVE), Option(BELOW_1), Option(truth_value)
_OF_RMSPROP = {
    **dict.fromkeys(("momentum", "eps", "weight_decay"), _POSITIVE), "alpha": _SHARE, "centered": _SWITCH,
}  # fmt: skip

# Names → entry, without the layerwise forms.
_ENTRIES = {
    # Torch's own, those of its builds for other chips, and transformers' Adafactor
    "adamw_torch": _torchs("AdamW", 2, with_adam),
    "adamw_torch_fused": _torchs("AdamW", 2, lambda request: {**request.adam, "fused": True}),
    "adamw_torch_xla": OptimizerEntry(
        "torch_xla.amp.syncfree.AdamW", "torch_xla", keywords=with_adam, states=2, device="a TPU"
    ),
    "adamw_torch_npu_fused": OptimizerEntry(
        "torch_npu.optim.NpuFusedAdamW", "torch_npu", keywords=with_adam, states=2, device="an Ascend NPU"
    ),
    "adafactor": OptimizerEntry(
        "transformers.optimization.Adafactor",
        "[transformers]",
        keywords=lambda _: {"scale_parameter": False, "relative_step": False},
        states=0,
    ),
    "sgd": _torchs(
        "SGD",
        0,
        adds_states=("momentum",),
        momentum=_POSITIVE,
        weight_decay=_POSITIVE,
        dampening=Option(FINITE),
        nesterov=_SWITCH,
    ),
    "adagrad": _torchs("Adagrad", 1, lr_decay=_POSITIVE, weight_decay=_POSITIVE, eps=_POSITIVE),
    "rmsprop": _torchs("RMSprop", 1, options_alone, ("momentum", "centered"), **_OF_RMSPROP),
    # Their states take 8 or 4 bits, or paged memory
    "adamw_torch_4bit": _torchao("AdamW4bit"),
    "adamw_torch_8bit": _torchao("AdamW8bit"),
    "adamw_bnb_8bit adamw_8bit paged_adamw_32bit paged_adamw_8bit": _bitsandbytes("AdamW", 2, with_adam),
    "ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit": _bitsandbytes(
        "AdEMAMix",
        3,
        _ademamix,
        **{"beta1": _SHARE, "beta2": _SHARE, "beta3": Option(BELOW_1, 0.9999), "eps": _POSITIVE},
        **{"alpha": Option(FINITE, 5.0), "t_alpha": Option(COUNT), "t_beta3": Option(COUNT)},
    ),
    "lion_32bit lion_8bit paged_lion_32bit paged_lion_8bit": _bitsandbytes(
        "Lion", 1, lambda request: {"betas": request.adam["betas"]}
    ),
    "rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit": _bitsandbytes(
        "RMSprop", 1, options_alone, min_8bit_size=Option(COUNT), **_OF_RMSPROP
    ),
    # Each of these packages has one optimizer
    "adamw_anyprecision": OptimizerEntry(
        "torchdistx.optimizers.AnyPrecisionAdamW",
        "git+https://github.com/pytorch/torchdistx",
        options={
            "use_kahan_summation": Option(truth_value, False),
            **dict.fromkeys(("momentum_dtype", "variance_dtype"), Option(_DTYPE, torch.float32)),
            "compensation_buffer_dtype": Option(_DTYPE, torch.bfloat16),
        },
        keywords=with_adam,
    ),
    "grokadamw": OptimizerEntry(
        "grokadamw.GrokAdamW",
        "grokadamw",
        options={
            "alpha_init": Option(BELOW_1, 0.98),
            "lamb": Option(FINITE, 2.0),
            "gamma": Option(FINITE, 0.1),
            "grokking_signal_decay_rate": Option(FINITE, 0.1),
            "gradient_clipping": Option(NOT_NEGATIVE, 1.0),
        },
        states=3,
        refused_with={"fsdp": "its step does not end on sharded parameters"},
    ),
    "stable_adamw": OptimizerEntry(
        "optimi.StableAdamW",
        "torch-optimi",
        options={
            "decouple_lr": Option(truth_value, False),
            "max_lr": Option(or_none(NOT_NEGATIVE), None),
            "kahan_sum": Option(or_none(truth_value), None),
        },
        keywords=with_adam_and_decay,
        states=2,
    ),
    # They average the trained weights instead of decaying the learning rate. `optim/stepping.py` switches between
    # the trained weights and their average
    "schedule_free_radam": _schedule_free("RAdamScheduleFree"),
    "schedule_free_adamw": _schedule_free("AdamWScheduleFree"),
    "schedule_free_sgd": _schedule_free("SGDScheduleFree"),
    # They project the gradients of the target layers
    "galore_adamw": _low_rank("GaLoreAdamW", GALORE_OPTIONS),
    "galore_adamw_8bit": _low_rank("GaLoreAdamW8bit", GALORE_OPTIONS, device="a GPU"),
    # The layerwise form gets these keywords, too. Upstream leaves them out, and the package refuses the learning rate.
    "galore_adafactor": _low_rank(
        "GaLoreAdafactor", GALORE_OPTIONS, further={"scale_parameter": False, "relative_step": False}
    ),
    # Only the projected parameters get the betas and the epsilon of the arguments.
    "apollo_adamw": _low_rank("APOLLOAdamW", APOLLO_OPTIONS, lambda request: {**request.options, **request.adam}),
    # They run the backward pass
    "lomo": _lomo("Lomo"),
    "adalomo": _lomo("AdaLomo"),
}
_ONCE = {name: entry for names, entry in _ENTRIES.items() for name in names.split()}
OPTIMIZERS: dict[str, OptimizerEntry] = _ONCE | {
    f"{name}_layerwise": replace(entry, in_backward=True, refused_with={})
    for name, entry in _ONCE.items()
    if entry.projects
}


def state_bytes(optim: str, optim_args: str | None) -> int | None:
    """Return the bytes of an optimizer's states for each trained parameter, or None if they depend on a rank."""
    entry = OPTIMIZERS[optim]
    states = entry.states
    for part in (optim_args or "").replace(" ", "").split(","):
        name, _, value = part.partition("=")
        if states is not None and name in entry.adds_states:
            states += bool(read_as(f"optim_args: {name}", entry.options[name].kind, value))
    # 8 and 4 bits are in the name
    return None if states is None else states if "8bit" in optim else states // 2 if "4bit" in optim else 4 * states


_log = logging.getLogger(__name__)


def target_expressions(request: OptimizerRequest) -> list[re.Pattern[str]]:
    """Read `optim_target_modules`. Refuse it if it is missing or not a regular expression."""
    targets = request.args.optim_target_modules
    if targets is None:
        raise ArgumentError(
            f"`optim='{request.name}'` needs `optim_target_modules`.\n\n"
            "Hint: name the linear layers to project, as a list or a regular expression, or set 'all-linear'."
        )
    try:
        return list(map(re.compile, [targets] if isinstance(targets, str) else targets))
    except re.error as error:
        raise ArgumentError(
            f"`{shown('optim_target_modules', targets)}`: {brief(error.pattern)} is not a regular expression: "
            f"{error}.\n\nHint: name modules, give a regular expression that matches whole names, or 'all-linear'."
        ) from error


def low_rank_groups(request: OptimizerRequest, options: Keywords, warn: bool = True) -> list[ParameterGroup]:
    """Divide the model's parameters into the weights of the target layers, which get the options, and the others."""
    expressions, model = target_expressions(request), request.whole_model
    targets = request.args.optim_target_modules
    is_text = isinstance(targets, str)
    is_all_linear = is_text and expressions[0].pattern.replace("_", "-") == "all-linear"
    chosen = set()
    for name, module in model.named_modules():
        by_name = any(name == one.pattern if is_text else one.pattern in name for one in expressions)
        by_expression = any(one.fullmatch(name) for one in expressions)
        if isinstance(module, nn.Linear) and (by_name or by_expression or is_all_linear):
            chosen.add(f"{name}.weight")
        elif by_name and warn and not isinstance(module, nn.Linear):
            # an expression may match other modules, too
            _log.warning("%s is not projected: %s works on linear layers only.", name, request.name)
    if not chosen:
        raise ArgumentError(
            f"`{shown('optim_target_modules', targets)}` matches no linear layer of the model, so "
            f"`optim='{request.name}'` has nothing to project.\n\n"
            "Hint: a text is a regular expression for a module's whole name; a list holds parts of names."
        )
    named = list(model.named_parameters())
    return [
        {"params": [parameter for name, parameter in named if name not in chosen]},
        {"params": [parameter for name, parameter in named if name in chosen], **options},
    ]


def refuse_in_backward(request: OptimizerRequest) -> None:
    """Refuse arguments that need gradients after the backward pass."""
    args, name = request.args, request.name
    why = f"`optim={brief(name)}` updates each parameter in the backward pass"
    whole = name.removesuffix("_layerwise")
    if args.world_size > 1:
        instead = f"use `optim={brief(whole)}`" if whole != name else "choose another optimizer"
        raise UnsupportedArgument(
            f"{why}, which does not support DDP: gradients are exchanged between the {args.world_size} processes after "
            f"it.\n\nHint: train in one process, or {instead}."
        )
    if whole != name and args.gradient_accumulation_steps != 1:
        raise ArgumentError(
            f"Layerwise {name} does not support gradient accumulation, and "
            f"`gradient_accumulation_steps={args.gradient_accumulation_steps}`: each parameter is stepped as soon as "
            f"its gradient is there.\n\nHint: set it to 1, or use `optim={brief(whole)}`."
        )
    if args.mixed_precision == "fp16":
        raise UnsupportedArgument(f"{why}, where gradients are still scaled for `fp16=True`.\n\nHint: `bf16=True`.")


# Parameters of these layers and with these names do not decay.
NO_DECAY_LAYERS = (nn.LayerNorm,)
NO_DECAY_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE | re.ASCII)


def get_decay_parameter_names(model: nn.Module) -> list[str]:
    """List the parameters that weight decay is applied to, which are all but biases and norms.

    Mirrors:
        `transformers.Trainer.get_decay_parameter_names`.
    """
    names: list[str] = []
    for child_name, child in model.named_children():
        if not isinstance(child, NO_DECAY_LAYERS):
            names += [f"{child_name}.{name}" for name in get_decay_parameter_names(child)]
    names += model._parameters
    return [name for name in names if not NO_DECAY_NAMES.search(name)]


def check_request(args: TrainingArguments, model: nn.Module | None = None) -> None:
    """Refuse what is known to fail before the optimizer is made."""
    entry, request = read_request(args, model)
    kind = entry.load(f"`optim='{request.name}'`")
    if entry.device and args.device.type == "cpu":
        raise UnsupportedArgument(
            f"`optim='{request.name}'` needs {entry.device}, and this run is on the CPU.\n\n"
            "Hint: use another optimizer; or run where there is one, without `use_cpu`."
        )
    for strategy, why in entry.refused_with.items():
        if getattr(args, strategy):
            raise UnsupportedArgument(
                f"`optim='{request.name}'` does not train with `{strategy}`: {why}.\n\n"
                f"Hint: use another optimizer; or leave `{strategy}` out, and several processes train with DDP."
            )
    if entry.in_backward:
        refuse_in_backward(request)
        # the package keeps AdaLomo's averages on CUDA even if the model is on the CPU
        is_packages = kind.__module__.startswith("lomo_optim.") and request.name == OptimizerNames.ADALOMO
        if is_packages and not torch.cuda.is_available():
            raise UnsupportedArgument(
                f"`optim='{request.name}'` keeps its averages on a CUDA GPU, and there is none.\n\n"
                "Hint: `optim='lomo'`."
            )
    if entry.projects:
        target_expressions(request)
        if model is not None:
            low_rank_groups(request, {}, warn=False)


def unread_arguments(args: TrainingArguments, model: nn.Module | None = None) -> dict[str, str]:
    """Name the arguments that the optimizer of `optim` does not read, each with the reason.

    Its keywords are made again with another value of each argument. One that changes nothing is not read. None is
    named if `optim_args` cannot be read, which raises an error where the optimizer is made.
    """
    try:
        entry, request = read_request(args, model)
    except ArgumentError:
        return {}
    told = f"`optim='{request.name}'`"
    if entry.in_backward:
        why = f"{told} updates each parameter in the backward pass, as in transformers"
        unread = dict.fromkeys(("max_grad_norm", "weight_decay"), why)
    else:
        unread = {}
    if not entry.projects:
        unread["optim_target_modules"] = f"{told} trains every parameter alike. GaLore and APOLLO take it"
    if model is None and (entry.projects or entry.in_backward):  # they are made of a model's parameters
        return unread
    try:
        made = entry.keywords(request)
    except ArgumentError:
        return unread
    for name in (*(name for name in ROWS if name.startswith("adam_")), "warmup_steps"):
        changed = copy.copy(args)
        changed.__dict__[name] = getattr(args, name) + 1  # unchecked: only keywords are made of it
        if entry.keywords(read_request(changed, model)[1]) == made:
            unread[name] = f"{told} does not read it"
    return unread


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
        `transformers.Trainer.get_optimizer_cls_and_kwargs`.

    Differs:
        A switch may be any truth value (`nesterov=on`, `kahan_sum=false`), and other words are refused. There,
        `nesterov=on` is false and `kahan_sum=false` true. Numbers of `optim_args` are numbers for every optimizer.
        There, `block_size=128` and the options of `rmsprop_bnb` reach the optimizer as text, and fail.
    """
    entry, request = read_request(args, model)
    found = entry.load(f"`optim='{request.name}'`")
    keywords = {"lr": args.learning_rate, **entry.keywords(request)}
    if entry.in_backward:
        refuse_in_backward(request)
    if not (entry.projects and entry.in_backward):
        return found, keywords
    groups: list[ParameterGroup] = keywords.pop("params")
    optimizers = {one: found([{**group, "params": [one]}], **keywords) for group in groups for one in group["params"]}
    return LayerWiseDummyOptimizer, {"lr": args.learning_rate, "optimizer_dict": optimizers, "params": groups}


def check_optimized(optimizer: object, model: nn.Module, warns: bool = True) -> None:
    """Refuse an optimizer that holds none of the parameters to train, and so trains nothing.

    If it `warns`, say that an optimizer has parameters that the model has no more in place of some that it has.

    Raises:
        ArgumentError: It holds those of another model, frozen ones alone, or none at all.
    """
    held = _held_by(optimizer)
    if held is None:
        return
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = [name for name, parameter in trained.items() if id(parameter) not in held]
    if trained and len(missing) == len(trained):
        raise ArgumentError(
            f"The optimizer ({type(optimizer).__name__}) holds {len(held)} parameters, and none of the {len(trained)} "
            f"that the model ({type(model).__name__}) would train, so nothing is trained.\n\nHint: make it from "
            "`trainer.model.parameters()`, after the model was changed or wrapped."
        )
    if warns:
        _tell_of_stale(optimizer, held, model, missing)


def _held_by(optimizer: object) -> set[int] | None:
    """The identities of an optimizer's parameters. None if its groups do not have them."""
    groups = getattr(optimizer, "param_groups", None)
    # the groups of this class, and of transformers' own one of that name, hold none
    if not isinstance(groups, list) or type(optimizer).__name__ == LayerWiseDummyOptimizer.__name__:
        return None
    return {id(parameter) for group in groups for parameter in group["params"]}


def _tell_of_stale(optimizer: object, held: set[int], model: nn.Module, missing: list[str]) -> None:
    stale = len(held.difference(map(id, model.parameters())))
    if stale and missing:
        warn_user(
            f"The optimizer ({type(optimizer).__name__}) holds {stale} parameters that the model "
            f"({type(model).__name__}) does not have, and does not train {brief(missing)}.\n\nHint: make it from "
            "`trainer.model.parameters()`, after the model was changed or wrapped."
        )


def tell_of_later_parameters(optimizer: object, model: nn.Module, frozen: Sequence[nn.Parameter]) -> None:
    """Warn of parameters that were unfrozen or replaced while the model trained, and that the optimizer lacks.

    `frozen` are those that were not to be trained at first.
    """
    held = _held_by(optimizer)
    if held is None:
        return
    missing = {name: one for name, one in model.named_parameters() if one.requires_grad and id(one) not in held}
    first = set(map(id, frozen))
    later = [name for name, one in missing.items() if id(one) in first]
    if later:
        warn_user(
            f"{brief(later)} were unfrozen after the optimizer ({type(optimizer).__name__}) was made. It does not hold "
            "them, so they were not trained.\n\nHint: call `optimizer.add_param_group` where they are unfrozen, or "
            "freeze them in `on_train_begin`, once the optimizer was made of all parameters."
        )
    _tell_of_stale(optimizer, held, model, [name for name in missing if name not in later])


# Options of an optimizer's groups, which a checkpoint has, and the arguments that set them.
_KEPT = {
    "initial_lr": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "adam_beta1, adam_beta2",
    "eps": "adam_epsilon",
    "momentum": "optim_args",
}


def tell_of_kept_options(
    made: Sequence[Mapping[str, object]], loaded: Sequence[Mapping[str, object]], rates: Sequence[float]
) -> None:
    """Warn of options with which an optimizer was made, and that have given way to those of a checkpoint.

    Args:
        made: The groups of the optimizer before the checkpoint was loaded.
        loaded: The groups after that.
        rates: The rates with which the schedule of the checkpoint was made. Callbacks may change those of groups.
    """
    found = {}
    for place, (before, after) in enumerate(zip(made, loaded, strict=False)):
        kept = {**after, "initial_lr": rates[place] if place < len(rates) else before.get("initial_lr")}
        cycled = {"betas", "momentum"} if "max_momentum" in after else set()  # by a schedule of torch's
        for name, argument in _KEPT.items():
            if name not in cycled and name in before and name in kept and before[name] != kept[name]:
                found[argument] = f"{name} is {brief(kept[name])} (now set to {brief(before[name])})"
    if found:
        warn_user(
            f"The resumed run goes on with the checkpoint's optimizer: {', '.join(found.values())}.\n\n"
            f"Hint: for another value of {', '.join(found)}, begin a new run with the checkpoint's weights."
        )


def keep_embeddings_in_32_bit(model: nn.Module) -> None:
    """Keep the state of embeddings in 32 bits, whose gradients are too sparse for the 8 bits of bitsandbytes.

    Mirrors:
        The end of `transformers.Trainer.create_optimizer`.
    """
    manager = need("bitsandbytes", "bitsandbytes", "An optimizer of 8 bits").optim.GlobalOptimManager.get_instance()
    kept = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            kept += sum({weight.data_ptr(): weight.numel() for weight in module.parameters()}.values())
            _log.info("skipped %s: %sM params", module, kept / 2**20)
            manager.register_module_override(module, "weight", {"optim_bits": 32})
            _log.debug("bitsandbytes: will optimize %s in fp32", module)
    _log.info("skipped: %sM params", kept / 2**20)
