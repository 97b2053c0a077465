"""Rules on a source as a whole: other libraries' trainers, copies, texts, and comparisons of the rank."""

from __future__ import annotations

import contextlib
from dataclasses import fields

import libcst as cst

from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES
from hf_compat.tools.migration.expression_types import ExpressionTypes, Thing, elements_of
from hf_compat.tools.migration.names import PUBLIC, is_beside_older
from hf_compat.tools.migration.old_arguments import today
from hf_compat.tools.migration.overrides import OVERRIDABLE
from hf_compat.tools.migration.rank_comparisons import PROBLEM, WAY_OUT, comparisons_with_zero
from hf_compat.tools.migration.report import Effect, Rewritten, Spot, Target
from hf_compat.tools.migration.source import Source, dotted, fields_of, methods_of

# Every release of transformers' Trainer has these methods. A subclass overrides a few of them.
_OF_A_COPY = frozenset(OVERRIDABLE) | {
    "_inner_training_loop", "create_optimizer_and_scheduler", "get_train_dataloader", "num_examples", "train",
    "_prepare_inputs", "floating_point_ops",
}  # fmt: skip
_ENOUGH = 9
# Libraries whose trainers are subclasses of transformers' (`docs/libraries.md` compares some).
_LIBRARIES = (
    "adapters", "alignment", "llmtuner", "llamafactory", "optimum", "pylate", "sentence_transformers", "setfit",
    "simpletransformers", "span_marker", "swift", "trl", "unsloth",
)  # fmt: skip
_CHECKED_CLASSES = (
    "TrainingArguments", "Seq2SeqTrainingArguments", "TrainerCallback", "TrainerState", "TrainerControl",
)  # fmt: skip


def follow_classes(source: Source) -> None:
    """Record the classes of other files that this source imports and that lead to transformers' classes."""
    for node in source.of(cst.ImportFrom):
        for alias in node.names if not isinstance(node.names, cst.ImportStar) else ():
            name = dotted(alias.name)
            module = "." * len(node.relative) + dotted(node.module)
            found = source.graph.ancestry(f"{module}{'' if module.endswith('.') else '.'}{name}")
            for kind, file in zip(found.classes, found.files, strict=True) if found is not None else ():
                source.follow(node, kind.name, file)


def follow_imports(source: Source) -> None:
    """Record the files of the folder that run when this source runs."""
    for line, file in source.graph.files_imported(source.text):
        source.follow(line, file.name, file, is_import=True)


def keep_foreign(source: Source, things: ExpressionTypes) -> None:
    """List other libraries' trainers. A source that has no other trainer keeps its imports from transformers.

    Those trainers check their arguments and callbacks by `isinstance` against transformers' own classes. Objects from
    this package would fail the check.
    """
    if source.target is not Target.HF_COMPAT:
        return
    used: dict[str, cst.CSTNode] = {}
    for node in reversed(source.nodes):
        bases = [one.value for one in node.bases] if isinstance(node, cst.ClassDef) else []
        for one in [node.func] if isinstance(node, cst.Call) else reversed(bases):
            name = source.imported(one)
            if name.partition(".")[0] in _LIBRARIES and name.endswith("Trainer"):
                used[name] = node
    if not used:
        return
    has_ours = Thing.TRAINER_CLASS in things.local_classes.values() or any(
        things.of(one.func) is Thing.TRAINER_CLASS for one in source.of(cst.Call)
    )
    modules = [dotted(one.module) for one in source.of(cst.ImportFrom) if not one.relative]
    is_moved = any(one.partition(".")[0] == "hf_compat" for one in modules)
    source.moves_here = source.moves_here and has_ours
    effect = Effect.DIFFERS if is_moved else Effect.LOOK
    is_mixed = has_ours or is_moved
    for name, node in used.items():
        mixed = "; objects from hf_compat that it gets are not of its classes" if is_mixed else ""
        way = "`hf-compat run`, or `hf_compat.patch()` before its import, has it train here"
        reason = f"{name.partition('.')[0]}'s trainer trains on transformers' own engine: {way}{mixed}"
        source.list(node, name.rpartition(".")[2], reason, effect)
    for call in source.of(cst.Call) if is_mixed else ():
        is_check = dotted(call.func) == "isinstance" and len(call.args) == 2
        for kind in elements_of(call.args[1].value) if is_check else ():
            package, last = source.imported(kind).partition(".")[0], source.imported(kind).rpartition(".")[2]
            if last in _CHECKED_CLASSES and package in ("transformers", "hf_compat"):
                reason = f"false for what {'/'.join(sorted(used))} makes, once {last} comes from hf_compat"
                source.list(call, source.code(call), reason, effect)


