"""Apply all rules to one Python source, and list what concerns the source as a whole."""

from __future__ import annotations

import ast
import contextlib
import itertools
import warnings
from dataclasses import fields

import libcst as cst

from hf_compat.errors import MigrationError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES
from hf_compat.tools.migration.attributes import list_former_members, rewrite_attributes, rewrite_loading
from hf_compat.tools.migration.calls import rewrite_calls
from hf_compat.tools.migration.imports import list_missing, rewrite_imports
from hf_compat.tools.migration.names import PUBLIC, is_beside_older
from hf_compat.tools.migration.old_arguments import today
from hf_compat.tools.migration.overrides import OVERRIDABLE, rewrite_overrides
from hf_compat.tools.migration.rank_comparisons import PROBLEM, WAY_OUT, comparisons_with_zero
from hf_compat.tools.migration.report import Effect, Finding, Rewritten, Target
from hf_compat.tools.migration.source import Source, dotted, fields_of, methods_of
from hf_compat.tools.migration.things import Thing, Things, elements_of

# libcst's parser and its visitors recurse once for each level: a deep source ends the process or takes minutes.
_DEEPEST = 300
# About half a minute of libcst's visitors, and forty times the nodes of a trainer of 4,000 lines.
_MOST_NODES = 250_000
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


def rewrite_python(text: str, target: Target) -> Rewritten:
    """Rewrite a source with today's names.

    Raises:
        MigrationError: It is not Python 3, or cannot be rewritten. The message has no file name.
    """
    if "transformers" not in text and "hf_compat" not in text:
        return Rewritten(text)
    check_bounds(text)
    try:
        source = Source(text, target)
        things = Things(source)
        _keep_foreign(source, things)
        _list_collisions(source, things)
        rewrite_calls(source, things)
        rewrite_attributes(source, things)
        rewrite_overrides(source, things)
        rewrite_loading(source)
        list_former_members(source)
        rewrite_imports(source)
        list_missing(source)
        for node in source.of(cst.SimpleString):
            _list_text(node, source)
        with contextlib.suppress(SyntaxError):  # of a Python that only libcst reads
            for line, comparison in comparisons_with_zero(text):  # beside 4.x the rank is 0, also for this package
                effect = Effect.LOOK if is_beside_older(target) else Effect.DIFFERS
                source.list(line, comparison, f"{PROBLEM} {WAY_OUT}", effect)
        result = source.result()
    except cst.ParserSyntaxError as error:
        raise MigrationError(_account(error, text)) from error
    except RecursionError as error:
        raise MigrationError("it is nested too deeply to be rewritten") from error
    try:
        cst.parse_module(result.text)
    except cst.ParserSyntaxError as error:
        raise MigrationError(f"the rewritten source would not be Python: {_account(error, result.text)}") from error
    return _unless_a_copy(source, result)


def check_bounds(text: str) -> None:
    """Refuse a source that is too deep or too large for libcst. A source that is not Python passes."""
    # Python's own parser has bounds of its own, and libcst reads sources that Python does not: brackets bound those
    deepest = max(itertools.accumulate((one in "([{") - (one in ")]}") for one in text if one in "([{)]}"), default=0)
    if deepest > _DEEPEST:
        raise MigrationError(f"it has {deepest} brackets within each other: more than {_DEEPEST} are not read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the user's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    except (MemoryError, RecursionError) as error:
        raise MigrationError("it is nested too deeply to be read") from error
    level: list[ast.AST] = [tree]
    count = depth = 0
    while level:
        count, depth = count + len(level), depth + 1
        line = next((one.lineno for one in level if isinstance(one, (ast.expr, ast.stmt))), 1)
        if depth > _DEEPEST:
            raise MigrationError(f"line {line}: it is nested more than {_DEEPEST} levels deep")
        level = [child for one in level for child in ast.iter_child_nodes(one)]
    if count > _MOST_NODES:
        raise MigrationError(f"it has {count:,} syntax nodes: more than {_MOST_NODES:,} are data rather than a script")


def _account(error: cst.ParserSyntaxError, text: str) -> str:
    line = text.splitlines()[error.raw_line - 1 : error.raw_line] or [""]
    is_python_2 = line[0].lstrip().startswith(("print ", "exec ")) or ", e:" in line[0]
    why = "a statement of Python 2" if is_python_2 else "a syntax error"
    return f"line {error.raw_line}: {why}: {line[0].strip()[:80]}"


def _list_text(node: cst.SimpleString, source: Source) -> None:
    """List a text that names a class of this package, an old argument as a key, or an old option."""
    text = node.evaluated_value
    if not isinstance(text, str):
        return
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


def _unless_a_copy(source: Source, result: Rewritten) -> Rewritten:
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
        return Rewritten(source.text, (Finding(source.line(node), f"class {node.name.value}", reason, effect=effect),))
    return result


def _list_collisions(source: Source, things: Things) -> None:
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


def _keep_foreign(source: Source, things: Things) -> None:
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
