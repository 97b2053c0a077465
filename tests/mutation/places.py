"""Where a mistake can be planted, and which: changes of source text, found by the syntax tree.

Left out are messages (what is raised, warned of, logged or printed; a command's help; f-strings; text of three words
and more),
annotations and what only a type checker reads, `__all__`, and what checks the code itself: `zip(…, strict=True)`, and a
dataclass's `frozen`, `slots` and `kw_only`.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutation.view import ROOT

PACKAGE = ROOT / "hf_compat"
COMPARISONS = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: (r"not\s+in", ("in",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: (r"is\s+not", ("is",)),
}
ARITHMETIC = {
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.BitOr: (r"\|", "&"), ast.BitAnd: ("&", "|"),
}  # fmt: skip
# Functions whose result is the same, or which mypy refuses, when arguments are swapped
_ANY_ORDER = ("max", "min", "isinstance", "issubclass", "cast", "TypeVar")
SPEAKS = re.compile(r"(^|\.)_?(warn|logger\.|log\.(info|debug|warn|err)|print$|say$|tell|rank_zero_(warn|info|debug))")
SAYS_LITTLE = re.compile(r"\.(info|debug)$|^(print|say)$")
IS_TRUE_OR_FALSE = re.compile(r"^(bool|isinstance|issubclass|callable|hasattr|any|all|is_\w+|has_\w+)$")


@dataclass(frozen=True)
class Change:
    """A mistake at a place.

    Args:
        file: Its path below the repository.
        function: The innermost function or class by its qualified name; empty at the top of a module.
        is_inside: Whether it runs when the function is called; what runs at the import does not.
        names: What the statement defines, where it runs at the import.
        line: Of the change, from 1.
        start: Where the changed text begins in the file.
        end: Where it ends.
        old: The text.
        new: What stands in its place.
        kind: Of the mistake.
        key: What names the mistake also after other lines have moved.
    """

    file: str
    function: str
    is_inside: bool
    names: tuple[str, ...]
    line: int
    start: int
    end: int
    old: str
    new: str
    kind: str
    key: str = ""

    @property
    def room(self) -> str:
        """The folder of the package in which the file lies; `top` for those in none."""
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else "top"

    @property
    def place(self) -> tuple[str, int, int]:
        """Where it is; several changes are possible at a place."""
        return self.file, self.start, self.end

    def planted(self, text: str) -> str:
        """A file's text with the mistake."""
        assert text[self.start : self.end] == self.old
        return text[: self.start] + self.new + text[self.end :]


