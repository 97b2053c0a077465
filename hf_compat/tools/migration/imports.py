"""Imports of transformers: names that this package has come from it, moved ones from where they are today."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import libcst as cst
from libcst.metadata import Assignment, ImportAssignment

from hf_compat.interop.former_names import MOVED_MODULES, RENAMED, is_restored
from hf_compat.tools.migration.elements import Edit
from hf_compat.tools.migration.import_blocks import Block, FromImport, Imported, is_import_line, sorted_as
from hf_compat.tools.migration.names import ADAMW_DIFFERS, PUBLIC, bound_by_star, home, renamed
from hf_compat.tools.migration.old_arguments import read_constant
from hf_compat.tools.migration.report import Effect, Target
from hf_compat.tools.migration.resolving import find, looked_up_in, moved_path
from hf_compat.tools.migration.source import Source, binding_node, dotted, import_statement, name_or_dotted
from hf_compat.tools.migration.trainer_calls import call_change

_STAR = "star import: import the names that are used"
# Functions that do nothing today, and whose calls give nothing.
_WITHOUT_EFFECT = ("send_example_telemetry",)
# Modules that both packages have; `import … as` of one gives transformers' own names, too.
_MIRRORED = tuple(
    f"transformers.{name}"
    for name in (
        "debug_utils", "optimization", "trainer_callback", "trainer_pt_utils", "trainer_utils", "training_args",
        "training_args_seq2seq",
    )
)  # fmt: skip


def rewrite_imports(source: Source) -> None:
    """Have the imports of one source rewritten."""
    blocks = _Blocks(source)
    for node in source.of(cst.ImportFrom):
        module = dotted(node.module)
        if module.split(".")[0] == "transformers" and not node.relative:
            if isinstance(node.names, cst.ImportStar):
                source.list(node, f"from {module} import *", _STAR)
                _import_below_star(node, module, source, blocks)
            else:
                before = FromImport.of(node, module, source.parent(node))
                homes: dict[str, list[Imported]] = {}
                for name in before.names:
                    if name.name in _WITHOUT_EFFECT and _drop_calls(node, name, source, blocks):
                        _mend(node, f"{module}.{name.name}", f"from {module} import {name.name}", "", source)
                        continue
                    place, today = _place_of(node, module, name, source)
                    homes.setdefault(place, []).append(today)
                if not (list(homes) == [module] and homes[module] == list(before.names)):
                    rest = homes.pop(module, None)
                    new = [
                        replace(before, module=place, names=sorted_as(names, before.names))
                        for place, names in homes.items()
                    ]
                    blocks.replace(
                        node, new, None if rest is None else replace(before, names=sorted_as(rest, before.names))
                    )
    _rewrite_uses(source, blocks)
    blocks.apply()


class _Blocks:
    """What becomes of the import statements of each block of one source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._blocks: dict[cst.CSTNode, Block] = {}

    def is_alone(self, node: cst.CSTNode) -> bool:
        """Return whether a statement is all that stands on its line, in a block."""
        line = self._source.parent(node)
        body = None if line is None else self._source.parent(line)
        is_only = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
        return is_only and isinstance(body, (cst.Module, cst.IndentedBlock))

    def replace(
        self, node: cst.BaseSmallStatement, new: Sequence[FromImport | str], rest: FromImport | str | None
    ) -> None:
        """Have an import replaced by others, and by what is left of it.

        Args:
            node: The import, or another statement that goes.
            new: Imports of names, or modules to import.
            rest: What is left of it: an import, or a statement; empty text where it stays as it is, None where it goes.
        """
        line = self._source.parent(node)
        body = None if line is None else self._source.parent(line)
        if self.is_alone(node):
            assert isinstance(line, cst.SimpleStatementLine) and isinstance(body, (cst.Module, cst.IndentedBlock))
            self._blocks.setdefault(body, Block(body, self._source.module)).replace(line, new, rest)
            return
        codes = [_one_line(one) for one in (*new, *([] if rest in (None, "") else [rest]))]
        parsed = [cst.parse_statement(one) for one in codes]
        small = [one.body[0] for one in parsed if isinstance(one, cst.SimpleStatementLine)]
        self._source.change(node, lambda updated: cst.FlattenSentinel([*([updated] if rest == "" else []), *small]))

    def apply(self) -> None:
        """Ask for the changes."""
        for body, block in self._blocks.items():
            self._source.change(body, block.rebuilt)


