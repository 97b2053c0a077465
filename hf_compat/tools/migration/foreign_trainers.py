"""Trainers of other libraries, made from transformers' Trainer: an import of ours does not move their engine."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hf_compat.tools.migration.report import Effect, Target
from hf_compat.tools.migration.source import Source, dotted
from hf_compat.tools.migration.things import Thing, Things

# Libraries whose trainers are subclasses of transformers' (`docs/libraries.md` compares some).
LIBRARIES = (
    "adapters", "alignment", "llmtuner", "llamafactory", "optimum", "pylate", "sentence_transformers", "setfit",
    "simpletransformers", "span_marker", "swift", "trl", "unsloth",
)  # fmt: skip
_CLASSES = ("TrainingArguments", "Seq2SeqTrainingArguments", "TrainerCallback", "TrainerState", "TrainerControl")
_WAY = "`hf-compat run`, or `hf_compat.patch()` before its import, has it train here"


def keep_foreign(source: Source, things: Things) -> None:
    """Tell of other libraries' trainers; where a source has no other, its imports stay with transformers.

    Their arguments and callbacks are checked by `isinstance` against transformers' own classes: what came from this
    package would not be one of them.
    """
    if source.target is not Target.HF_COMPAT:
        return
    used = {name: node for node, name in reversed(list(_foreign(source)))}
    if not used:
        return
    has_ours = any(things.of(one.func) is Thing.TRAINER_CLASS for one in source.of(cst.Call)) or any(
        thing is Thing.TRAINER_CLASS for thing in things.local_classes.values()
    )
    is_moved = any(_is_ours(one) for one in source.of(cst.ImportFrom))
    source.moves_here = source.moves_here and has_ours
    for name, node in used.items():
        package = name.partition(".")[0]
        mixed = "" if not has_ours and not is_moved else "; what it is given from hf_compat is none of its classes"
        reason = f"{package}'s trainer trains on transformers' own engine: {_WAY}{mixed}"
        source.list(node, name.rpartition(".")[2], reason, Effect.DIFFERS if is_moved else Effect.LOOK)
    if not has_ours and not is_moved:
        return
    for call in source.of(cst.Call):
        if dotted(call.func) == "isinstance" and len(call.args) == 2:
            for kind in _kinds(call.args[1].value):
                last = (source.imported(kind) or "").rpartition(".")[2]
                if last in _CLASSES and (source.imported(kind) or "").partition(".")[0] in (
                    "transformers",
                    "hf_compat",
                ):
                    reason = f"false for what {'/'.join(sorted(used))} makes, once {last} comes from hf_compat"
                    source.list(call, source.code(call), reason, Effect.DIFFERS if is_moved else Effect.LOOK)


def _foreign(source: Source) -> Iterator[tuple[cst.CSTNode, str]]:
    """Yield each call and base class that is a trainer of another library, with its full name."""
    for node in source.nodes:
        made = node.func if isinstance(node, cst.Call) else None
        bases = [one.value for one in node.bases] if isinstance(node, cst.ClassDef) else []
        for one in [made, *bases]:
            name = None if one is None else source.imported(one)
            if name is not None and name.partition(".")[0] in LIBRARIES and name.endswith("Trainer"):
                yield node, name


def _is_ours(node: cst.ImportFrom) -> bool:
    return not node.relative and dotted(node.module).partition(".")[0] == "hf_compat"


def _kinds(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    return [one.value for one in node.elements] if isinstance(node, cst.Tuple) else [node]
