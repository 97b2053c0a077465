"""Who may import whom, read off the source; file lengths; what the docs must hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hf_compat"

# Modules that stand for those of transformers.
MIRRORS = (
    "trainer_utils",
    "trainer_callback",
    "trainer_pt_utils",
    "debug_utils",
    "integrations",
    "trainer_seq2seq",
    "training_args",
    "training_args_seq2seq",
    "optimization",
)

# From the lowest room to the highest: each may import those before it, and itself.
ROOMS = (
    "errors",
    "upstream",
    "runtime",
    "hf",
    "interop",
    "data",
    "optim",
    "plan",
    "checkpoint",
    "engine",
    "training_run",
    "callbacks",
    "hub",
    "search",
    "trainer_methods",
    "native",
    "trainer",
    "cli",
    "tools",
    "__main__",
)
# From the lowest tool to the highest, and what serves several of them.
TOOLS = (
    "terminal",
    "explanation",
    "isolation",
    "until_train",
    "preflight",
    "curves",
    "comparison",
    "migration",
    "ejection",
    "commands",
)
# What the core may ask of a tool, where the user asks for it by a method or by `run`: never at the top of a file.
ASKED_FOR = {
    ("trainer.py", "hf_compat.tools.preflight.checking"),
    ("trainer.py", "hf_compat.tools.preflight.diagnosis"),
    ("trainer.py", "hf_compat.tools.preflight.report"),
    ("interop/user_script.py", "hf_compat.tools.migration.gone_names"),
    ("interop/user_script.py", "hf_compat.tools.migration.rank_comparisons"),
}
# Rooms that name no Lightning at all.
SPEAK_NO_LIGHTNING = {"errors", "runtime", "hf", "interop", "data", "optim", "plan"}
# Where transformers may be named at all: in functions, after it was found loaded.
MAY_NAME_GUESTS = {"interop"}
GUESTS = {"transformers", "peft", "datasets", "accelerate"}


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer_of(path: Path) -> str:
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "trainer" if layer in MIRRORS else layer


def imports(path: Path) -> list[tuple[str, bool]]:
    """List the modules that a file imports, and whether at its top level."""
    tree = ast.parse(path.read_text())
    top = set(ast.walk(ast.Module([n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))], [])))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node in top))
    return found


def may_import(layer: str, name: str) -> bool:
    package, _, rest = name.partition(".")
    if package == "hf_compat" and rest:
        return rest.split(".")[0] in ROOMS[: ROOMS.index(layer) + 1]
    if package in ("lightning", "lightning_utilities"):
        return layer not in SPEAK_NO_LIGHTNING
    return package not in GUESTS or layer in MAY_NAME_GUESTS


def test_a_layer_may_import_what_stands_below_it():
    assert may_import("trainer", "hf_compat.engine.loop") and not may_import("engine", "hf_compat.trainer")
    assert may_import("engine", "lightning.pytorch") and not may_import("plan", "lightning.pytorch")
    assert may_import("interop", "transformers") and not may_import("engine", "transformers.trainer")


def test_no_file_imports_what_its_layer_may_not():
    files = {str(path.relative_to(PACKAGE)): path for path in modules()}
    assert "trainer.py" in files, "the search finds the files"
    assert {layer_of(path) for path in files.values()} <= set(ROOMS), "every file stands in a room"
    offenders = [
        f"{file} imports {name}"
        for file, path in files.items()
        for name, is_top in imports(path)
        if not may_import(layer_of(path), name) and (is_top or (file, name) not in ASKED_FOR)
    ]
    assert offenders == [], "\n".join(offenders)


def test_a_tool_imports_no_higher_one():
    for path in (PACKAGE / "tools").rglob("*.py"):
        own = path.relative_to(PACKAGE / "tools").parts[0].removesuffix(".py")
        for name, _ in imports(path):
            if name.startswith("hf_compat.tools.") and own != "__init__":
                other = name.split(".")[2]
                assert TOOLS.index(other) <= TOOLS.index(own), f"{path} imports {name}"


@pytest.mark.real_python
def test_the_core_loads_no_tool():
    script = "import hf_compat.trainer, hf_compat.native.module, sys; print([n for n in sys.modules if '.tools' in n])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not [name for name in ast.literal_eval(result.stdout) if name.startswith("hf_compat.")], result.stdout


def test_guests_are_never_imported_at_the_top():
    for path in modules():
        for name, is_top in imports(path):
            assert not (is_top and name.split(".")[0] in GUESTS), f"{path} imports {name}"


def test_there_are_no_cycles():
    graph = {}
    for path in modules():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = {imported for imported, is_top in imports(path) if is_top and imported.startswith("hf_compat.")}

    seen = set()

    def visit(name, trail):
        assert name not in trail, " → ".join([*trail[trail.index(name) :], name])
        if name not in seen:
            seen.add(name)
            for following in graph.get(name, ()):
                visit(following, [*trail, name])

    for name in graph:
        visit(name, [])


def test_no_file_is_longer_than_700_lines():
    for folder in ("hf_compat", "tests", "examples", ".setup"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 700, path


def test_the_public_names_are_the_documented_ones():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    import hf_compat

    assert typed == set(hf_compat.__all__)
    for name in hf_compat.__all__:
        assert getattr(hf_compat, name).__doc__, name


def test_the_top_level_is_the_agreed_one():
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    leftovers = {"main_job_output", "trainer_output", "tmp_trainer", "build", "hf_compat.egg-info"}
    assert names - leftovers == {"pyproject.toml", "hf_compat", "tests", "examples", "docs", "README.md"}
