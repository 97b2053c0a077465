"""Import statements as text and as blocks: split, merged and put where isort has them. Knows no name of any package."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import libcst as cst

from hf_compat.tools.migration.source import dotted

# Longest import that goes on one line where it was broken before: short enough for every formatter's default.
_LINE = 79
_LONGEST_LINE = 88
_IMPORTS = (cst.Import, cst.ImportFrom)


@dataclass(frozen=True, slots=True)
class Imported:
    """One name of an import.

    Args:
        name: What is imported.
        alias: After `as`.
        comment: At the end of its line.
        above: Comments on lines of their own before it.
    """

    name: str
    alias: str | None = None
    comment: str | None = None
    above: tuple[str, ...] = ()

    @property
    def bound(self) -> str:
        """The name that the script has it under."""
        return self.alias or self.name

    @property
    def code(self) -> str:
        """As it is written."""
        return self.name if self.alias is None else f"{self.name} as {self.alias}"

    @property
    def order(self) -> tuple[int, str, str]:
        """Where isort has it: constants, classes, others."""
        is_constant = self.name.isupper() and len(self.name) > 1
        return (0 if is_constant else 1 if self.name[:1].isupper() else 2, self.name.lower(), self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class FromImport:
    """`from MODULE import NAMES`.

    Args:
        module: Where from.
        names: What.
        is_broken: Whether it stood in parentheses on several lines.
        head: Comment after the opening parenthesis.
        comment: Comment at its end.
    """

    module: str
    names: tuple[Imported, ...]
    is_broken: bool = False
    head: str | None = None
    comment: str | None = None

    @staticmethod
    def of(node: cst.ImportFrom, module: str, line: cst.CSTNode | None) -> FromImport:
        """Return an import as it is written.

        Args:
            node: The import, of names.
            module: Its module.
            line: The line that it stands on.
        """
        assert not isinstance(node.names, cst.ImportStar)
        start = None if node.lpar is None else node.lpar.whitespace_after
        comment = getattr(getattr(line, "trailing_whitespace", None), "comment", None)
        return FromImport(
            module=module,
            names=tuple(_names(node, start)),
            is_broken=isinstance(start, cst.ParenthesizedWhitespace) or _has_breaks(node),
            head=_first_comment(start),
            comment=comment.value if isinstance(comment, cst.Comment) else None,
        )

    def code(self, newline: str, *, exploded: bool) -> str:
        """Return the statement, on one line or with a name on each."""
        end = "" if self.comment is None else f"  {self.comment}"
        if not exploded:
            return f"from {self.module} import {', '.join(one.code for one in self.names)}{end}"
        lines = [f"from {self.module} import ({'' if self.head is None else f'  {self.head}'}"]
        for one in self.names:
            lines += [f"    {comment}" for comment in one.above]
            lines.append(f"    {one.code},{'' if one.comment is None else f'  {one.comment}'}")
        return newline.join([*lines, f"){end}"])

    @property
    def has_comments(self) -> bool:
        """Whether comments stand in its parentheses."""
        return self.head is not None or any(one.comment or one.above for one in self.names)

    def is_exploded(self, *, is_rest: bool) -> bool:
        """Return whether each name gets a line of its own."""
        length = len(self.code("\n", exploded=False))
        if self.has_comments or length > _LONGEST_LINE:
            return True
        return self.is_broken and (is_rest or length > _LINE)


def _names(node: cst.ImportFrom, start: object) -> Iterator[Imported]:
    assert not isinstance(node.names, cst.ImportStar)
    above = _own_lines(start)
    for alias in node.names:
        after = alias.comma.whitespace_after if isinstance(alias.comma, cst.Comma) else None
        end = after if after is not None else (node.rpar.whitespace_before if node.rpar is not None else None)
        bound = alias.asname.name if alias.asname is not None else None
        name = bound.value if isinstance(bound, cst.Name) else None
        yield Imported(dotted(alias.name), name, _first_comment(end), above)
        above = _own_lines(after)


def _first_comment(space: object) -> str | None:
    comment = space.first_line.comment if isinstance(space, cst.ParenthesizedWhitespace) else None
    return None if comment is None else comment.value


def _own_lines(space: object) -> tuple[str, ...]:
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return ()
    return tuple(line.comment.value for line in space.empty_lines if line.comment is not None)


def _has_breaks(node: cst.ImportFrom) -> bool:
    commas = [one.comma for one in node.names] if not isinstance(node.names, cst.ImportStar) else []
    spaces = [one.whitespace_after for one in commas if isinstance(one, cst.Comma)]
    return any(isinstance(space, cst.ParenthesizedWhitespace) for space in spaces)


@dataclass(frozen=True, slots=True)
class _Plan:
    new: tuple[FromImport | str, ...]
    rest: FromImport | str | None


@dataclass(frozen=True, slots=True)
class _Line:
    """A statement, and what it imports from where; None of both where it is no plain import."""

    node: cst.SimpleStatementLine
    module: str
    names: FromImport | None


class Block:
    """The statements of a module, function or branch, some imports of which are replaced.

    Args:
        body: The block.
        module: The module, for its line endings.
    """

    def __init__(self, body: cst.Module | cst.IndentedBlock, module: cst.Module) -> None:
        self._body = body
        self._module = module
        self._plans: dict[cst.CSTNode, _Plan] = {}

    def replace(
        self, line: cst.SimpleStatementLine, new: Sequence[FromImport | str], rest: FromImport | str | None
    ) -> None:
        """Replace an import.

        Args:
            line: Its line.
            new: Imports of names, or modules, that come in.
            rest: What is left: an import of names, or a statement; None where nothing is.
        """
        self._plans[line] = _Plan(tuple(new), rest)

    def rebuilt(self, updated: cst.CSTNode) -> cst.CSTNode:
        """Return the block with its imports replaced."""
        assert isinstance(updated, (cst.Module, cst.IndentedBlock))
        body: list[cst.BaseStatement] = []
        pairs: list[tuple[cst.CSTNode, cst.BaseStatement]] = list(zip(self._body.body, updated.body, strict=True))
        for run in _runs(pairs):
            body += self._rebuilt_run(run) if any(old in self._plans for old, _ in run) else [new for _, new in run]
        return updated.with_changes(body=body)

    def _rebuilt_run(self, run: Sequence[tuple[cst.CSTNode, cst.BaseStatement]]) -> list[cst.BaseStatement]:
        statements = [new for _, new in run if isinstance(new, cst.SimpleStatementLine)]
        modules = [_module_of(one) for one in statements if _is_from(one)]
        is_sorted = modules == sorted(modules, key=str.lower)
        lines: list[_Line] = []
        incoming: list[_Line] = []
        for (old, _), statement in zip(run, statements, strict=True):
            plan = self._plans.get(old)
            if plan is None:
                lines.append(_line(statement))
                continue
            end = statement.trailing_whitespace
            new = [self._parsed(one, end if plan.rest is None else None, is_rest=False) for one in plan.new]
            rest = [] if plan.rest is None else [self._parsed(plan.rest, end, is_rest=True)]
            if is_sorted:
                incoming += new
            else:
                lines += new
            lines += [_line(statement)] if plan.rest == "" else rest
        for one in incoming:
            _insert(lines, one)
        merged = _below_stars(self._merged(lines))
        first = statements[0].leading_lines
        return [one.node.with_changes(leading_lines=() if n else first) for n, one in enumerate(merged)]

    def _parsed(
        self, statement: FromImport | str, end: cst.TrailingWhitespace | None = None, *, is_rest: bool
    ) -> _Line:
        newline = self._module.default_newline
        if isinstance(statement, str):
            code = statement if " " in statement or not statement else f"import {statement}"
            code = code or "pass"
        else:
            code = statement.code(newline, exploded=statement.is_exploded(is_rest=is_rest))
        node = cst.parse_statement(code, config=self._module.config_for_parsing)
        assert isinstance(node, cst.SimpleStatementLine)
        if isinstance(statement, str) and end is not None:
            node = node.with_changes(trailing_whitespace=end)
        return _line(node)

    def _merged(self, lines: Sequence[_Line]) -> list[_Line]:
        """Return imports where those of one module, one of which is new, are one."""
        merged: list[_Line] = []
        for line in lines:
            place = next((n for n, one in enumerate(merged) if _is_mergeable(one, line)), None)
            if place is None:
                merged.append(line)
                continue
            first, second = merged[place].names, line.names
            assert first is not None and second is not None
            new = tuple(one for one in second.names if one.code not in {name.code for name in first.names})
            names = (*first.names, *new)
            both_sorted = all(list(one) == sorted(one, key=lambda n: n.order) for one in (first.names, second.names))
            if both_sorted:
                names = tuple(sorted(names, key=lambda n: n.order))
            merged[place] = self._parsed(
                replace(first, names=names, is_broken=first.is_broken or second.is_broken), is_rest=first.is_broken
            )
        return merged


def _runs(
    pairs: Sequence[tuple[cst.CSTNode, cst.BaseStatement]],
) -> Iterator[Sequence[tuple[cst.CSTNode, cst.BaseStatement]]]:
    """Yield statements one by one, and import statements without anything between them together."""
    run: list[tuple[cst.CSTNode, cst.BaseStatement]] = []
    for old, new in pairs:
        is_import = is_import_line(new)
        if run and (not is_import or (isinstance(new, cst.SimpleStatementLine) and bool(new.leading_lines))):
            yield run
            run = []
        if is_import:
            run.append((old, new))
        else:
            yield [(old, new)]
    if run:
        yield run


def is_import_line(line: cst.CSTNode) -> bool:
    """Whether a statement is one import, and nothing else."""
    is_alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    return is_alone and isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], _IMPORTS)


def _below_stars(lines: Sequence[_Line]) -> list[_Line]:
    """Return imports with this package's below the last star import of transformers, which binds the same names."""
    stars = [n for n, one in enumerate(lines) if one.names is None and _is_from(one.node)]
    last = max((n for n in stars if lines[n].module.partition(".")[0] == "transformers"), default=-1)
    ours = [one for one in lines[: last + 1] if _is_from(one.node) and one.module.partition(".")[0] == "hf_compat"]
    return [*(one for one in lines[: last + 1] if one not in ours), *ours, *lines[last + 1 :]]


