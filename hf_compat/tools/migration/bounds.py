"""Sources that are nested too deeply or too large to be rewritten, told before libcst reads them.

libcst's parser and its visitors call themselves once for each level: a deep source ends the process or takes minutes.
"""

from __future__ import annotations

import ast
import itertools
import warnings

from hf_compat.errors import MigrationError

_DEEPEST = 300
# About half a minute of libcst's visitors: forty times the nodes of a trainer of 4,000 lines would be data
_MOST_NODES = 250_000


def check_bounds(text: str) -> None:
    """Refuse a source that cannot be rewritten in reasonable depth and time; one that is no Python passes.

    Raises:
        MigrationError: It is nested too deeply, or has too many syntax nodes.
    """
    # Python's own parser has bounds, and stands what is below them; brackets are counted for what only libcst reads
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
