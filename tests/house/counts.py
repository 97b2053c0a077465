"""Counts of the house, read off the source: what grows when a design decays.

    python tests/house/counts.py [ROOT]

ROOT holds `hf_compat/`; any version of it may be counted. What is counted:

- the Trainer: names that a method of `Trainer`, or of a base class of it in the package, assigns to `self`; names of
  the methods and properties of those classes;
- `Any`: how often it stands in annotations, of parameters and results ("signatures") and of variables, and elsewhere
  (aliases, casts);
- private accesses across modules: `x._name` where `x` is not `self`, `cls` or `super()`, and the module itself
  neither defines nor assigns `_name`; those of Lightning's and torch's objects included;
- walkers: functions that ask `isinstance` for a container (dict, Mapping, list, tuple, Sequence …) and call
  themselves;
- lengths of functions: lines of the body without the docstring.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = {"dict", "list", "tuple", "set", "Mapping", "MutableMapping", "Sequence", "Collection", "Iterable"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Counts:
    """What was counted; the lists say where."""

    attributes: list[str]
    methods: list[str]
    any_in_signatures: int
    any_in_variables: int
    any_elsewhere: int
    private: list[str]
    walkers: list[str]
    lengths: list[tuple[int, str]]

    @property
    def median(self) -> float:
        return statistics.median(length for length, _ in self.lengths)

    @property
    def p90(self) -> int:
        return self.lengths[int(len(self.lengths) * 0.9)][0]


def read(root: Path) -> dict[str, ast.Module]:
    """Read every module of the package, by its path."""
    package = root / "hf_compat"
    return {str(path.relative_to(package)): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def count(root: Path) -> Counts:
    modules = read(root)
    classes = trainer_classes(modules)
    every = [(f"{path}:{f.lineno} {f.name}", f) for path, tree in modules.items() for f in functions(tree)]
    variables = [n.annotation for t in modules.values() for n in ast.walk(t) if isinstance(n, ast.AnnAssign)]
    in_signatures, in_variables = sum(anys(a) for _, f in every for a in signature(f)), sum(map(anys, variables))
    return Counts(
        attributes=sorted({name for c in classes for name in assigned_to_self(c)}),
        methods=sorted({node.name for c in classes for node in c.body if isinstance(node, Function)}),
        any_in_signatures=in_signatures,
        any_in_variables=in_variables,
        any_elsewhere=sum(map(anys, modules.values())) - in_signatures - in_variables,
        private=[where for path, tree in modules.items() for where in private_accesses(path, tree)],
        walkers=[name for name, f in every if is_walker(f)],
        lengths=sorted((body_lines(f), name) for name, f in every if body_lines(f)),
    )


def trainer_classes(modules: dict[str, ast.Module]) -> list[ast.ClassDef]:
    """List `Trainer` and the base classes of it that the package defines."""
    known = {node.name: node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found, names = [], ["Trainer"]
    while names:
        node = known.get(names.pop())
        if node is not None and node not in found:
            found.append(node)
            names += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found


def assigned_to_self(node: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(node):
        is_stored = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if is_stored and isinstance(part.value, ast.Name) and part.value.id == "self":
            yield part.attr


def anys(node: ast.AST | None) -> int:
    return 0 if node is None else sum(isinstance(n, ast.Name) and n.id == "Any" for n in ast.walk(node))


def signature(function: Function) -> list[ast.expr | None]:
    a = function.args
    given = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    return [argument.annotation for argument in given if argument is not None] + [function.returns]


def private_accesses(path: str, tree: ast.Module) -> Iterator[str]:
    own = {name for node in ast.walk(tree) for name in names_made_by(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            holder = ast.unparse(node.value)
            if holder not in ("self", "cls", "super()") and node.attr not in own:
                yield f"{path}:{node.lineno} {holder}.{node.attr}"


def names_made_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def is_walker(function: Function) -> bool:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    called = {ast.unparse(call.func).removeprefix("self.") for call in calls}
    passed = {ast.unparse(argument) for call in calls for argument in call.args}
    asked = {
        word.rpartition(".")[2]
        for call in calls
        if ast.unparse(call.func) == "isinstance"
        for word in ast.unparse(call.args[1]).strip("()").replace("|", ",").replace(" ", "").split(",")
    }
    return function.name in called | passed and bool(asked & CONTAINERS)


def body_lines(function: Function) -> int:
    body = function.body
    has_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    body = body[1:] if has_docstring else body
    return function.end_lineno - body[0].lineno + 1 if body else 0


def main() -> None:
    found = count(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    print(f"Trainer: {len(found.attributes)} attributes, {len(found.methods)} methods and properties")
    print(f"Any: {found.any_in_signatures} in signatures, {found.any_in_variables} in variables' annotations, ", end="")
    print(f"{found.any_elsewhere} elsewhere")
    print(f"private accesses across modules: {len(found.private)}")
    print(f"walkers of nested data: {len(found.walkers)}")
    for name in found.walkers:
        print(f"  {name}")
    print(f"functions: {len(found.lengths)}, median {found.median:g} lines, p90 {found.p90}, ", end="")
    print(f"longest {found.lengths[-1][0]} ({found.lengths[-1][1]})")


if __name__ == "__main__":
    main()
