"""Optimizers that need only the arguments, such as those of torch, bitsandbytes and schedule-free.

An entry of an optimizer name holds the source of its class, its options and its keywords. The entries are made here
and in `optimizers.py`, which has the whole table. An optimizer's package is imported only when its name is requested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from hf_compat.errors import ArgumentError, MissingOptimizer, warn_once
from hf_compat.hf.argument_values import read_as
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import OptimizerNames
from hf_compat.hf.value_types import NONE, TRUTH_VALUE, Range, ValueType, choice, either, number, whole_number
from hf_compat.runtime.text import did_you_mean, need

# An optimizer's options, of types that differ by optimizer.
Keywords: TypeAlias = dict[str, Any]
OptimizerClass: TypeAlias = type[torch.optim.Optimizer]
ClassAndKeywords: TypeAlias = tuple[OptimizerClass, Keywords]

_NOT_GIVEN = object()
FINITE = number()
NOT_NEGATIVE = number(Range(low=0))
BELOW_1 = number(Range(low=0, high=1, excludes_high=True))
COUNT = whole_number(Range(low=1))


@dataclass(frozen=True, slots=True)
class Option:
    """One option that an optimizer takes from `optim_args`.

    Args:
        kind: What it may be.
        default: Its value where it is not given; without one, the optimizer's own default counts.
    """

    kind: ValueType
    default: object = _NOT_GIVEN


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassSource:
    """Where an optimizer's class comes from.

    Args:
        modules: The module that has it, and those that had it in earlier releases.
        name: The class.
        install: What `pip install` takes to bring it.
    """

    modules: tuple[str, ...]
    name: str
    install: str

    @property
    def package(self) -> str:
        """The package that the class belongs to."""
        return self.modules[0].partition(".")[0]

    def load(self, for_what: str) -> OptimizerClass:
        """Import the class.

        Args:
            for_what: The optimizer that needs it; the error begins with it.

        Raises:
            MissingOptimizer: The package is missing, or is a release without this class.
        """
        found: OptimizerClass
        reasons = []
        for module in self.modules:
            try:
                found = getattr(need(module, self.install, for_what), self.name)
            except (AttributeError, ImportError) as error:
                reasons.append(error)
                continue
            return found
        raise MissingOptimizer(
            f"{for_what} needs {self.name} of the package {self.package}, which cannot be imported: "
            f"{reasons[0].__cause__ or reasons[0]}.\n\nHint: pip install {self.install}",
            name=self.package,
        ) from reasons[0]


@dataclass(frozen=True, slots=True)
class OptimizerRequest:
    """A request for one optimizer.

    Args:
        args: The run's arguments.
        model: The model that is trained; None where it is not known yet.
        options: Those of `optim_args`, read by their types; defaults of the table are filled in.
    """

    args: TrainingArguments
    model: nn.Module | None
    options: Keywords

    @property
    def name(self) -> str:
        """The optimizer's name."""
        return OptimizerNames(self.args.optim).value

    @property
    def adam(self) -> Keywords:
        """The keywords of every Adam: `betas` and `eps`."""
        return {"betas": (self.args.adam_beta1, self.args.adam_beta2), "eps": self.args.adam_epsilon}


# Make the optimizer's class and keywords from a request and the loaded class. A missing `lr` is added.
Chooser = Callable[[OptimizerRequest, OptimizerClass], ClassAndKeywords]


