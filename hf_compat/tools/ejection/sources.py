"""Take over the source of the user's own functions and classes, with all that they need."""

from __future__ import annotations

import ast
import builtins
import copy
import graphlib
import inspect
import itertools
import logging
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

from hf_compat.tools.ejection.findings import CannotBeWritten
from hf_compat.tools.ejection.secrets import looks_secret, secrets_in

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Names of HF's trainer that user code may mention, and the project's module of each.
STAND_INS = {
    "EvalPrediction": "evaluation",
    "Seq2SeqTrainer": "hf_trainer",
    "Seq2SeqTrainingArguments": "hf_events",
    "Trainer": "hf_trainer",
    "TrainerCallback": "hf_events",
    "TrainerControl": "hf_events",
    "TrainerState": "hf_events",
    "TrainingArguments": "hf_events",
}
_OF_TRAINER = re.compile(r"^(hf_compat|transformers\.(\w*trainer|training_args|integrations))\b")
# Modules of transformers that do without its trainer, and have functions that scripts import from there.
_TOOLS = ("transformers.trainer_utils", "transformers.trainer_pt_utils", "transformers.optimization")
_BUILTINS = frozenset(vars(builtins))


class Import(NamedTuple):
    """An import: `from module import name as known_as`, or `import module as known_as` without a name."""

    module: str
    name: str | None
    known_as: str

    def __str__(self) -> str:
        if self.name is None:
            plain = self.known_as == self.module.partition(".")[0]
            return f"import {self.module}" + ("" if plain else f" as {self.known_as}")
        return f"from {self.module} import {self.name}" + ("" if self.known_as == self.name else f" as {self.known_as}")


class ModuleSource(NamedTuple):
    """The source of a user's module."""

    name: str
    file: str
    lines: list[str]
    tree: ast.Module

    @property
    def defined(self) -> dict[str, ast.stmt]:
        """Statements of the top level by the names that they bind. The last one of a name counts."""
        found: dict[str, ast.stmt] = {}
        for statement in _flat(self.tree.body):
            names: list[str] = []
            if isinstance(statement, Definition):
                names = [statement.name]
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                names = [(alias.asname or alias.name).partition(".")[0] for alias in statement.names]
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                parts = (part for target in targets for part in ast.walk(target))
                names = [part.id for part in parts if isinstance(part, ast.Name)]
            found |= dict.fromkeys(names, statement)
        return found

    def text_of(self, node: ast.stmt) -> str:
        """The lines of a statement with its decorators and the comments right above it."""
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        indent = self.lines[first][: len(self.lines[first]) - len(self.lines[first].lstrip())]
        while first > 0 and self.lines[first - 1].startswith(f"{indent}# "):
            first -= 1
        return textwrap.dedent("\n".join(self.lines[first : node.end_lineno])).rstrip()


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module's top level, including those under `if` and `try`."""
    for statement in statements:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for block in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, block, []))


@dataclass(slots=True)
class Piece:
    """A piece of the user's source, and its text in the project. The text is empty while its needs are looked up."""

    module: str
    line: float
    text: str = ""


