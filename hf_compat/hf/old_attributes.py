"""Read and set old names as attributes of `TrainingArguments`.

An old name is read from the current arguments if they have its meaning. Otherwise it has the value set by the user, or
the default of its last release. Setting it sets the current arguments. Subclasses may declare old names as fields,
which then work as in their release. `dataclasses.replace` copies the values of old names.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from types import CodeType, FrameType
from typing import TYPE_CHECKING, cast

from hf_compat.errors import ArgumentError, warn_once
from hf_compat.hf.argument_values import NO_DEFAULT, AcceleratorConfig, ArgumentCheck, ArgumentValue, default_of
from hf_compat.hf.enums import default_logdir
from hf_compat.hf.legacy import (
    ATTRIBUTES_ONLY,
    OLD_NAMES,
    Said,
    Translation,
    asked_by,
    merge,
    name_repository,
    read_old,
    warn_of_inert,
)
from hf_compat.runtime.launch import variable
from hf_compat.runtime.text import shown

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments


# The instance attribute with the values of old names.
_PLACE = "_given_by_old_names"
# Attributes of one process, which are not copied from another process.
PROCESS_ATTRIBUTES = frozenset({"_launch", "deepspeed_plugin", "device", "distributed_state", "fsdp_plugin_args"})


class OldAttributes:
    """Old names as attributes. A subclass's field, property or method of that name takes precedence."""

    if not TYPE_CHECKING:  # any other name is an error to a type checker, too

        def __getattr__(self, name: str) -> ArgumentValue:
            """Return the value of an old name, which Python does not find as an attribute."""
            if name in OLD_NAMES:
                return read_attribute(self, name)
            return object.__getattribute__(self, name)  # raises


def remembered(args: object) -> Translation:
    """Return the values that arguments were given under old names."""
    return cast(Translation, vars(args).get(_PLACE, {}))


def remember(args: object, values: Translation) -> None:
    """Add values of old names. A copy of the arguments shares no values with the original."""
    if values:
        vars(args)[_PLACE] = {**remembered(args), **values}


def is_old_attribute(args: TrainingArguments, name: str) -> bool:
    """Return whether a class does not declare an old name itself."""
    is_declared = hasattr(type(args), name) and name != "place_model_on_device"  # a property of ours
    return not is_declared and name not in type(args)._checks()


def chosen_logging_dir(args: TrainingArguments) -> str | None:
    """Return the folder for TensorBoard that was set or read before, or None."""
    if hasattr(type(args), "logging_dir") or "logging_dir" in vars(args):  # a subclass's own
        return cast("str | None", getattr(args, "logging_dir"))  # noqa: B009 - no field of ours
    return cast("str | None", remembered(args).get("logging_dir"))


def read_attribute(args: ArgumentValue, name: str) -> ArgumentValue:
    """Return the value of an old name."""
    given = remembered(args)
    if name in _READERS:
        return _READERS[name](args)
    if name in _WHERE_GIVEN:
        return _WHERE_GIVEN[name](args) if name in given else None
    return given.get(name, OLD_NAMES[name].default)


def read_old_state(args: TrainingArguments, state: Mapping[str, ArgumentValue]) -> None:
    """Copy the attributes of a pickled object, such as `training_args.bin` of any release.

    Files of our class are copied unchanged. Files of older releases lack current fields. Their old names set the
    current arguments that still have their defaults.
    """
    held = {field.name: field for field in fields(args)}
    if held.keys() <= state.keys():
        vars(args).update(state)
        return
    for name, field in held.items():
        if name not in state:
            vars(args)[name] = field.default if field.default_factory is MISSING else field.default_factory()
    of_process = (*PROCESS_ATTRIBUTES, *(name for name in state if name.startswith("_")))
    vars(args).update({n: value for n, value in state.items() if n not in OLD_NAMES and n not in of_process})
    for name in (name for name in OLD_NAMES if state.get(name) not in (None, OLD_NAMES[name].default)):
        remember(args, {name: state[name]})
        for today, said in OLD_NAMES[name].translate(state[name]).items():
            is_free = today in held and state.get(today, held[today].default) == held[today].default
            if is_free:
                setattr(args, today, said)


