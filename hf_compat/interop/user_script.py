"""A script or module in this process, as `python script.py` and `python -m module` run it.

Which names the modules of an installed package have, read off its sources: nothing of it is imported or run.

What `transformers` does at its import is followed: lazy import structures, star imports, aliases of modules that moved.

Where a script compares the arguments' `local_rank` with 0: never true under transformers 5, where it stays -1.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from hf_compat.errors import ArgumentError, warn_once
from hf_compat.hf.arguments_rules import generation_beside
from hf_compat.interop.former_names import account_of
from hf_compat.runtime.launch import read_launch

# Where a package says which names its lazy module has, and which modules have another name today.
_STRUCTURE = "import_structure"
_ALIASES = "_LEGACY_MODULE_ALIASES"
_EXPORTED = re.compile(r"^__all__ *(?:\+?=|: *[^=]+=) *[\[(](.*?)[\])]", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"""["'](\w+)["']""")
_FAST = ("TokenizerFast", "ImageProcessorFast")
# Places without public names, such as dummies of absent packages, tests, tools and single models.
_NO_HOMES = ("models", "cli", "commands", "exporters", "testing_utils.py")


@dataclass(slots=True)
class _Module:
    """The names that a module's source binds.

    Args:
        names: At its top level, imports among them.
        stars: The modules whose public names it takes: leading dots, and a path.
        aliases: Modules of the package under other names.
    """

    names: set[str] = field(default_factory=set)
    stars: list[tuple[int, str]] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)


class InstalledNames:
    """The names of one package's modules.

    Args:
        root: The package's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, _Module | None] = {}
        self._files: dict[str, Path | None] = {}
        self._exports: dict[Path, frozenset[str] | None] = {}
        self._found: dict[tuple[str, str], bool] = {}
        self._homes: dict[str, tuple[str, ...]] = {}

    @functools.cached_property
    def version(self) -> str:
        """The package's version, as its source has it; empty where it has none."""
        found = re.search(r"^__version__ *= *[\"']([^\"']+)", _text(self._root / "__init__.py"), re.MULTILINE)
        return "" if found is None else found[1]

    def has(self, path: str) -> bool:
        """Return whether a dotted path leads to a module, or to something that a module has.

        Parts below the first name in a module (a class's attribute) are not looked up.
        """
        module, *parts = path.split(".")
        for part in parts:
            if self._file(f"{module}.{part}") is None:
                return self._has_name(module, part)
            module = f"{module}.{part}"
        return self._file(module) is not None

    def is_module(self, path: str) -> bool:
        """Return whether a dotted path is a module's."""
        return self._file(path) is not None

    def homes(self, name: str) -> Sequence[str]:
        """Return the modules from which a name can be imported: the top level, or else those that define it."""
        if name not in self._homes:
            top = self._root.name
            self._homes[name] = (top,) if self._has_name(top, name) else tuple(self._defining(name))
        return self._homes[name]

    def _defining(self, name: str) -> Iterator[str]:
        defined = re.compile(rf"^(?:class|def|async def) {name}\b|^{name} *(?::[^=\n]+)?=[^=]", re.MULTILINE)
        for path in sorted(self._root.rglob("*.py")):
            inner = path.relative_to(self._root)
            if inner.parts[0] not in _NO_HOMES and not inner.name.startswith("dummy_") and defined.search(_text(path)):
                parts = inner.with_suffix("").parts
                yield ".".join((self._root.name, *(parts[:-1] if parts[-1] == "__init__" else parts)))

    def _has_name(self, module: str, name: str) -> bool:
        if (module, name) not in self._found:
            self._found[module, name] = False  # for star imports in a circle
            self._found[module, name] = self._binds(module, name)
        return self._found[module, name]

    def _binds(self, module: str, name: str) -> bool:
        read = self._read(module)
        if read is None:
            return False
        if name in read.names:
            return True
        # Of hundreds of models the one that a class is named after comes first
        by_name = sorted(read.stars, key=lambda star: not _is_named_after(name, star[1]))
        if any(self._exports_name(self._absolute(module, *star), name) for star in by_name):
            return True
        # Since 5.0 the one class of each kind answers to the name of the fast one, too
        return name.endswith(_FAST) and self._has_name(module, name.removesuffix("Fast"))

    def _exports_name(self, module: str, name: str) -> bool:
        """Return whether a star import of a module binds a name."""
        file = self._file(module)
        if file is None:
            return False
        if file not in self._exports:
            lists = _EXPORTED.findall(_text(file))
            self._exports[file] = frozenset(word for one in lists for word in _WORD.findall(one)) if lists else None
        exported = self._exports[file]
        if exported is not None:
            return name in exported
        # A package without a list gives the modules in it, too, once they are imported
        is_there = self._has_name(module, name) or self._file(f"{module}.{name}") is not None
        return not name.startswith("_") and is_there

    def _absolute(self, module: str, dots: int, path: str) -> str:
        """Return the full name of a module that another one names with leading dots."""
        if not dots:
            return path
        file = self._file(module)
        inner = module.split(".")
        kept = inner[: len(inner) - dots + (file is not None and file.name == "__init__.py")]
        return ".".join([*kept, *([path] if path else [])])

    def _file(self, module: str) -> Path | None:
        """Return a module's file; for one that has another name today, that one's."""
        if module not in self._files:
            self._files[module] = self._file_today(module)
        return self._files[module]

    def _file_today(self, module: str) -> Path | None:
        found = self._file_of(module)
        outer, _, last = module.rpartition(".")
        if found is not None or not outer:
            return found
        top = self._read(self._root.name)
        if outer == self._root.name and top is not None and last in top.aliases:
            return self._file_of(f"{outer}.{top.aliases[last]}")
        is_fast = "image_processing_" in last and last.endswith("_fast") and ".models." in module
        return self._file_of(module.removesuffix("_fast")) if is_fast else None

    def _file_of(self, module: str) -> Path | None:
        package, *parts = module.split(".")
        if package != self._root.name:
            return None
        place = self._root.joinpath(*parts)
        paths = (place / "__init__.py", place.with_name(f"{place.name}.py"))[: 2 if parts else 1]
        return next((path for path in paths if path.is_file()), None)

    def _read(self, module: str) -> _Module | None:
        if module not in self._modules:
            file = self._file_of(module) if module == self._root.name else self._file(module)
            self._modules[module] = None if file is None else _module_of(_text(file))
        return self._modules[module]


