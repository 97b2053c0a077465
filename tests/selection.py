"""Which tests run, and in which order (a plugin of pytest, used by `tests/run.py`).

`--quick` leaves the fastest tests of each file, as many as take some seconds; fewer where they start processes or
compare whole runs. `--changed REV` leaves the tests of what was changed since a commit and of what imports it. Files
come longest first, by the recorded durations, so that no worker idles at the end. Those that are not recorded come
before: they may be long. First of all come the files that fork, while no other test has filled the worker with threads:
a fork inherits their locks, and may wait for one for ever. `--record` writes the durations anew.
"""

from __future__ import annotations

import ast
import gc
import json
import math
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGE = ROOT / "hf_compat"
DURATIONS = TESTS / "durations.json"
# Tests of whole runs stand above every module: a change of the package takes a sample of them.
WHOLE_RUNS = ("parity", "distributed", "faults", "libraries", "scripts", "examples", "releases", "house", "")
STARTS_PROCESSES = re.compile(r"\b(subprocess|sys\.executable|os\.fork|forking|launching|multiprocessing)\b")
FORKS = re.compile(r"\bforking\b|\bos\.fork\(")
# In `--quick` the tests of a file run, fastest first, until they have taken so long. Of a file that starts processes
# none runs if the fastest takes longer than `SECONDS_OF_A_TEST`.
SECONDS_OF_A_FILE = 3.0
SECONDS_IF_IT_STARTS_PROCESSES = 1.5
SECONDS_OF_A_TEST = 2.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection of tests")
    group.addoption("--quick", action="store_true", help="the fastest tests of each file")
    group.addoption("--changed", metavar="REV", help="tests of what was changed since a commit, and of what imports it")
    group.addoption("--record", action="store_true", help="write tests/durations.json anew")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all files are imported: none of that is garbage
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    recorded = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
    keys = {path: _place(path, recorded) for path in {item.path for item in items}}
    items.sort(key=lambda item: keys[item.path])
    chosen = items
    if since := config.getoption("--changed"):
        changed = Changed(changed_files(since))
        chosen = [item for item in items if changed.concerns(item.path)]
        sample = set(_sampled([item for item in items if changed.samples(item.path)], recorded))
        chosen += [item for item in items if item in sample and item not in set(chosen)]
    if config.getoption("--quick"):
        chosen = list(_sampled(chosen, recorded))
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


def pytest_collection_finish() -> None:
    gc.enable()


def _place(path: Path, recorded: dict[str, dict[str, float]]) -> tuple[bool, float, Path]:
    """Where a file comes among the others."""
    return not FORKS.search(path.read_text()), -sum(recorded.get(_name(path), {"": math.inf}).values()), path


def _name(path: Path) -> str:
    return str(path.relative_to(TESTS))


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2].partition("[")[0]


def _sampled(items: list[pytest.Item], recorded: dict[str, dict[str, float]]) -> Iterator[pytest.Item]:
    """Yield the fastest tests of each file, at least one."""
    of_files = defaultdict(list)
    for item in items:
        of_files[item.path].append(item)
    for path, tests in of_files.items():
        starts = STARTS_PROCESSES.search(path.read_text()) or path.parent.name in WHOLE_RUNS
        most = SECONDS_IF_IT_STARTS_PROCESSES if starts else SECONDS_OF_A_FILE
        took = recorded.get(_name(path), {})
        counts = defaultdict(int)
        for test in tests:
            counts[_function(test)] += 1
        each = {name: took.get(name, most) / count for name, count in counts.items()}
        spent, kept = 0.0, set()
        for test in sorted(tests, key=lambda test: each[_function(test)]):
            seconds = each[_function(test)]
            spent += seconds
            if (kept and spent > most) or (starts and seconds > SECONDS_OF_A_TEST):
                break
            kept.add(test)
        if len(kept) < len(tests):
            kept -= {test for test in tests if test.get_closest_marker("whole_file")}
        yield from (test for test in tests if test in kept)


def changed_files(since: str) -> list[Path]:
    """List what differs from a commit, committed or not."""
    asked = (["git", "diff", "--name-only", since], ["git", "ls-files", "--others", "--exclude-standard"])
    answers = [subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout for words in asked]
    return [ROOT / name for name in "".join(answers).splitlines()]


class Changed:
    """What a change concerns.

    Args:
        files: The files that it touches.
    """

    def __init__(self, files: list[Path]) -> None:
        sources = [path for folder in (PACKAGE, TESTS) for path in folder.rglob("*.py")]
        importers = defaultdict(set)
        for path in sources:
            for imported in _imported(path):
                importers[imported].add(path)
        self.everything = any(_is_of_all(path) for path in files)
        self.concerned, waiting = set(), list(files)
        while waiting:
            path = waiting.pop()
            if path not in self.concerned:
                self.concerned.add(path)
                waiting += importers[path]
        self.of_package = any(PACKAGE in path.parents for path in files)
        self.of_docs = any(path.parent == ROOT / "docs" for path in files)
        self.rooms = {_room(path) for path in self.concerned if PACKAGE in path.parents}

    def concerns(self, test: Path) -> bool:
        """Whether all tests of a file are to run."""
        folder = _name(test).rpartition("/")[0]
        is_of_room = folder in self.rooms and folder not in WHOLE_RUNS
        return (
            self.everything
            or is_of_room
            or (self.of_docs and folder == "docs")
            or (test in self.concerned and folder in ("", *self.rooms))
            or (test in self.concerned and not self.of_package)
        )

    def samples(self, test: Path) -> bool:
        """Whether a sample of a file's tests is to run: those of whole runs, and of docs and forms."""
        return self.of_package and (test.parent.name in WHOLE_RUNS or test.parent == TESTS)


def _is_of_all(path: Path) -> bool:
    return path.name in ("pyproject.toml", "conftest.py", "constraints.txt") or path.parent.name == "warm_python"


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imported(path: Path) -> Iterator[Path]:
    """Yield the files of the package and of the tests that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            for folder in (ROOT, TESTS, path.parent):
                place = folder / name.replace(".", "/")
                yield from (found for found in (place.with_suffix(".py"), place / "__init__.py") if found.is_file())


class Recorder:
    """Adds up how long the tests of each function took, set-up included, and writes it."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, test = report.nodeid.partition("::")
        self.seconds[file.removeprefix("tests/")][test.partition("[")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
        found = {file: {test: round(took, 2) for test, took in tests.items()} for file, tests in self.seconds.items()}
        kept = {file: tests for file, tests in {**known, **found}.items() if (TESTS / file).is_file()}
        lines = [f"{json.dumps(file)}: {json.dumps(kept[file], sort_keys=True)}" for file in sorted(kept)]
        DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
