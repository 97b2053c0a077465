"""List the names of an installed package's modules from its sources. Nothing of it is imported or run.

What `transformers` does at its import is followed: lazy import structures, star imports, aliases of moved modules.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import re
from pathlib import Path

# Where a package says which names its lazy module has, and which modules have another name today.
_STRUCTURE = "import_structure"
_ALIASES = "_LEGACY_MODULE_ALIASES"
_EXPORTED = re.compile(r"^__all__ *(?:\+?=|: *[^=]+=) *[\[(](.*?)[\])]", re.MULTILINE | re.DOTALL)
_DEFINED = re.compile(r"^(?:class|def) (\w+)", re.MULTILINE)
_WORD = re.compile(r"""["'](\w+)["']""")
_FAST = ("TokenizerFast", "ImageProcessorFast")
# Places without public names, such as dummies of absent packages, tests, tools and single models.
_NO_HOMES = ("models", "cli", "commands", "exporters", "testing_utils.py")


class _Module(ast.NodeVisitor):
    """The names that a module's source binds outside of functions and classes."""

    def __init__(self, text: str) -> None:
        self.names: set[str] = set()
        self.stars: list[tuple[int, str]] = []
        self.aliases: dict[str, str] = {}
        with contextlib.suppress(SyntaxError):  # of a newer Python: nothing of it is known
            tree = ast.parse(text)
            self.visit(tree)
            if "__getattr__" in self.names:  # the names are in the module's lists and dicts
                self.names.update(*(_words(one.value) for one in tree.body if isinstance(one, ast.Assign)))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.names.add(node.name)

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # noqa: N815 - the names of `ast`

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*" and isinstance(node, ast.ImportFrom):
                self.stars.append((node.level, node.module or ""))
            else:
                self.names.add(alias.asname or alias.name.partition(".")[0])

    visit_ImportFrom = visit_Import  # noqa: N815 - the names of `ast`

    def visit_For(self, node: ast.For) -> None:
        """Add the words of a loop that binds its words as names."""
        if any("globals()[" in ast.unparse(one) for one in node.body):
            self.names |= _words(node.iter)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.names.add(node.id)

    def visit_Assign(self, node: ast.Assign | ast.AugAssign | ast.Expr) -> None:
        """Add the names of a lazy module's structure, and modules' aliases, that a statement sets."""
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node.value)]
        first: ast.AST = targets[0]
        while isinstance(first, (ast.Subscript, ast.Attribute, ast.Call)):
            first = first.func if isinstance(first, ast.Call) else first.value
        subject = first.id if isinstance(first, ast.Name) else ""
        if subject.endswith(_STRUCTURE):
            self.names |= {word.partition(".")[0] for one in (*targets, node.value) for word in _words(one)}
        elif subject == _ALIASES and isinstance(node.value, ast.Dict):
            self.aliases |= ast.literal_eval(node.value)
            self.names |= set(self.aliases)
        self.generic_visit(node)

    visit_AugAssign = visit_Expr = visit_Assign  # noqa: N815 - the names of `ast`


