"""Read `fsdp`, `fsdp_config` and the variables of `accelerate launch`, in the spellings of 4.x and 5.x."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_compat.errors import ArgumentError, UnsupportedArgument, warn_inert
from hf_compat.hf import argument_values as values
from hf_compat.hf.argument_values import options_of, read_as
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.value_types import (
    ANYTHING,
    LARGEST_COUNT,
    Range,
    Unreadable,
    ValueType,
    list_of,
    or_none,
    read_choice,
    read_options,
    text_value,
    truth_value,
    typed,
    whole_number,
)
from hf_compat.runtime.text import brief, parse_switch

Options = dict[str, Any]  # JSON values of `fsdp_config`

# Keys of `fsdp_config` of which `accelerate launch` sets a variable with another name than `FSDP_<KEY>`.
_VARIABLES = {"cpu_offload": "FSDP_OFFLOAD_PARAMS", "transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
# Options of FSDP 1 that FSDP 2 either always applies or does not have.
_FIRST_ONLY = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")
_INERT = {
    **dict.fromkeys(_FIRST_ONLY, "FSDP 2 has no such option"),
    "cpu_ram_efficient_loading": "every process loads the model whole before it is sharded",
    **dict.fromkeys(("xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"), "it is for TPUs"),
}
_STRATEGIES = {
    "full_shard": True,
    "shard_grad_op": False,
    "hybrid_shard": True,
    "hybrid_shard_zero2": False,
    "no_shard": False,
}
# The numbers of FSDP 1's `ShardingStrategy`, as accelerate writes them.
_NUMBERED = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
_POLICIES = {"TRANSFORMER_BASED_WRAP": "class", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}


@typed("known", takes_text=False)
def _sharding(value: object) -> object:
    """A strategy's name or number, or a truth value."""
    name = _NUMBERED.get(str(value), str(value).lower())
    if name in _STRATEGIES:
        return name
    try:
        return truth_value.read(value)
    except Unreadable as error:
        raise Unreadable(f"choose true, false, or one of {', '.join(_STRATEGIES)}.") from error


def _word_of(choices: Iterable[str]) -> ValueType:
    """The type of a word, also in lower case."""
    known = list(choices)
    return ValueType("known", lambda value: read_choice(value.upper() if isinstance(value, str) else value, known))


_SWITCH = or_none(truth_value)
_KNOWN: dict[str, ValueType] = {
    **dict.fromkeys(_INERT, ANYTHING),
    "version": whole_number(),
    **dict.fromkeys(("reshard_after_forward", "sharding_strategy"), _sharding),
    **dict.fromkeys(("cpu_offload", "activation_checkpointing", "xla"), _SWITCH),
    "min_num_params": or_none(whole_number(Range(low=0, high=LARGEST_COUNT))),
    "auto_wrap_policy": _word_of(_POLICIES),
    "state_dict_type": _word_of(("FULL_STATE_DICT", "SHARDED_STATE_DICT")),
    "transformer_layer_cls_to_wrap": or_none(list_of(text_value), text_value),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpPlan:
    """How parameters, gradients and optimizer states are sharded."""

    reshard_after_forward: bool = True  # free gathered parameters after the forward pass instead of the backward pass
    hybrid: bool = False  # shard within a machine, replicate over machines
    shard_size: int | None = None  # Processes that share one copy if `hybrid`. None means those of one machine.
    cpu_offload: bool = False  # keep shards on the CPU
    wrap: str = "class"  # How modules to shard one by one are chosen. `none` shards the model as a whole.
    wrap_classes: tuple[str, ...] = ()  # Names of these classes. Empty means the model's own list.
    min_num_params: int = 0  # minimum number of parameters of a module that is sharded by `size`
    activation_checkpointing: bool = False  # recompute the activations of wrapped modules
    state_dict_type: str = "FULL_STATE_DICT"  # `FULL_STATE_DICT` or `SHARDED_STATE_DICT`


def uses_fsdp(args: TrainingArguments, variables: Mapping[str, str]) -> bool:
    """Whether the arguments or the launcher ask for FSDP."""
    return bool(args.fsdp) or parse_switch(variables, "ACCELERATE_USE_FSDP")


def fsdp_plan(args: TrainingArguments, variables: Mapping[str, str]) -> FsdpPlan:
    """Translate the arguments, and fall back on the variables of `accelerate launch`."""
    options = _options_of(args.fsdp_config)
    # In 4.x a size alone means wrapping by size. Checked first, because the launcher's options always have a size.
    size_alone = bool(options.get("min_num_params")) and not options.get("transformer_layer_cls_to_wrap")
    if not bool(args.fsdp):
        options.setdefault("auto_wrap_policy", variables.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP"))
    for key in _KNOWN:
        name = _VARIABLES.get(key, f"FSDP_{key.upper()}")
        if name in variables:
            options.setdefault(key, variables[name])
    options = dict(read_options("fsdp_config` (or the launcher's `FSDP_…", _KNOWN, options))
    fsdp: Any = read_as("fsdp", values.fsdp, args.fsdp or False)
    words = fsdp.lower().split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    for word in words:
        if word in _STRATEGIES:
            options.setdefault("reshard_after_forward", word)
        elif word == "offload":
            options.setdefault("cpu_offload", True)
    if (version := options.get("version", 2)) != 2:
        raise UnsupportedArgument(
            f"`fsdp_config` has version={brief(version)}, which is not supported.\n\n"
            "Hint: leave `version` out. FSDP 2 has replaced FSDP 1 in torch and transformers."
        )
    sharding = options.get("reshard_after_forward", options.get("sharding_strategy") or True)
    if sharding == "no_shard":
        raise ArgumentError("`fsdp='no_shard'` is FSDP 1's.\n\nHint: leave `fsdp` out. DDP keeps whole parameters.")
    wrap = _POLICIES[options.get("auto_wrap_policy", "SIZE_BASED_WRAP" if size_alone else "TRANSFORMER_BASED_WRAP")]
    classes = options.get("transformer_layer_cls_to_wrap") or ()
    return FsdpPlan(
        reshard_after_forward=bool(_STRATEGIES.get(str(sharding), sharding)),
        hybrid=str(sharding).startswith("hybrid"),
        cpu_offload=bool(options.get("cpu_offload")),
        wrap=wrap,
        wrap_classes=tuple(name.strip() for name in classes.split(",")) if isinstance(classes, str) else tuple(classes),
        min_num_params=int(options.get("min_num_params") or 0) if wrap == "size" else 0,
        activation_checkpointing=bool(options.get("activation_checkpointing")),
        state_dict_type=options.get("state_dict_type", "FULL_STATE_DICT"),
    )


def _options_of(given: Mapping[str, Any] | str | None) -> Options:
    """Read the options of `fsdp_config` under their names of 5.x, and warn about those without effect."""
    options = {key.removeprefix("fsdp_"): value for key, value in options_of("fsdp_config", given or {}).items()}
    options = read_options("fsdp_config", _KNOWN, options)
    if options.get("xla"):
        raise ArgumentError("`fsdp_config={'xla': True}` is for TPUs, which are not supported.")
    for key, why in _INERT.items():  # the launcher's defaults have them, too
        if options.get(key) not in (None, False, "false", "False"):
            warn_inert(f"fsdp_config={{{brief(key)}: {brief(options[key])}}}", why)
    return options
