"""Every test can fail: forms of tests that cannot, found by reading them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))
# What a machine may lack: a GPU's absence is asked for, mounting needs root, a browser is not pip's.
# `test_beside_release` runs beside each release of transformers (`sweeps/releases/matrix.py --tests`), and some of its
# tests are about others. MLflow is not installed for the run: its rows are of the matrix, and a stand-in runs the same
# tests.
MAY_SKIP = {
    "test_bad_input.py", "faults/test_faults.py", "cli/test_plot.py", "isolation/test_isolation.py",
    "interop/test_beside_release.py", "callbacks/test_mlflow.py", "docs/test_site.py",
    "migration/test_former_settings.py",
}  # fmt: skip


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a function without the functions and classes that it defines."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from own_nodes(child)


def is_expectation(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        return any(word in ast.unparse(item.context_expr) for item in node.items for word in ("raises(", "warns("))
    return isinstance(node, (ast.Assert, ast.Raise))


def asserting_functions(tree: ast.Module) -> set[str]:
    """Name the functions of a file that expect something, or use one that does."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = {f.name for f in functions if any(map(is_expectation, own_nodes(f)))}
    while more := {f.name for f in functions if f.name not in found and uses(f, found)}:
        found |= more
    return found


def blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    statements = (node for node in own_nodes(function) if isinstance(node, (ast.stmt, ast.excepthandler)))
    for node in [function, *statements]:
        yield from (getattr(node, name, None) or [] for name in ("body", "orelse", "finalbody"))


def returns_first(block: list[ast.stmt], asserting: set[str]) -> bool:
    """Whether a block leaves its test without an expectation before that."""
    for line in block:
        if isinstance(line, ast.Return):
            return True
        if any(is_expectation(node) for node in [line, *own_nodes(line)]) or uses(line, asserting):
            return False
    return False


def uses(node: ast.AST, names: set[str]) -> bool:
    used = {node.id for node in own_nodes(node) if isinstance(node, ast.Name)}
    return bool(used & names) or any(name.startswith("assert_") for name in used)  # imported, by that name


def is_always_true(condition: ast.expr) -> bool:
    """Whether a condition has a branch that is true without a question, or compares a thing with itself."""
    if isinstance(condition, ast.IfExp):
        return any(isinstance(branch, ast.Constant) for branch in (condition.body, condition.orelse))
    if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.Or):
        return any(isinstance(part, ast.Constant) and part.value for part in condition.values)
    if isinstance(condition, ast.Compare) and isinstance(condition.ops[0], (ast.Eq, ast.Is)):
        return ast.unparse(condition.left) == ast.unparse(condition.comparators[0])
    return isinstance(condition, ast.Tuple) or (isinstance(condition, ast.Constant) and bool(condition.value))


def complaints(tree: ast.Module, may_skip: bool) -> Iterator[str]:
    asserting = asserting_functions(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and is_always_true(node.test):
            yield f"{node.lineno}: `{ast.unparse(node)}` is always true"
        elif isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body):
            yield f"{node.lineno}: an error is passed over"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
            yield f"{node.lineno}: a package that the environment has to hold is missing without a failure"
        elif isinstance(node, ast.Attribute) and node.attr in ("skip", "skipif") and not may_skip:
            yield f"{node.lineno}: a skip hides that nothing was tested"
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            if node.name not in asserting:
                yield f"{node.lineno}: {node.name} expects nothing"
            if any(returns_first(block, asserting) for block in blocks(node)):
                yield f"{node.lineno}: {node.name} may end before it asserts"


def test_every_test_can_fail():
    files = {str(path.relative_to(TESTS)): ast.parse(path.read_text()) for path in FILES}
    assert "house/test_tests_can_fail.py" in files, "the search finds the files"
    offenders = [f"{file}:{said}" for file, tree in files.items() for said in complaints(tree, file in MAY_SKIP)]
    assert offenders == [], "\n".join(offenders)


CANNOT_FAIL = {
    "assert x is None if there else True": "always true",
    "assert x or True": "always true",
    "assert x.y == x.y": "always true",
    "assert (x, 'said')": "always true",
    "try:\n    run()\nexcept ValueError:\n    pass": "passed over",
    "pytest.importorskip('torch')": "missing without a failure",
    "@pytest.mark.skipif(x)\ndef test_a():\n    assert x": "a skip hides",
    "def test_a():\n    print(run())": "expects nothing",
    "def test_a():\n    if x:\n        return\n    assert y": "may end before",
}


@pytest.mark.parametrize("source", CANNOT_FAIL)
def test_forms_that_cannot_fail_are_found(source):
    (said,) = complaints(ast.parse(source), may_skip=False)
    assert CANNOT_FAIL[source] in said
