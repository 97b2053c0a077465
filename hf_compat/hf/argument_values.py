"""What each argument may be: its type hint, and a table of what the hint does not say.

`checks_of` makes one `ArgumentCheck` a field; the constructor, the setters and every later assignment read their values
through it. Rules over several fields stand in `arguments_rules.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import os
import re
import sys
import types
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_compat.errors import ArgumentError, HfCompatWarning
from hf_compat.hf.accelerator_config import AcceleratorConfig
from hf_compat.hf.enums import DebugOption, IntervalStrategy, OptimizerNames, SaveStrategy
from hf_compat.hf.tracking import PACKAGES
from hf_compat.hf.value_types import (
    LARGEST_COUNT,
    NAME,
    NONE,
    OPTIONS,
    PATH,
    TEXT,
    TRUTH_VALUE,
    Range,
    Unreadable,
    ValueType,
    choice,
    either,
    list_of,
    member,
    number,
    parts_of,
    plain,
    read_choice,
    read_options_file,
    type_of,
)
from hf_compat.runtime.text import brief, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_COUNT = Range(low=1, high=LARGEST_COUNT)
_COUNT_OR_0 = Range(low=0, high=LARGEST_COUNT)
_NOT_NEGATIVE = Range(low=0)
_BELOW_1 = Range(low=0, high=1, excludes_high=True)
# -1 stands for "off" in scripts; the strategy that would read it refuses it
_STEPS = Range(low=-1, high=LARGEST_COUNT)

RANGES: dict[str, Range] = {
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "num_train_epochs": _COUNT_OR_0,
    "max_steps": _STEPS,
    "learning_rate": _NOT_NEGATIVE,
    "warmup_steps": _COUNT_OR_0,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _BELOW_1,
    "adam_beta2": _BELOW_1,
    "adam_epsilon": _NOT_NEGATIVE,
    "gradient_accumulation_steps": _COUNT,
    "max_grad_norm": _NOT_NEGATIVE,
    "label_smoothing_factor": _BELOW_1,
    "neftune_noise_alpha": _NOT_NEGATIVE,
    "torch_empty_cache_steps": _COUNT,
    "logging_steps": _STEPS,
    "eval_steps": _STEPS,
    "save_steps": _STEPS,
    "eval_delay": _COUNT_OR_0,
    "eval_accumulation_steps": _COUNT,
    "save_total_limit": _STEPS,
    "seed": Range(low=0, high=2**32 - 1),
    "data_seed": Range(low=-(2**63), high=2**63 - 1),
    "dataloader_num_workers": Range(low=0, high=4096),
    "dataloader_prefetch_factor": Range(low=1, high=2**31),
    "ddp_bucket_cap_mb": Range(low=0, high=2**31),
    "ddp_timeout": Range(low=1, high=10**9),
    "local_rank": Range(low=-1, high=2**31),
    **dict.fromkeys(("generation_max_length", "generation_num_beams"), _COUNT),
}


def _read_file_or_options(value: object) -> object:
    """Read options, or the path of a JSON file that holds them: the path is kept, as upstream keeps it."""
    if isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip().startswith("{")):
        return _in_json(OPTIONS.read(value))
    path = PATH.read(value)
    read_options_file(str(path))
    return path


def _in_json(options: object) -> object:
    """Return options that JSON can hold, as their file would."""
    try:
        json.dumps(options)
    except (RecursionError, TypeError, ValueError) as error:
        raise Unreadable(f"it holds what JSON cannot: {error}.") from error
    return options


def _or_empty(kind: ValueType) -> ValueType:
    """Return a type whose empty text stands for None."""
    return ValueType(f"{kind.expected} or None", lambda value: None if _is_empty(value) else kind.read(value))


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str) and value in ("", "none", "None", "null"))


OPTIONS_OR_FILE = ValueType("a dict of options, its JSON, or the path of a JSON file", _read_file_or_options)


def _strategy(kind: type[IntervalStrategy] | type[SaveStrategy]) -> ValueType:
    # 3.x and 4.x scripts also passed booleans
    named = member(kind)
    return ValueType(
        "known",
        lambda value: named.read(("steps" if value else "no") if isinstance(value, bool) else value),
        takes_text=True,
    )


def _read_tokens_seen(value: object) -> str:
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
        return "all" if TRUTH_VALUE.read(value) else "no"
    return read_choice(value, ("no", "all", "non_padding"))


_FSDP_WORDS = (
    "full_shard",
    "shard_grad_op",
    "no_shard",
    "hybrid_shard",
    "hybrid_shard_zero2",
    "offload",
    "auto_wrap",
)


def _read_fsdp(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [read_choice(word, _FSDP_WORDS, within=True) for word in value]
    if isinstance(value, str) and value.strip().lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        for word in value.split():
            read_choice(word.lower(), _FSDP_WORDS, within=True)
        return value
    return TRUTH_VALUE.read(value)


def _read_trackers(value: object) -> object:
    names = list(value) if isinstance(value, (list, tuple)) else [value]
    for name in names:
        if isinstance(name, str):
            read_choice(name, (*PACKAGES, *(("all", "none") if len(names) == 1 else ())), within=True)
        elif isinstance(name, type) or not callable(getattr(name, "log_metrics", None)):
            raise Unreadable(f"name trackers ({', '.join(PACKAGES)}, 'all', 'none'), or pass Lightning loggers.", name)
    return value if isinstance(value, (str, list)) else names


def _read_debug(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):  # 3.x
        return "tpu_metrics_debug" if TRUTH_VALUE.read(value) else ""
    for option in value.split() if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]:
        read_choice(option, [str(one.value) for one in DebugOption], within=True)
    return list(value) if isinstance(value, tuple) else value


LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")


def _log_level(of_minus_1: str) -> ValueType:
    """Return the type of a log level: its name, or its number in `logging`, as arguments of 4.9-4.29 hold it.

    Args:
        of_minus_1: What their -1 meant, the default.
    """
    by_number = {getattr(logging, name.upper()): name for name in LOG_LEVELS[1:-1]} | {-1: of_minus_1}

    def read(value: object) -> str:
        is_number = isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value) is not None
        number = int(str(value)) if is_number else value
        return by_number[number] if type(number) is int and number in by_number else read_choice(value, LOG_LEVELS)

    return ValueType("known", read, takes_text=True)


# Optimizers of 4.x that are gone upstream → what takes their place.
OLD_OPTIMIZERS = {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"}


def _read_optimizer(value: object) -> object:
    name = plain(value)
    if isinstance(name, str) and name in OLD_OPTIMIZERS:
        today = OLD_OPTIMIZERS[name]
        told = f"`optim={name!r}` is gone upstream: `optim={today!r}` takes its place."
        warnings.warn(told, HfCompatWarning, stacklevel=6)
        value = today
    return member(OptimizerNames).read(value)


_TARGETS = either((list_of(NAME), NAME))


def _read_target_modules(value: object) -> object:
    """Read a regular expression, or a list of parts of names and of regular expressions."""
    targets = _TARGETS.read(value)
    if not targets:
        raise Unreadable("it names no module; 'all-linear' names every linear layer.")
    for target in targets if isinstance(targets, list) else [targets]:
        try:
            re.compile(str(target))
        except re.error as error:
            raise Unreadable(f"{target!r} is no regular expression: {error}.") from error
    return targets


def _read_mesh(value: object) -> object:
    if not hasattr(type(value), "to_json"):
        raise Unreadable
    return value


def _read_checkpoint(value: object) -> object:
    if isinstance(value, bool) or (
        isinstance(value, str) and not value
    ):  # scripts ask `if args.resume_from_checkpoint`
        return value
    return PATH.read(value)


def _read_generation_config(value: object) -> object:
    if isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip().startswith("{")):
        return OPTIONS.read(value)
    if isinstance(value, os.PathLike) or callable(getattr(value, "to_diff_dict", None)):
        return value
    return PATH.read(value)


_METRIC_INPUT = ValueType("known", lambda name: read_choice(name, ("inputs", "loss"), within=True))


def _read_metric_inputs(value: object) -> object:
    # upstream asks `"inputs" in include_for_metrics`, which a text answers too
    return list_of(_METRIC_INPUT).read([value] if isinstance(value, str) and value[:1] != "[" else value)


def _as_float(allowed: Range) -> ValueType:
    found = number(allowed)
    return ValueType(found.expected, lambda value: float(str(found.read(value))))


COMPAT = ValueType(
    "known", lambda value: read_choice(str(value) if type(value) is int else value, ("4", "5")), takes_text=True
)
# Of the arguments that transformers does not have.
OWN_DEFAULTS: dict[str, object] = {"async_save": False, "compat": None}

_ZERO_IF_OFF = ("max_grad_norm", "weight_decay", "label_smoothing_factor")


def _zero_if_off(allowed: Range) -> ValueType:
    found = number(allowed)
    return ValueType(found.expected, lambda value: found.read(0.0 if value is False else value))


# In place of the annotation's type.
TYPES: dict[str, ValueType] = {
    "output_dir": PATH,
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _as_float(_BELOW_1)),  # torch takes no int beside a float
    **{name: _zero_if_off(RANGES[name]) for name in _ZERO_IF_OFF},
    **dict.fromkeys(("deepspeed", "fsdp_config"), _or_empty(OPTIONS_OR_FILE)),
    **dict.fromkeys(
        (
            "lr_scheduler_kwargs",
            "activation_checkpointing_kwargs",
            "gradient_checkpointing_kwargs",
            "liger_kernel_config",
        ),
        _or_empty(OPTIONS),
    ),
    "accelerator_config": ValueType(OPTIONS_OR_FILE.expected, AcceleratorConfig.from_any),
    "parallelism_config": either((NONE, ValueType("a ParallelismConfig of Accelerate", _read_mesh))),
    **dict.fromkeys(("eval_strategy", "logging_strategy"), _strategy(IntervalStrategy)),
    "save_strategy": _strategy(SaveStrategy),
    "include_num_input_tokens_seen": ValueType("known", _read_tokens_seen, takes_text=True),
    "include_for_metrics": ValueType("a list of 'inputs' and 'loss'", _read_metric_inputs),
    "label_names": list_of(NAME, 'write a list: `label_names=["labels"]`.'),
    "optim": ValueType("known", _read_optimizer, takes_text=True),
    "optim_target_modules": either(
        (NONE, ValueType("a list of names, or a regular expression", _read_target_modules, takes_text=True))
    ),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode", "metric_for_best_model"), either((NONE, NAME))),
    "length_column_name": NAME,
    "report_to": ValueType("known", _read_trackers, takes_text=True),
    "debug": ValueType("known", _read_debug, takes_text=True),
    "log_level": _log_level("passive"),
    "log_level_replica": _log_level("warning"),
    "fsdp": ValueType("true, false, or words of 4.x", _read_fsdp, takes_text=True),
    "hub_token": either((TEXT, TRUTH_VALUE)),
    "resume_from_checkpoint": ValueType("a path, true or false", _read_checkpoint, takes_text=True),
    "async_save": TRUTH_VALUE,
    "compat": COMPAT,
    "use_cache": either((NONE, TRUTH_VALUE)),
    "generation_config": _or_empty(
        ValueType(
            "a GenerationConfig, its options, or the name or path of one", _read_generation_config, takes_text=True
        )
    ),
}

# Taken besides what the annotation says, and left to the rules over several fields, or to upstream's meaning of it.
ALSO_NONE = frozenset(
    {
        "include_for_metrics",
        "debug",
        "label_names",
        "report_to",
        "logging_steps",
        "save_steps",
        "train_sampling_strategy",
        "length_column_name",
        "fsdp",
        "hub_token",
        "resume_from_checkpoint",
        "accelerator_config",
        "output_dir",
    }
)
# Of a field without one: an object that nobody can give.
NO_DEFAULT = object()
# What None means where the annotation does not know it.
MEANING_OF_NONE: dict[str, object] = {"max_grad_norm": 0.0}

HINTS: dict[str, str] = {
    "save_total_limit": "give the number of checkpoints to keep; None keeps all.",
    "max_steps": "give the number of updates; -1 counts epochs instead (`num_train_epochs`).",
    "max_grad_norm": "use 0 to leave gradients as they are; a large number (1e9) only logs their norm.",
    "num_train_epochs": "for training without an end in sight, set `max_steps`.",
    "warmup_ratio": "use `warmup_steps` with a whole number to give the warmup in updates.",
}


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """What one argument may be.

    Args:
        name: The argument.
        kind: Its type; None where anything goes.
        default: What it is where nothing is said; always allowed.
        hint: Its type hint.
        is_lenient: A field that a subclass declares: only text is read, everything else is the subclass's affair.
    """

    name: str
    kind: ValueType | None
    default: object
    hint: object = None
    is_lenient: bool = False

    def read(self, value: object) -> object:
        """Return the value that is meant.

        Raises:
            ArgumentError: It is none; the message names the argument, the value and the way out.
        """
        if self.kind is None or value is self.default or (self.is_lenient and not isinstance(value, str)):
            return value
        if value is None:
            if self.name in MEANING_OF_NONE:
                return MEANING_OF_NONE[self.name]
            if self.name in ALSO_NONE:
                return None
            if self.kind is TRUTH_VALUE:  # upstream asks `if args.bf16`
                return False
        try:
            return self.kind.read(value)
        except Unreadable as error:
            raise ArgumentError(self._message(value, error)) from error

    def _message(self, value: object, error: Unreadable) -> str:
        assert self.kind is not None  # the only caller has asked
        expected = self.kind.expected
        fact = f"is not {expected}" if error.part is None else f"has {brief(error.part)}, which is not known"
        way_out = str(error) or HINTS.get(self.name) or f"expected {self.name} to be {expected}."
        return f"`{shown(self.name, value)}` {fact}.\n\nHint: {way_out}"


@functools.cache
def _base_checks(base: type[DataclassInstance]) -> dict[str, ArgumentCheck]:
    """Return the checks of the fields that are upstream's."""
    hints = typing.get_type_hints(base)
    checks = {name: ArgumentCheck(name, TYPES[name], default) for name, default in OWN_DEFAULTS.items()}
    for field in dataclasses.fields(base):
        hint = hints[field.name]
        checks[field.name] = ArgumentCheck(field.name, _kind_of(field, hint), default_of(field), hint)
    return checks