@dataclass(slots=True)
class UserCode:
    """The content of `user_code.py`: pieces of the user's source in the order of the script.

    All modules of the user become one file. If two of them have the same name, one is renamed wherever it is used.
    """

    is_of_script: Callable[[str], bool]
    express: Callable[[object, object], str]  # writes the value of a name in the user's code
    pieces: dict[str, Piece] = field(default_factory=dict)  # the pieces by their names in the project
    imports: set[Import] = field(default_factory=set)
    _read: dict[str, ModuleSource] = field(default_factory=dict)
    _owners: dict[str, object] = field(default_factory=dict)
    _namespaces: dict[str, dict[str, str]] = field(default_factory=dict)
    _needs: dict[str, set[str]] = field(default_factory=dict)

    def add(self, value: type | FunctionType) -> str:
        """Take over a function or class with all that it needs, and give its name."""
        module, node = self.module(value.__module__), self.node_of(value)
        text, held = module.text_of(node), tuple[int, ...]()
        if "<locals>" in value.__qualname__:
            node = copy.deepcopy(node)
            outer = _OuterNames(_closure_of(value))
            node = outer.visit(node)
            parts = [value] if isinstance(value, FunctionType) else list(vars(value).values())
            for function in (getattr(one, "__func__", one) for one in parts):
                for part in (node, *node.body) if isinstance(function, FunctionType) else ():
                    if isinstance(part, ast.FunctionDef) and part.name == function.__name__:
                        held += self._write_defaults(part.args, inspect.unwrap(function))
            text = ast.unparse(node) if held or outer.found else text
        return self._add_piece(module, node.name, node.lineno, text, _free_names(text), _closure_of(value), held=held)

    def add_lambda(self, value: FunctionType) -> str:
        """Take over a lambda as a function that is named by its line."""
        module, line = self.module(value.__module__), value.__code__.co_firstlineno
        names = list(value.__code__.co_varnames[: value.__code__.co_argcount])
        lambdas = [node for node in ast.walk(module.tree) if isinstance(node, ast.Lambda) and node.lineno == line]
        found = [node for node in lambdas if [argument.arg for argument in node.args.args] == names]
        if len(found) != 1:
            raise CannotBeWritten(f"line {line} of {module.file} has {len(found)} lambdas like it")
        name = f"function_of_line_{line}"
        taken = copy.deepcopy(found[0])
        held = (taken.col_offset, *self._write_defaults(taken.args, value))
        text = f"def {name}({ast.unparse(taken.args)}):\n    return {ast.unparse(taken.body)}"
        used = {part.id for part in ast.walk(found[0]) if isinstance(part, ast.Name)} - set(names)
        return self._add_piece(module, name, line, text, used, _closure_of(value), held=held)

    def _write_defaults(self, taken: ast.arguments, function: FunctionType) -> tuple[int, ...]:
        """Write the values of defaults that are not literals: a loop or an enclosing function may have set them."""
        defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
        names = [one.arg for one in (*taken.posonlyargs, *taken.args)][-len(defaults) :] if defaults else []
        of_names = [(place, one.arg) for place, one in enumerate(taken.kwonlyargs) if one.arg in named]
        places: list[tuple[list[Any], int, str, object]] = [
            *((taken.defaults, *one) for one in zip(range(len(names)), names, defaults, strict=True)),
            *((taken.kw_defaults, place, name, named[name]) for place, name in of_names),
        ]
        found = [one for one in places if not _is_literal(one[0][one[1]], one[3])]
        for nodes, place, name, default in found:
            nodes[place] = ast.parse(self.express(name, default), mode="eval").body
        return tuple(id(default) for *_, default in found)

    def import_(self, wanted: Import) -> str:
        """Import something, and give its name, which differs from its own if that is taken."""
        name = self._claim(wanted.known_as, (wanted.module, wanted.name), wanted.module)
        self.imports.add(wanted._replace(known_as=name))
        return name

    def _claim(self, name: str, owner: object, module: str) -> str:
        """The first free name for something in the project."""
        origin = re.sub(r"\W", "_", module.rpartition(".")[2].strip("_"))
        others = (f"{name}_of_{origin}{number or ''}" for number in itertools.count())
        return next(free for free in itertools.chain([name], others) if self._owners.setdefault(free, owner) == owner)

    def module(self, name: str) -> ModuleSource:
        if name not in self._read:
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is None:
                raise CannotBeWritten(f"{name} has no source file")
            try:
                text = Path(file).read_text(encoding="utf-8")
            except OSError as error:
                raise CannotBeWritten(f"the source of {name} cannot be read ({error})") from error
            self._read[name] = ModuleSource(name, file, text.splitlines(), ast.parse(text))
        return self._read[name]

    def where(self, value: object) -> str:
        """The text `file:line` of a function or class, as far as that is known."""
        code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
        try:
            return f"{self.module(value.__module__).file}:{self.node_of(value).lineno}"  # type: ignore[arg-type]  # a class
        except (CannotBeWritten, AttributeError):
            return str(getattr(value, "__module__", "?"))

    def node_of(self, value: type | FunctionType) -> Definition:
        """Find the definition of a class by its name, or of a function by its line."""
        module, own = self.module(value.__module__), inspect.unwrap(value) if isinstance(value, FunctionType) else value
        line = (
            own.__code__.co_firstlineno if isinstance(own, FunctionType) else None
        )  # not that of a decorator's wrapper
        for node in ast.walk(module.tree):
            if not isinstance(node, Definition) or node.name != value.__name__:
                continue
            starts = {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}
            if line in starts or (line is None and isinstance(node, ast.ClassDef)):
                return node
        raise CannotBeWritten(f"the source of {value.__qualname__} is not found in {module.file}")

    def _add_piece(
        self,
        module: ModuleSource,
        name: str,
        line: float,
        text: str,
        needed: set[str],
        cells: Mapping[str, CellType],
        marks: Mapping[str, str] | None = None,
        held: tuple[int, ...] = (),
    ) -> str:
        """Take over a text under a name with all that it needs, and give its name in the project.

        `held` tells texts of one line apart. So do the values that functions of one source hold.
        """
        if marks is None:
            held += tuple(_identity(cells[other]) for other in sorted(needed & cells.keys()))
        known_as = self._claim(name, (module.name, line, *held), module.name)
        if known_as in self.pieces:
            return known_as
        before = dict(self.pieces)
        piece = self.pieces[known_as] = Piece(module.name, line)
        try:
            needs = self._add_needs(module, line, text, needed - {name}, cells)
            changed = {old: new for old, new in {**needs, name: known_as}.items() if old != new}
            piece.text = _Renaming(changed).renamed(text) if changed else text
        except CannotBeWritten:
            self.pieces = before  # without a half of what it needs
            raise
        for mark, mark_name in (marks or {}).items():
            piece.text = piece.text.replace(mark, mark_name, 1)
        return known_as

    def _add_needs(
        self, module: ModuleSource, line: float, text: str, needed: set[str], cells: Mapping[str, CellType]
    ) -> dict[str, str]:
        """Take over what a text takes from outside, and give the names in the project by those in the text."""
        renamed: dict[str, str] = {}
        namespace = vars(sys.modules[module.name])
        for other in sorted(needed):
            if other in cells:
                held = cells[other]
                renamed[other] = self._add_value(module, other, held.cell_contents, line - 0.5, (_identity(held),))
            elif other in module.defined and other in namespace:
                renamed[other] = self._add_global(module, other, namespace[other], text)
            elif other not in _BUILTINS and other in namespace:
                renamed[other] = self._add_value(module, other, namespace[other], line - 0.5)
            needs = self.pieces.get(renamed.get(other, ""))
            if needs is not None and needs.module != module.name:
                self._needs.setdefault(module.name, set()).add(needs.module)
        return renamed

    def _add_global(self, module: ModuleSource, name: str, value: object, text: str) -> str:
        """Take over the value of a name of the user's top level, and give its name in the project."""
        statement = module.defined[name]
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            alias = next(one for one in statement.names if (one.asname or one.name).partition(".")[0] == name)
            if isinstance(value, ModuleType) and self.is_of_script(value.__name__):
                # The attributes of another module of the user that the text reads
                known_as = self._claim(name, value.__name__, value.__name__)
                found, other = self._namespaces.setdefault(known_as, {}), self.module(value.__name__)
                for attribute in sorted(set(re.findall(rf"\b{name}\.(\w+)", text)) & set(vars(value))):
                    part = getattr(value, attribute)
                    if attribute in other.defined:
                        found[attribute] = self._add_global(other, attribute, part, "")
                    else:
                        found[attribute] = self._add_value(other, attribute, part, 0)
                return known_as
            if isinstance(statement, ast.Import):
                return self.import_(Import(alias.name, None, alias.asname or name))
            origin = statement.module or ""
            if isinstance(value, logging.Logger) or (_OF_TRAINER.match(origin) and not callable(value)):
                return self._add_value(module, name, value, statement.lineno)
            if statement.level:  # relative to the package of the user's
                origin = str(getattr(value, "__module__", origin))
            return self._add_import_from(origin, alias.name, name, value)
        if isinstance(statement, Definition):
            text = module.text_of(statement)
            return self._add_piece(module, statement.name, statement.lineno, text, _free_names(text), {})
        is_secret = isinstance(value, str) and (looks_secret(name, value) or secrets_in(value))
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and not is_secret and _is_literal(statement.value, value):
            return self._add_piece(module, name, statement.lineno, module.text_of(statement), set(), {})
        return self._add_value(module, name, value, statement.lineno)

    def _add_value(
        self, module: ModuleSource, name: str, value: object, line: float, held: tuple[int, ...] = ()
    ) -> str:
        try:
            expression = self.express(name, value)
        except CannotBeWritten as error:
            raise CannotBeWritten(f"{name!r} in {module.file} is needed, and {error}") from error
        if expression in self._owners:  # a function or class that is taken over already
            return expression
        return self._add_piece(module, name, line, f"{name} = {expression}", set(), {}, held=held)

    def _add_import_from(self, origin: str, name: str, known_as: str, value: object) -> str:
        """Import a name as the script does. Names of HF's trainer come from elsewhere."""
        home = str(getattr(value, "__module__", ""))
        if name in STAND_INS and origin.partition(".")[0] in ("transformers", "hf_compat"):
            return self.import_(Import(STAND_INS[name], name, known_as))
        if name == "set_seed" and origin.startswith(("transformers", "hf_compat")):
            return self.import_(Import("lightning.pytorch", "seed_everything", known_as))
        if self.is_of_script(home) and isinstance(value, (type, FunctionType)):
            return self.add(value)
        if _OF_TRAINER.match(origin):  # which has many names of other modules
            tools = (one for one in (home, *_TOOLS) if getattr(sys.modules.get(one), name, None) is value)
            origin = next((one for one in tools if not _OF_TRAINER.match(one)), origin)
        is_tool = origin.startswith("transformers.") and not _OF_TRAINER.match(origin)
        if _OF_TRAINER.match(origin) or (_OF_TRAINER.match(home) and "collat" not in home and not is_tool):
            raise CannotBeWritten(f"{name} of {origin} belongs to HF's trainer, which the project does without")
        if self.is_of_script(origin):  # a value of another module of the user's
            return self._add_value(self.module(origin), name, value, 0)
        return self.import_(Import(origin, name, known_as))

    def add_needs_of(self, kind: type, methods: Container[str]) -> None:
        """Take over what some methods of a class take from outside."""
        node, module = self.node_of(kind), self.module(kind.__module__)
        own = [module.text_of(part) for part in node.body if isinstance(part, Definition) and part.name in methods]
        needed = set().union(*map(_free_names, own)) - {"__class__"}
        self._add_needs(module, node.lineno, "\n".join(own), needed, _closure_of(kind))

    def add_trainer(self, kinds: list[type], methods: set[str], constants: Iterable[str], left: Iterable[str]) -> str:
        """Take over methods of a Trainer's classes on the stand-in for HF's. `left` are methods that raise."""
        nodes = {kind: self.node_of(kind) for kind in kinds}
        homes = {kind: self.module(kind.__module__) for kind in kinds}
        names = {
            kind: self._claim(node.name, (kind.__module__, node.lineno), kind.__module__)
            for kind, node in nodes.items()
        }
        stand_in = self.import_(Import("hf_trainer", "Trainer", "Trainer"))
        for kind in reversed(kinds):
            module, node = homes[kind], nodes[kind]
            assert isinstance(node, ast.ClassDef)
            own = [part for part in node.body if isinstance(part, Definition) and part.name in methods]
            bases = [names[base] for base in kind.__bases__ if base in names] or [stand_in]
            marks = {f"base_{number}": base for number, base in enumerate(bases)}  # renamed with the rest
            body = [ast.unparse(node.body[0])] if ast.get_docstring(node) else []
            if kind is kinds[0]:
                lines = ["super().__init__(module)", *constants]
                body += ["def __init__(self, module):\n" + textwrap.indent("\n".join(lines), "    "), *left]
            body += map(module.text_of, own)
            text = f"class {node.name}({', '.join(marks)}):\n" + textwrap.indent("\n\n".join(body or ["pass"]), "    ")
            needed = set().union(*(_free_names(module.text_of(method)) for method in own)) - {"__class__"}
            self._add_piece(module, node.name, node.lineno, text, needed, _closure_of(kind), marks)
            for base in kind.__bases__:
                if base in names and base.__module__ != module.name:
                    self._needs.setdefault(module.name, set()).add(base.__module__)
        return names[kinds[0]]

    def text(self) -> str:
        """The file's text without its head. Modules that others need come first."""
        homes = {name: self._needs.get(name, set()) for name in sorted({one.module for one in self.pieces.values()})}
        order = list(graphlib.TopologicalSorter(homes).static_order())
        pieces = sorted(self.pieces.values(), key=lambda one: (order.index(one.module), one.line, one.text))
        imports = set(self.imports)
        spaces = []
        for name, parts in self._namespaces.items():
            spaces.append(f"{name} = SimpleNamespace({', '.join(f'{key}={value}' for key, value in parts.items())})")
            imports.add(Import("types", "SimpleNamespace", "SimpleNamespace"))
        lines = sorted(map(str, imports), key=lambda line: (line.startswith("from"), line))
        blocks = ["\n".join(lines)] if lines else []
        return "\n\n\n".join([*blocks, *(one.text for one in pieces), *spaces]) + "\n"


