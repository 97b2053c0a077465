"""Read and set old names as attributes of `TrainingArguments`.

An old name is read from the current arguments if they have its meaning. Otherwise it has the value set by the user, or
the default of its last release. Setting it sets the current arguments. Subclasses may declare old names as fields,
which then work as in their release. `dataclasses.replace` copies the values of old names.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import CodeType, FrameType
from typing import TYPE_CHECKING, cast

from hf_compat.errors import ArgumentError, InertArgumentWarning, warn_once
from hf_compat.hf.argument_values import NO_DEFAULT, ArgumentCheck, ArgumentValue, default_of
from hf_compat.hf.legacy import (
    OLD_NAMES,
    PLACE,
    Said,
    Translation,
    held_options,
    merge,
    name_repository,
    read_old,
    remember,
    remembered,
    warn_of_inert,
)
from hf_compat.runtime.text import shown

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments


# Attributes of one process, which are not copied from another process.
PROCESS_ATTRIBUTES = frozenset(
    {"_launch", "deepspeed_plugin", "device", "distributed_state", "fsdp_plugin_args", "hf_deepspeed_config"}
)


class OldAttributes:
    """Old names as attributes. A subclass's field, property or method of that name takes precedence."""

    if not TYPE_CHECKING:  # any other name is an error to a type checker, too

        def __getattr__(self, name: str) -> ArgumentValue:
            if name in OLD_NAMES:
                return read_attribute(self, name)
            return object.__getattribute__(self, name)  # raises


def is_old_attribute(args: TrainingArguments, name: str) -> bool:
    """Whether a class does not declare an old name itself."""
    is_declared = hasattr(type(args), name) and name != "place_model_on_device"  # a property of ours
    return not is_declared and name not in type(args)._checks()


def chosen_logging_dir(args: TrainingArguments) -> str | None:
    """The folder for TensorBoard that was set or read before, or None."""
    if hasattr(type(args), "logging_dir") or "logging_dir" in vars(args):  # a subclass's own
        return cast("str | None", getattr(args, "logging_dir"))  # noqa: B009 - no field of ours
    return cast("str | None", remembered(args).get("logging_dir"))


def read_attribute(args: ArgumentValue, name: str) -> ArgumentValue:
    """Read the attribute of an old name."""
    row, given = OLD_NAMES[name], remembered(args)
    if row.read is None:
        return given.get(name, row.default)
    return row.read(args) if name in given or not row.reads_if_set else None


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
            if today in held and state.get(today, held[today].default) == held[today].default:
                setattr(args, today, said)


def assign_old(args: TrainingArguments, name: str, value: object) -> None:
    """Set the current arguments that replace an old name, and remember the value."""
    read = set_by_old(args, name, value)
    if read is not None:
        remember(args, {name: read})
    else:
        vars(args)[PLACE] = {old: given for old, given in remembered(args).items() if old != name}


def set_by_old(args: TrainingArguments, name: str, value: object) -> ArgumentValue:
    """Check and set the current arguments that replace an old name, and return the converted value."""
    read = read_old(name, value, args._checks())
    warn_of_inert(name, read)
    for today, said in _assigned(args, name, read).items():
        setattr(args, today, said)
    return read


def _assigned(args: TrainingArguments, name: str, value: ArgumentValue) -> Translation:
    """The current arguments that an assignment sets, with their values."""
    if name == "push_to_hub_organization" and value:
        repository = args.hub_model_id or os.path.basename(os.path.normpath(str(args.output_dir)))
        return {"hub_model_id": f"{value}/{repository.rpartition('/')[2]}"}
    if name == "warmup_ratio" and args.warmup_steps >= 1:  # 4.x: a count of updates wins
        return {}
    row = OLD_NAMES[name]
    asked = row.translate(value)
    if not asked:
        return row.off(args) if row.off is not None and read_attribute(args, name) else {}
    assigned: Translation = {}
    for new, said in asked.items():
        if isinstance(said, dict):
            said = {**held_options(args, new), **said}
        elif isinstance(said, list):
            said = [*getattr(args, new), *(item for item in said if item not in getattr(args, new))]
        elif new == "debug":
            said = [*args.debug, said]
        assigned[new] = said
    return assigned


@functools.lru_cache(maxsize=64)
def declared_old_names(kind: type) -> Mapping[str, object]:
    """The old names that a class has as fields, except properties, with their defaults."""
    return {
        one.name: default_of(one)
        for one in fields(kind)
        if one.name in OLD_NAMES and not isinstance(getattr(kind, one.name, None), property)
    }


def obey_declared(args: TrainingArguments) -> None:
    """Set the current arguments that declared old names replace, before they are normalised."""
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
    """The current arguments that declared old names change.

    A current argument wins over an old name's default, unless it has its own default.
    """
    changed: Translation = {}
    read: Translation = {}
    for name, default in declared.items():
        value = getattr(args, name)
        if not keeps_its_meaning(name, default, checks):
            warn_once(
                f"`{shown(name, value)}` of {type(args).__name__} has no effect by itself. The field has the name of "
                f"an earlier release's argument, but another meaning.\n\nHint: rename the field. "
                f"Today the argument is {OLD_NAMES[name].means}.",
                InertArgumentWarning,
            )
            continue
        read[name] = read_old(name, value, checks)
        warn_of_inert(name, read[name])
        for new, said in OLD_NAMES[name].translate(read[name]).items():
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
    """The object that `dataclasses.replace` is copying.

    Python before 3.13 has no hook, and `replace` calls the class like any caller.
    """
    source: TrainingArguments | None = caller.f_locals.get("obj", caller.f_locals.get("self"))
    return source if type(source) is kind else None


def without_outdated(
    source: TrainingArguments, given: Mapping[str, object], checks: Mapping[str, ArgumentCheck]
) -> dict[str, ArgumentValue]:
    """Drop copied values from a call's keywords that an old name among the keywords changes."""
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
    """Copy the values of the source's old names, except those that the call gives."""
    remember(copied, {name: value for name, value in remembered(source).items() if name not in given})
    held = vars(source).get("_defaults_of_profile")
    if held is not None and copied.compat == source.compat:
        unchanged = (name for name in held if getattr(source, name) == given.get(name))
        vars(copied)["_defaults_of_profile"] = tuple(unchanged)
