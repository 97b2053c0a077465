"""The source of the user's own functions and classes, with all that they need, read off the script."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FunctionType

from hf_compat.ejection.findings import CannotBeWritten

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Names of HF's trainer that user code may mention, and the module of the project that has them.
STAND_INS = {
    "EvalPrediction": "evaluation",
    "TrainerCallback": "hf_events",
    "TrainerControl": "hf_events",
    "TrainerState": "hf_events",
    "TrainingArguments": "hf_events",
}
_OF_TRAINER = re.compile(r"^(hf_compat|transformers\.(\w*trainer|training_args|integrations))\b")
_BUILTINS = frozenset(vars(builtins))


@dataclass(frozen=True, slots=True)
class Import:
    """An import: `from module import name as known_as`, or `import module as known_as` without a name."""

    module: str
    name: str | None
    known_as: str

    def __str__(self) -> str:
        if self.name is None:
            plain = self.known_as == self.module.partition(".")[0]
            return f"import {self.module}" + ("" if plain else f" as {self.known_as}")
        return f"from {self.module} import {self.name}" + ("" if self.known_as == self.name else f" as {self.known_as}")


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module of the user's: its text, its top level by name."""

    name: str
    file: str
    lines: list[str]
    tree: ast.Module

    @property
    def defined(self) -> dict[str, ast.stmt]:
        """Statements of the top level, by the names that they bind; of several the last one counts."""
        return {name: statement for statement in _flat(self.tree.body) for name in _bound_by(statement)}

    def text_of(self, node: ast.stmt) -> str:
        """Return the lines of a statement, with its decorators and the comments right above it."""
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        indent = self.lines[first][: len(self.lines[first]) - len(self.lines[first].lstrip())]
        while first > 0 and self.lines[first - 1].startswith(f"{indent}# "):
            first -= 1
        return textwrap.dedent("\n".join(self.lines[first : node.end_lineno])).rstrip()


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module's top level, those under `if` and `try` too."""
    for statement in statements:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for block in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, block, []))


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, Definition):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))