def _one_line(statement: FromImport | str | None) -> str:
    if isinstance(statement, FromImport):
        return replace(statement, comment=None).code("\n", exploded=False)
    return statement if statement and " " in statement else f"import {statement}"


def _import_below_star(node: cst.ImportFrom, module: str, source: Source, blocks: _Blocks) -> None:
    """Have the names of ours that a source uses imported below a star import, which binds transformers' own."""
    if not source.moves_here:
        return
    wanted = (bound_by_star(module) & _named(source)) - set(_imported_below(node, source))
    homes: dict[str, list[Imported]] = {}
    for name in sorted(wanted):
        imported = Imported(renamed(name), None if renamed(name) == name else name)
        if not _is_fallback_star(node, name, source):
            homes.setdefault(home(module, imported.name, ours=True), []).append(imported)
    if homes:
        new = [FromImport(module=place, names=sorted_as(names, ())) for place, names in sorted(homes.items())]
        blocks.replace(node, new, "")


def _named(source: Source) -> set[str]:
    """Return the names that a source reads, binds, or has as a text: an annotation in quotes, `__all__`."""
    others: set[cst.CSTNode | None] = {node.attr for node in source.of(cst.Attribute)}
    others |= {node.keyword for node in source.of(cst.Arg)}
    others |= {node.name for node in source.of(cst.ImportAlias) if node.asname is not None}
    names = {node.value for node in source.of(cst.Name) if node not in others}
    return names | {str(node.evaluated_value) for node in source.of(cst.SimpleString)}


def _imported_below(node: cst.ImportFrom, source: Source) -> Iterator[str]:
    """Yield the names that the imports right below one take from this package."""
    line = source.parent(node)
    body = None if line is None else source.parent(line)
    if not isinstance(line, cst.SimpleStatementLine) or not isinstance(body, (cst.Module, cst.IndentedBlock)):
        return
    lines = itertools.takewhile(is_import_line, body.body[list(body.body).index(line) + 1 :])
    of_lines = (one for below in lines if isinstance(below, cst.SimpleStatementLine) for one in below.body)
    for one in (*line.body[list(line.body).index(node) + 1 :], *of_lines):
        is_ours = isinstance(one, cst.ImportFrom) and dotted(one.module).split(".")[0] == "hf_compat"
        if is_ours and isinstance(one, cst.ImportFrom) and not isinstance(one.names, cst.ImportStar):
            yield from (name.bound for name in FromImport.of(one, "", None).names)


def _is_fallback_star(node: cst.ImportFrom, name: str, source: Source) -> bool:
    """Whether the same `try` statement imports a name from this package, too."""
    tries = [one for one in source.above(node) if isinstance(one, cst.Try)]
    scope = source.scope(node)
    for binding in () if scope is None else scope[name]:
        one = import_statement(binding)
        is_ours = isinstance(one, cst.ImportFrom) and dotted(one.module).split(".")[0] == "hf_compat"
        if one is not None and is_ours and any(outer in tries for outer in source.above(one)):
            return True
    return False


def _place_of(node: cst.ImportFrom, module: str, name: Imported, source: Source) -> tuple[str, Imported]:
    """Return the module that a name is imported from today, and the import of it."""
    if _is_fallback(node, name, source):
        return module, name
    moved = MOVED_MODULES.get(f"{module}.{name.name}")
    if moved is not None:
        place, _, last = moved.rpartition(".")
        _mend(node, f"{module}.{name.name}", f"from {module} import {name.name}", moved, source)
        return place, name if last == name.name else replace(name, name=last, alias=name.bound)
    today = renamed(name.name)
    place = home(module, today, ours=source.moves_here)
    if f"{module}.{name.name}" in _MIRRORED and source.moves_here:
        place = "hf_compat"
    if name.name == "AdamW" and place == "torch.optim":
        source.list(node, "AdamW", ADAMW_DIFFERS)
    is_there = True
    if place.partition(".")[0] == "transformers":
        found = find(place, today, source.target)
        place, today, is_there = found.module, found.name, found.reason is None
        if found.reason is not None and not is_guarded(node, source):
            effect = Effect.LOOK if _is_restored(f"{module}.{name.name}", source) else Effect.FAILS
            source.list(node, f"from {module} import {name.name}", found.reason, effect)
    if not is_guarded(node, source) and f"{place}.{today}" != f"{module}.{name.name}" and is_there:
        _mend(node, f"{module}.{name.name}", f"from {module} import {name.name}", f"{place}.{today}", source)
    if today == name.name:
        return place, name
    return place, _renamed_import(node, name, today, source)


