"""What `fsdp` and `fsdp_config` ask for, in the spellings of 4.x and 5.x, and from `accelerate launch`. Pure."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_compat.errors import ArgumentError, InertArgumentWarning

# `fsdp_config` key → variable that `accelerate launch` sets.
_VARIABLES = {
    "version": "FSDP_VERSION",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "min_num_params": "FSDP_MIN_NUM_PARAMS",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "forward_prefetch": "FSDP_FORWARD_PREFETCH",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "use_orig_params": "FSDP_USE_ORIG_PARAMS",
    "sync_module_states": "FSDP_SYNC_MODULE_STATES",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
}
# Of FSDP 1: FSDP 2 does these things by itself, or has no such choice.
_FIRST_ONLY = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")
_INERT = {
    **dict.fromkeys(_FIRST_ONLY, "FSDP 2 has no such option"),
    "cpu_ram_efficient_loading": "every process loads the model whole before it is sharded",
    **dict.fromkeys(("xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"), "it is for TPUs"),
}
_STATE_DICTS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
_STRATEGIES = {
    "full_shard": True,
    "shard_grad_op": False,
    "hybrid_shard": True,
    "hybrid_shard_zero2": False,
    "no_shard": False,
}
_POLICIES = {"TRANSFORMER_BASED_WRAP": "class", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
_KNOWN = {*_VARIABLES, *_INERT, "xla"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpPlan:
    """How parameters, gradients and optimizer states are sharded.

    Args:
        version: 2 (torch's `fully_shard`), or 1 (`FullyShardedDataParallel`), which is not run.
        reshard_after_forward: Free gathered parameters after the forward pass; else they wait for the backward pass.
        hybrid: Shard within a machine, replicate over machines.
        cpu_offload: Keep shards on the CPU.
        wrap: Which modules are sharded one by one: by `class`, by `size`, or `none` but the whole.
        wrap_classes: Names of these classes; empty asks the model.
        min_num_params: Parameters from which on a module is, by size.
        activation_checkpointing: Recompute the activations of wrapped modules.
        state_dict_type: How checkpoints hold weights: whole, or as shards.
    """

    version: int = 2
    reshard_after_forward: bool = True
    hybrid: bool = False
    cpu_offload: bool = False
    wrap: str = "class"
    wrap_classes: tuple[str, ...] = ()
    min_num_params: int = 0
    activation_checkpointing: bool = False
    state_dict_type: str = "FULL_STATE_DICT"


def uses_fsdp(args: Any, variables: Mapping[str, str]) -> bool:
    """Say whether the arguments, or the launcher, ask for FSDP."""
    return bool(args.fsdp) or variables.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def fsdp_plan(args: Any, variables: Mapping[str, str]) -> FsdpPlan:
    """Translate the arguments; what `accelerate launch` has set counts where they are silent.

    Args:
        args: `fsdp` (a flag, or a list of words in 4.x) and `fsdp_config` (a dict, or a JSON file's path).
        variables: The launcher's environment.

    Raises:
        ArgumentError: An unknown option, or one that its version does not have.
    """
    config = _config(args.fsdp_config)
    _warn_of_inert(config)
    # 4.x: a size alone means wrapping by size; accelerate always gives one
    size_alone = bool(config.get("min_num_params")) and not config.get("transformer_layer_cls_to_wrap")
    if args.fsdp is None or not args.fsdp:  # the launcher's own affair: without a policy it wraps the whole only
        config.setdefault("auto_wrap_policy", variables.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP"))
    for key, name in _VARIABLES.items():
        if name in variables and key not in config:
            config[key] = variables[name]
    version = int(config.get("version", 2))
    if version not in (1, 2):
        raise ArgumentError(f"`fsdp_config` has version={version!r}.\n\nHint: leave it out: 2 is meant.")
    _words(args.fsdp, config, version)
    strategy = str(config.pop("sharding_strategy", "") or "").lower()
    reshard = config.get("reshard_after_forward", strategy or True)
    named = str(reshard).lower()
    if named in ("1", "2", "3", "4", "5"):  # numbers of FSDP 1's strategies, as accelerate writes them
        named = list(_STRATEGIES)[{"1": 0, "2": 1, "3": 4, "4": 2, "5": 3}[named]]
    hybrid = named.startswith("hybrid")
    if version == 2 and named == "no_shard":
        raise ArgumentError("`fsdp='no_shard'` is FSDP 1's.\n\nHint: leave `fsdp` out: DDP keeps whole parameters.")
    classes = config.get("transformer_layer_cls_to_wrap") or ()
    if isinstance(classes, str):
        classes = [name.strip() for name in classes.split(",")]
    policy = str(config.get("auto_wrap_policy", "SIZE_BASED_WRAP" if size_alone else "TRANSFORMER_BASED_WRAP")).upper()
    if policy not in _POLICIES:
        raise ArgumentError(f"`fsdp_config` has auto_wrap_policy={policy!r}.\n\nHint: choose {', '.join(_POLICIES)}.")
    size = int(config.get("min_num_params") or 0)
    state_dict_type = str(config.get("state_dict_type", "FULL_STATE_DICT")).upper()
    if state_dict_type not in _STATE_DICTS:
        raise ArgumentError(
            f"`fsdp_config` has state_dict_type={state_dict_type!r}.\n\nHint: choose {' or '.join(_STATE_DICTS)}."
        )
    return FsdpPlan(
        version=version,
        reshard_after_forward=_STRATEGIES[named] if named in _STRATEGIES else _flag(reshard),
        hybrid=hybrid,
        cpu_offload=_flag(config.get("cpu_offload", False)),
        wrap=_POLICIES[policy],
        wrap_classes=tuple(classes),
        min_num_params=size if _POLICIES[policy] == "size" else 0,
        activation_checkpointing=_flag(config.get("activation_checkpointing", False)),
        state_dict_type=state_dict_type,
    )


def _config(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        with open(given, encoding="utf-8") as file:
            given = json.load(file)
    config = {key.removeprefix("fsdp_"): value for key, value in (given or {}).items()}
    unknown = sorted(set(config) - _KNOWN)
    if unknown:
        raise ArgumentError(
            f"`fsdp_config` has no option {unknown}.\n\nHint: the options are {', '.join(sorted(_KNOWN))}."
        )
    if config.get("xla"):
        raise ArgumentError("`fsdp_config={'xla': True}` is for TPUs, which are not supported.")
    return config


def _warn_of_inert(config: Mapping[str, Any]) -> None:
    """Warn about what the user's own configuration sets without effect; a launcher's defaults are nobody's wish."""
    for key, why in _INERT.items():
        if config.get(key) not in (None, False, "false", "False"):
            warnings.warn(
                f"`fsdp_config={{{key!r}: {config[key]!r}}}` has no effect: {why}.", InertArgumentWarning, stacklevel=5
            )


def _words(fsdp: Any, config: dict[str, Any], version: int) -> None:
    """Take the words of 4.x over: `full_shard auto_wrap offload`."""
    words = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, (list, tuple)) else []
    for word in (str(getattr(word, "value", word)).lower() for word in words):
        if word in _STRATEGIES:
            config.setdefault("reshard_after_forward", word)
        elif word == "offload":
            config.setdefault("cpu_offload", True)
        elif word not in ("auto_wrap", "true", ""):
            raise ArgumentError(
                f"`fsdp={fsdp!r}` has {word!r}, which is not known.\n\n"
                f"Hint: the words are {', '.join(_STRATEGIES)}, offload, auto_wrap; or write `fsdp=True`."
            )


def _flag(value: Any) -> bool:
    return str(value).lower() in ("1", "true", "yes", "y", "on", "t")