@dataclass(slots=True)
class UserCode:
    """What `user_code.py` will hold: pieces of the user's source, in the order of the script.

    Args:
        is_of_script: Whether a module is the script, or stands beside it.
        express: From a value to the Python that makes it again; what names in the user's code stand for is written so.
    """

    is_of_script: Callable[[str], bool]
    express: Callable[[object], str]
    pieces: dict[str, tuple[tuple[str, float], str]] = field(default_factory=dict)
    imports: set[Import] = field(default_factory=set)
    _read: dict[str, ModuleSource] = field(default_factory=dict)
    _under_way: set[str] = field(default_factory=set)

    def add(self, value: type | FunctionType) -> str:
        """Take over a function or class with all that it needs, and return its name.

        Raises:
            CannotBeWritten: Its source, or a value that it uses, cannot be written down.
        """
        module = self.module(value.__module__)
        node = self._node_of(module, value)
        cells = closure_of(value)
        self._add_definition(module, node, cells)
        return node.name

    def add_lambda(self, value: FunctionType) -> str:
        """Take over a lambda as a function that its line names.

        Raises:
            CannotBeWritten: There are several like it in that line.
        """
        module, line = self.module(value.__module__), value.__code__.co_firstlineno
        names = list(value.__code__.co_varnames[: value.__code__.co_argcount])
        lambdas = [node for node in ast.walk(module.tree) if isinstance(node, ast.Lambda) and node.lineno == line]
        found = [node for node in lambdas if [argument.arg for argument in node.args.args] == names]
        if len(found) != 1:
            raise CannotBeWritten(f"line {line} of {module.file} has {len(found)} lambdas like it")
        name = f"function_of_line_{line}"
        text = f"def {name}({ast.unparse(found[0].args)}):\n    return {ast.unparse(found[0].body)}"
        used = {part.id for part in ast.walk(found[0]) if isinstance(part, ast.Name)} - set(names)
        self._add_piece(module, name, line, text, used, closure_of(value))
        return name

    def module(self, name: str) -> ModuleSource:
        """Return the source of a module.

        Raises:
            CannotBeWritten: It has none.
        """
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
        """Return `file:line` of a function or class, as far as that is known."""
        code = getattr(value, "__code__", None)
        module = self._read.get(str(getattr(value, "__module__", "")))
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
        if isinstance(value, type) and module is not None:
            return f"{module.file}:{self._node_of(module, value).lineno}"
        return str(getattr(value, "__module__", "?"))

    def _node_of(self, module: ModuleSource, value: type | FunctionType) -> Definition:
        """Return where a function or class is defined; a class by its name, a function by its line."""
        line = value.__code__.co_firstlineno if isinstance(value, FunctionType) else None
        for node in ast.walk(module.tree):
            if not isinstance(node, Definition) or node.name != value.__name__:
                continue
            starts = {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}
            if line in starts or (line is None and isinstance(node, ast.ClassDef)):
                return node
        raise CannotBeWritten(f"the source of {value.__qualname__} is not found in {module.file}")

    def _add_definition(self, module: ModuleSource, node: Definition, cells: Mapping[str, object]) -> None:
        self._add_piece(module, node.name, node.lineno, module.text_of(node), free_names(module, node), cells)

    def _add_piece(
        self,
        module: ModuleSource,
        name: str,
        line: float,
        text: str,
        needed: set[str],
        cells: Mapping[str, object],
    ) -> None:
        """Take over a text under a name, and what it needs."""
        key = ((module.name, line), text)
        if self.pieces.get(name, key) != key:
            raise CannotBeWritten(f"two things of the name {name} are needed, in {module.file} and elsewhere")
        if name in self.pieces:
            return
        self.pieces[name] = key
        for other in sorted(needed - {name}):
            namespace = vars(sys.modules[module.name])
            if other in cells:
                self._add_value(module, other, cells[other], line - 0.5)
            elif other in module.defined and other in namespace:
                self._add_global(module, other, namespace[other])
            elif other not in _BUILTINS and other in namespace:
                self._add_value(module, other, namespace[other], line - 0.5)

    def _add_global(self, module: ModuleSource, name: str, value: object) -> None:
        statement = module.defined[name]
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                if (alias.asname or alias.name).partition(".")[0] != name:
                    continue
                if isinstance(statement, ast.Import):
                    self.imports.add(Import(alias.name, None, alias.asname or name))
                else:
                    self._add_import_from(statement.module or "", alias.name, name, value)
        elif isinstance(statement, Definition):
            self._add_definition(module, statement, {})
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and _is_literal(statement.value):
            self._add_piece(module, name, statement.lineno, module.text_of(statement), set(), {})
        else:
            self._add_value(module, name, value, statement.lineno)

    def _add_value(self, module: ModuleSource, name: str, value: object, line: float) -> None:
        """Take over a value under the name that the user's code knows it by."""
        try:
            expression = self.express(value)
        except CannotBeWritten as error:
            raise CannotBeWritten(f"{name!r} in {module.file} is needed, and {error}") from error
        if expression != name:  # a function or class of that name is there by now
            self._add_piece(module, name, line, f"{name} = {expression}", set(), {})

    def _add_import_from(self, origin: str, name: str, known_as: str, value: object) -> None:
        """Import a name as the script does; what it takes from HF's trainer comes from elsewhere."""
        home = str(getattr(value, "__module__", ""))
        if name in STAND_INS and origin.partition(".")[0] in ("transformers", "hf_compat"):
            self.imports.add(Import(STAND_INS[name], name, known_as))
        elif name == "set_seed" and origin.startswith(("transformers", "hf_compat")):
            self.imports.add(Import("lightning.pytorch", "seed_everything", known_as))
        elif self.is_of_script(home) and isinstance(value, (type, FunctionType)):
            if self.add(value) != known_as:
                raise CannotBeWritten(f"{name} is known as {known_as}; only its own name can be kept")
        elif _OF_TRAINER.match(origin) or (_OF_TRAINER.match(home) and "collat" not in home):
            raise CannotBeWritten(f"{name} of {origin} belongs to HF's trainer, which the project does without")
        else:
            self.imports.add(Import(origin, name, known_as))

    def add_methods(self, kind: type, names: list[str], constants: Mapping[str, str]) -> str:
        """Take over methods of a class as a class of their own, with constants in place of its attributes."""
        module = self.module(kind.__module__)
        node = self._node_of(module, kind)
        if not isinstance(node, ast.ClassDef):
            raise CannotBeWritten(f"{kind.__qualname__} is no class in {module.file}")
        methods = [part for part in node.body if isinstance(part, Definition) and part.name in names]
        body = [*(f"{name} = {text}" for name, text in constants.items()), *map(module.text_of, methods)]
        text = f"class {node.name}:\n" + textwrap.indent("\n\n".join(body), "    ")
        needed = set().union(*(free_names(module, method) for method in methods)) - {"__class__"}
        self._add_piece(module, node.name, node.lineno, text, needed, closure_of(kind))
        return node.name

    def text(self) -> str:
        """Return the file's text, without its head."""
        ordered = [text for _, text in sorted(self.pieces.values())]
        lines = sorted(map(str, self.imports), key=lambda line: (line.startswith("from"), line))
        blocks = ["\n".join(lines)] if lines else []
        return "\n\n\n".join(blocks + ordered) + "\n"


def closure_of(value: type | FunctionType) -> dict[str, object]:
    """Return what the free names of a function, or of a class's methods, stand for."""
    functions = [value] if isinstance(value, FunctionType) else _functions_of(value)
    found: dict[str, object] = {}
    for function in functions:
        cells: tuple[CellType, ...] = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            if name != "__class__":
                found[name] = cell.cell_contents
    return found


def _functions_of(kind: type) -> list[FunctionType]:
    parts = (inspect.unwrap(part) if callable(part) else part for part in vars(kind).values())
    return [part for part in parts if isinstance(part, FunctionType)]


def _is_literal(node: ast.expr | None) -> bool:
    try:
        ast.literal_eval(node)  # type: ignore[arg-type]  # None is no literal, and says so
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


def free_names(module: ModuleSource, node: ast.stmt) -> set[str]:
    """Return the names that a definition takes from outside of itself."""
    text = textwrap.dedent(module.text_of(node))
    tree = ast.parse(text)
    table = symtable.symtable(text, module.file, "exec")
    used = {part.id for part in ast.walk(tree) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    outside = {symbol.get_name() for inner in _tables(table) for symbol in inner.get_symbols() if symbol.is_global()}
    top = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and not symbol.is_assigned()}
    return (used & outside) | (used & top)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