def _is_fallback(node: cst.ImportFrom, name: Imported, source: Source) -> bool:
    """Return whether the name is imported from this package, too: one of the two is for where it is not installed."""
    scope = source.scope(node)
    bindings = () if scope is None else scope[name.bound]
    modules = [dotted(one.module) for b in bindings if isinstance(one := import_statement(b), cst.ImportFrom)]
    return any(one.split(".")[0] == "hf_compat" for one in modules)


def _renamed_import(node: cst.ImportFrom, name: Imported, today: str, source: Source) -> Imported:
    """Import a name under today's; the script's own uses follow, unless others may look for the old one."""
    if name.alias is not None:
        return replace(name, name=today)
    scope = source.scope(node)
    bindings = [] if scope is None else [one for one in scope[name.name] if import_statement(one) is node]
    uses = [access.node for one in bindings if isinstance(one, Assignment) for access in one.references]
    plain = [use for use in uses if isinstance(use, cst.Name)]
    is_only = scope is not None and len(list(scope[name.name])) == 1
    if len(plain) != len(uses) or not is_only or f'"{name.name}"' in source.text or f"'{name.name}'" in source.text:
        return replace(name, name=today, alias=name.name)
    for use in plain:
        source.change(use, lambda updated: updated.with_changes(value=today))
    return replace(name, name=today)


def _rewrite_uses(source: Source, blocks: _Blocks) -> None:
    """Rewrite `transformers.Trainer` and the like, and the imports that they stand on."""
    for statement in source.of(cst.Import):
        if source.moves_here:
            _rewrite_import(statement, source, blocks)
        else:
            for alias in statement.names:
                if dotted(alias.name).partition(".")[0] == "transformers":
                    _look_up_module(alias, dotted(alias.name), source)
    for call in source.of(cst.Call):
        if (source.imported(call.func) or "").rpartition(".")[2] == "is_torch_tpu_available":
            _rewrite_tpu_call(call, source)
    for node in source.of(cst.Attribute):
        if not isinstance(source.parent(node), (cst.Attribute, cst.ImportAlias, cst.ImportFrom)):
            _rewrite_use(node, source)


def _rewrite_use(node: cst.Attribute, source: Source) -> None:
    """Rewrite `transformers.….name` where the name, or a module before it, has moved; list what is not there."""
    for inner in _innermost_first(node):
        path = source.imported(inner) or ""
        module, _, last = path.rpartition(".")
        if path.partition(".")[0] != "transformers" or not module:
            continue
        is_from = _is_from(inner, source)
        if path in MOVED_MODULES and not is_from:
            rest = MOVED_MODULES[path].removeprefix(f"{module}.")
            source.change(inner, lambda updated, rest=rest: _with_path(updated, rest))  # type: ignore[misc]
        elif last in RENAMED and not is_from:
            source.change(inner.attr, lambda updated, last=last: updated.with_changes(value=RENAMED[last]))  # type: ignore[misc]
        elif not source.is_changed(inner) and _is_of_module(moved_path(module), source):
            found = find(moved_path(module), last, source.target)
            if found.reason is not None and not is_guarded(node, source):
                effect = Effect.LOOK if _is_restored(path, source) else Effect.FAILS
                source.list(node, source.code(inner), found.reason, effect)
            elif f"{found.module}.{found.name}" != moved_path(path):
                _move_use(inner, f"{found.module}.{found.name}", source)
            else:
                continue
            return


def _innermost_first(node: cst.Attribute) -> Iterator[cst.Attribute]:
    if isinstance(node.value, cst.Attribute):
        yield from _innermost_first(node.value)
    yield node


def _is_of_module(module: str, source: Source) -> bool:
    """Whether a path of transformers is a module of the release: what stands below it can be looked up."""
    names = looked_up_in(source.target)
    return module == "transformers" if names is None else names.is_module(module)


