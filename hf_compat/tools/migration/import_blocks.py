"""Split, merge and sort import statements as isort does. Knows no name of any package."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import libcst as cst

from hf_compat.tools.migration.source import Source, dotted

# A broken import of at most this length goes on one line, which suits every formatter's default.
_LINE = 79
_LONGEST_LINE = 88
Body: TypeAlias = cst.Module | cst.IndentedBlock


@dataclass(frozen=True, slots=True)
class Imported:
    """One name of an import."""

    name: str
    alias: str | None = None
    comment: str | None = None  # at the end of its line
    above: tuple[str, ...] = ()  # comments on lines of their own

    @property
    def bound(self) -> str:
        """The name that the script uses."""
        return self.alias or self.name

    @property
    def code(self) -> str:
        return self.name if self.alias is None else f"{self.name} as {self.alias}"

    @property
    def order(self) -> tuple[int, str, str]:
        """The position that isort gives it: constants, classes, others."""
        is_constant = self.name.isupper() and len(self.name) > 1
        return (0 if is_constant else 1 if self.name[:1].isupper() else 2, self.name.lower(), self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class FromImport:
    """`from MODULE import NAMES`."""

    module: str
    names: tuple[Imported, ...]
    is_broken: bool = False  # on several lines
    head: str | None = None  # comment after the opening parenthesis
    comment: str | None = None  # at its end

    @staticmethod
    def of(node: cst.ImportFrom, module: str, line: cst.CSTNode | None) -> FromImport:
        assert not isinstance(node.names, cst.ImportStar)
        start = None if node.lpar is None else node.lpar.whitespace_after
        spaces = [one.comma.whitespace_after if isinstance(one.comma, cst.Comma) else None for one in node.names]
        names, above = [], _own_lines(start)
        for alias, after in zip(node.names, spaces, strict=True):
            end = node.rpar.whitespace_before if after is None and node.rpar is not None else after
            name = bound_name(alias.asname) if alias.asname is not None else None
            names.append(Imported(dotted(alias.name), name, _first_comment(end), above))
            above = _own_lines(after)
        comment = getattr(getattr(line, "trailing_whitespace", None), "comment", None)
        return FromImport(
            module=module,
            names=tuple(names),
            is_broken=any(isinstance(space, cst.ParenthesizedWhitespace) for space in (start, *spaces)),
            head=_first_comment(start),
            comment=comment.value if isinstance(comment, cst.Comment) else None,
        )

    def code(self, newline: str, *, exploded: bool) -> str:
        """Write the statement on one line or with a name on each line."""
        end = "" if self.comment is None else f"  {self.comment}"
        if not exploded:
            return f"from {self.module} import {', '.join(one.code for one in self.names)}{end}"
        lines = [f"from {self.module} import ({'' if self.head is None else f'  {self.head}'}"]
        for one in self.names:
            lines += [f"    {comment}" for comment in one.above]
            lines.append(f"    {one.code},{'' if one.comment is None else f'  {one.comment}'}")
        return newline.join([*lines, f"){end}"])


# An import of names, the name of a module to import, or a statement.
Written: TypeAlias = FromImport | str


def bound_name(name: cst.AsName) -> str:
    """The name of `as name`."""
    return name.name.value if isinstance(name.name, cst.Name) else ""


def _first_comment(space: object) -> str | None:
    comment = space.first_line.comment if isinstance(space, cst.ParenthesizedWhitespace) else None
    return None if comment is None else comment.value


def _own_lines(space: object) -> tuple[str, ...]:
    lines = space.empty_lines if isinstance(space, cst.ParenthesizedWhitespace) else ()
    return tuple(line.comment.value for line in lines if line.comment is not None)


class _Line(NamedTuple):
    """A statement with its module and names. `names` is None for anything but a plain import of names."""

    node: cst.SimpleStatementLine
    module: str
    names: FromImport | None

    @property
    def is_from(self) -> bool:
        return isinstance(self.node.body[0], cst.ImportFrom)

    def is_of(self, package: str) -> bool:
        return self.module.partition(".")[0] == package


class ImportBlocks:
    """Collects the replaced imports of one source, and rebuilds the blocks that hold them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        # Line of an import → the imports that come in, and the rest of it
        self._plans: dict[cst.CSTNode, tuple[Sequence[Written], Written | None]] = {}
        self._bodies: dict[Body, None] = {}

    def is_alone(self, node: cst.CSTNode) -> bool:
        """Whether a statement is alone on its line in a block."""
        line = self._source.parent(node)
        is_only = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
        return is_only and isinstance(self._source.parent(line), (cst.Module, cst.IndentedBlock))

    def replace(self, node: cst.BaseSmallStatement, new: Sequence[Written], rest: Written | None) -> None:
        """Replace an import, or remove another statement.

        `rest` is the remaining part of it. Empty text leaves it as it is, None removes it.
        """
        if self.is_alone(node):
            line = cast("cst.SimpleStatementLine", self._source.parent(node))
            self._bodies[cast("Body", self._source.parent(line))] = None
            self._plans[line] = (new, rest)
            return
        parsed = [self._parsed(one, None, is_rest=False, is_alone=False) for one in (*new, rest) if one]
        small = [one.node.body[0] for one in parsed]
        self._source.change(node, lambda updated: cst.FlattenSentinel([*([updated] if rest == "" else []), *small]))

    def apply(self) -> None:
        for body in self._bodies:
            self._source.change(body, partial(self._rebuilt, body))

    def _rebuilt(self, body: Body, updated: Body) -> Body:
        statements: list[cst.BaseStatement] = []
        for run in _runs(list(zip(body.body, updated.body, strict=True))):
            if not any(old in self._plans for old, _ in run):
                statements += [cast("cst.BaseStatement", new) for _, new in run]
                continue
            before = [_line(cast("cst.SimpleStatementLine", new)) for _, new in run]
            modules = [one.module for one in before if one.is_from]
            is_sorted = modules == sorted(modules, key=str.lower)
            lines: list[_Line] = []
            incoming: list[_Line] = []
            for (old, _), line in zip(run, before, strict=True):
                if old not in self._plans:
                    lines.append(line)
                    continue
                coming, rest = self._plans[old]
                end = line.node.trailing_whitespace
                written = [self._parsed(one, end if rest is None else None, is_rest=False) for one in coming]
                (incoming if is_sorted else lines).extend(written)
                if rest is not None:
                    lines.append(line if rest == "" else self._parsed(rest, end, is_rest=True))
            for new in incoming:  # where isort puts it: among those of its kind, by module
                alike = [n for n, one in enumerate(lines) if one.is_from == new.is_from and one.module != "__future__"]
                after = [n for n in alike if lines[n].module.lower() > new.module.lower()]
                last = alike[-1] + 1 if alike else len(lines) if new.is_from else 0
                lines.insert(after[0] if after else last, new)
            # This package's imports below the last star import of transformers, which binds the same names
            merged = self._merged(lines)
            stars = [
                n for n, one in enumerate(merged) if one.names is None and one.is_from and one.is_of("transformers")
            ]
            above = merged[: max(stars, default=-1) + 1]
            ours = [one for one in above if one.is_from and one.is_of("hf_compat")]
            merged = [*(one for one in above if one not in ours), *ours, *merged[len(above) :]]
            first = before[0].node.leading_lines
            statements += [one.node.with_changes(leading_lines=() if n else first) for n, one in enumerate(merged)]
        return updated.with_changes(body=statements)

    def _parsed(
        self, statement: Written, end: cst.TrailingWhitespace | None, *, is_rest: bool, is_alone: bool = True
    ) -> _Line:
        module = self._source.module
        if isinstance(statement, str):
            code = statement if " " in statement else f"import {statement}"
        elif is_alone:
            has_comments = statement.head is not None or any(one.comment or one.above for one in statement.names)
            length = len(statement.code("\n", exploded=False))
            is_long = has_comments or length > _LONGEST_LINE
            exploded = is_long or (statement.is_broken and (is_rest or length > _LINE))
            code = statement.code(module.default_newline, exploded=exploded)
        else:
            code = replace(statement, comment=None).code("\n", exploded=False)
        node = cst.ensure_type(cst.parse_statement(code, config=module.config_for_parsing), cst.SimpleStatementLine)
        if isinstance(statement, str) and end is not None:
            node = node.with_changes(trailing_whitespace=end)
        return _line(node)

    def _merged(self, lines: Sequence[_Line]) -> list[_Line]:
        """Merge imports of one module into one if one of them is new."""
        merged: list[_Line] = []
        places: dict[tuple[str, str | None], int] = {}
        for line in lines:
            second = line.names
            # isort keeps names with an alias separate
            if (
                second is None
                or any(one.alias for one in second.names)
                or not (line.is_of("hf_compat") or line.is_of("torch"))
            ):
                merged.append(line)
                continue
            place = places.setdefault((line.module, second.comment), len(merged))
            first = merged[place].names if place < len(merged) else None
            if first is None:
                merged.append(line)
                continue
            new = tuple(one for one in second.names if one.code not in {name.code for name in first.names})
            names = (*first.names, *new)
            if all(list(one) == sorted(one, key=lambda n: n.order) for one in (first.names, second.names)):
                names = tuple(sorted(names, key=lambda n: n.order))
            joined = replace(first, names=names, is_broken=first.is_broken or second.is_broken)
            merged[place] = self._parsed(joined, None, is_rest=first.is_broken)
        return merged


