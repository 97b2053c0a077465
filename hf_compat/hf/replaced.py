"""`dataclasses.replace` hands over the fields alone: what arguments hold besides goes with them. HF words only."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from types import CodeType
from typing import TYPE_CHECKING

from hf_compat.hf.argument_values import ArgumentCheck
from hf_compat.hf.declared_old_names import declared_old_names, keeps_its_meaning
from hf_compat.hf.legacy import OLD_NAMES, ArgumentValue, read_old
from hf_compat.hf.old_attributes import remember, remembered

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments  # which imports this module

# Python 3.13 calls the object's `__replace__`, which has the code of this other function.
_REPLACE: CodeType = getattr(dataclasses, "_replace", dataclasses.replace).__code__


def source_of_replace(kind: type) -> TrainingArguments | None:
    """Return the object that `dataclasses.replace` is copying, where it is the caller of the caller's caller.

    Python before 3.13 offers no hook: `replace` calls the class as anybody else does.

    Args:
        kind: The class that is called; the object is one of it.
    """
    frame = sys._getframe(2)
    if frame.f_code is not _REPLACE:
        return None
    source: TrainingArguments | None = frame.f_locals.get("obj", frame.f_locals.get("self"))
    return source if type(source) is kind else None


def hand_over_own(source: TrainingArguments, own: dict[str, object], names: Collection[str]) -> None:
    """Add our own arguments that a call does not give."""
    for name in names:
        own.setdefault(name, getattr(source, name))


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