class _OuterNames(ast.NodeTransformer):
    """Makes global what a definition sets in the function around it, since it moves out of there."""

    def __init__(self, names: Container[str]) -> None:
        self.names = names
        self.found = False

    def visit_Nonlocal(self, node: ast.Nonlocal) -> list[ast.stmt]:
        outer = [name for name in node.names if name in self.names]
        self.found |= bool(outer)
        inner = [name for name in node.names if name not in outer]
        return [*([ast.Global(outer)] if outer else []), *([ast.Nonlocal(inner)] if inner else [])]


class _Renaming(ast.NodeTransformer):
    """Renames what a piece takes from outside."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._is_in_function = False

    def renamed(self, text: str) -> str:
        """Rename a piece of source and what it takes from outside. It loses its comments."""
        tree = ast.parse(text)
        self.visit(tree)
        if isinstance(tree.body[0], Definition):
            tree.body[0].name = self.names.get(tree.body[0].name, tree.body[0].name)
        return ast.unparse(tree)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        self._refuse_local(node.arg)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self._is_in_function:
            self._refuse_local(node.name)
        within, self._is_in_function = self._is_in_function, True
        self.generic_visit(node)
        self._is_in_function = within
        return node

    def visit_Global(self, node: ast.Global) -> ast.Global:
        return ast.Global([self.names.get(name, name) for name in node.names])

    def _refuse_local(self, name: str) -> None:
        if name in self.names:
            raise CannotBeWritten(f"{name!r} is something local, and the name of two other things")


def _closure_of(value: type | FunctionType) -> dict[str, CellType]:
    """The cells of the free names of a function, or of a class's methods."""
    parts = [value] if isinstance(value, FunctionType) else list(vars(value).values())
    found: dict[str, CellType] = {}
    for part in parts:
        function = inspect.unwrap(part) if callable(part) and part is not value else part
        if isinstance(function, FunctionType):
            cells: tuple[CellType, ...] = function.__closure__ or ()
            names = zip(function.__code__.co_freevars, cells, strict=True)
            found |= {name: cell for name, cell in names if name != "__class__"}
    return found


def _identity(cell: CellType) -> int:
    """Identify what a cell holds: an object by itself, and a number or text, which may be counted up, by the cell."""
    held = cell.cell_contents
    return id(cell) if held is None or isinstance(held, (bool, int, float, str, tuple)) else id(held)


def _is_literal(node: ast.expr | None, value: object) -> bool:
    """Whether an expression is a literal of a value, which nothing has changed since."""
    try:
        written = ast.literal_eval(node)  # type: ignore[arg-type]  # None is not a literal and raises
        return type(written) is type(value) and bool(written == value)
    except (ValueError, TypeError, SyntaxError):
        return False


def _free_names(text: str) -> set[str]:
    """The names that a definition takes from outside of itself."""
    table = symtable.symtable(text, "definition", "exec")
    parts = list(ast.walk(ast.parse(text)))
    used = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    used |= {name for part in parts if isinstance(part, ast.Global) for name in part.names}  # `+=` reads them, too
    outside = {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and not symbol.is_assigned()
    }
    tables = [table]
    while tables:
        inner = tables.pop()
        outside |= {symbol.get_name() for symbol in inner.get_symbols() if symbol.is_global()}
        tables += inner.get_children()
    return used & outside