@functools.lru_cache(maxsize=4)
def names_at(root: Path) -> InstalledNames:
    """Return the names of the package in a folder; read once a process."""
    return InstalledNames(root)


def installed_names(package: str) -> InstalledNames | None:
    """Return the names of a package that Python would import from here; None where there is none."""
    spec = importlib.machinery.PathFinder.find_spec(package)
    origin = None if spec is None else spec.origin
    return None if origin is None or not origin.endswith("__init__.py") else names_at(Path(origin).parent)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _is_named_after(name: str, path: str) -> bool:
    return name.lower().startswith(path.rpartition(".")[2].replace("_", ""))


def _module_of(text: str) -> _Module:
    module = _Module()
    try:
        tree = ast.parse(text)
    except SyntaxError:  # of a newer Python: nothing of it is known
        return module
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            module.names.add(node.name)
            if node.name == "__getattr__":  # its names are in the module's lists and dicts
                module.names |= {word for one in tree.body if isinstance(one, ast.Assign) for word in _words(one.value)}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if alias.name == "*" and isinstance(node, ast.ImportFrom):
                    module.stars.append((node.level, node.module or ""))
                else:
                    module.names.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.expr):
            stored = (one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
            module.names |= {one.id for one in stored}
        else:
            _add_structure(module, node)
            pending.extend(ast.iter_child_nodes(node))
    return module


def _add_structure(module: _Module, node: ast.AST) -> None:
    """Add the names of a lazy module's structure, and modules' aliases, that a statement sets."""
    if not isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
        return
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    first: ast.AST = targets[0] if targets else node.value
    while isinstance(first, (ast.Subscript, ast.Attribute, ast.Call)):
        first = first.func if isinstance(first, ast.Call) else first.value
    subject = first.id if isinstance(first, ast.Name) else ""
    if subject.endswith(_STRUCTURE):
        module.names |= {word.partition(".")[0] for one in (*targets, node.value) for word in _words(one)}
    elif subject == _ALIASES and isinstance(node.value, ast.Dict):
        module.aliases |= ast.literal_eval(node.value)
        module.names |= set(module.aliases)


def _words(node: ast.AST) -> set[str]:
    return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


WAY_OUT = "compare `args.local_process_index`, or ask `trainer.is_world_process_zero()`"
PROBLEM = (
    "`local_rank` of training arguments is -1 under transformers 5 unless the command line gives it: what is done "
    "where it is 0 is never done. Releases 4.x set it to 0 on the first process."
)


def comparisons_in_file(path: str) -> list[tuple[int, str]]:
    """Return the comparisons in a file, none for an archive or a file that is not Python."""
    try:
        with tokenize.open(path) as file:
            return comparisons_with_zero(file.read())
    except (OSError, SyntaxError, ValueError):  # running the file reports it
        return []


def comparisons_with_zero(source: str) -> list[tuple[int, str]]:
    """Return line and text of each comparison that takes the first process for rank 0 and not for -1, too.

    An object is taken for training arguments by its name (`args`, `training_args`), or where it is made by a class of
    such a name, unless the source declares an option or a field `local_rank` itself.

    Args:
        source: Python source.

    Raises:
        SyntaxError: It is none.
    """
    tree = ast.parse(source)
    if any(_declares_rank(node) for node in ast.walk(tree)):
        return []
    # The names that hold the arguments' rank, and nothing else but a constant before
    values: dict[str, list[ast.expr]] = {}
    for node in (one for one in ast.walk(tree) if isinstance(one, ast.Assign)):
        for target in node.targets:
            if isinstance(target, ast.Name):
                values.setdefault(target.id, []).append(node.value)
    made = {
        f"{name}.local_rank"
        for name, held in values.items()
        if any(isinstance(one, ast.Call) and "TrainingArguments" in ast.unparse(one.func) for one in held)
    }
    names = made | {
        name
        for name, held in values.items()
        if any(_is_rank(one, made) for one in held)
        and all(_is_rank(one, made) or isinstance(one, ast.Constant) for one in held)
    }
    also_minus_one = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.BoolOp) and any(_compares(one, names, -1) for one in node.values)
        for inner in node.values
    }
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.expr) and node not in also_minus_one and _compares(node, names, 0)
    ]
    return sorted((node.lineno, ast.unparse(node)) for node in found if not _compares(node, names, -1))


