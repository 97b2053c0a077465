"""One Python source: its tree, whose name is whose, and the changes that rules ask for, whatever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

import libcst as cst
from libcst.metadata import (
    Assignment,
    BaseAssignment,
    CodeRange,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameSource,
    Scope,
    ScopeProvider,
)

from hf_compat.tools.migration.report import Effect, Finding, Rewritten, Target

Node = TypeVar("Node", bound=cst.CSTNode)
# What stands in a node's place: another one, several, or none.
Outcome: TypeAlias = cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNode]
Change: TypeAlias = Callable[[cst.CSTNode], Outcome]


# Where formatters break a line, unless a source has longer ones; and at most.
_LIMIT = 88
_LONGEST = 120


class Source:
    """A source that rules read and ask to be changed.

    Args:
        text: The source.
        target: What the result is for.

    Raises:
        libcst.ParserSyntaxError: It is no Python 3.
    """

    def __init__(self, text: str, target: Target) -> None:
        wrapper = MetadataWrapper(cst.parse_module(text))
        self.text = text
        self.target = target
        self.module = wrapper.module
        self._scopes = cast("Mapping[cst.CSTNode, Scope | None]", wrapper.resolve(ScopeProvider))
        self._parents = cast("Mapping[cst.CSTNode, cst.CSTNode]", wrapper.resolve(ParentNodeProvider))
        self._positions = cast("Mapping[cst.CSTNode, CodeRange]", wrapper.resolve(PositionProvider))
        self._lines = text.splitlines() or [""]
        self._limit = min(max(_LIMIT, *map(len, self._lines)), _LONGEST)
        self.nodes = tuple(_walk(self.module))
        self._changes: dict[cst.CSTNode, list[Change]] = {}
        self._findings: set[Finding] = set()
        self._mended: set[Finding] = set()
        # Whether names that this package has come from it; a source of another library's trainer keeps its own
        self.moves_here = target is Target.HF_COMPAT

    def of(self, kind: type[Node]) -> Iterator[Node]:
        """Yield the nodes of one kind, outer ones first."""
        return (node for node in self.nodes if isinstance(node, kind))

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return what a node stands in."""
        return self._parents.get(node)

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield what a node stands in, from the nearest."""
        while (outer := self._parents.get(node)) is not None:
            yield outer
            node = outer

    def scope(self, node: cst.CSTNode) -> Scope | None:
        """Return the scope that a node's names are looked up in."""
        found = self._scopes.get(node)
        return found or next((scope for outer in self.above(node) if (scope := self._scopes.get(outer))), None)

    def line(self, node: cst.CSTNode) -> int:
        """Return the line that a node begins on."""
        found = self._positions.get(node)
        return 1 if found is None else found.start.line

    def outgrows(self, before: cst.CSTNode, after: cst.CSTNode) -> bool:
        """Return whether a node on one line would make that line longer than it may be."""
        found = self._positions.get(before)
        if found is None or found.start.line != found.end.line:
            return False
        grown = len(self.code(after)) - len(self.code(before))
        return grown > 0 and len(self._lines[found.start.line - 1]) + grown > self._limit

    def fits(self, node: cst.CSTNode, text: str) -> bool:
        """Return whether a text fits on a line that is indented as a node's."""
        line = self._lines[self.line(node) - 1]
        return len(line) - len(line.lstrip()) + len(text) <= self._limit

    def indent_within_block(self, node: cst.CSTNode) -> str:
        """Return by how much a node's line is indented more than the block that it stands in."""
        line = self._lines[self.line(node) - 1]
        blocks = [one for one in self.above(node) if isinstance(one, cst.IndentedBlock)]
        of_blocks = sum(len(one.indent or self.module.default_indent) for one in blocks)
        return " " * max(len(line) - len(line.lstrip()) - of_blocks, 0)

    def code(self, node: cst.CSTNode) -> str:
        """Return a node's source."""
        return self.module.code_for_node(node)

    def assignments(self, name: cst.Name) -> tuple[BaseAssignment, ...]:
        """Return what binds the name that is read or set here."""
        scope = self.scope(name)
        return () if scope is None else tuple(scope[name.value])

    def bound_nodes(self, node: cst.BaseExpression) -> tuple[cst.CSTNode, ...]:
        """Return the statements and names that bind what a name stands for; none for any other expression."""
        bindings = self.assignments(node) if isinstance(node, cst.Name) else ()
        return tuple(found for one in bindings if (found := binding_node(one)) is not None)

    def imported(self, node: cst.CSTNode) -> str | None:
        """Return the full name of what is imported under a name or dotted name; None where it is anything else."""
        scope = self.scope(node)
        if scope is None or not dotted(node):
            return None
        found = list(scope.get_qualified_names_for(node))
        imports = {one.name for one in found if one.source is QualifiedNameSource.IMPORT}
        return imports.pop() if len(imports) == 1 else None

    def change(self, node: cst.CSTNode, how: Change) -> None:
        """Have a node changed, after all that stands in it; several changes of one node come one after the other."""
        self._changes.setdefault(node, []).append(how)

    def is_changed(self, node: cst.CSTNode) -> bool:
        """Return whether somebody has had a node changed already."""
        return node in self._changes

    def list(self, node: cst.CSTNode, what: str, reason: str, effect: Effect = Effect.LOOK) -> None:
        """Leave something to a person."""
        self.list_line(self.line(node), what, reason, effect)

    def list_line(self, line: int, what: str, reason: str, effect: Effect = Effect.LOOK) -> None:
        """Leave something on a line to a person."""
        self._findings.add(Finding(line, what, reason, effect=effect))

    def mend(self, node: cst.CSTNode, what: str, reason: str, effect: Effect = Effect.FAILS) -> None:
        """Remember what happens at a place that is rewritten, should the source stay as it is."""
        self._mended.add(Finding(self.line(node), what, reason, effect=effect))

    def mend_for_5(self, node: cst.CSTNode, what: str, reason: str, effect: Effect = Effect.FAILS) -> None:
        """Remember what transformers 5 does at a place that is rewritten; this package takes it as it is."""
        if self.target is Target.TRANSFORMERS_5:
            self.mend(node, what, reason, effect)

    @property
    def fails_in_5(self) -> Effect:
        """What comes of a name that transformers 5 lacks, and that this package still takes."""
        return Effect.FAILS if self.target is Target.TRANSFORMERS_5 else Effect.LOOK

    def result(self) -> Rewritten:
        """Return the source with all changes."""
        changed = self.module.visit(_Changing(self._changes)) if self._changes else self.module
        assert isinstance(changed, cst.Module)
        return Rewritten(changed.code, tuple(sorted(self._findings)), tuple(sorted(self._mended)))


