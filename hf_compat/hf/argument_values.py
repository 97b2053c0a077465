"""The types and checks of `TrainingArguments` fields, and the options of `accelerator_config`.

`checks_of` builds one `ArgumentCheck` per field. The constructor, the setters and every later assignment read their
values through it. Rules over several fields are in `arguments_rules.py`.
"""

from __future__ import annotations

import contextlib
import copy
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from hf_compat.errors import ArgumentError, InertArgumentWarning, UnsupportedArgument, warn_user
from hf_compat.hf.enums import (
    OWN_OPTIMIZERS,
    PACKAGES,
    DebugOption,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    available_trackers,
)
from hf_compat.hf.rows import OWN_ARGUMENTS, ROWS
from hf_compat.hf.value_types import (
    LARGEST_COUNT,
    NAME,
    Range,
    Unreadable,
    ValueType,
    choice,
    either,
    list_of,
    member,
    number,
    options_value,
    or_none,
    parts_of,
    passing,
    path_or_store,
    path_value,
    plain,
    read_choice,
    read_options,
    read_options_file,
    text_value,
    truth_value,
    type_of,
    typed,
    whole_number,
)
from hf_compat.runtime.addresses import store_address
from hf_compat.runtime.text import brief, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# Of `gradient_accumulation_kwargs`: the fields of Accelerate's `GradientAccumulationPlugin`.
_ACCUMULATION: dict[str, ValueType] = {
    "num_steps": or_none(whole_number(Range(low=1, high=LARGEST_COUNT))),
    **dict.fromkeys(("adjust_scheduler", "sync_with_dataloader", "sync_each_batch"), truth_value),
}


@dataclass
class AcceleratorConfig:
    """Options of data loading across processes. Mirrors `transformers.trainer_pt_utils.AcceleratorConfig`."""

    split_batches: bool = False  # treat the batch size as global and split it over the processes
    # Let the main process read and send batches. None decides by the kind of data set.
    dispatch_batches: bool | None = None
    even_batches: bool = True  # repeat first samples so that every process gets batches of one size
    use_seedable_sampler: bool = True  # shuffle with a separate generator, seeded by seed + epoch
    non_blocking: bool = False  # copy to the device without waiting (useful with pinned memory)
    gradient_accumulation_kwargs: dict[str, Any] | None = None  # `num_steps` replaces `gradient_accumulation_steps`
    use_configured_state: bool = False  # reuse an Accelerate state that the script has set up

    @classmethod
    def from_any(cls, value: object) -> AcceleratorConfig:
        """Build the options from None, a mapping, its JSON, a JSON file's path or an object with `to_dict()`.

        Raises:
            ArgumentError: An option is unknown, or has a wrong value.
            UnsupportedArgument: The value is a class instead of an object (a `NotImplementedError`, as upstream).
        """
        if value is None:
            return cls()
        if isinstance(value, type):
            raise UnsupportedArgument(
                f"Tried passing in a callable to `accelerator_config`: {brief(value)} is a class.\n\n"
                "Hint: pass an object of it, or a dict of its options."
            )
        to_dict = getattr(value, "to_dict", None)
        given = to_dict() if callable(to_dict) else value
        options = read_options("accelerator_config", _OPTION_TYPES, options_of("accelerator_config", given))
        accumulation = options.get("gradient_accumulation_kwargs")
        if isinstance(accumulation, dict):
            options["gradient_accumulation_kwargs"] = read_options(
                "accelerator_config['gradient_accumulation_kwargs']", _ACCUMULATION, accumulation
            )
        return value if isinstance(value, cls) and options == value.to_dict() else cls(**options)  # type: ignore[arg-type]

    @classmethod
    def from_json_file(cls, json_file: str) -> AcceleratorConfig:
        """Read the options from a JSON file."""
        return cls.from_any(json_file)

    def to_dict(self) -> dict[str, Any]:
        """Copy the options to a plain dict."""
        return copy.deepcopy(self.__dict__)

    def pop(self, key: str, default: object = None) -> object:
        """Remove an option, as upstream's arguments do."""
        return self.__dict__.pop(key, default)