def _declares_rank(node: ast.AST) -> bool:
    """Whether a parser's option or a field is the script's own `local_rank`."""
    if isinstance(node, ast.Call):
        words = (one.value for one in node.args if isinstance(one, ast.Constant))
        return any(word in ("--local_rank", "--local-rank") for word in words)
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "local_rank"


def _is_rank_of_arguments(node: ast.expr) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != "local_rank":
        return False
    owner = ast.unparse(node.value).rpartition(".")[2]
    return "arg" in owner.lower()


def _compares(node: ast.expr, names: set[str], rank: int) -> bool:
    """Whether an expression is true, or false, for this rank alone, or for it among others."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return rank == 0 and _is_rank(operand, names)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return False
    sides = (node.left, node.comparators[0])
    if not any(_is_rank(side, names) for side in sides):
        return False
    if isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        return any(rank in numbers for numbers in map(_numbers, sides))
    return isinstance(node.ops[0], (ast.In, ast.NotIn)) and rank in _numbers(sides[1])


def _is_rank(node: ast.expr, names: set[str]) -> bool:
    is_known = isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names
    return is_known or _is_rank_of_arguments(node)


def _numbers(node: ast.expr) -> list[object]:
    """Return the constants of a number, or of a tuple, list or set of them."""
    found = []
    for one in node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]:
        with contextlib.suppress(ValueError):  # a name, a call: no constant
            found.append(ast.literal_eval(one))
    return found


def require_script(path: str, usage: str) -> None:
    """Check a path before anything is run.

    Args:
        path: What the user named.
        usage: How the command is called.

    Raises:
        ArgumentError: There is nothing, or it is a notebook.
    """
    if not os.path.exists(path):
        raise ArgumentError(f"There is no script {path}.\n\nHint: `{usage}`.")
    if path.endswith(".ipynb") and not os.path.isdir(path):
        raise ArgumentError(
            f"{path} is a notebook, no script: `{usage}`.\n\nHint: `jupyter nbconvert --to script {path}` makes a "
            "script of it. To train in the notebook itself, begin it with `import hf_compat; hf_compat.patch()`; "
            "`hf-compat migrate` rewrites notebooks as they are."
        )


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script, or a folder or archive that holds a `__main__.py`, as this process's `__main__`.

    What the script raises is raised; the traceback that Python then shows begins in the script.

    Raises:
        SystemExit: There is nothing to run in the folder.
    """
    importer = pkgutil.get_importer(os.path.abspath(path))
    if importer is not None:  # a folder, or an archive
        _begin(os.path.abspath(path), [path, *arguments])
        _run_found("__main__", importer.find_spec("__main__"), f" in {path}")
        return
    _begin(os.path.dirname(os.path.realpath(path)), [path, *arguments])
    path = os.path.abspath(path)
    _execute(_new_main(path, importlib.machinery.SourceFileLoader("__main__", path)), lambda: _compiled(path))


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module, or the `__main__` of a package, as this process's `__main__`.

    Raises:
        SystemExit: The module does not exist.
    """
    _begin(os.getcwd(), ["-m", *arguments])
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    if spec is not None and spec.origin is not None:
        sys.argv[0] = spec.origin
    _run_found(name, spec, "")


def _find(name: str) -> ModuleSpec | None:
    """Locate a module. Its packages are imported, and their errors propagate."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def _run_found(name: str, spec: ModuleSpec | None, where: str) -> None:
    read = None if spec is None else getattr(spec.loader, "get_code", None)
    if spec is None or read is None:
        raise SystemExit(
            f"There is no module {name}{where} to run.\n\n"
            "Hint: `hf-compat run SCRIPT`, or `hf-compat run -m MODULE` with a module that Python finds from here."
        )
    main = _new_main(spec.origin or name, spec.loader)
    vars(main).update(__spec__=spec, __package__=spec.parent, __cached__=spec.cached)
    _execute(main, lambda: read(spec.name))


