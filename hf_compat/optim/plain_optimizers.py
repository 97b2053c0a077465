"""Entries of the optimizers that need only the arguments, such as those of torch, bitsandbytes and schedule-free.

`optimizers.py` has the whole table. An optimizer's package is imported only when its name is requested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from hf_compat.errors import ArgumentError, MissingOptimizer, warn_once
from hf_compat.hf.argument_values import read_as
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import OptimizerNames
from hf_compat.hf.value_types import TRUTH_VALUE, Range, ValueType, choice, number, or_none, whole_number
from hf_compat.runtime.text import did_you_mean, need

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
    model: nn.Module | None  # None if it is not known yet
    options: Keywords  # of `optim_args`, with the table's defaults

    @property
    def name(self) -> str:
        return OptimizerNames(self.args.optim).value

    @property
    def adam(self) -> Keywords:
        """`betas` and `eps`, which every Adam takes."""
        return {"betas": (self.args.adam_beta1, self.args.adam_beta2), "eps": self.args.adam_epsilon}


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
    install: str  # the requirement for `pip install`
    _: KW_ONLY
    former_module: str = ""  # which had the class in earlier releases
    options: Mapping[str, Option] = field(default_factory=dict)  # that `optim_args` may set
    keywords: KeywordsOf = options_alone  # of the class. A missing `lr` is added
    # refuses what cannot be trained, when a Trainer is made, with its model if there is one
    check: Callable[[OptimizerRequest], None] | None = None
    needs_model: bool = False  # for its keywords
    is_layerwise: bool = False  # each parameter gets an optimizer of its own
    device: str = ""  # that its kernels need, if a CPU is not enough
    refused_with: Mapping[str, str] = field(default_factory=dict)  # `fsdp` or `deepspeed`, and why not

    def load(self, for_what: str) -> OptimizerClass:
        """Import the class for a feature, which the error names first."""
        current, _, name = self.path.rpartition(".")
        reasons = []
        for module in filter(None, (current, self.former_module)):
            try:
                found: OptimizerClass = getattr(need(module, self.install, for_what), name)
                return found
            except (AttributeError, ImportError) as error:
                reasons.append(error)
        package = current.partition(".")[0]
        raise MissingOptimizer(
            f"{for_what} needs {name} of the package {package}, which cannot be imported: "
            f"{reasons[0].__cause__ or reasons[0]}.\n\nHint: pip install {self.install}",
            name=package,
        ) from reasons[0]


def read_options(args: TrainingArguments, entry: OptimizerEntry) -> Keywords:
    """Read `optim_args`, written `key=value,key=value`, as the options of an entry."""
    given: dict[str, str] = {}
    for part in (args.optim_args or "").replace(" ", "").split(","):
        key, equals, value = part.partition("=")
        if part and not (equals and key):
            raise ArgumentError(
                f"`optim_args={args.optim_args!r}` has the part {part!r}.\n\nHint: write key=value,key=value."
            )
        if given.get(key, value) != value:
            raise ArgumentError(f"`optim_args={args.optim_args!r}` has {key} twice.\n\nHint: write it once.")
        if part:
            given[key] = value
    for name in given:
        if name in entry.options:
            continue
        takes = f"takes {', '.join(entry.options)}" if entry.options else "takes no options"
        others = "the learning rate, the weight decay, and the betas and epsilon of Adam are arguments of their own."
        raise ArgumentError(
            f"`optim_args={args.optim_args!r}` has {name}, but `optim={OptimizerNames(args.optim).value!r}` "
            f"{takes}.\n\nHint: {did_you_mean(name, entry.options, others)}"
        )
    read: Keywords = {}
    for name, option in entry.options.items():
        if name in given:
            read[name] = read_as(f"optim_args: {name}", option.kind, given[name])
        elif option.default is not _NOT_GIVEN:
            read[name] = option.default
    return read


_log = logging.getLogger(__name__)
_MIB = 2**20


def _torchs(name: str, keywords: KeywordsOf = options_alone, **options: Option) -> OptimizerEntry:
    return OptimizerEntry(f"torch.optim.{name}", "torch", keywords=keywords, options=options)


def _ademamix(request: OptimizerRequest) -> Keywords:
    args = request.args
    options = {"beta1": args.adam_beta1, "beta2": args.adam_beta2, "eps": args.adam_epsilon, **request.options}
    betas = tuple(float(options.pop(name)) for name in ("beta1", "beta2", "beta3"))
    return {"betas": betas, **options}


def _bitsandbytes(name: str, keywords: KeywordsOf, **options: Option) -> OptimizerEntry:
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
        refused_with={"fsdp": "the kernels of bitsandbytes take no sharded parameters (DTensor)"},
    )


def _torchao(name: str) -> OptimizerEntry:
    return OptimizerEntry(
        f"torchao.optim.{name}",
        "'torchao>=0.4.0'",
        former_module="torchao.prototype.low_bit_optim",
        options={"block_size": Option(COUNT, 256), "bf16_stochastic_round": Option(TRUTH_VALUE, False)},
        keywords=with_adam,
    )


def _warmed_up(request: OptimizerRequest) -> Keywords:
    adam = {} if request.name.endswith("sgd") else request.adam  # SGD has no betas
    args = request.args
    return {**adam, "weight_decay": args.weight_decay, "warmup_steps": args.warmup_steps, **request.options}


def _warn_of_share(request: OptimizerRequest) -> None:
    """Warn of a warm-up given as a share of the run, which the optimizer takes for updates, as upstream."""
    steps = request.args.warmup_steps
    if 0 < steps < 1:
        warn_once(
            f"`warmup_steps={steps}`: `optim={request.name!r}` warms up itself and takes this for updates, not for a "
            f"share of the run, as in transformers: its first step is {1 / steps:g} times `learning_rate`.\n\n"
            "Hint: give a number of updates."
        )


def _schedule_free(name: str) -> OptimizerEntry:
    is_radam = name.startswith("RAdam")  # which warms up without a number of updates
    return OptimizerEntry(
        f"schedulefree.{name}",
        "schedulefree>=1.4.0" if is_radam else "schedulefree",
        options={"weight_lr_power": Option(FINITE, 2.0), "r": Option(FINITE, 0.0)},
        keywords=with_adam_and_decay if is_radam else _warmed_up,
        check=None if is_radam else _warn_of_share,
    )


_DTYPES = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "float", "half", "double")
}
_DTYPE_NAME = choice(_DTYPES)
_DTYPE = ValueType(_DTYPE_NAME.expected, lambda value: _DTYPES[str(_DTYPE_NAME.read(value))], takes_text=True)
_POSITIVE, _SHARE, _SWITCH = Option(NOT_NEGATIVE), Option(BELOW_1), Option(TRUTH_VALUE)
_OF_RMSPROP = {
    **dict.fromkeys(("momentum", "eps", "weight_decay"), _POSITIVE), "alpha": _SHARE, "centered": _SWITCH,
}  # fmt: skip

# Names → entry of the optimizers that need only the arguments.
_ENTRIES = {
    # Torch's own, those of its builds for other chips, and transformers' Adafactor
    "adamw_torch": _torchs("AdamW", with_adam),
    "adamw_torch_fused": _torchs("AdamW", lambda request: {**request.adam, "fused": True}),
    "adamw_torch_xla": OptimizerEntry("torch_xla.amp.syncfree.AdamW", "torch_xla", keywords=with_adam, device="a TPU"),
    "adamw_torch_npu_fused": OptimizerEntry(
        "torch_npu.optim.NpuFusedAdamW", "torch_npu", keywords=with_adam, device="an Ascend NPU"
    ),
    "adafactor": OptimizerEntry(
        "transformers.optimization.Adafactor",
        "'hf-compat[transformers]'",
        keywords=lambda _: {"scale_parameter": False, "relative_step": False},
    ),
    "sgd": _torchs("SGD", momentum=_POSITIVE, weight_decay=_POSITIVE, dampening=Option(FINITE), nesterov=_SWITCH),
    "adagrad": _torchs("Adagrad", lr_decay=_POSITIVE, weight_decay=_POSITIVE, eps=_POSITIVE),
    "rmsprop": _torchs("RMSprop", options_alone, **_OF_RMSPROP),
    # Their states take 8 or 4 bits, or paged memory
    "adamw_torch_4bit": _torchao("AdamW4bit"),
    "adamw_torch_8bit": _torchao("AdamW8bit"),
    "adamw_bnb_8bit adamw_8bit paged_adamw_32bit paged_adamw_8bit": _bitsandbytes("AdamW", with_adam),
    "ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit": _bitsandbytes(
        "AdEMAMix",
        _ademamix,
        **{"beta1": _SHARE, "beta2": _SHARE, "beta3": Option(BELOW_1, 0.9999), "eps": _POSITIVE},
        **{"alpha": Option(FINITE, 5.0), "t_alpha": Option(COUNT), "t_beta3": Option(COUNT)},
    ),
    "lion_32bit lion_8bit paged_lion_32bit paged_lion_8bit": _bitsandbytes(
        "Lion", lambda request: {"betas": request.adam["betas"]}
    ),
    "rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit": _bitsandbytes(
        "RMSprop", options_alone, min_8bit_size=Option(COUNT), **_OF_RMSPROP
    ),
    # Each of these packages has one optimizer
    "adamw_anyprecision": OptimizerEntry(
        "torchdistx.optimizers.AnyPrecisionAdamW",
        "git+https://github.com/pytorch/torchdistx",
        options={
            "use_kahan_summation": Option(TRUTH_VALUE, False),
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
        refused_with={"fsdp": "its step does not end on sharded parameters"},
    ),
    "stable_adamw": OptimizerEntry(
        "optimi.StableAdamW",
        "torch-optimi",
        options={
            "decouple_lr": Option(TRUTH_VALUE, False),
            "max_lr": Option(or_none(NOT_NEGATIVE), None),
            "kahan_sum": Option(or_none(TRUTH_VALUE), None),
        },
        keywords=with_adam_and_decay,
    ),
    # They average the trained weights instead of decaying the learning rate. `optim/stepping.py` switches between
    # the trained weights and their average
    "schedule_free_radam": _schedule_free("RAdamScheduleFree"),
    "schedule_free_adamw": _schedule_free("AdamWScheduleFree"),
    "schedule_free_sgd": _schedule_free("SGDScheduleFree"),
}
PLAIN_OPTIMIZERS = {OptimizerNames(name): entry for names, entry in _ENTRIES.items() for name in names.split()}


def keep_embeddings_in_32_bit(model: nn.Module, optimizer_class: object, keywords: Keywords) -> None:
    """Keep the state of embeddings in 32 bits, whose gradients are too sparse for the 8 bits of bitsandbytes.

    Mirrors:
        The end of `transformers.Trainer.create_optimizer`, 5.23.
    """
    if "bitsandbytes" not in str(optimizer_class) or keywords.get("optim_bits") != 8:
        return
    manager = need("bitsandbytes", "bitsandbytes", "An optimizer of 8 bits").optim.GlobalOptimManager.get_instance()
    kept = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            kept += sum({weight.data_ptr(): weight.numel() for weight in module.parameters()}.values())
            _log.info("skipped %s: %sM params", module, kept / _MIB)
            manager.register_module_override(module, "weight", {"optim_bits": 32})
            _log.debug("bitsandbytes: will optimize %s in fp32", module)
    _log.info("skipped: %sM params", kept / _MIB)
