"""Find comparisons of the arguments' `local_rank` with 0, which are never true under transformers 5."""

from __future__ import annotations

import ast
import contextlib
import tokenize

WAY_OUT = "compare `args.local_process_index`, or ask `trainer.is_world_process_zero()`"
PROBLEM = (
    "`local_rank` of training arguments is -1 under transformers 5 unless the command line gives it: code for "
    "`local_rank` 0 never runs. Releases 4.x set it to 0 on the first process."
)


def comparisons_in_file(path: str) -> list[tuple[int, str]]:
    """Find the comparisons in a file. An archive or a file that is not Python has none."""
    try:
        with tokenize.open(path) as file:
            return comparisons_with_zero(file.read())
    except (OSError, SyntaxError, ValueError):  # running the file reports it
        return []


def comparisons_with_zero(source: str) -> list[tuple[int, str]]:
    """Find line and text of each comparison that expects rank 0, and not -1 too, on the first process.

    Training arguments are objects with a name such as `args`, or made by a class of arguments. A source that declares
    an option or a field `local_rank` itself has no findings.
    """
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    words = {one.value for call in calls for one in call.args if isinstance(one, ast.Constant)}
    fields = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    is_declared = any(isinstance(one, ast.Name) and one.id == "local_rank" for one in fields)
    if is_declared or not words.isdisjoint(("--local_rank", "--local-rank")):
        return []
    # names that hold the arguments' rank, apart from constants
    values: dict[str, list[ast.expr]] = {}
    for node in (one for one in ast.walk(tree) if isinstance(one, ast.Assign)):
        for target in node.targets:
            if isinstance(target, ast.Name):
                values.setdefault(target.id, []).append(node.value)
    made = {
        f"{name}.local_rank"
        for name, held in values.items()
        if any(isinstance(one, ast.Call) and "TrainingArguments" in ast.unparse(one.func) for one in held)
    }
    names = made | {
        name
        for name, held in values.items()
        if any(_is_rank(one, made) for one in held)
        and all(_is_rank(one, made) or isinstance(one, ast.Constant) for one in held)
    }
    also_minus_one = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.BoolOp) and any(_compares(one, names, -1) for one in node.values)
        for inner in node.values
    }
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.expr) and node not in also_minus_one and _compares(node, names, 0)
    ]
    return sorted((node.lineno, ast.unparse(node)) for node in found if not _compares(node, names, -1))


def _compares(node: ast.expr, names: set[str], rank: int) -> bool:
    """Whether an expression compares the rank with a number, or with several that include it."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return rank == 0 and _is_rank(operand, names)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return False
    sides = (node.left, node.comparators[0])
    if not any(_is_rank(side, names) for side in sides):
        return False
    if isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        return any(rank in numbers for numbers in map(_numbers, sides))
    return isinstance(node.ops[0], (ast.In, ast.NotIn)) and rank in _numbers(sides[1])


def _is_rank(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names:
        return True
    if not isinstance(node, ast.Attribute) or node.attr != "local_rank":
        return False
    return "arg" in ast.unparse(node.value).rpartition(".")[2].lower()


def _numbers(node: ast.expr) -> list[object]:
    """The constant of an expression, or those of a tuple, list or set."""
    found = []
    for one in node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]:
        with contextlib.suppress(ValueError):  # a name or a call
            found.append(ast.literal_eval(one))
    return found
