"""Which tests reach which statement: one run of all tests over an instrumented view of the package.

Every statement of a function sets a byte of a shared file first. Only the compiled files differ from the sources, so
every interpreter that a test starts or forks runs them, also one that is killed. Each worker has a file of its own; a
process writes into that of the worker among its ancestors, so a test is credited with what its processes do. What a
fixture of a module or a session does is credited to every test that takes the fixture.

Coverage.py would do the same with dynamic contexts, but not for processes that are killed or leave by `os._exit`, and
a fork of the warm process would write to the test that started the warm process.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib._bootstrap_external as bootstrap
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from mutation import view
from mutation.view import ROOT

PACKAGE = ROOT / "hf_compat"
HITS = """
import builtins, ctypes, mmap, os

FOLDER, SIZE = {folder!r}, {size}

def _file(process):
    try:
        while process > 0:
            path = f"{{FOLDER}}/{{process}}"
            if os.path.exists(path):
                return path
            # a launcher that was forked from the warm process descends from no worker, but writes into one's file
            with open(f"/proc/{{process}}/maps") as maps:
                taken = {{line.split()[-1] for line in maps if FOLDER in line}} - {{FOLDER + "/none"}}
            if taken:
                return taken.pop()
            with open(f"/proc/{{process}}/stat") as stat:
                process = int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        pass
    return FOLDER + "/none"

def attach(process):
    number = os.open(_file(process), os.O_RDWR)
    mapped = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), 3, 0x11, number, ctypes.c_long(0))
    os.close(number)
    assert mapped == address

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
hits = builtins.__hits__ = mmap.mmap(-1, SIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(hits))
attach(os.getpid())
"""
AT_IMPORT = """
import importlib, os, pathlib, sys
import hf_compat_hits

sys.path.insert(0, "tests")
from warm_python import imports

pathlib.Path(hf_compat_hits.FOLDER, str(os.getpid())).write_bytes(bytes(hf_compat_hits.SIZE))
hf_compat_hits.attach(os.getpid())
for name in imports._ours():
    importlib.import_module(name)
pathlib.Path(sys.argv[1]).write_bytes(hf_compat_hits.hits[:])
"""
FORKS_ATTACH = """

_plainly = _take_place

def _take_place(facts, streams, loaded):
    import hf_compat_hits
    hf_compat_hits.attach(facts["process"])
    _plainly(facts, streams, loaded)
"""


def statements(tree: ast.Module) -> Iterator[tuple[list[ast.stmt], int, str, ast.stmt]]:
    """Yield each statement inside of a function: its list, its place there, the function's name and itself."""

    def visit(node: ast.AST, name: str, is_function: bool) -> Iterator[tuple[list[ast.stmt], int, str, ast.stmt]]:
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue
            for place, child in enumerate(block):
                own = name
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    own = f"{name}.{child.name}" if name else child.name
                if is_function and isinstance(child, ast.stmt) and not _is_docstring(child):
                    yield block, place, name, child
                is_inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from visit(child, own, is_function or is_inside)

    yield from visit(tree, "", False)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def instrument(path: Path, first: int) -> list[list]:
    """Write a file's compiled form in which statements set their byte.

    Returns:
        For each statement its file and function, a digest of the function, and the first and the last line in it.
    """
    text = path.read_text()
    functions = digests(text)
    tree = ast.parse(text)
    found = list(statements(tree))
    for number, (block, place, _, node) in sorted(enumerate(found), key=lambda one: -one[1][1]):
        store = ast.parse(f"__hits__[{first + number}] = 1").body[0]
        for part in ast.walk(store):
            if hasattr(part, "lineno"):
                part.lineno = part.end_lineno = node.lineno
        block.insert(place, store)
    start = 1 if tree.body and _is_docstring(tree.body[0]) else 0
    while start < len(tree.body) and getattr(tree.body[start], "module", "") == "__future__":
        start += 1
    tree.body.insert(start, ast.parse("import hf_compat_hits").body[0])
    code = compile(tree, str(path), "exec", dont_inherit=True)
    compiled = Path(importlib.util.cache_from_source(str(path)))
    compiled.parent.mkdir(exist_ok=True)
    compiled.unlink(missing_ok=True)
    compiled.write_bytes(bootstrap._code_to_hash_pyc(code, importlib.util.source_hash(text.encode()), False))
    file = str(path.relative_to(ROOT))
    rows = ((*functions[name], name, node) for _, _, name, node in found)
    return [[file, name, digest, node.lineno - start, node.end_lineno - start] for start, digest, name, node in rows]


def digests(text: str) -> dict[str, tuple[int, str]]:
    """Find where each function of a text begins, and a digest of it."""
    lines, found = text.splitlines(), {}

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            own = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own = f"{name}.{child.name}" if name else child.name
                body = "\n".join(lines[child.lineno - 1 : child.end_lineno])
                found[own] = (child.lineno, hashlib.sha1(body.encode()).hexdigest()[:12])
            visit(child, own)

    visit(ast.parse(text), "")
    return found


def record(arguments: list[str], keep: Path, known: list[str]) -> tuple[list[list], list[dict], bytes]:
    """Run tests over an instrumented view; return the statements, what each test and what the import has reached.

    Args:
        arguments: Of pytest.
        keep: A folder for what is found; what an earlier run has left in it is taken as well.
        known: Tests that need not run.
    """
    keep.mkdir(parents=True, exist_ok=True)
    (keep / "known.json").write_text(json.dumps(known))
    with tempfile.TemporaryDirectory(prefix="hf_compat-reach-") as folder:
        pid = os.fork()
        if pid == 0:
            view.enter(Path(folder))
            os._exit(_recorded(Path(folder), arguments, keep))
        os.waitpid(pid, 0)
    found = [json.loads(line) for path in keep.glob("*.jsonl") for line in path.read_text().splitlines()]
    return json.loads((keep / "statements.json").read_text()), found, (keep / "at_import").read_bytes()


def _recorded(folder: Path, arguments: list[str], keep: Path) -> int:
    if first := os.fork():  # process 1 of the namespace: all others end with it
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    view.see_processes()
    table: list[list] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        table += instrument(path, len(table))
    (keep / "statements.json").write_text(json.dumps(table))
    hits = folder / "hits"
    hits.mkdir()
    (hits / "none").write_bytes(bytes(len(table)))
    site = next((ROOT / ".venv" / "lib").glob("python3*")) / "site-packages"
    (site / "hf_compat_hits.py").write_text(HITS.format(folder=str(hits), size=len(table)))
    tests = ROOT / "tests"
    with (tests / "warm_python" / "child.py").open("a") as file:
        file.write(FORKS_ATTACH)
    with (tests / "conftest.py").open("a") as file:
        file.write(f'\npytest_plugins.append("mutation.recorder")\nos.environ["REACHED_KEEP"] = {str(keep)!r}\n')
    python = str(ROOT / ".venv" / "bin" / "python")
    subprocess.run([python, "-c", AT_IMPORT, str(keep / "at_import")], cwd=ROOT, check=True)
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    print(subprocess.run(command, cwd=ROOT).returncode, flush=True)
    sys.stdout.flush()
    return 0


def state_of_package() -> str:
    """Name the present sources: what was recorded of others is not taken for theirs."""
    texts = b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))
    return hashlib.sha1(texts).hexdigest()[:12]


def packed(hits: bytes) -> str:
    """Write bytes of 0 and 1 as text."""
    return base64.b64encode(zlib.compress(hits)).decode()


def unpacked(text: str) -> bytes:
    """Read what `packed` has written."""
    return zlib.decompress(base64.b64decode(text))