def list_collisions(source: Source, things: ExpressionTypes) -> None:
    """List fields of a script's dataclasses that have the name of a current argument: argparse refuses both."""
    known = {one.name for one in fields(TrainingArguments) if one.init}
    for call in source.of(cst.Call):
        kinds = elements_of(call.args[0].value) if call.args and things.of(call.func) is Thing.PARSER_CLASS else []
        if not any(things.of(one) is Thing.ARGUMENTS_CLASS for one in kinds):
            continue
        nodes = [source.bound(kind, cst.ClassDef) for kind in kinds if things.of(kind) is None]
        for node, name in ((one, target.value) for one in nodes if one for _, target in fields_of(one)):
            if name in known:
                reason = (
                    "TrainingArguments has an argument of that name today: the parser refuses two. Rename the field"
                )
                source.list(node, f"{node.name.value}.{name}", reason, Effect.FAILS)


def list_texts(source: Source) -> None:
    """List the texts that name a class of this package, an old argument as a key, or an old option."""
    for node in source.of(cst.SimpleString):
        text = node.evaluated_value
        if not isinstance(text, str):
            continue
        # A name for `importlib` or `mock`, such as `patch("transformers.Trainer")`
        last = text.rpartition(".")[2]
        if source.moves_here and text.startswith("transformers.") and last in PUBLIC:
            source.list(node, text, f"named in a text: the class is hf_compat.{last} now")
        outer = source.parent(node)
        place = source.parent(outer)
        # A key that no rule has dealt with: of a dict, of `x[…]`, of `getattr` and the like
        if text in OLD_NAMES and text not in ATTRIBUTES_ONLY:
            is_entry = isinstance(outer, cst.Index) or (isinstance(outer, cst.DictElement) and outer.key is node)
            is_key = is_entry and not (place is not None and source.is_changed(place))
            is_attribute = isinstance(place, cst.Call) and dotted(place.func) in ("getattr", "setattr", "hasattr")
            if is_key or is_attribute:
                source.list(node, source.code(node), f"if it is for training arguments, {today(text)}")
        option = text.partition("=")[0]
        name = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and name in OLD_NAMES:
            call = next((one for one in source.above(node) if isinstance(one, cst.Call)), None)
            # The script's own parser may declare an option of that name
            if call is None or dotted(call.func).rpartition(".")[2] != "add_argument":
                source.list(node, option, f"if the command takes training arguments: {OLD_NAMES[name].means}")


def list_ranks(source: Source) -> None:
    """List comparisons of the arguments' rank that are never true under transformers 5."""
    with contextlib.suppress(SyntaxError):  # of a Python that only libcst reads
        for line, comparison in comparisons_with_zero(source.text):  # beside 4.x the rank is 0, also for this package
            effect = Effect.LOOK if is_beside_older(source.target) else Effect.DIFFERS
            source.list(line, comparison, f"{PROBLEM} {WAY_OUT}", effect)


def unless_a_copy(source: Source, result: Rewritten) -> Rewritten:
    """Leave a source with a copy of transformers' Trainer as it was, with one note for all of its parts."""
    for node in source.of(cst.ClassDef):
        if len({one.name.value for one in methods_of(node)} & _OF_A_COPY) < _ENOUGH:
            continue
        fails = [one for one in result.findings if one.effect is Effect.FAILS]
        parts = len(result.findings) + len(result.mended)
        first = f"; {fails[0].what} on line {fails[0].line} fails, for one" if fails else ""
        reason = (
            "a copy of transformers 4.x's Trainer: inherit from Trainer and override what differs. It is left as it "
            f"is, with {parts} places of earlier releases{first}"
        )
        effect = Effect.FAILS if fails else Effect.LOOK
        return Rewritten(source.text, (Spot(source.line(node), f"class {node.name.value}", reason, effect=effect),))
    return result