def _move_use(node: cst.Attribute, path: str, source: Source) -> None:
    """Have `transformers.….name` read where it is today; what an import binds by another name is left to a person."""
    if dotted(node).partition(".")[0] == "transformers" and not _is_from(node, source):
        source.change(node, lambda updated: _renamed_path(updated, path))
    else:
        source.list(node, source.code(node), f"is {path} today")


def _with_path(node: cst.CSTNode, rest: str) -> cst.CSTNode:
    """Return an attribute with another path below what it is an attribute of."""
    assert isinstance(node, cst.Attribute)
    value = node.value
    *inner, last = rest.split(".")
    for part in inner:
        value = cst.Attribute(value, cst.Name(part))
    return node.with_changes(value=value, attr=cst.Name(last))


def _rewrite_tpu_call(call: cst.Call, source: Source) -> None:
    """Give the call of `is_torch_xla_available` the argument that asks for what the old one asked for."""
    for place, argument in enumerate(call.args[:1]):
        value = read_constant(argument.value)
        edit = Edit(drop=True) if value is not None and not value.value else Edit(name="check_is_tpu")
        if argument.keyword is None and not edit.drop:
            equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
            source.change(argument, lambda node, equal=equal: node.with_changes(equal=equal))  # type: ignore[misc]
        source.change(call, call_change(source, call, {place: edit}))


def _is_restored(path: str, source: Source) -> bool:
    """Whether the source as it is finds a name, under `hf-compat run`."""
    return source.target is Target.HF_COMPAT and is_restored(path)


def _mend(node: cst.CSTNode, path: str, what: str, today: str, source: Source) -> None:
    """Remember that an import fails as it stands, where it does in the release that is installed."""
    names = looked_up_in(source.target)
    if names is not None and not names.has(path) and not _is_restored(path, source):
        where = f": it is {today} today" if today else ", and nothing takes its place"
        source.mend(node, what, f"transformers {names.version} has no such name{where}")


def is_guarded(node: cst.CSTNode, source: Source) -> bool:
    """Whether an import stands in a `try` that goes on where it fails."""
    inner = node
    for outer in source.above(node):
        if isinstance(outer, cst.Try) and inner is outer.body:
            caught = {dotted(one) for handler in outer.handlers for one in _caught(handler)}
            if caught & {"", "ImportError", "ModuleNotFoundError", "Exception", "BaseException", "AttributeError"}:
                return True
        inner = outer
    return False


def _caught(handler: cst.ExceptHandler) -> Sequence[cst.BaseExpression | None]:
    kind = handler.type
    return [one.value for one in kind.elements] if isinstance(kind, cst.Tuple) else [kind]


def _drop_calls(node: cst.ImportFrom, name: Imported, source: Source, blocks: _Blocks) -> bool:
    """Take the calls of a function without effect out, where all its uses are statements; say whether it was."""
    scope = source.scope(node)
    bindings = [] if scope is None else [one for one in scope[name.bound] if import_statement(one) is node]
    uses = [access.node for one in bindings if isinstance(one, Assignment) for access in one.references]
    calls = [source.parent(use) for use in uses]
    lines = [
        source.parent(call) if isinstance(call, cst.Call) and call.func is use else None
        for call, use in zip(calls, uses, strict=True)
    ]
    if not all(isinstance(one, cst.Expr) and blocks.is_alone(one) for one in lines) or not blocks.is_alone(node):
        return False
    for line in lines:
        assert isinstance(line, cst.Expr)
        blocks.replace(line, [], None)
    return True


def _is_from(node: cst.Attribute, source: Source) -> bool:
    """Return whether the name that a dotted one begins with is imported by `from`: then it is no module."""
    inner = node.value
    while isinstance(inner, cst.Attribute):
        inner = inner.value
    return isinstance(inner, cst.Name) and any(
        isinstance(import_statement(one), cst.ImportFrom) for one in source.assignments(inner)
    )


@dataclass(frozen=True, slots=True)
class _Use:
    """`transformers.Trainer`, which is to come from this package."""

    node: cst.Attribute
    name: str