_Run: TypeAlias = Sequence[tuple[cst.CSTNode, cst.CSTNode]]


def _runs(pairs: _Run) -> Iterator[_Run]:
    """Yield import statements with nothing between them together, and all others one by one."""
    run: list[tuple[cst.CSTNode, cst.CSTNode]] = []
    for old, new in pairs:
        is_import = is_import_line(new)
        if run and (not is_import or getattr(new, "leading_lines", None)):
            yield run
            run = []
        if is_import:
            run.append((old, new))
        else:
            yield [(old, new)]
    if run:
        yield run


def is_import_line(line: cst.CSTNode) -> bool:
    """Whether a line consists of one import."""
    if not isinstance(line, cst.SimpleStatementLine):
        return False
    return len(line.body) == 1 and isinstance(line.body[0], (cst.Import, cst.ImportFrom))


def _line(node: cst.SimpleStatementLine) -> _Line:
    statement = node.body[0]
    if isinstance(statement, cst.ImportFrom):
        module = "." * len(statement.relative) + dotted(statement.module)
        is_star = isinstance(statement.names, cst.ImportStar)
        return _Line(node, module, None if is_star else FromImport.of(statement, module, node))
    return _Line(node, dotted(statement.names[0].name) if isinstance(statement, cst.Import) else "", None)


def sorted_as(names: Sequence[Imported], before: Sequence[Imported]) -> tuple[Imported, ...]:
    """Sort names as isort does if the earlier names were sorted."""
    if all(a.order <= b.order for a, b in itertools.pairwise(before)):
        return tuple(sorted(names, key=lambda n: n.order))
    return tuple(names)