def _field(name: str) -> Callable[[ArgumentValue], ArgumentValue]:
    return lambda args: getattr(args, name)


def _is(name: str, value: str) -> Callable[[ArgumentValue], ArgumentValue]:
    return lambda args: bool(getattr(args, name) == value)


def _warmup_ratio(args: ArgumentValue) -> float:
    given: float = remembered(args).get("warmup_ratio", 0.0)
    steps: float = args.warmup_steps
    return given if steps >= 1 or OLD_NAMES["warmup_ratio"].translate(given).get("warmup_steps", 0) == steps else steps


def _logging_dir(args: ArgumentValue) -> str:
    """Return the folder for TensorBoard, which is fixed at the first reading."""
    folder: str | None = remembered(args).get("logging_dir")
    if folder is None:
        folder = variable("TENSORBOARD_LOGGING_DIR") or os.path.join(str(args.output_dir), default_logdir())
        remember(args, {"logging_dir": folder})
    return os.path.expanduser(folder)


def _option(config: str, key: str, default: object = None) -> Callable[[ArgumentValue], ArgumentValue]:
    return lambda args: _options(args, config).get(key, default)


def _options(args: ArgumentValue, config: str) -> Mapping[str, ArgumentValue]:
    held = getattr(args, config)
    if isinstance(held, AcceleratorConfig):
        return held.to_dict()
    return held if isinstance(held, Mapping) else {}


