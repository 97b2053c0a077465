"""Old names that a subclass of the arguments declares as fields again: obeyed, as a release that had them did.

`dataclasses.replace` hands such names, and what the copied instance was given, to the copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import fields
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from hf_compat.errors import ArgumentError, warn_once
from hf_compat.hf.argument_values import NO_DEFAULT, ArgumentCheck, ArgumentValue, default_of
from hf_compat.hf.legacy import (
    OLD_NAMES,
    Said,
    Translation,
    asked_by,
    merge,
    name_repository,
    read_old,
    warn_of_inert,
)
from hf_compat.hf.old_attributes import remember, remembered, set_by_old
from hf_compat.runtime.text import shown

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments  # which imports this module


@functools.lru_cache(maxsize=64)
def declared_old_names(kind: type) -> Mapping[str, object]:
    """Return the old names that a class has as fields, with their defaults; a property says itself what it does."""
    return {
        one.name: default_of(one)
        for one in fields(kind)
        if one.name in OLD_NAMES and not isinstance(getattr(kind, one.name, None), property)
    }


def obey_declared(args: TrainingArguments) -> None:
    """Set the arguments of today that the declared old names stand for, before they get their normal forms.

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
    """Set what a declared old name stands for, as a script sets the field later."""
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
        defaults: Those of today's arguments.
        checks: What today's arguments may be.

    Raises:
        ArgumentError: An old name and today's contradict each other, or a value that the old name cannot have.
    """
    changed: Translation = {}
    read: Translation = {}
    for name, default in declared.items():
        value = getattr(args, name)
        if not keeps_its_meaning(name, default, checks):
            warn_once(
                f"`{shown(name, value)}` of {type(args).__name__} does nothing by itself: the field has the name of "
                f"an earlier release's argument, and another meaning.\n\nHint: rename the field; "
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

    Python before 3.13 offers no hook: `replace` calls the class as anybody else does.

    Args:
        kind: The class that is called; the object is one of it.
        caller: Its caller's frame, of the code REPLACE.
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
    """Let a copy remember what its source was given by old names, but for those that the call gives.

    Args:
        source: The arguments that are copied.
        copied: The copy.
        given: The call's keywords.
    """
    remember(copied, {name: value for name, value in remembered(source).items() if name not in given})
    held = vars(source).get("_defaults_of_profile")
    if held is not None and copied.compat == source.compat:
        unchanged = (name for name in held if getattr(source, name) == given.get(name))
        vars(copied)["_defaults_of_profile"] = tuple(unchanged)
