"""A Python source with its tree, the bindings of its names, and the changes that the rules ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
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

from hf_compat.tools.migration.class_graph import ClassGraph
from hf_compat.tools.migration.report import Effect, Followed, Rewritten, Spot, Target

Node = TypeVar("Node", bound=cst.CSTNode)
# The replacement of a node: one node, none, or several.
Outcome: TypeAlias = cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNode]


class Source:
    """A source that rules read, and that they ask to change.

    Args:
        text: The source.
        target: The package that the result is for.
        file: Its file, beside which the modules that it imports are looked for.

    Raises:
        libcst.ParserSyntaxError: It is not Python 3.
    """

    def __init__(self, text: str, target: Target, file: Path | None = None) -> None:
        wrapper = MetadataWrapper(cst.parse_module(text))
        self.text = text
        self.target = target
        self.graph = ClassGraph(file)
        self.module = wrapper.module
        known = wrapper.resolve_many((ScopeProvider, ParentNodeProvider, PositionProvider))  # in fewer passes than each
        self._scopes = cast("Mapping[cst.CSTNode, Scope | None]", known[ScopeProvider])
        self._parents = cast("Mapping[cst.CSTNode, cst.CSTNode]", known[ParentNodeProvider])
        self._positions = cast("Mapping[cst.CSTNode, CodeRange]", known[PositionProvider])
        self.nodes = tuple(walk(self.module))
        self._changes: dict[cst.CSTNode, list[Callable[[cst.CSTNode], Outcome]]] = {}
        self._findings: set[Spot] = set()
        self._mended: set[Spot] = set()
        self._followed: set[Followed] = set()
        # Whether our names are imported from this package. A source with another library's trainer keeps its own.
        self.moves_here = target is Target.HF_COMPAT

    def of(self, kind: type[Node]) -> Iterator[Node]:
        """Yield the nodes of one kind, outer ones first."""
        return (node for node in self.nodes if isinstance(node, kind))

    def parent(self, node: cst.CSTNode | None) -> cst.CSTNode | None:
        return None if node is None else self._parents.get(node)

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, from the nearest."""
        while (outer := self._parents.get(node)) is not None:
            yield outer
            node = outer

    def scope(self, node: cst.CSTNode) -> Scope | None:
        """The scope in which a node's names are looked up."""
        found = self._scopes.get(node)
        return found or next((scope for outer in self.above(node) if (scope := self._scopes.get(outer))), None)

    def line(self, node: cst.CSTNode) -> int:
        found = self._positions.get(node)
        return 1 if found is None else found.start.line

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def assignments(self, name: cst.CSTNode, as_: str | None = None) -> tuple[BaseAssignment, ...]:
        """List the bindings of a name, or of another name in the same place."""
        scope = self.scope(name)
        text = name.value if as_ is None and isinstance(name, cst.Name) else as_
        return () if scope is None or text is None else tuple(scope[text])

    def bound(self, node: cst.BaseExpression, kind: type[Node]) -> Node | None:
        """The first statement or name of a kind that binds a name. None for any other expression."""
        found = map(binding_node, self.assignments(node))
        return next((one for one in found if isinstance(one, kind)), None)

    def reads(self, binding: BaseAssignment) -> list[cst.CSTNode]:
        return [access.node for access in binding.references]

    def bindings_of(self, parameter: cst.Param | None) -> tuple[BaseAssignment, ...]:
        found = () if parameter is None else self.assignments(parameter.name)
        return tuple(one for one in found if binding_node(one) is parameter)

    def keys(
        self, bindings: Iterable[BaseAssignment]
    ) -> Iterator[tuple[cst.CSTNode | None, cst.BaseExpression | None]]:
        """Yield the node around each use of a mapping, with the key that it asks for. None if it asks for none."""
        for read in (one for binding in bindings for one in self.reads(binding)):
            outer = self.parent(read)
            around = self.parent(outer)
            key: cst.BaseExpression | None = None
            if isinstance(outer, cst.Subscript) and isinstance(outer.slice[0].slice, cst.Index):
                key = outer.slice[0].slice.value
            elif isinstance(outer, cst.Attribute) and outer.attr.value in ("get", "pop", "setdefault"):
                key = around.args[0].value if isinstance(around, cst.Call) and around.args else None
            elif isinstance(outer, cst.ComparisonTarget) and isinstance(around, cst.Comparison):
                key = around.left  # of `"key" in mapping`
            yield outer, key

    def imported(self, node: cst.CSTNode) -> str:
        """The full name of an import that a name or dotted name stands for. Empty for anything else."""
        scope = self.scope(node)
        if scope is None or not dotted(node):
            return ""
        found = scope.get_qualified_names_for(node)
        imports = {one.name for one in found if one.source is QualifiedNameSource.IMPORT}
        return imports.pop() if len(imports) == 1 else ""

    def change(self, node: Node, how: Callable[[Node], Outcome]) -> None:
        """Change a node after everything inside it. Several changes of one node follow each other."""
        self._changes.setdefault(node, []).append(cast("Callable[[cst.CSTNode], Outcome]", how))

    def put(self, node: cst.CSTNode, new: cst.CSTNode) -> None:
        self.change(node, lambda _: new)

    def rename(self, node: cst.Name, name: str) -> None:
        self.put(node, node.with_changes(value=name))

    def is_changed(self, node: cst.CSTNode) -> bool:
        return node in self._changes

    def list(self, place: cst.CSTNode | int, what: str, reason: str, effect: Effect = Effect.LOOK) -> None:
        """Leave a place, a node or a line, to a person."""
        line = place if isinstance(place, int) else self.line(place)
        self._findings.add(Spot(line, what, reason, effect=effect))

    def mend(self, node: cst.CSTNode, what: str, reason: str, effect: Effect = Effect.FAILS) -> None:
        """Record what would happen at a rewritten place if the source stayed as it is."""
        self._mended.add(Spot(self.line(node), what, reason, effect=effect))

    def mend_for_5(self, node: cst.CSTNode, what: str, reason: str, effect: Effect = Effect.FAILS) -> None:
        """Record what transformers 5 does at a rewritten place. This package accepts it as it is."""
        if self.target is Target.TRANSFORMERS_5:
            self.mend(node, what, reason, effect)

    def follow(self, place: cst.CSTNode | int, name: str, file: Path, *, is_import: bool = False) -> None:
        """Record that this source, at a node or a line, builds on a class of another file, or only imports the file."""
        line = place if isinstance(place, int) else self.line(place)
        self._followed.add(Followed(line, name, file, is_import))

    @property
    def fails_in_5(self) -> Effect:
        """The effect of a name that transformers 5 lacks and this package accepts."""
        return Effect.FAILS if self.target is Target.TRANSFORMERS_5 else Effect.LOOK

    def result(self) -> Rewritten:
        changed = self.module.visit(_Changing(self._changes)) if self._changes else self.module
        return Rewritten(
            changed.code, tuple(sorted(self._findings)), tuple(sorted(self._mended)), tuple(sorted(self._followed))
        )