# Old names that are always read from the current arguments.
_READERS: dict[str, Callable[[ArgumentValue], ArgumentValue]] = {
    "evaluation_strategy": _field("eval_strategy"),
    "evaluate_during_training": _is("eval_strategy", "steps"),
    "no_cuda": _field("use_cpu"),
    "_n_gpu": _field("n_gpu"),
    "logging_dir": _logging_dir,
    "warmup_ratio": _warmup_ratio,
    "group_by_length": _is("train_sampling_strategy", "group_by_length"),
    "adafactor": _is("optim", "adafactor"),
    "include_inputs_for_metrics": lambda args: "inputs" in args.include_for_metrics,
    "include_tokens_per_second": lambda args: args.include_num_input_tokens_seen != "no",
    "tpu_metrics_debug": lambda args: "tpu_metrics_debug" in args.debug,
    "fsdp_min_num_params": _option("fsdp_config", "min_num_params", 0),
    "half_precision_backend": lambda args: str(
        remembered(args).get("half_precision_backend") or remembered(args).get("fp16_backend") or "auto"
    ),
}
# Old names that are read from the current argument if the user set them, and else None, as in 4.x.
_WHERE_GIVEN: dict[str, Callable[[ArgumentValue], ArgumentValue]] = {
    "per_gpu_train_batch_size": _field("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _field("per_device_eval_batch_size"),
    "push_to_hub_token": _field("hub_token"),
    "torchdynamo": _field("torch_compile_backend"),
    "xpu_backend": _field("ddp_backend"),
    "dispatch_batches": _option("accelerator_config", "dispatch_batches"),
    "split_batches": _option("accelerator_config", "split_batches"),
    "fsdp_transformer_layer_cls_to_wrap": _option("fsdp_config", "transformer_layer_cls_to_wrap"),
}


def assign_old(args: TrainingArguments, name: str, value: object) -> None:
    """Set the current arguments that replace an old name, and remember the value.

    Raises:
        ArgumentError: The value is not allowed. Nothing is changed.

    Warns:
        InertArgumentWarning: The old name no longer has an effect.
    """
    read = set_by_old(args, name, value)
    if read is not None:
        remember(args, {name: read})
    else:
        vars(args)[_PLACE] = {old: given for old, given in remembered(args).items() if old != name}


def set_by_old(args: TrainingArguments, name: str, value: object) -> ArgumentValue:
    """Check and set the current arguments that replace an old name, and return the converted value."""
    read = read_old(name, value, args._checks())
    warn_of_inert(name, read)
    for today, said in _assigned(args, name, read).items():
        setattr(args, today, said)
    return read


def _assigned(args: TrainingArguments, name: str, value: ArgumentValue) -> Translation:
    """Return the current arguments that an assignment sets, with their values."""
    if name == "push_to_hub_organization" and value:
        repository = args.hub_model_id or os.path.basename(os.path.normpath(str(args.output_dir)))
        return {"hub_model_id": f"{value}/{repository.rpartition('/')[2]}"}
    if name == "warmup_ratio" and args.warmup_steps >= 1:  # 4.x: a count of updates wins
        return {}
    asked = OLD_NAMES[name].translate(value)
    if not asked:
        # Switch off the setting that the old name has switched on
        row = OLD_NAMES[name]
        if row.inert or not read_attribute(args, name):
            return {}
        if name in _SWITCHED_OFF:
            return _SWITCHED_OFF[name](args)
        return {}
    return {new: _with_others(args, new, said) for new, said in asked.items() if new not in ATTRIBUTES_ONLY}


def _with_others(args: TrainingArguments, new: str, said: ArgumentValue) -> ArgumentValue:
    """Merge a value into the argument's other options or list members."""
    if isinstance(said, dict):
        return {**_options(args, new), **said}
    if isinstance(said, list):
        return [*getattr(args, new), *(item for item in said if item not in getattr(args, new))]
    if new == "debug":
        return [*args.debug, said]
    return said


def _default_of(name: str) -> Callable[[ArgumentValue], Translation]:
    return lambda args: {name: next(field.default for field in fields(args) if field.name == name)}


def _without(name: str, item: str) -> Callable[[ArgumentValue], Translation]:
    return lambda args: {name: [held for held in getattr(args, name) if held != item]}


_SWITCHED_OFF: dict[str, Callable[[ArgumentValue], Translation]] = {
    "evaluate_during_training": _default_of("eval_strategy"),
    "warmup_ratio": lambda args: {"warmup_steps": 0},
    "group_by_length": lambda args: {"train_sampling_strategy": "random"},
    "adafactor": _default_of("optim"),
    "include_inputs_for_metrics": _without("include_for_metrics", "inputs"),
    "include_tokens_per_second": lambda args: {"include_num_input_tokens_seen": "no"},
    "tpu_metrics_debug": _without("debug", "tpu_metrics_debug"),
    "fsdp_min_num_params": lambda args: {"fsdp_config": {**_options(args, "fsdp_config"), "min_num_params": 0}},
}


@functools.lru_cache(maxsize=64)
def declared_old_names(kind: type) -> Mapping[str, object]:
    """Return the old names that a class has as fields, except properties, with their defaults."""
    return {
        one.name: default_of(one)
        for one in fields(kind)
        if one.name in OLD_NAMES and not isinstance(getattr(kind, one.name, None), property)
    }


def obey_declared(args: TrainingArguments) -> None:
    """Set the current arguments that declared old names replace, before they are normalised.

    Raises:
        ArgumentError: An old name and today's contradict each other, or a value that the old name cannot have.

    Warns:
        HfCompatWarning: A field that has only the name of an old argument.
        InertArgumentWarning: An old name without effect, whose value asks for one.
    """
    defaults = {one.name: default_of(one) for one in fields(args)}
    for today, said in asked_by_declared(args, declared_old_names(type(args)), defaults, args._checks()).items():
        setattr(args, today, said)


def follow_declared(args: TrainingArguments, name: str, value: ArgumentValue) -> None:
    """Set the current arguments of a declared old name when a script sets the field later."""
    default = declared_old_names(type(args)).get(name, NO_DEFAULT)
    if name in declared_old_names(type(args)) and keeps_its_meaning(name, default, args._checks()):
        set_by_old(args, name, value)


def asked_by_declared(
    args: object, declared: Mapping[str, object], defaults: Mapping[str, object], checks: Mapping[str, ArgumentCheck]
) -> Translation:
    """Return the arguments of today that declared old names change.

    Today's argument wins over the default of an old name, unless it is at its own.

    Args:
        args: The arguments.
        declared: The old names, with their defaults.
        defaults: Defaults of the current arguments.
        checks: Checks of the current arguments.

    Raises:
        ArgumentError: An old name and today's contradict each other, or a value that the old name cannot have.
    """
    changed: Translation = {}
    read: Translation = {}
    for name, default in declared.items():
        value = getattr(args, name)
        if not keeps_its_meaning(name, default, checks):
            warn_once(
                f"`{shown(name, value)}` of {type(args).__name__} has no effect by itself. The field has the name of "
                f"an earlier release's argument, but another meaning.\n\nHint: rename the field; "
                f"what the name stood for is {OLD_NAMES[name].means} today."
            )
            continue
        read[name] = read_old(name, value, checks)
        warn_of_inert(name, read[name])
        for new, said in asked_by(name, read[name]).items():
            held = changed.get(new, getattr(args, new, None))  # an older release lacks some
            if held is None or held == defaults.get(new):
                held = None
            elif value == default and not isinstance(said, (dict, list)):
                continue
            changed[new] = merge(Said(name, value, new, said), "", held)
    if "push_to_hub_organization" in read:
        place: Translation = {one: changed.get(one, getattr(args, one)) for one in ("hub_model_id", "output_dir")}
        name_repository(place, {**remembered(args), **read})
        changed["hub_model_id"] = place["hub_model_id"]
    return changed


def keeps_its_meaning(name: str, default: object, checks: Mapping[str, ArgumentCheck]) -> bool:
    """Whether the default of a declared field is a value that the old name could have."""
    try:
        read_old(name, None if default is NO_DEFAULT else default, checks)
    except ArgumentError:
        return False
    return True


# Python 3.13 calls the object's `__replace__`, which has the code of this other function.
REPLACE: CodeType = getattr(dataclasses, "_replace", dataclasses.replace).__code__


def source_of_replace(kind: type, caller: FrameType) -> TrainingArguments | None:
    """Return the object that `dataclasses.replace` is copying.

    Python before 3.13 has no hook, and `replace` calls the class like any caller.

    Args:
        kind: The called class, of which the object is an instance.
        caller: The caller's frame, which runs the code REPLACE.
    """
    source: TrainingArguments | None = caller.f_locals.get("obj", caller.f_locals.get("self"))
    return source if type(source) is kind else None


def without_outdated(
    source: TrainingArguments, given: Mapping[str, object], checks: Mapping[str, ArgumentCheck]
) -> dict[str, ArgumentValue]:
    """Return a call's keywords without the copied values that an old name among the keywords changes."""
    changed: set[str] = set()
    declared = declared_old_names(type(source))
    for name in OLD_NAMES.keys() & given.keys():
        before = getattr(source, name)
        is_copied = name in declared and given[name] == before  # `replace` hands over every field
        if is_copied or (name in declared and not keeps_its_meaning(name, declared[name], checks)):
            continue
        for value in (given[name], before):
            asked = OLD_NAMES[name].translate(read_old(name, value, checks))
            changed |= {new for new, said in asked.items() if not isinstance(said, (dict, list))}  # these are joined
    return {name: v for name, v in given.items() if not (name in changed and v is getattr(source, name, None))}


def hand_over_old(source: TrainingArguments, copied: TrainingArguments, given: Mapping[str, object]) -> None:
    """Copy the values of the source's old names, except those that the call gives.

    Args:
        source: The copied arguments.
        copied: The copy.
        given: Keywords of the call.
    """
    remember(copied, {name: value for name, value in remembered(source).items() if name not in given})
    held = vars(source).get("_defaults_of_profile")
    if held is not None and copied.compat == source.compat:
        unchanged = (name for name in held if getattr(source, name) == given.get(name))
        vars(copied)["_defaults_of_profile"] = tuple(unchanged)