class _Changing(cst.CSTTransformer):
    """Makes the changes of a tree."""

    def __init__(self, changes: Mapping[cst.CSTNode, Sequence[Change]]) -> None:
        super().__init__()
        self._changes = changes

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> cst.CSTNodeT:
        outcome: Outcome = updated_node
        for change in self._changes.get(original_node, ()):
            if isinstance(outcome, cst.CSTNode):
                outcome = change(outcome)
        return cast("cst.CSTNodeT", outcome)


def _walk(root: cst.CSTNode) -> Iterator[cst.CSTNode]:
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(node.children))


def import_statement(assignment: BaseAssignment) -> cst.Import | cst.ImportFrom | None:
    """Return the import that binds a name; None where something else does."""
    if isinstance(assignment, ImportAssignment) and isinstance(assignment.node, (cst.Import, cst.ImportFrom)):
        return assignment.node
    return None


def binding_node(assignment: BaseAssignment) -> cst.CSTNode | None:
    """Return the node that binds a name; None for a builtin."""
    return assignment.node if isinstance(assignment, Assignment) else None


def dotted(node: cst.CSTNode | None) -> str:
    """Return `a.b.c` of names and attributes; empty for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        outer = dotted(node.value)
        return f"{outer}.{node.attr.value}" if outer else ""
    return ""


def name_or_dotted(path: str) -> cst.Name | cst.Attribute:
    """Return the node of `a.b.c`."""
    found = cst.parse_expression(path)
    assert isinstance(found, (cst.Name, cst.Attribute))
    return found
