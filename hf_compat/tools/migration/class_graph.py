"""Follow classes and imports into other files of a folder. Nothing is imported or run."""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LONGEST_CHAIN = 20
_PACKAGES = ("transformers", "hf_compat")
_MOST_FILES = 200  # of one source's imports
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BUILD_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
_HIGHEST = 6  # folders above a file in which the modules that it imports are looked for


class Ancestry(NamedTuple):
    """A class of another file: what it is of transformers, and the classes between, the nearest first."""

    name: str  # in transformers, as `transformers.Trainer`
    classes: tuple[ast.ClassDef, ...]
    files: tuple[Path, ...]  # of the classes

    @property
    def own_parameters(self) -> set[str]:
        """The parameters of the constructors, and the texts in them, such as the keys of `**keywords`."""
        makers = [one for kind in self.classes for one in kind.body if isinstance(one, ast.FunctionDef)]
        found: set[str] = set()
        for maker in (one for one in makers if one.name == "__init__"):
            found |= {one.arg for one in (*maker.args.args, *maker.args.kwonlyargs)}
            texts = (one.value for one in ast.walk(maker) if isinstance(one, ast.Constant))
            found |= {one for one in texts if isinstance(one, str)}
        return found

    @property
    def own_fields(self) -> set[str]:
        """The annotated fields of the classes."""
        fields = (one.target for kind in self.classes for one in kind.body if isinstance(one, ast.AnnAssign))
        return {one.id for one in fields if isinstance(one, ast.Name)}


