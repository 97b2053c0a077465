"""Old names as attributes of `TrainingArguments`: what each gives, and what setting it does.

A name whose meaning today's arguments hold is read from them; any other gives what somebody has set, or the default of
its last release. Setting one sets the arguments of today.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, cast

from hf_compat.hf.accelerator_config import AcceleratorConfig
from hf_compat.hf.argument_values import ArgumentValue
from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES, Translation, read_old, warn_of_inert
from hf_compat.hf.tracking import default_logdir
from hf_compat.runtime.launch import variable

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments  # which imports this module

# Where the instance keeps what was given by old names.
_PLACE = "_given_by_old_names"
# What a process finds out by itself: none of it is taken over from another one's.
PROCESS_ATTRIBUTES = frozenset({"_launch", "deepspeed_plugin", "device", "distributed_state", "fsdp_plugin_args"})


class OldAttributes:
    """Old names as attributes; a subclass's own field, property or method of such a name goes first."""

    if not TYPE_CHECKING:  # any other name is an error to a type checker, too

        def __getattr__(self, name: str) -> ArgumentValue:
            """Return the value of an old name: Python asks here for what is not there by itself."""
            if name in OLD_NAMES:
                return read_attribute(self, name)
            return object.__getattribute__(self, name)  # raises


def remembered(args: object) -> Translation:
    """Return what arguments were given by old names."""
    return cast(Translation, vars(args).get(_PLACE, {}))


def remember(args: object, values: Translation) -> None:
    """Keep what arguments are given by old names, besides what they hold; copies share nothing with the original."""
    if values:
        vars(args)[_PLACE] = {**remembered(args), **values}


def is_old_attribute(args: TrainingArguments, name: str) -> bool:
    """Return whether an old name is no attribute that a class declares."""
    is_declared = hasattr(type(args), name) and name != "place_model_on_device"  # a property of ours
    return not is_declared and name not in type(args)._checks()


def chosen_logging_dir(args: TrainingArguments) -> str | None:
    """Return the folder for TensorBoard that somebody has chosen or read; None where nobody has."""
    if hasattr(type(args), "logging_dir") or "logging_dir" in vars(args):  # a subclass's own
        return cast("str | None", getattr(args, "logging_dir"))  # noqa: B009 - no field of ours
    return cast("str | None", remembered(args).get("logging_dir"))


def read_attribute(args: ArgumentValue, name: str) -> ArgumentValue:
    """Return what an old name gives."""
    given = remembered(args)
    if name in _READERS:
        return _READERS[name](args)
    if name in _WHERE_GIVEN:
        return _WHERE_GIVEN[name](args) if name in given else None
    return given.get(name, OLD_NAMES[name].default)


def read_old_state(args: TrainingArguments, state: Mapping[str, ArgumentValue]) -> None:
    """Take over the attributes of a pickled object: `training_args.bin` of any release, read where our class stands.

    What ours has written is taken as it is. What an older release has written lacks today's fields, and says some of
    them by old names: those set their successors, where these are at their defaults.
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
    """Return the folder for TensorBoard; what was once read stays."""
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


# Read from today's arguments, whatever they were set by.
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
# None, as in 4.x, unless somebody has given the old name: today's argument says it then.
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
    """Set an old name: the arguments of today that stand for it are set, and the value is remembered.

    Raises:
        ArgumentError: It cannot have that value; nothing is changed then.

    Warns:
        InertArgumentWarning: It has no effect, and the value asks for one.
    """
    read = set_by_old(args, name, value)
    if read is not None:
        remember(args, {name: read})
    else:
        vars(args)[_PLACE] = {old: given for old, given in remembered(args).items() if old != name}


def set_by_old(args: TrainingArguments, name: str, value: object) -> ArgumentValue:
    """Set the arguments of today that stand for an old name, checked as they are; return the value as it was read."""
    read = read_old(name, value, args._checks())
    warn_of_inert(name, read)
    for today, said in _assigned(args, name, read).items():
        setattr(args, today, said)
    return read


def _assigned(args: TrainingArguments, name: str, value: ArgumentValue) -> Translation:
    """Return which arguments of today an assignment sets, to what."""
    if name == "push_to_hub_organization" and value:
        repository = args.hub_model_id or os.path.basename(os.path.normpath(str(args.output_dir)))
        return {"hub_model_id": f"{value}/{repository.rpartition('/')[2]}"}
    if name == "warmup_ratio" and args.warmup_steps >= 1:  # 4.x: a count of updates wins
        return {}
    asked = OLD_NAMES[name].translate(value)
    if not asked:
        # What switches off what an old name has switched on
        row = OLD_NAMES[name]
        if row.inert or not read_attribute(args, name):
            return {}
        if name in _SWITCHED_OFF:
            return _SWITCHED_OFF[name](args)
        return {}
    return {new: _with_others(args, new, said) for new, said in asked.items() if new not in ATTRIBUTES_ONLY}


def _with_others(args: TrainingArguments, new: str, said: ArgumentValue) -> ArgumentValue:
    """Return an argument's value with what it holds besides: other options, other members of a list."""
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