class _Changing(cst.CSTTransformer):
    def __init__(self, changes: Mapping[cst.CSTNode, list[Callable[[cst.CSTNode], Outcome]]]) -> None:
        super().__init__()
        self._changes = changes

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> cst.CSTNodeT:
        outcome: Outcome = updated_node
        for change in self._changes.get(original_node, ()):
            if isinstance(outcome, cst.CSTNode):
                outcome = change(outcome)
        return cast("cst.CSTNodeT", outcome)


def walk(root: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and all nodes in it, outer ones first."""
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(node.children))


def import_statement(assignment: BaseAssignment) -> cst.Import | cst.ImportFrom | None:
    """The import that binds a name. None for any other binding."""
    if isinstance(assignment, ImportAssignment) and isinstance(assignment.node, (cst.Import, cst.ImportFrom)):
        return assignment.node
    return None


def binding_node(assignment: BaseAssignment) -> cst.CSTNode | None:
    """The node that binds a name. None for a builtin."""
    return assignment.node if isinstance(assignment, Assignment) else None


def dotted(node: cst.CSTNode | None) -> str:
    """The text `a.b.c` of names and attributes. Empty for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        outer = dotted(node.value)
        return f"{outer}.{node.attr.value}" if outer else ""
    return ""


def is_super_call(call: cst.Call, method: str) -> bool:
    """Whether a call is `super().METHOD(…)`."""
    func = call.func
    if not isinstance(func, cst.Attribute) or func.attr.value != method or not isinstance(func.value, cst.Call):
        return False
    return dotted(func.value.func) == "super"


def keyword(argument: cst.Arg) -> str:
    """The keyword of an argument. Empty for a positional one."""
    return "" if argument.keyword is None else argument.keyword.value


def fields_of(node: cst.ClassDef) -> Iterator[tuple[cst.AnnAssign, cst.Name]]:
    """Yield the annotated fields of a class with their names."""
    for statement in node.body.body:
        for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name):
                yield small, small.target


def methods_of(node: cst.ClassDef) -> Iterator[cst.FunctionDef]:
    """Yield the methods of a class."""
    return (one for one in node.body.body if isinstance(one, cst.FunctionDef))


def name_or_dotted(path: str) -> cst.Name | cst.Attribute:
    """Make the node of `a.b.c`."""
    return cast("cst.Name | cst.Attribute", cst.parse_expression(path))
