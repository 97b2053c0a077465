"""Old names that a subclass of the arguments declares as fields again: obeyed, as a release that had them did."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from hf_compat.errors import ArgumentError, warn_once
from hf_compat.hf.argument_values import NO_DEFAULT, ArgumentCheck, default_of
from hf_compat.hf.legacy import (
    OLD_NAMES,
    ArgumentValue,
    Said,
    Translation,
    asked_by,
    merge,
    name_repository,
    read_old,
    warn_of_inert,
)
from hf_compat.hf.old_attributes import remembered, set_by_old
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
    kind = type(args)
    declared = declared_old_names(kind)
    if declared:
        defaults = {one.name: default_of(one) for one in fields(kind)}
        for today, said in asked_by_declared(args, declared, defaults, args._checks()).items():
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