class InstalledNames:
    """The names of one package's modules. Each file is read once. An instance stays as long as the process."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found: dict[tuple[str, str], bool] = {}

    @functools.cached_property
    def version(self) -> str:
        """The package's version, as its source or its installation has it; empty where neither does."""
        found = re.search(r"^__version__ *= *[\"']([^\"']+)", _text(self._root / "__init__.py"), re.MULTILINE)
        if found is not None:
            return found[1]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(self._root.name)
        return ""

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

    def can_import(self, path: str) -> bool:
        """Return whether `from module import name` works for `module.name`. A module's attribute is not a module."""
        return self.is_module(path.rpartition(".")[0]) and self.has(path)

    def is_module(self, path: str) -> bool:
        return self._file(path) is not None

    @functools.cache  # noqa: B019 - the instance stays
    def homes(self, name: str) -> tuple[str, ...]:
        """Return the modules from which a name can be imported: the top level, or else those that define it."""
        if self._has_name(self._root.name, name):
            return (self._root.name,)
        defined = re.compile(rf"^(?:class|def|async def) {name}\b|^{name} *(?::[^=\n]+)?=[^=]", re.MULTILINE)
        homes = []
        for path in sorted(self._root.rglob("*.py")):
            inner = path.relative_to(self._root)
            if inner.parts[0] not in _NO_HOMES and not inner.name.startswith("dummy_") and defined.search(_text(path)):
                parts = inner.with_suffix("").parts
                homes.append(".".join((self._root.name, *(parts[:-1] if parts[-1] == "__init__" else parts))))
        return tuple(homes)

    def outermost_home(self, name: str) -> str:
        """Return the shortest module path from which a name can be imported; empty if it is gone."""
        for home in self.homes(name):
            parts = home.split(".")
            outer = (".".join(parts[:length]) for length in range(1, len(parts)))
            return next((module for module in outer if self._has_name(module, name)), home)
        return ""

    @functools.cache  # noqa: B019 - the instance stays
    def forward_of(self, model: str) -> ast.FunctionDef | None:
        """Return the source of a model's `forward`, its own or that of a base; None if there is none."""
        defined = re.compile(rf"^class {model}\b", re.MULTILINE)
        paths = (*sorted(self._root.glob("models/*/modeling_*.py")), self._root / "modeling_layers.py")
        text = next((text for path in paths if path.is_file() and defined.search(text := _text(path))), "")
        for kind in ast.parse(text).body:
            if isinstance(kind, ast.ClassDef) and kind.name == model:
                found = (one for one in kind.body if isinstance(one, ast.FunctionDef) and one.name == "forward")
                bases = (self.forward_of(one.id) for one in kind.bases if isinstance(one, ast.Name))
                return next(found, None) or next((one for one in bases if one is not None), None)
        return None

    @functools.cached_property
    def _definitions(self) -> dict[str, list[Path]]:
        """The files that define a function or a class, by its name. One that defines it twice is there twice."""
        found: dict[str, list[Path]] = {}
        for path in (one for one in sorted(self._root.rglob("*.py")) if "tests" not in one.parts):
            for name in _DEFINED.findall(_text(path)):
                found.setdefault(name, []).append(path)
        return found

    @functools.cache  # noqa: B019 - the instance stays
    def keywords_of(self, path: str) -> frozenset[str] | None:
        """Return the keywords that a function or a class takes. None if the sources do not tell."""
        name = path.rpartition(".")[2]
        files = self._definitions.get(name, ())
        body = ast.parse(_text(files[0])).body if len(files) == 1 else []  # two of a name may differ
        kinds = (one for one in body if isinstance(one, (ast.ClassDef, ast.FunctionDef)))
        maker = next((one for one in kinds if one.name == name), None)
        if isinstance(maker, ast.ClassDef):
            methods = (one for one in maker.body if isinstance(one, ast.FunctionDef))
            maker = next((one for one in methods if one.name == "__init__"), None)
        if maker is None or maker.args.kwarg is not None:
            return None
        return frozenset(one.arg for one in (*maker.args.args, *maker.args.kwonlyargs))

    def _has_name(self, module: str, name: str) -> bool:
        read, key = self._read(module), (module, name)
        if read is None or name in read.names or key in self._found:
            return read is not None and self._found.get(key, True)
        self._found[key] = False  # for star imports in a circle
        # Of hundreds of models the one that a class is named after comes first
        stems = {star: star[1].rpartition(".")[2].replace("_", "") for star in read.stars}
        by_name = sorted(read.stars, key=lambda star: not name.lower().startswith(stems[star]))
        places = [self._absolute(module, *star) for star in by_name]
        self._found[key] = any(self.exports(one, name) or one in self._compiled for one in places) or (
            # Since 5.0 the one class of each kind answers to the name of the fast one, too
            name.endswith(_FAST) and self._has_name(module, name.removesuffix("Fast"))
        )
        return self._found[key]

    def exports(self, module: str, name: str) -> bool:
        """Return whether a star import of a module binds a name."""
        file = self._file(module)
        exported = None if file is None else _exports_of(file)
        if file is None or exported is not None:
            return exported is not None and name in exported
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

    @functools.cached_property
    def _compiled(self) -> set[str]:
        """Modules without a source, so that their names are not known."""
        places = (path.relative_to(self._root.parent) for path in self._root.rglob("*.*.so"))
        return {".".join([*place.parent.parts, place.name.partition(".")[0]]) for place in places}

    @functools.cache  # noqa: B019 - the instance stays
    def _file(self, module: str) -> Path | None:
        """Return a module's file; for one that has another name today, that one's."""
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

    @functools.cache  # noqa: B019 - the instance stays
    def _read(self, module: str) -> _Module | None:
        file = self._file_of(module) if module == self._root.name else self._file(module)
        return None if file is None else _Module(_text(file))


@functools.cache
def _exports_of(file: Path) -> frozenset[str] | None:
    lists = _EXPORTED.findall(_text(file))
    return frozenset(word for one in lists for word in _WORD.findall(one)) if lists else None


_names_at = functools.cache(InstalledNames)


def installed_names(package: str) -> InstalledNames | None:
    """Return the names of a package that Python would import from here; None where there is none."""
    spec = importlib.machinery.PathFinder.find_spec(package)
    origin = None if spec is None else spec.origin
    return None if origin is None or not origin.endswith("__init__.py") else _names_at(Path(origin).parent)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _words(node: ast.AST) -> set[str]:
    return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
