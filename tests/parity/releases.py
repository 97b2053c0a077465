"""The trainers' APIs beside an older transformers: a case's arguments are spelled as that release has them.

`theirs()` is transformers itself, `ours()` is hf_compat; both are given the installed release's own TrainingArguments.
The old spellings are read out of `hf_compat.hf.legacy.OLD_NAMES`, the other way round.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect

ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")


class NotInThisRelease(Exception):
    """A case needs what the installed transformers does not have."""


class Api:
    """A package's names, with the arguments of the installed transformers, spelled for it.

    Args:
        name: `transformers` or `hf_compat`.
    """

    def __init__(self, name: str) -> None:
        self._package = importlib.import_module(name)

    def __getattr__(self, name: str):
        if name in ARGUMENTS:
            kind = getattr(importlib.import_module("transformers"), name)
            return functools.partial(make_arguments, kind)
        return getattr(self._package, name)


def make_arguments(kind: type, **chosen):
    """Make the release's own arguments of what a case says in the names of today."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    given: dict = {}
    for name, value in chosen.items():
        given |= {name: value} if _takes(fields.get(name), value) else old_spelling(name, value, fields)
    return kind(**given)


def _takes(field, value) -> bool:
    """Return whether a field of the release takes a value: it is there, and no count that is given a share."""
    return field is not None and not (field.type in (int, "int") and isinstance(value, float))


def old_spelling(name: str, value, fields) -> dict:
    """Return the release's keyword that means an argument of today.

    Raises:
        NotInThisRelease: It has none.
    """
    from hf_compat.hf.legacy import OLD_NAMES

    for old, row in OLD_NAMES.items():
        if old not in fields or row.inert:
            continue
        for candidate in (value, True):
            if _translated(row, candidate) == {name: value}:
                return {old: candidate}
    raise NotInThisRelease(f"{name}={value!r}")


def _translated(row, value):
    try:
        return row.translate(value)
    except (TypeError, ValueError):
        return None


def check_keywords(trainer_class: type, keywords: dict) -> None:
    """Raise where the release's Trainer lacks a keyword."""
    known = inspect.signature(trainer_class.__init__).parameters
    missing = [name for name in keywords if name not in known and "args" not in known]
    if missing:
        raise NotInThisRelease(f"Trainer({missing[0]}=…)")