def with_options(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    """Choose the class with the options of `optim_args` alone."""
    return found, dict(request.options)


def with_adam(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    """Choose the class with the betas and the epsilon of the arguments, and the options."""
    return found, {**request.adam, **request.options}


def with_adam_and_decay(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    """Choose the same with the weight decay, which the optimizer does not take from its groups alone."""
    return found, {**request.adam, "weight_decay": request.args.weight_decay, **request.options}


def no_check(request: OptimizerRequest) -> None:
    """Refuse nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerEntry:
    """One optimizer name.

    Args:
        source: Where its class comes from.
        options: What it takes from `optim_args`, by name.
        choose: Makes class and keywords.
        check: Refuses what cannot be trained; asked when a Trainer is made, with its model where there is one.
        needs_model: Class and keywords can only be made with the model.
        device: What the optimizer's kernels need besides a CPU; empty where a CPU does.
        refused_with: `fsdp` or `deepspeed`, and why the optimizer cannot train with it.
    """

    source: ClassSource
    options: Mapping[str, Option] = field(default_factory=dict)
    choose: Chooser = with_options
    check: Callable[[OptimizerRequest], None] = no_check
    needs_model: bool = False
    device: str = ""
    refused_with: Mapping[str, str] = field(default_factory=dict)


def read_options(args: TrainingArguments, entry: OptimizerEntry) -> Keywords:
    """Read `optim_args` as the options of an entry.

    Raises:
        ArgumentError: A part that is not a `key=value`, an option that the optimizer does not take, or a value of
            another type.
    """
    given = parse_optim_args(args.optim_args)
    for name in given:
        if name not in entry.options:
            takes = f"takes {', '.join(entry.options)}" if entry.options else "takes no options"
            others = (
                "the learning rate, the weight decay, and the betas and epsilon of Adam are arguments of their own."
            )
            raise ArgumentError(
                f"`optim_args={args.optim_args!r}` has {name}, but `optim={OptimizerNames(args.optim).value!r}` "
                f"{takes}.\n\nHint: {did_you_mean(name, entry.options, others)}"
            )
    read: Keywords = {
        name: option.default for name, option in entry.options.items() if option.default is not _NOT_GIVEN
    }
    for name, text in given.items():
        read[name] = read_as(f"optim_args: {name}", entry.options[name].kind, text)
    return read


def parse_optim_args(optim_args: str | None) -> dict[str, str]:
    """Split `key=value,key=value`.

    Raises:
        ArgumentError: A part without an equals sign, or a duplicate key.
    """
    parsed: dict[str, str] = {}
    for part in (optim_args or "").replace(" ", "").split(","):
        key, equals, value = part.partition("=")
        if part and not (equals and key):
            raise ArgumentError(
                f"`optim_args={optim_args!r}` has the part {part!r}.\n\nHint: write key=value,key=value."
            )
        if parsed.get(key, value) != value:
            raise ArgumentError(f"`optim_args={optim_args!r}` has {key} twice.\n\nHint: write it once.")
        if part:
            parsed[key] = value
    return parsed


_log = logging.getLogger(__name__)
_MIB = 2**20


def _torchs(name: str) -> ClassSource:
    return ClassSource(modules=("torch.optim",), name=name, install="torch")


_SWITCH = Option(TRUTH_VALUE)

# Torch's own and those of its builds for other chips, and Adafactor.
TORCH_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.ADAMW_TORCH: OptimizerEntry(source=_torchs("AdamW"), choose=with_adam),
    OptimizerNames.ADAMW_TORCH_FUSED: OptimizerEntry(
        source=_torchs("AdamW"), choose=lambda request, found: (found, {**request.adam, "fused": True})
    ),
    OptimizerNames.ADAMW_TORCH_XLA: OptimizerEntry(
        source=ClassSource(modules=("torch_xla.amp.syncfree",), name="AdamW", install="torch_xla"),
        choose=with_adam,
        device="a TPU",
    ),
    OptimizerNames.ADAMW_TORCH_NPU_FUSED: OptimizerEntry(
        source=ClassSource(modules=("torch_npu.optim",), name="NpuFusedAdamW", install="torch_npu"),
        choose=with_adam,
        device="an Ascend NPU",
    ),
    OptimizerNames.ADAFACTOR: OptimizerEntry(
        # transformers' own, for which scripts ask with `isinstance`; without transformers the same from here
        source=ClassSource(
            modules=("transformers.optimization", "hf_compat.optim.adafactor"), name="Adafactor", install="hf-compat"
        ),
        choose=lambda _, found: (found, {"scale_parameter": False, "relative_step": False}),
    ),
    OptimizerNames.SGD: OptimizerEntry(
        source=_torchs("SGD"),
        options={
            "momentum": Option(NOT_NEGATIVE),
            "dampening": Option(FINITE),
            "weight_decay": Option(NOT_NEGATIVE),
            "nesterov": _SWITCH,
        },
    ),
    OptimizerNames.ADAGRAD: OptimizerEntry(
        source=_torchs("Adagrad"),
        options=dict.fromkeys(("lr_decay", "weight_decay", "eps"), Option(NOT_NEGATIVE)),
    ),
    OptimizerNames.RMSPROP: OptimizerEntry(
        source=_torchs("RMSprop"),
        options={
            "momentum": Option(NOT_NEGATIVE),
            "alpha": Option(BELOW_1),
            "eps": Option(NOT_NEGATIVE),
            "weight_decay": Option(NOT_NEGATIVE),
            "centered": _SWITCH,
        },
    ),
}


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


def _ademamix(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    options = {"beta1": request.args.adam_beta1, "beta2": request.args.adam_beta2, "eps": request.args.adam_epsilon}
    options |= request.options
    betas = tuple(float(options.pop(name)) for name in ("beta1", "beta2", "beta3"))
    return found, {"betas": betas, **options, **_bits_and_pages(request.name)}


def _bitsandbytes(name: str, choose: Chooser, options: Mapping[str, Option]) -> OptimizerEntry:
    return OptimizerEntry(
        source=ClassSource(modules=("bitsandbytes.optim",), name=name, install="bitsandbytes"),
        choose=choose,
        options=options,
        refused_with={"fsdp": "the kernels of bitsandbytes take no sharded parameters (DTensor)"},
    )


_ADAMW = _bitsandbytes("AdamW", _adamw, {})
_LION = _bitsandbytes(
    "Lion", lambda request, found: (found, {"betas": request.adam["betas"], **_bits_and_pages(request.name)}), {}
)
_ADEMAMIX = _bitsandbytes("AdEMAMix", _ademamix, _ADEMAMIX_OPTIONS)
_RMSPROP = _bitsandbytes(
    "RMSprop", lambda request, found: (found, {**request.options, **_bits(request.name)}), _RMSPROP_OPTIONS
)


def _torchao(name: str) -> OptimizerEntry:
    modules = ("torchao.optim", "torchao.prototype.low_bit_optim")
    return OptimizerEntry(
        source=ClassSource(modules=modules, name=name, install="'torchao>=0.4.0'"),
        options={"block_size": Option(COUNT, 256), "bf16_stochastic_round": Option(TRUTH_VALUE, False)},
        choose=with_adam,
    )


# With states of 8 or 4 bits, or in paged memory: bitsandbytes' and torchao's.
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
    """Make bitsandbytes keep the state of embeddings in 32 bits. Their gradients are too sparse for 8.

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


_DTYPES = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "float", "half", "double")
}
_DTYPE_NAME = choice(_DTYPES)
_DTYPE = ValueType(_DTYPE_NAME.expected, lambda value: _DTYPES[str(_DTYPE_NAME.read(value))], takes_text=True)


# Of packages that give nothing else.
PACKAGE_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.ADAMW_ANYPRECISION: OptimizerEntry(
        source=ClassSource(
            modules=("torchdistx.optimizers",),
            name="AnyPrecisionAdamW",
            install="git+https://github.com/pytorch/torchdistx",
        ),
        options={
            "use_kahan_summation": Option(TRUTH_VALUE, False),
            "momentum_dtype": Option(_DTYPE, torch.float32),
            "variance_dtype": Option(_DTYPE, torch.float32),
            "compensation_buffer_dtype": Option(_DTYPE, torch.bfloat16),
        },
        choose=with_adam,
    ),
    OptimizerNames.GROKADAMW: OptimizerEntry(
        source=ClassSource(modules=("grokadamw",), name="GrokAdamW", install="grokadamw"),
        options={
            "alpha_init": Option(BELOW_1, 0.98),
            "lamb": Option(FINITE, 2.0),
            "gamma": Option(FINITE, 0.1),
            "grokking_signal_decay_rate": Option(FINITE, 0.1),
            "gradient_clipping": Option(NOT_NEGATIVE, 1.0),
        },
        choose=with_options,
        refused_with={"fsdp": "its step does not end on sharded parameters"},
    ),
    OptimizerNames.STABLE_ADAMW: OptimizerEntry(
        source=ClassSource(modules=("optimi",), name="StableAdamW", install="torch-optimi"),
        options={
            "decouple_lr": Option(TRUTH_VALUE, False),
            "max_lr": Option(either((NONE, NOT_NEGATIVE)), None),
            "kahan_sum": Option(either((NONE, TRUTH_VALUE)), None),
        },
        choose=with_adam_and_decay,
    ),
}