class ClassGraph:
    """The classes that a source imports from files of its folder.

    Args:
        file: The source's own file. None if it has none, and nothing is followed.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def ancestry(self, path: str) -> Ancestry | None:
        """Follow an imported name, `module.Class`, with leading dots if the import is relative."""
        return None if self._file is None else _followed(self._file, path, ())

    def has_beside(self, module: str) -> bool:
        """Whether a module lies beside the source, where a script finds it before an installed one."""
        place = None if self._file is None else self._file.with_name(module)
        return place is not None and (place.with_name(f"{module}.py").is_file() or (place / "__init__.py").is_file())

    def files_imported(self, text: str) -> Iterator[tuple[int, Path]]:
        """Yield the files of the folder that run when a source runs, with the source's line that leads there.

        Imports in functions, and those in a `try` or an `if`, may never run.
        """
        waiting = [] if self._file is None else [(one.lineno, self._file, one) for one in _plain_imports(_parsed(text))]
        seen = {self._file}
        for line, importer, node in waiting:  # grows on the way
            for home in _homes_of(importer, node):
                if home not in seen and len(seen) < _MOST_FILES:
                    seen.add(home)
                    yield line, home
                    waiting += [(line, home, one) for one in _plain_imports(_read(home))]

    def leads_to_transformers(self, text: str) -> bool:
        """Whether a source imports a file of its folder that names transformers, itself or by a further one."""
        return self._file is not None and "import" in text and _leads(self._file, _parsed(text), {self._file})


def lines_of_plain_imports(file: Path) -> set[int]:
    """The lines of a file on which an import begins that runs whenever the file is imported."""
    return {one.lineno for one in _plain_imports(_read(file))}


def lines_reached_by(file: Path, name: str) -> set[int]:
    """The lines of a file that run when its class is used: module level, the class, and what these name."""
    body = _read(file).body
    definitions = {one.name: one for one in body if isinstance(one, _DEFINITIONS)}
    waiting: list[ast.AST] = [one for one in body if not isinstance(one, _DEFINITIONS) and not _is_of_scripts(one)]
    waiting += [definitions.pop(name)] if name in definitions else []
    for node in waiting:  # grows on the way
        named = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        waiting += [definitions.pop(one) for one in sorted(named & definitions.keys())]
    reached = [one for one in waiting if isinstance(one, ast.stmt)]
    return {line for one in reached for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}


def _is_of_scripts(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__":`, which does nothing in a file that is imported."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _plain_imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [one for one in tree.body if isinstance(one, (ast.Import, ast.ImportFrom))]


def _homes_of(file: Path, node: ast.Import | ast.ImportFrom) -> Iterator[Path]:
    """Yield the files of the folder that an import runs."""
    if isinstance(node, ast.Import):
        paths = [one.name for one in node.names]
    else:
        module = "." * node.level + (node.module or "")
        joint = "" if module.endswith(".") else "."
        paths = [module, *(f"{module}{joint}{one.name}" for one in node.names)]
    for path in paths:
        # A script finds a module of one name beside itself alone. Folders above may be on the path by their packages,
        # and a repository's own package is installed from there.
        home = _file_of(file, path)
        if home is not None and ("." in path or home.parent in (file.parent, file.parent / path) or _is_built(home)):
            yield from _packages_around(file, path)
            yield home


def _is_built(home: Path) -> bool:
    """Whether a file begins a package beside the file by which its repository builds it."""
    return home.name == "__init__.py" and any((home.parents[1] / name).is_file() for name in _BUILD_FILES)


def _packages_around(file: Path, path: str) -> Iterator[Path]:
    """Yield the `__init__.py` of the packages around a module, which run before it."""
    parts = [] if path.startswith(".") else path.split(".")[:-1]  # packages of a relative import run already
    for place in (_file_of(file, ".".join(parts[:length])) for length in range(1, len(parts) + 1)):
        if place is not None and place.name == "__init__.py":
            yield place


def _leads(file: Path, tree: ast.Module, seen: set[Path]) -> bool:
    imports = _imports_of(tree).values()
    homes = (_file_of(file, module) for path in imports for module in (path, path.rpartition(".")[0]))
    for home in homes:
        if home is None or home in seen:
            continue
        seen.add(home)
        tree = _read(home)
        if any(path.lstrip(".").partition(".")[0] in _PACKAGES for path in _imports_of(tree).values()):
            return True
        if len(seen) <= _LONGEST_CHAIN and _leads(home, tree, seen):
            return True
    return False


def _followed(file: Path, path: str, before: tuple[tuple[Path, str], ...]) -> Ancestry | None:
    """Follow a name that a file imports."""
    if path.partition(".")[0] in _PACKAGES:
        return Ancestry(path, (), ())
    module, _, name = path.rpartition(".")
    home = _file_of(file, module)
    if home is None or (home, name) in before or len(before) > _LONGEST_CHAIN:
        return None
    return _of_name(home, name, (*before, (home, name)))


def _of_name(home: Path, name: str, before: tuple[tuple[Path, str], ...]) -> Ancestry | None:
    """Follow a name of a file: an import, or a class with its bases."""
    tree = _read(home)
    imports = _imports_of(tree)
    kind = next((one for one in reversed(tree.body) if isinstance(one, ast.ClassDef) and one.name == name), None)
    if kind is None:
        return _followed(home, imports[name], before) if name in imports else None
    for base in map(_dotted, kind.bases):
        first, _, rest = base.partition(".")
        if first in imports:
            above = _followed(home, f"{imports[first]}.{rest}" if rest else imports[first], before)
        elif base and (home, base) not in before:
            above = _of_name(home, base, (*before, (home, base)))
        else:
            above = None
        if above is not None:
            return Ancestry(above.name, (kind, *above.classes), (home, *above.files))
    return None


def _file_of(file: Path, module: str) -> Path | None:
    """Find the file of a module that another file imports."""
    dots = len(module) - len(module.lstrip("."))
    parts = [part for part in module.lstrip(".").split(".") if part]
    folders = [file.parents[dots - 1]] if 0 < dots <= len(file.parents) else list(file.parents)[:_HIGHEST]
    for folder in folders if parts or dots else ():
        place = folder.joinpath(*parts)
        for found in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if found.is_file() and found != file:
                return found
    return None


@functools.lru_cache(maxsize=500)
def _imports_of(tree: ast.Module) -> dict[str, str]:
    """Return the full names of what a module imports, by the names that it binds."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            joint = "" if module.endswith(".") else "."
            found |= {one.asname or one.name: f"{module}{joint}{one.name}" for one in node.names if one.name != "*"}
        elif isinstance(node, ast.Import):
            for one in node.names:
                top = one.name.partition(".")[0]
                found[one.asname or top] = one.name if one.asname else top
    return found


@functools.lru_cache(maxsize=500)
def _read_at(file: Path, changed: int) -> ast.Module:
    return _parsed(file.read_text(encoding="utf-8", errors="replace"))


def _read(file: Path) -> ast.Module:
    return _read_at(file, file.stat().st_mtime_ns)


def _parsed(text: str) -> ast.Module:
    """Parse a source. One that Python cannot read has nothing in it: what reads it for itself says why."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the user's strings
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (outer := _dotted(node.value)):
        return f"{outer}.{node.attr}"
    return ""
