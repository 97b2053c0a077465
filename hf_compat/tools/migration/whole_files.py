"""What is said of a source as a whole: a copy of transformers' Trainer, fields that have an argument's name."""

from __future__ import annotations

from dataclasses import fields

import libcst as cst

from hf_compat.hf.arguments import TrainingArguments
from hf_compat.tools.migration.calls import fields_of, local_class
from hf_compat.tools.migration.overrides import OVERRIDABLE
from hf_compat.tools.migration.report import Effect, Finding, Rewritten
from hf_compat.tools.migration.source import Source
from hf_compat.tools.migration.things import Thing, Things

# Methods that stand together in transformers' Trainer of every release; a subclass overrides a few of them.
_OF_A_COPY = frozenset(OVERRIDABLE) | {
    "_inner_training_loop", "create_optimizer_and_scheduler", "get_train_dataloader", "num_examples", "train",
    "_prepare_inputs", "floating_point_ops",
}  # fmt: skip
_ENOUGH = 9


def copy_in(source: Source) -> cst.ClassDef | None:
    """Return the class that is a copy of transformers' Trainer; None where there is none."""
    for node in source.of(cst.ClassDef):
        methods = {one.name.value for one in node.body.body if isinstance(one, cst.FunctionDef)}
        if len(methods & _OF_A_COPY) >= _ENOUGH:
            return node
    return None


def told_as_copy(source: Source, copied: cst.ClassDef, result: Rewritten) -> Rewritten:
    """Return a source with a copy of the Trainer as it was, with one note in place of one for each of its parts."""
    fails = [one for one in result.findings if one.effect is Effect.FAILS]
    parts = len(result.findings) + len(result.mended)
    first = f"; {fails[0].what} on line {fails[0].line} fails, for one" if fails else ""
    reason = (
        "a copy of transformers 4.x's Trainer: inherit from Trainer and override what differs. It is left as it is, "
        f"with {parts} places of earlier releases{first}"
    )
    told = Finding(
        source.line(copied), f"class {copied.name.value}", reason, effect=Effect.FAILS if fails else Effect.LOOK
    )
    return Rewritten(source.text, (told,))


def list_collisions(source: Source, things: Things) -> None:
    """List fields of a script's dataclasses that an argument of today's has the name of: argparse refuses both."""
    known = {one.name for one in fields(TrainingArguments) if one.init}
    for call in source.of(cst.Call):
        if things.of(call.func) is not Thing.PARSER_CLASS or not call.args:
            continue
        given = call.args[0].value
        kinds = [one.value for one in given.elements] if isinstance(given, (cst.Tuple, cst.List)) else [given]
        if not any(things.of(one) is Thing.ARGUMENTS_CLASS for one in kinds):
            continue
        for kind in kinds:
            node = local_class(kind, source)
            for name in fields_of(node) if node is not None and things.of(kind) is None else ():
                if name in known:
                    assert node is not None
                    reason = (
                        "TrainingArguments has an argument of that name today: the parser refuses two. Rename the field"
                    )
                    source.list(node, f"{node.name.value}.{name}", reason, Effect.FAILS)
