"""Apply all rules to one Python source that libcst can read."""

from __future__ import annotations

import ast
import itertools
import warnings
from pathlib import Path

import libcst as cst

from hf_compat.errors import MigrationError
from hf_compat.tools.migration import (
    attributes,
    calls,
    changed_numbers,
    constant_arguments,
    former_settings,
    imports,
    overrides,
    own_models,
    torch_names,
    whole_source,
)
from hf_compat.tools.migration.class_graph import ClassGraph
from hf_compat.tools.migration.expression_types import ExpressionTypes
from hf_compat.tools.migration.import_blocks import ImportBlocks
from hf_compat.tools.migration.report import Rewritten, Target
from hf_compat.tools.migration.source import Source

# libcst's parser and its visitors recurse once for each level: a deep source ends the process or takes minutes.
_DEEPEST = 300
# About half a minute of libcst's visitors, and forty times the nodes of a trainer of 4,000 lines.
_MOST_NODES = 250_000


def rewrite_python(text: str, target: Target, file: Path | None = None) -> Rewritten:
    """Rewrite a source with today's names. Classes that it imports are looked for beside its file.

    Raises:
        MigrationError: It is not Python 3, or cannot be rewritten. The message has no file name.
    """
    is_of_these = "transformers" in text or "hf_compat" in text
    if not is_of_these and not ClassGraph(file).leads_to_transformers(text):
        return Rewritten(text)
    refuse_huge_source(text)
    try:
        source = Source(text, target, file)
        things = ExpressionTypes(source)
        whole_source.keep_foreign(source, things)
        whole_source.list_collisions(source, things)
        taken = calls.rewrite_arguments(source, things)
        constant_arguments.list_refused(source, things)
        changed_numbers.list_undivided(source, things)
        changed_numbers.list_fractions(source, things)
        calls.rewrite_trainer_calls(source, things)
        calls.list_moved_places_of_bases(source, things)
        calls.rewrite_adamw(source, things)
        calls.rewrite_training_calls(source, things)
        calls.list_unknown_calls(source, things, taken)
        attributes.rewrite_trainer_attributes(source, things)
        attributes.rewrite_argument_attributes(source, things)
        attributes.rewrite_fields(source, things)
        overrides.rewrite_overrides(source, things)
        overrides.rewrite_events(source, things)
        own_models.list_nameless_forwards(source, things)
        own_models.rewrite_own_models(source)
        attributes.rewrite_loading(source)
        attributes.list_former_members(source)
        attributes.list_chat_templates(source)
        former_settings.list_former_settings(source)
        former_settings.list_former_tokenizers(source)
        former_settings.list_former_forwards(source)
        attributes.list_former_files(source)
        attributes.rewrite_optimizer_names(source)
        blocks = ImportBlocks(source)
        imports.rewrite_from_imports(source, blocks)
        imports.import_below_stars(source, blocks)
        imports.rewrite_module_imports(source, blocks)
        imports.rewrite_tpu_calls(source)
        imports.rewrite_dotted_names(source)
        blocks.apply()
        imports.list_missing(source)
        imports.list_refused_keywords(source)
        torch_names.list_gone_of_torch(source)
        torch_names.rewrite_schedulers(source)
        torch_names.list_former_calls(source)
        imports.list_unbound(source)
        whole_source.follow_classes(source)
        whole_source.follow_imports(source)
        whole_source.list_texts(source)
        whole_source.list_ranks(source)
        result = source.result()
    except cst.ParserSyntaxError as error:
        raise MigrationError(_account(error, text)) from error
    except RecursionError as error:
        raise MigrationError("it is nested too deeply to be rewritten") from error
    try:
        cst.parse_module(result.text)
    except cst.ParserSyntaxError as error:
        raise MigrationError(f"the rewritten source would not be Python: {_account(error, result.text)}") from error
    return whole_source.unless_a_copy(source, result)


def refuse_huge_source(text: str) -> None:
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