_OPTION_TYPES = {
    name: type_of(hint) or options_value for name, hint in typing.get_type_hints(AcceleratorConfig).items()
}


# The value of any argument, whose type varies.
ArgumentValue: TypeAlias = Any

COUNT = Range(low=1, high=LARGEST_COUNT)
COUNT_OR_0 = Range(low=0, high=LARGEST_COUNT)
NOT_NEGATIVE = Range(low=0)
_BELOW_1 = Range(low=0, high=1, excludes_high=True)
# Scripts write -1 for "off". A strategy that needs the number refuses -1.
STEPS = Range(low=-1, high=LARGEST_COUNT)


def _or_empty(kind: ValueType) -> ValueType:
    """Let an empty text and the words for None mean None."""

    def read(value: object) -> object:
        is_empty = value is None or (isinstance(value, str) and value in ("", "none", "None", "null"))
        return None if is_empty else kind.read(value)

    return ValueType(f"{kind.expected} or None", read)


def holds_options(value: object) -> bool:
    """Whether a value is a mapping, or the JSON of one."""
    return isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip().startswith("{"))


def options_of(name: str, given: object) -> dict[str, Any]:
    """Copy an argument's options, or read them from their JSON or from the JSON file that it names."""
    try:
        if holds_options(given):
            return copy.deepcopy(options_value.read(given))
        return read_options_file(path_value.read(given))
    except Unreadable as error:
        hint = str(error) or "pass a dict of its options, its JSON, or the path of a JSON file."
        raise ArgumentError(f"`{shown(name, given)}` cannot be read.\n\nHint: {hint}") from error


def _is_truth_word(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false"))


@typed("a dict of options, its JSON, or the path of a JSON file", takes_text=False)
def options_or_file(value: object) -> object:
    """Options as a dict. The path of a JSON file stays a path, as upstream."""
    if not holds_options(value):
        path = path_value.read(value)
        read_options_file(path)
        return path
    options = options_value.read(value)
    try:
        json.dumps(options)  # as their file would hold them
    except (RecursionError, TypeError, ValueError) as error:
        raise Unreadable(f"it holds what JSON cannot: {error}.") from error
    return options


def _strategy(kind: type[IntervalStrategy] | type[SaveStrategy]) -> ValueType:
    # 3.x and 4.x scripts also passed booleans
    named = member(kind)
    return ValueType(
        "known",
        lambda value: named.read(("steps" if value else "no") if isinstance(value, bool) else value),
        takes_text=True,
    )


INTERVALS, SAVES = _strategy(IntervalStrategy), _strategy(SaveStrategy)


@typed("known")
def tokens_seen(value: object) -> object:
    """A way to count tokens. 4.x had a truth value."""
    if _is_truth_word(value):
        return "all" if truth_value.read(value) else "no"
    return read_choice(value, ("no", "all", "non_padding"))


_FSDP_WORDS = (
    "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap",
)  # fmt: skip


@typed("true, false, or words of 4.x")
def fsdp(value: object) -> object:
    """A truth value, or the options of 4.x as a list or a text."""
    if isinstance(value, (list, tuple)):
        return [read_choice(word, _FSDP_WORDS, within=True) for word in value]
    if isinstance(value, str) and value.strip().lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        for word in value.split():
            read_choice(word.lower(), _FSDP_WORDS, within=True)
        return value
    return truth_value.read(value)


@typed("known")
def trackers(value: object) -> object:
    """Names of trackers, and Lightning loggers."""
    names = list(value) if isinstance(value, (list, tuple)) else [value]
    for name in names:
        if isinstance(name, str):
            read_choice(name, (*PACKAGES, *(("all", "none") if len(names) == 1 else ())), within=True)
        elif isinstance(name, type) or not callable(getattr(name, "log_metrics", None)):
            raise Unreadable(f"name trackers ({', '.join(PACKAGES)}, 'all', 'none'), or pass Lightning loggers.", name)
    return value if isinstance(value, (str, list)) else names


@typed("known")
def debug(value: object) -> object:
    """Debug modes, as a list or separated by spaces. 3.x had a truth value."""
    if _is_truth_word(value):
        return "tpu_metrics_debug" if truth_value.read(value) else ""
    for option in value.split() if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]:
        read_choice(option, [str(one.value) for one in DebugOption], within=True)
    return list(value) if isinstance(value, tuple) else value