def _rewrite_import(node: cst.Import, source: Source, blocks: _Blocks) -> None:
    kept: list[cst.ImportAlias] = []
    ours = False
    for alias in node.names:
        module = dotted(alias.name)
        if module in _MIRRORED and alias.asname is not None and len(node.names) == 1:
            path = f"hf_compat.{module.removeprefix('transformers.')}"
            blocks.replace(node, [f"import {path} as {_bound_name(alias.asname)}"], None)
            return
        if module in _MIRRORED and alias.asname is not None:
            _import_mirror(alias, module, source)
            kept.append(alias)
        elif module.split(".")[0] == "transformers":
            _look_up_module(alias, module, source)
            uses, others = _uses_of(node, alias, source)
            for use in uses:
                path = f"hf_compat.{use.name}"
                source.change(use.node, lambda updated, path=path: _renamed_path(updated, path))  # type: ignore[misc]
            ours = ours or bool(uses)
            kept += [alias] if others or not uses else []
        else:
            kept.append(alias)
    if ours:
        rest = f"import {', '.join(_alias_code(one) for one in kept)}" if kept else None
        blocks.replace(node, ["hf_compat"], "" if len(kept) == len(node.names) else rest)


def _look_up_module(alias: cst.ImportAlias, module: str, source: Source) -> None:
    """Import a module by today's name; list one that is not there."""
    today = moved_path(module)
    if today != module:
        source.change(alias.name, lambda _: name_or_dotted(today))
    names = looked_up_in(source.target)
    if names is not None and not names.is_module(today) and not is_guarded(alias, source):
        source.list(alias, f"import {module}", f"transformers {names.version} has no such module", Effect.FAILS)
    if today != module:
        _mend(alias, module, f"import {module}", today, source)


def _alias_code(alias: cst.ImportAlias) -> str:
    name = moved_path(dotted(alias.name))
    return name if alias.asname is None else f"{name} as {_bound_name(alias.asname)}"


def _bound_name(name: cst.AsName) -> str:
    """Return the name of `as name`."""
    return name.name.value if isinstance(name.name, cst.Name) else ""


def _import_mirror(alias: cst.ImportAlias, module: str, source: Source) -> None:
    path = f"hf_compat.{module.removeprefix('transformers.')}"
    source.change(alias.name, lambda _: name_or_dotted(path))


def _renamed_path(node: cst.CSTNode, path: str) -> cst.CSTNode:
    assert isinstance(node, cst.Attribute)
    return name_or_dotted(path).with_changes(lpar=node.lpar, rpar=node.rpar)


def _uses_of(node: cst.Import, alias: cst.ImportAlias, source: Source) -> tuple[list[_Use], int]:
    """Return the uses of an imported `transformers` that are of names of ours, and how many others there are."""
    found: list[_Use] = []
    others = 0
    scope = source.scope(node)
    for assignment in [] if scope is None else list(scope.assignments):
        if not isinstance(assignment, ImportAssignment) or binding_node(assignment) is not node:
            continue
        if assignment.as_name is not (alias.name if alias.asname is None else alias.asname.name):
            continue
        for access in assignment.references:
            # The dotted name that stands for something imported: `transformers.Trainer`, not `….Trainer.train`
            use: cst.Attribute | None = None
            for outer in (access.node, *source.above(access.node)):
                if not isinstance(outer, (cst.Attribute, cst.Name)):
                    break
                if isinstance(outer, cst.Attribute) and _of_ours(outer, source) is not None:
                    use = outer
            name = None if use is None else _of_ours(use, source)
            if use is not None and name is not None:
                found.append(_Use(use, name))
            else:
                others += 1
    return list({id(use.node): use for use in found}.values()), others


def _of_ours(node: cst.Attribute, source: Source) -> str | None:
    name = source.imported(node) or ""
    module, _, last = name.rpartition(".")
    today = renamed(last)
    is_module = all(part.islower() for part in module.split("."))
    return today if module.split(".")[0] == "transformers" and is_module and today in PUBLIC else None


def names_in_text(source: Source) -> Iterator[tuple[cst.SimpleString, str]]:
    """Yield strings that name something of transformers which this package has: `patch("transformers.Trainer")`."""
    for node in source.of(cst.SimpleString):
        text = node.evaluated_value if "transformers." in node.value else None
        if isinstance(text, str) and text.startswith("transformers.") and text.rpartition(".")[2] in PUBLIC:
            yield node, text