def _is_from(line: cst.SimpleStatementLine) -> bool:
    return isinstance(line.body[0], cst.ImportFrom)


def _module_of(line: cst.SimpleStatementLine) -> str:
    node = line.body[0]
    if isinstance(node, cst.ImportFrom):
        return "." * len(node.relative) + dotted(node.module)
    return dotted(node.names[0].name) if isinstance(node, cst.Import) else ""


def _line(node: cst.SimpleStatementLine) -> _Line:
    module, statement = _module_of(node), node.body[0]
    is_plain = isinstance(statement, cst.ImportFrom) and not isinstance(statement.names, cst.ImportStar)
    assert not is_plain or isinstance(statement, cst.ImportFrom)
    names = FromImport.of(statement, module, node) if is_plain and isinstance(statement, cst.ImportFrom) else None
    return _Line(node, module, names)


def _insert(lines: list[_Line], new: _Line) -> None:
    """Put an import where isort has it: among those of its kind, by module."""
    kind = _is_from(new.node)
    alike = [n for n, one in enumerate(lines) if _is_from(one.node) == kind and one.module != "__future__"]
    after = [n for n in alike if lines[n].module.lower() > new.module.lower()]
    if after:
        place = after[0]
    elif alike:
        place = alike[-1] + 1
    else:
        place = len(lines) if kind else 0
    lines.insert(place, new)


def _is_mergeable(one: _Line, other: _Line) -> bool:
    if one.names is None or other.names is None or one.module != other.module:
        return False
    if any(name.alias for line in (one.names, other.names) for name in line.names):  # isort has these on their own
        return False
    return one.module.partition(".")[0] in ("hf_compat", "torch") and one.names.comment == other.names.comment


def sorted_as(names: Sequence[Imported], before: Sequence[Imported]) -> tuple[Imported, ...]:
    """Return names in isort's order where others were."""
    if all(a.order <= b.order for a, b in itertools.pairwise(before)):
        return tuple(sorted(names, key=lambda n: n.order))
    return tuple(names)