# Name of a log level → its number in `logging`.
LEVELS = {"detail": logging.DEBUG} | {
    name: int(getattr(logging, name.upper())) for name in ("debug", "info", "warning", "error", "critical")
}
LOG_LEVELS = (*LEVELS, "passive")


def _log_level(of_minus_1: str) -> ValueType:
    """The type of a log level, given by name or, as in 4.9-4.29, by its number in `logging`."""
    by_number = {level: name for name, level in LEVELS.items()} | {-1: of_minus_1}

    def read(value: object) -> str:
        is_number = isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value) is not None
        number = int(str(value)) if is_number else value
        return by_number[number] if type(number) is int and number in by_number else read_choice(value, LOG_LEVELS)

    return ValueType("known", read, takes_text=True)


LOG_LEVEL, LOG_LEVEL_REPLICA = _log_level("passive"), _log_level("warning")
# Optimizers of 4.x that upstream removed → their replacements.
OLD_OPTIMIZERS = {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"}


@typed("known")
def optimizer(value: object) -> object:
    """A name of an optimizer, which may be one of ours, or one of 4.x."""
    name = plain(value)
    if isinstance(name, str) and name in OLD_OPTIMIZERS:
        value = OLD_OPTIMIZERS[name]
        told = f"`optim={brief(name)}` is gone upstream: `optim={brief(value)}` takes its place."
        warn_user(told, InertArgumentWarning)  # which ranks above 0 leave out
    name = read_choice(value, [*(str(one.value) for one in OptimizerNames), *OWN_OPTIMIZERS])
    return name if name in OWN_OPTIMIZERS else OptimizerNames(name)


_TARGETS = either((list_of(NAME), NAME))


@or_none
@typed("a list of names, or a regular expression")
def target_modules(value: object) -> object:
    """A list of names, or an expression, of modules."""
    targets = _TARGETS.read(value)
    if not targets:
        raise Unreadable("it names no module. 'all-linear' names every linear layer.")
    for target in targets if isinstance(targets, list) else [targets]:
        try:
            re.compile(str(target))
        except re.error as error:
            raise Unreadable(f"{brief(target)} is not a regular expression: {error}.") from error
    return targets


MESH = or_none(passing("a ParallelismConfig of Accelerate", lambda value: hasattr(type(value), "to_json")))


@typed("a path, true or false")
def checkpoint(value: object) -> object:
    """A path, or a value that scripts test with `if args.resume_from_checkpoint`."""
    is_tested = isinstance(value, bool) or (isinstance(value, str) and not value)
    return value if is_tested else path_or_store.read(value)


@or_none
@typed("the address of a folder in other storage")
def store(value: object) -> object:
    """An address that fsspec knows."""
    address = store_address(path_value.read(value))
    if address is None:
        raise Unreadable("write an address such as 's3://bucket/run', of a storage that fsspec knows.")
    return address


@_or_empty
@typed("a GenerationConfig, its options, or the name or path of one")
def generation_config(value: object) -> object:
    """An object, a dict of options, its JSON, a name or a path."""
    if holds_options(value):
        return options_value.read(value)
    if isinstance(value, os.PathLike) or callable(getattr(value, "to_diff_dict", None)):
        return value
    return path_value.read(value)


_METRIC_INPUTS = list_of(ValueType("known", lambda name: read_choice(name, ("inputs", "loss"), within=True)))


@typed("a list of 'inputs' and 'loss'", takes_text=False)
def metric_inputs(value: object) -> object:
    """A list, or one name, as upstream tests `"inputs" in include_for_metrics`."""
    is_one = isinstance(value, str) and not value.lstrip().startswith("[")
    return _METRIC_INPUTS.read([value] if is_one else value)


TEXT_OR_FALSE = or_none(text_value, passing("false", lambda value: value is False))
LABEL_NAMES = list_of(NAME, 'write a list: `label_names=["labels"]`.')
TOKEN = either((text_value, truth_value))
TRUTH_OR_NONE = or_none(truth_value)
ACCELERATOR_CONFIG = ValueType(options_or_file.expected, AcceleratorConfig.from_any)
OPTIONS_OR_NONE, FILE_OR_NONE, NAME_OR_NONE = _or_empty(options_value), _or_empty(options_or_file), or_none(NAME)


_SHARE, _AMOUNT = number(_BELOW_1), number(NOT_NEGATIVE)
BETA = ValueType(_SHARE.expected, lambda value: float(str(_SHARE.read(value))))  # torch takes no int beside a float
BELOW_1_OR_OFF = ValueType(_SHARE.expected, lambda value: _SHARE.read(0.0 if value is False else value))
ZERO_IF_OFF = ValueType(_AMOUNT.expected, lambda value: _AMOUNT.read(0.0 if value is False else value))


def folder(value: ArgumentValue) -> str:
    """Fill in upstream's default folder, and expand `~`."""
    return "trainer_output" if value is None else os.path.expanduser(value)


def rounded(steps: ArgumentValue) -> ArgumentValue:
    """Convert a whole number of steps to int, and keep a share below 1."""
    return int(steps) if steps is not None and steps > 1 and steps == int(steps) else steps


def is_without_bars(disable_tqdm: ArgumentValue) -> bool:
    """Fill in upstream's default, which follows `transformers.logging.set_verbosity_error()`."""
    return logging.getLogger("transformers").level > logging.WARNING if disable_tqdm is None else bool(disable_tqdm)


def tracker_names(report_to: ArgumentValue) -> list[str]:
    """List the trackers, which are names and Lightning loggers."""
    names = report_to if isinstance(report_to, list) else [] if report_to is None else [report_to]
    if names == ["all"]:
        return available_trackers()
    return [] if names == ["none"] else names


def debug_options(debug: ArgumentValue) -> list[DebugOption]:
    """List the debug modes."""
    return list(map(DebugOption, map(plain, debug.split() if isinstance(debug, str) else debug or [])))


def member_of(kind: type[Enum]) -> Callable[[ArgumentValue], ArgumentValue]:
    """Make a function that converts a text to an enum member. Field defaults are texts as well."""
    members = {str(one.value): one for one in kind}
    return lambda value: members.get(value, value) if type(value) is str else value


NEWEST = "5"  # the newest generation of transformers
COMPAT = ValueType(
    "known", lambda value: read_choice(str(value) if type(value) is int else value, ("4", NEWEST)), takes_text=True
)
# Marks a field without a default.
NO_DEFAULT = object()


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """The check of one argument's value."""

    name: str  # the argument
    kind: ValueType | None  # Its type. None allows any value.
    default: object  # its default, which is always allowed
    hint: object = None  # its type hint
    is_lenient: bool = False  # Read only text. Other values of a subclass's field are the subclass's concern.

    def read(self, value: object) -> object:
        """Convert a value to the argument's type."""
        if self.kind is None or value is self.default or (self.is_lenient and not isinstance(value, str)):
            return value
        row = ROWS.get(self.name)
        if value is None:
            if row is not None and (row.takes_none or row.none_means is not None):
                return copy.copy(row.none_means)
            if self.kind is truth_value:  # upstream tests `if args.bf16`
                return False
        try:
            return self.kind.read(value)
        except Unreadable as error:
            expected = self.kind.expected
            fact = f"is not {expected}" if error.part is None else f"has {brief(error.part)}, which is not known"
            way_out = self.kind.way_out if row is None else row.way_out
            way_out = str(error) or way_out or f"expected {self.name} to be {expected}."
            raise ArgumentError(f"`{shown(self.name, value)}` {fact}.\n\nHint: {way_out}") from error


def default_of(field: dataclasses.Field[typing.Any]) -> ArgumentValue:
    """A field's default, or NO_DEFAULT if it has none."""
    if callable(field.default_factory):
        return field.default_factory()
    return NO_DEFAULT if field.default is dataclasses.MISSING else field.default


@functools.lru_cache(maxsize=64)
def checks_of(kind: type[DataclassInstance], base: type[DataclassInstance]) -> dict[str, ArgumentCheck]:
    """Make the checks of the arguments of a class, which is `base` or a subclass of it.

    The type of a row takes precedence over choices and the hint.
    """
    if kind is base:
        hints = typing.get_type_hints(base)
        checks = {}
        for name, own in OWN_ARGUMENTS.items():
            hint = typing.get_args(hints[name])[0] if name in hints else None  # of `ClassVar[…]`
            checks[name] = ArgumentCheck(name, own.row.kind or type_of(hint, own.row.allowed), own.default, hint)
        for field in dataclasses.fields(base):
            hint, row = hints[field.name], ROWS[field.name]
            read = row.kind
            if read is None and "choices" in field.metadata:
                known = choice(field.metadata["choices"])
                read = or_none(known) if type(None) in parts_of(hint) else known
            read = read or type_of(hint, row.allowed)
            checks[field.name] = ArgumentCheck(field.name, read, default_of(field), hint)
        return checks
    checks = dict(checks_of(base, base))
    for field in dataclasses.fields(kind):
        owner = next((c for c in kind.__mro__ if field.name in inspect.get_annotations(c)), base)
        if owner not in base.__mro__:
            checks[field.name] = _check_of_subclass(field, owner, checks.get(field.name))
    return checks


def _check_of_subclass(
    field: dataclasses.Field[typing.Any], owner: type, inherited: ArgumentCheck | None
) -> ArgumentCheck:
    """Make the check of a field that a subclass declares, or declares again."""
    declared, hint = types.SimpleNamespace(__annotations__={field.name: field.type}), None
    # hints of local classes, and imports for type checkers, cannot be resolved
    with contextlib.suppress(AttributeError, KeyError, NameError, SyntaxError, TypeError):
        names = vars(sys.modules[owner.__module__])
        hint = typing.get_type_hints(declared, names, dict(vars(owner)))[field.name]
    default = default_of(field)
    is_wider = False  # whether the hint allows values that the inherited one does not
    if inherited is not None and hint is not None:
        known = {*parts_of(inherited.hint), type(None)} | ({int} if float in parts_of(inherited.hint) else set())
        is_wider = not known.issuperset(parts_of(hint))
    if inherited is None or is_wider:
        is_number = {bool, int, float, type(None)}.issuperset(parts_of(hint))  # or a truth value
        return ArgumentCheck(field.name, type_of(hint) if is_number else None, default, hint, is_lenient=True)
    kind = inherited.kind
    if kind is not None and (default is None or type(None) in parts_of(hint)):
        kind = or_none(kind)
    return dataclasses.replace(inherited, default=default, kind=kind)


def read_all(checks: Mapping[str, ArgumentCheck], values: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Read values. The result is the allowed values, and an error message for each of the others."""
    good, problems = {}, []
    for name, value in values.items():
        check = checks.get(name)
        try:
            good[name] = value if check is None else check.read(value)
        except ArgumentError as error:
            problems.append(str(error))
    return good, problems


def read_as(name: str, kind: ValueType, value: object) -> object:
    """Read the value of a method's argument, or of one from an earlier release."""
    return ArgumentCheck(name, kind, NO_DEFAULT).read(value)