def _kind_of(field: dataclasses.Field[typing.Any], hint: object) -> ValueType | None:
    if field.name in TYPES:
        return TYPES[field.name]
    if "choices" in field.metadata:
        known = choice(field.metadata["choices"])
        return either((NONE, known)) if type(None) in parts_of(hint) else known
    return type_of(hint, RANGES.get(field.name))


def default_of(field: dataclasses.Field[typing.Any]) -> object:
    """Return a field's default; NO_DEFAULT where it has none, or a factory."""
    return NO_DEFAULT if field.default is dataclasses.MISSING else field.default


@functools.lru_cache(maxsize=64)
def checks_of(kind: type[DataclassInstance], base: type[DataclassInstance]) -> dict[str, ArgumentCheck]:
    """Return the checks of the arguments of a class.

    Args:
        kind: The class: that of the arguments, or a subclass.
        base: The class of the arguments.
    """
    checks = dict(_base_checks(base))
    for field in dataclasses.fields(kind):
        owner = next((c for c in kind.__mro__ if field.name in inspect.get_annotations(c)), base)
        if owner not in base.__mro__:
            checks[field.name] = _check_of_subclass(field, owner, checks.get(field.name))
    return checks


def _check_of_subclass(
    field: dataclasses.Field[typing.Any], owner: type, inherited: ArgumentCheck | None
) -> ArgumentCheck:
    """Return the check of a field that a subclass declares, or declares again."""
    default, hint = default_of(field), _resolved(field, owner)
    if inherited is None or _is_wider(hint, inherited.hint):
        # Numbers and truth values only
        return ArgumentCheck(
            field.name,
            type_of(hint) if {bool, int, float, type(None)}.issuperset(parts_of(hint)) else None,
            default,
            hint,
            is_lenient=True,
        )
    if inherited.kind is None or not (default is None or type(None) in parts_of(hint)):
        return dataclasses.replace(inherited, default=default)
    return dataclasses.replace(inherited, default=default, kind=either((NONE, inherited.kind)))