def core() -> list[Path]:
    """List the files in which mistakes are planted."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "tools" not in path.parents]


def all_changes() -> list[Change]:
    """Find every change of the core."""
    return [change for path in core() for change in changes_of(path)]


def changes_of(path: Path) -> list[Change]:
    """Find every change of a file."""
    return changes_in(str(path.relative_to(ROOT)), path.read_text())


def changes_in(file: str, text: str) -> list[Change]:
    """Find every change of a text, with its key."""
    found = sorted(_Finder(file, text).changes(), key=lambda one: (one.start, one.end, one.new))
    lines, seen, named = text.splitlines(), Counter(), []
    for change in found:
        old, new = (" ".join(one.split()) for one in (change.old, change.new))
        shown = f"{old} -> {new}" if len(old) < 60 else f"{old[:57]}... -> {new[:57]}"
        key = f"{change.file} | {change.function} | {lines[change.line - 1].strip()} | {change.kind}: {shown}"
        seen[key] += 1
        if seen[key] > 1:
            key += f" #{seen[key]}"
        named.append(Change(**{**vars(change), "key": key}))
    return named


def drawn(changes: list[Change], seed: int, number: int) -> list[Change]:
    """Draw places at random, and one change for each."""
    at_places: dict[tuple, list[Change]] = {}
    for change in changes:
        at_places.setdefault(change.place, []).append(change)
    draw = random.Random(seed)
    places = draw.sample(sorted(at_places), min(number, len(at_places)))
    return [draw.choice(at_places[place]) for place in places]


class _Finder:
    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.tree = ast.parse(text)
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = text.splitlines()

    def changes(self) -> Iterator[Change]:
        for statement in self.tree.body:
            yield from self._of(statement, _Around())

    def _of(self, node: ast.AST, around: _Around) -> Iterator[Change]:
        if _is_left_out(node):
            return
        if isinstance(node, ast.stmt) and not around.is_inside:
            around = around.defining(_defined(node))
        if hasattr(node, "lineno"):
            for start, end, new, kind in self._at(node, around):
                line = self.text.count("\n", 0, start) + 1
                old = self.text[start:end]
                if old != new:
                    yield Change(
                        self.file, around.name, around.is_inside, around.names, line, start, end, old, new, kind
                    )
        for child, inner in self._children(node, around):
            yield from self._of(child, inner)

    def _children(self, node: ast.AST, around: _Around) -> Iterator[tuple[ast.AST, _Around]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
                if child is not None:
                    yield child, around.defining((node.name,))
            for child in _without_docstring(node.body):
                yield child, around.within(node.name, True, _is_yes_or_no(node))
        elif isinstance(node, ast.ClassDef):
            for child in (*node.decorator_list, *(one for one in node.keywords)):
                yield child, around.defining((node.name,))
            for child in _without_docstring(node.body):
                yield child, around.within(node.name, around.is_inside, False)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield node.value, around
        elif isinstance(node, ast.Call):
            yield from ((child, around) for child in _worth_of_call(node))
        else:
            for child in ast.iter_child_nodes(node):
                yield child, around

    def _at(self, node: ast.AST, around: _Around) -> Iterator[tuple[int, int, str, str]]:
        """Yield start, end, new text and kind for the changes of a node itself."""
        method = getattr(self, f"_at_{type(node).__name__.lower()}", None)
        if method is not None:
            yield from method(node, around)
        for test in _conditions(node):
            if not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):
                yield *self._span(test), f"(not ({self._source(test)}))", "not"

    def _at_compare(self, node: ast.Compare, around: _Around) -> Iterator[tuple[int, int, str, str]]:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            pattern, others = COMPARISONS[type(operator)]
            for start, end in self._between(left, right, pattern):
                yield from ((start, end, other, "comparison") for other in others)

    def _at_boolop(self, node: ast.BoolOp, around: _Around) -> Iterator[tuple[int, int, str, str]]:
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            for start, end in self._between(left, right, word):
                yield start, end, other, "and/or"

    def _at_binop(self, node: ast.BinOp, around: _Around) -> Iterator[tuple[int, int, str, str]]:
        if type(node.op) in ARITHMETIC and not any(_is_text(side) for side in (node.left, node.right)):
            pattern, other = ARITHMETIC[type(node.op)]
            for start, end in self._between(node.left, node.right, pattern):
                yield start, end, other, "arithmetic"

    def _at_augassign(self, node: ast.AugAssign, around: _Around) -> Iterator[tuple[int, int, str, str]]:
        if type(node.op) in ARITHMETIC and not _is_text(node.value):
            pattern, other = ARITHMETIC[type(node.op)]
            for start, end in self._between(node.target, node.value, pattern + "="):
                yield start, end, other + "=", "arithmetic"

    def _at_unaryop(self, node: ast.UnaryOp, around: _Around) -> Iterator[tuple[int, int, str, str]]:
        if isinstance(node.op, ast.Not):
            yield *self._span(node), f"({self._source(node.operand)})", "not"

    def _at_constant(self, node: ast.Constant, around: _Around) -> Iterator[tuple[int, int, str, str]]:
        value, span = node.value, self._span(node)
        if isinstance(value, bool):
            yield *span, str(not value), "True/False"
        elif isinstance(value, int):
            yield *span, str(value + 1), "constant"
            yield *span, str(value - 1), "constant"
        elif isinstance(value, float):
            yield *span, repr(value * 2 if value else 1.0), "constant"
        elif isinstance(value, str) and len(value.split()) < 3 and "\n" not in self._source(node):
            source = self._source(node)
            quote = source[-1]
            if source[-3:] != quote * 3:
                yield *span, f"{source[:-1]}XX{quote}", "constant"

    def _at_expr(self, node: ast.Expr, around: _Around) -> Iterator[tuple[int, int, str, str]]:
        if isinstance(node.value, ast.Call) and not SAYS_LITTLE.search(_called(node.value)):
            yield *self._span(node), self._over_lines(node, "pass"), "call left out"

    def _at_return(self, node: ast.Return, around: _Around) -> Iterator[tuple[int, int, str, str]]:
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            return
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            return  # `True/False` does the same
        if around.is_yes_or_no or _is_yes_or_no_value(node.value):
            yield *self._span(node.value), f"(not ({self._source(node.value)}))", "returned value"
        else:
            yield *self._span(node.value), self._over_lines(node.value, "None"), "returned value"

    def _at_call(self, node: ast.Call, around: _Around) -> Iterator[tuple[int, int, str, str]]:
        if SPEAKS.search(_called(node)) or _called(node) in _ANY_ORDER:
            return
        for left, right in itertools.pairwise(_heard(node)):
            if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
                continue
            first, second = self._source(left), self._source(right)
            if first != second:
                start, middle = self._span(left)
                after, end = self._span(right)
                yield start, end, second + self.text[middle:after] + first, "swapped arguments"

    def _between(self, left: ast.AST, right: ast.AST, pattern: str) -> Iterator[tuple[int, int]]:
        """Find an operator between two operands; comments there hide it."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = re.sub(r"#[^\n]*", lambda found: " " * len(found[0]), self.text[start:end])
        bound = r"\b" if pattern[0].isalpha() else ""
        if found := re.search(bound + pattern + bound, gap):
            yield start + found.start(), start + found.end()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def _source(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.text[start:end]

    def _over_lines(self, node: ast.AST, word: str) -> str:
        """A word that takes as many lines as the node does, so that the lines below keep their numbers."""
        count = node.end_lineno - node.lineno
        return word if not count else f"({word}" + "\n" * count + ")" if word == "None" else word + "\n" * count


@dataclass(frozen=True)
class _Around:
    name: str = ""
    is_inside: bool = False
    names: tuple[str, ...] = ()
    is_yes_or_no: bool = False

    def within(self, name: str, is_inside: bool, is_yes_or_no: bool) -> _Around:
        names = () if is_inside else (name,)
        return _Around(f"{self.name}.{name}".strip("."), is_inside, names, is_yes_or_no)

    def defining(self, names: tuple[str, ...]) -> _Around:
        return self if self.is_inside or not names else _Around(self.name, False, names)


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.Import() | ast.ImportFrom() | ast.arguments() | ast.arg():
            return True
        case ast.Assign(targets=[ast.Name(id="__all__"), *_]):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.FunctionDef():
            return any(_name_of(one).endswith("overload") for one in node.decorator_list)
        case ast.ClassDef():
            return any(_name_of(one) in ("Protocol", "TypedDict") for one in node.bases)
        case ast.Expr(value=ast.Constant()):
            return True
    return False


def _worth_of_call(node: ast.Call) -> Iterator[ast.AST]:
    """Yield the parts of a call in which a mistake may be."""
    called = _called(node)
    yield node.func
    if SPEAKS.search(called) or called in ("TypeVar", "ParamSpec", "NewType"):
        return
    if called == "cast":
        yield from node.args[1:]
        return
    left_out = {"zip": ("strict",), "dataclass": ("frozen", "slots", "kw_only")}.get(called, ())
    if called.endswith("add_argument"):
        left_out = ("help", "metavar")
    yield from _heard(node)
    yield from (keyword.value for keyword in node.keywords if keyword.arg not in left_out)


def _heard(node: ast.Call) -> list[ast.expr]:
    """A call's arguments, without the part of a message that `need` takes last."""
    return node.args[:-1] if _called(node) == "need" else node.args


def _called(node: ast.Call) -> str:
    return _name_of(node.func)


def _name_of(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_name_of(value)}.{name}"
        case ast.Call(func=function):
            return _name_of(function)
        case ast.Subscript(value=value):
            return _name_of(value)
    return ""


def _conditions(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            return [test]
        case ast.comprehension(ifs=tests):
            return tests
    return []


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_yes_or_no(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return isinstance(node.returns, ast.Name) and node.returns.id == "bool"


def _is_yes_or_no_value(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return IS_TRUE_OR_FALSE.match(_called(node).rpartition(".")[2]) is not None
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]


def _defined(node: ast.stmt) -> tuple[str, ...]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.Assign(targets=targets):
            return tuple(one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.AugAssign(target=ast.Name(id=name)):
            return (name,)
    return ()