def _new_main(file: str, loader: object) -> ModuleType:
    """Return a new `__main__`, in place of the command's."""
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __file__=file, __loader__=loader, __cached__=None, __annotations__={})
    # multiprocessing keeps the second name: spawned processes send back objects of the script's classes under it
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


def _begin(folder: str, arguments: list[str]) -> None:
    """Set the command line, and look for modules first where Python would rather than where the command was found."""
    of_command = ("", os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0])))
    sys.argv = arguments
    if sys.flags.safe_path:
        return
    if sys.path and sys.path[0] in of_command:
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)


def _compiled(path: str) -> CodeType:
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _execute(main: ModuleType, read: Callable[[], CodeType]) -> None:
    file = str(main.__file__)
    if not (generation_beside() == "4" or read_launch().process_index > 0):
        for line, comparison in comparisons_in_file(file):
            warn_once(f"{file}:{line}: `{comparison}`: {PROBLEM}\n\nHint: {WAY_OUT}.")
    try:
        exec(read(), vars(main))
    except BaseException as error:
        if (account := account_of(error)) is not None:
            error.add_note(account)
        _show_from(str(main.__file__), error)
        raise  # Python ends the process with the script's own status


def _show_from(file: str, error: BaseException) -> None:
    """Show an uncaught error without the frames of the command above the script's."""
    show = sys.excepthook

    def show_from_script(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        while value is error and trace is not None and trace.tb_frame.f_code.co_filename != file:
            trace = trace.tb_next
        show(kind, value.with_traceback(trace), trace)

    sys.excepthook = show_from_script