def _is_wider(hint: object, inherited: object) -> bool:
    """Return whether a subclass's type hint allows what the inherited one does not."""
    known = {*parts_of(inherited), type(None)} | ({int} if float in parts_of(inherited) else set())
    return hint is not None and not known.issuperset(parts_of(hint))


def _resolved(field: dataclasses.Field[typing.Any], owner: type) -> object:
    """Return a field's type hint; None where its names are not to be found."""
    declared = types.SimpleNamespace(__annotations__={field.name: field.type})
    try:
        return typing.get_type_hints(declared, vars(sys.modules[owner.__module__]), dict(vars(owner)))[field.name]
    except (AttributeError, KeyError, NameError, SyntaxError, TypeError):  # of a local class; for type checkers only
        return None


def read_all(checks: Mapping[str, ArgumentCheck], values: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Read values; return those that are allowed, and a complaint about each of the others."""
    good, problems = {}, []
    for name, value in values.items():
        check = checks.get(name)
        try:
            good[name] = value if check is None else check.read(value)
        except ArgumentError as error:
            problems.append(str(error))
    return good, problems


def read_as(name: str, kind: ValueType, value: object) -> object:
    """Read the value of an argument that is no field: one of an earlier release, or of a method.

    Raises:
        ArgumentError: It is not of that type.
    """
    return ArgumentCheck(name, kind, NO_DEFAULT).read(value)