def _warmed_up(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    """Choose the class with the warm-up of the arguments; SGD has no betas."""
    adam = {} if request.name.endswith("sgd") else request.adam
    args = request.args
    return found, {**adam, "weight_decay": args.weight_decay, "warmup_steps": args.warmup_steps, **request.options}


def _warn_of_share(request: OptimizerRequest) -> None:
    """Warn of a warm-up that is a share of the run: the optimizer takes it for updates, as upstream hands it on."""
    steps = request.args.warmup_steps
    if 0 < steps < 1:
        warn_once(
            f"`warmup_steps={steps}`: `optim={request.name!r}` warms up itself and takes this for updates, not for a "
            f"share of the run, as in transformers: its first step is {1 / steps:g} times `learning_rate`.\n\n"
            "Hint: give a number of updates."
        )


def _schedule_free(
    name: str, choose: Chooser, check: Callable[[OptimizerRequest], None] = no_check, release: str = ""
) -> OptimizerEntry:
    return OptimizerEntry(
        source=ClassSource(modules=("schedulefree",), name=name, install=f"schedulefree{release}"),
        options={"weight_lr_power": Option(FINITE, 2.0), "r": Option(FINITE, 0.0)},
        choose=choose,
        check=check,
    )


# They average the weights they have trained, in place of a learning rate that decays; `optim/stepping.py` switches
# between the weights that are trained and their average.
SCHEDULE_FREE_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.SCHEDULE_FREE_RADAM: _schedule_free("RAdamScheduleFree", with_adam_and_decay, release=">=1.4.0"),
    OptimizerNames.SCHEDULE_FREE_ADAMW: _schedule_free("AdamWScheduleFree", _warmed_up, _warn_of_share),
    OptimizerNames.SCHEDULE_FREE_SGD: _schedule_free("SGDScheduleFree", _warmed_up, _warn_of_share),
}
