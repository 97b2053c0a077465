"""One Python source, from any release's names to today's."""

from __future__ import annotations

import libcst as cst

from hf_compat.errors import MigrationError
from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES
from hf_compat.interop.rank_comparisons import PROBLEM, WAY_OUT, comparisons_with_zero
from hf_compat.tools.migration.attributes import rewrite_attributes, uses_transformers
from hf_compat.tools.migration.bounds import check_bounds
from hf_compat.tools.migration.callbacks import rewrite_callbacks
from hf_compat.tools.migration.calls import rewrite_calls
from hf_compat.tools.migration.foreign_trainers import keep_foreign
from hf_compat.tools.migration.former_members import rewrite_former_members
from hf_compat.tools.migration.imports import names_in_text, rewrite_imports
from hf_compat.tools.migration.neighbours import list_missing
from hf_compat.tools.migration.old_arguments import today
from hf_compat.tools.migration.overrides import rewrite_overrides
from hf_compat.tools.migration.report import Effect, Rewritten, Target
from hf_compat.tools.migration.resolving import is_beside_older
from hf_compat.tools.migration.source import Source, dotted
from hf_compat.tools.migration.things import Things
from hf_compat.tools.migration.whole_files import copy_in, list_collisions, told_as_copy


def rewrite_python(text: str, target: Target) -> Rewritten:
    """Return a source with today's names.

    Args:
        text: The source.
        target: What the result is for.

    Raises:
        MigrationError: It is no Python 3, or cannot be rewritten; the message has no file name.
    """
    if not uses_transformers(text):
        return Rewritten(text)
    check_bounds(text)
    try:
        return _rewritten(Source(text, target))
    except cst.ParserSyntaxError as error:
        raise MigrationError(_account(error, text)) from error
    except RecursionError as error:
        raise MigrationError("it is nested too deeply to be rewritten") from error


def _rewritten(source: Source) -> Rewritten:
    things = Things(source)
    keep_foreign(source, things)
    list_collisions(source, things)
    rewrite_calls(source, things)
    rewrite_attributes(source, things)
    rewrite_overrides(source, things)
    rewrite_callbacks(source, things)
    rewrite_former_members(source)
    rewrite_imports(source)
    list_missing(source)
    # Words of a command line, names of transformers for `importlib` or `mock`
    if source.moves_here:
        for node, text in names_in_text(source):
            source.list(node, text, f"named in a text: the class is hf_compat.{text.rpartition('.')[2]} now")
    for node in source.of(cst.SimpleString):
        # List an old name as a key that no rule has dealt with: of a dict, of `x[…]`, of `getattr` and its like
        name = node.evaluated_value
        if not (not isinstance(name, str) or name not in OLD_NAMES or name in ATTRIBUTES_ONLY):
            outer = source.parent(node)
            place = source.parent(outer) if outer is not None else None
            is_key = isinstance(outer, (cst.DictElement, cst.Index)) and not (
                place is not None and source.is_changed(place)
            )
            is_key = is_key and (isinstance(outer, cst.Index) or getattr(outer, "key", None) is node)
            is_attribute = isinstance(place, cst.Call) and dotted(place.func) in ("getattr", "setattr", "hasattr")
            if is_key or is_attribute:
                reason = f"if it is for training arguments, {today(name)}"
                source.list(node, source.code(node), reason)
        word = node.evaluated_value if "--" in node.value else None
        name = word.removeprefix("--").partition("=")[0].replace("-", "_") if isinstance(word, str) else ""
        if isinstance(word, str) and word.startswith("--") and name in OLD_NAMES and not _is_declared(node, source):
            source.list(
                node, word.partition("=")[0], f"if the command takes training arguments: {OLD_NAMES[name].means}"
            )
    _list_ranks(source)
    copied = copy_in(source)
    result = _checked(source.result())
    return result if copied is None else told_as_copy(source, copied, result)


def _account(error: cst.ParserSyntaxError, text: str) -> str:
    """Return what is wrong with a source, on one line."""
    line = text.splitlines()[error.raw_line - 1 : error.raw_line] or [""]
    is_python_2 = line[0].lstrip().startswith(("print ", "exec ")) or ", e:" in line[0]
    why = "a statement of Python 2" if is_python_2 else "a syntax error"
    return f"line {error.raw_line}: {why}: {line[0].strip()[:80]}"


def _checked(rewritten: Rewritten) -> Rewritten:
    """Return the result; one that is no Python any longer is never handed on."""
    try:
        cst.parse_module(rewritten.text)
    except cst.ParserSyntaxError as error:
        raise MigrationError(f"the rewritten source would not be Python: {_account(error, rewritten.text)}") from error
    return rewritten


def _list_ranks(source: Source) -> None:
    """List what is done on local rank 0 alone."""
    try:
        found = comparisons_with_zero(source.text)
    except SyntaxError:  # of a Python that only libcst reads
        return
    for line, comparison in found:  # beside 4.x the rank is 0, and this package's beside it too
        effect = Effect.LOOK if is_beside_older(source.target) else Effect.DIFFERS
        source.list_line(line, comparison, f"{PROBLEM} {WAY_OUT}", effect)


def _is_declared(node: cst.SimpleString, source: Source) -> bool:
    """Return whether a word is the name of an option of the script's own parser."""
    call = next((one for one in source.above(node) if isinstance(one, cst.Call)), None)
    return call is not None and dotted(call.func).rpartition(".")[2] == "add_argument"
