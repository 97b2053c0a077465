"""The trainers' APIs beside an older transformers: a case's arguments are spelled as that release has them.

`theirs()` is transformers itself, `ours()` is hf_compat; both are given the installed release's own TrainingArguments.
The old spellings are read out of `hf_compat.hf.legacy.OLD_NAMES`, the other way round.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib

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
        if name == "transformers":
            evaluate_after_the_last_update(importlib.import_module("transformers.trainer_callback").DefaultFlowCallback)

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
        field = fields.get(name)
        if name == "include_num_input_tokens_seen" and field is not None and "str" not in str(field.type):
            if value == "non_padding":
                raise NotInThisRelease(f"{name}={value!r}")
            value = value != "no"
        given |= {name: value} if _takes(field, value) else old_spelling(name, value, fields)
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
        for candidate in (True, value):
            if _translated(row, candidate) == {name: value}:
                return {old: candidate}
    raise NotInThisRelease(f"{name}={value!r}")


def _translated(row, value):
    try:
        return row.translate(value)
    except (TypeError, ValueError):
        return None


def evaluate_after_the_last_update(flow: type) -> None:
    """Let an older release's callback evaluate after the last update too, as 5.23's does.

    Args:
        flow: transformers' DefaultFlowCallback.
    """
    as_it_was = flow.on_step_end

    def on_step_end(self, args, state, control, **kwargs):
        control = as_it_was(self, args, state, control, **kwargs)
        is_last = state.global_step >= state.max_steps and args.eval_delay <= state.global_step
        if is_last and args.eval_strategy == "steps":
            control.should_evaluate = True
        return control

    flow.on_step_end = on_step_end
