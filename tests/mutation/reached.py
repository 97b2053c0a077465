"""The map of which tests reach which statement, `tests/reached.json.xz`: writing it, and asking it.

A statement is found by its function and its place in it. Of a function that has changed since the recording, every test
counts that reached any part of it, and so of a statement that none was seen to reach: a compiler or a bare fork may run
it. What runs at the import is reached by all: there the tests come first whose
functions, or whose own text, name what the statement defines.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import lzma
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from functools import cached_property
from pathlib import Path

from mutation import recording
from mutation.places import Change, core
from mutation.view import ROOT

MAP = ROOT / "tests" / "reached.json.xz"
UNKNOWN = 1.001  # seconds of a test that was written since; those of another that was not recorded are known
DURATIONS = ROOT / "tests" / "durations.json"

_ROWS_OF_A_WORD = 40  # test functions that a word of a table's row is in, at most


def write(
    table: list[list], found: list[dict], at_import: bytes, functions: dict[str, str], earlier: Reached | None = None
) -> None:
    """Write the map.

    Args:
        table: The statements.
        found: What each test has reached.
        at_import: What the import has reached.
        functions: The test functions when the recording began.
        earlier: A map from which the other tests are taken over.
    """
    found = sorted(found, key=lambda one: one["test"])
    columns = [recording.unpacked(one["hits"]) for one in found]
    kept = _Kept(earlier, {one["test"] for one in found}, len(found))
    sets: dict[int, int] = {}
    files: dict[str, dict[str, dict]] = {}
    for number, (file, name, digest, first, last) in enumerate(table):
        bits = sum(1 << place for place, column in enumerate(columns) if column[number])
        bits |= kept.bits(file, name, digest, first, last)
        function = files.setdefault(file, {}).setdefault(name, {"digest": digest, "lines": []})
        function["lines"].append([first, last, sets.setdefault(bits, len(sets)), at_import[number]])
    tests = [*_timed(found), *kept.tests]
    size = len(tests) // 8 + 1
    document = {"tests": tests, "sets": [_text_of(one, size) for one in sets], "files": files, "bodies": {}}
    known = {test[0].partition("[")[0] for test in tests}
    document["bodies"] = {name: digest for name, digest in functions.items() if name in known}
    MAP.write_bytes(lzma.compress(json.dumps(document, separators=(",", ":")).encode(), preset=9))


def _text_of(bits: int, size: int) -> str:
    packed = lzma.compress(bits.to_bytes(size, "little"), lzma.FORMAT_RAW, filters=_FILTERS)
    return base64.b85encode(packed).decode()


def _timed(found: list[dict]) -> list[list]:
    """List the tests with their seconds, and those of the fixtures they share, as on an idle machine."""
    usual = json.loads(DURATIONS.read_text())
    took: dict[str, float] = defaultdict(float)
    for one in found:
        took[one["test"].partition("::")[0]] += one["seconds"]
    timed = []
    for one in found:
        file = one["test"].partition("::")[0]
        known = sum(usual.get(file.removeprefix("tests/"), {}).values()) or took[file]
        scale = min(1.0, known / max(took[file], 0.001))
        timed.append([one["test"], round(one["seconds"] * scale, 3), round(one.get("shared", 0.0) * scale, 2)])
    return timed


def bodies(root: Path = ROOT) -> dict[str, str]:
    """Take a digest of every test function that a plain run runs, by the test's id."""
    found = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for name, node in _functions(ast.parse(text), str(path.relative_to(root))):
            marks = [ast.unparse(one) for one in node.decorator_list]
            if not {"pytest.mark.matrix", "pytest.mark.whole_file"} & set(marks):  # of the latter all cases have to run
                body = "\n".join([*marks, *lines[node.lineno - 1 : node.end_lineno]])
                found[name] = hashlib.sha1(body.encode()).hexdigest()[:8]
    return found


def _functions(tree: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        own = f"{name}::{getattr(node, 'name', '')}"
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, own)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield own, node


class _Kept:
    """The tests of an earlier map that were not recorded again, and what they reach of today's statements."""

    def __init__(self, earlier: Reached | None, again: set[str], start: int) -> None:
        self.earlier = earlier
        known = set(earlier.unchanged()) - again if earlier else set()
        places = [place for place, test in enumerate(earlier.tests) if test in known] if earlier else []
        self.tests = [[earlier.tests[one], earlier.seconds[earlier.tests[one]], earlier.shared[earlier.tests[one]]]
                      for one in places]  # fmt: skip
        self._today = {place: start + number for number, place in enumerate(places)}
        self._bits: dict[int, int] = {}

    def bits(self, file: str, name: str, digest: str, first: int, last: int) -> int:
        function = self.earlier.files.get(file, {}).get(name) if self.earlier else None
        if function is None:
            return 0
        is_same = function["digest"] == digest
        joined = 0
        for number in {row[2] for row in function["lines"] if not is_same or row[:2] == [first, last]}:
            if number not in self._bits:
                members = self.earlier.members(number)
                self._bits[number] = sum(1 << self._today[place] for place in members if place in self._today)
            joined |= self._bits[number]
        return joined


_WORD = re.compile(r"\w{4,}")
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6}]


class Reached:
    """The recorded map, beside today's sources."""

    def __init__(self) -> None:
        document = json.loads(lzma.decompress(MAP.read_bytes()))
        self.tests = [one[0] for one in document["tests"]]
        self.seconds = {name: seconds for name, seconds, _ in document["tests"]}
        self.shared = {name: shared for name, _, shared in document["tests"]}
        self.files = document["files"]
        self._known = document["bodies"]
        self._known_files = {name.partition("::")[0] for name in self._known}
        self._sets, self._read, self._today = document["sets"], {}, {}

    @cached_property
    def _bodies(self) -> dict[str, str]:
        return bodies()

    @cached_property
    def there(self) -> set[int]:
        """The places of the recorded tests that exist today."""
        return {place for place, name in enumerate(self.tests) if name.partition("[")[0] in self._bodies}

    @cached_property
    def new(self) -> set[str]:
        """The test functions that were written or changed since."""
        new = {name for name, digest in self._bodies.items() if self._known.get(name) != digest}
        usual = json.loads(DURATIONS.read_text())
        for test in new:
            file, _, name = test.removeprefix("tests/").partition("::")
            self.seconds[test] = usual.get(file, {}).get(name, UNKNOWN)
        return new

    def reaching(self, change: Change) -> list[str]:
        """List the tests that reach a change, those first that are likely to notice it soon."""
        tiers: list[set[int]] = []
        function = self.files.get(change.file, {}).get(change.function) if change.is_inside else None
        at_import = function is None
        if function is not None:
            rows = self._rows(change, function)
            tiers.append(self._union(row[2] for row in rows) or self._union(row[2] for row in function["lines"]))
            at_import = any(row[3] for row in rows) or not tiers[0]
        if at_import:
            tiers += self._at_import(change)
        files = {self.tests[place].partition("::")[0] for tier in tiers[:1] for place in tier}
        new = sorted(self.new, key=lambda test: (self.seconds[test], test))
        # those that are not recorded come first: few are near, and they are often written for what has survived
        ordered = dict.fromkeys(test for test in new if self._is_near(test, change, files))
        for tier in tiers:
            ordered |= dict.fromkeys(self._ordered(tier & self.there, change))
        ordered |= dict.fromkeys(test for test in new if test.partition("::")[0] not in self._known_files)
        return list(ordered)

    def statements(self, wanted: Container[int]) -> Iterator[tuple[str, str, int, int]]:
        """Yield file, function, line and set of each statement that wanted sets of tests reach; where it is today."""
        for file, functions in self.files.items():
            rows = [(name, row) for name, one in functions.items() for row in one["lines"] if row[2] in wanted]
            path = ROOT / file
            today = recording.digests(path.read_text()) if rows and path.is_file() else {}
            yield from ((file, name, today[name][0] + row[0], row[2]) for name, row in rows if name in today)

    def counts(self, *tests: set[str]) -> dict[int, tuple[int, ...]]:
        """Count how many of some tests are in each set, for the sets with one of the first."""
        masks = [sum(1 << place for place, name in enumerate(self.tests) if name in some) for some in tests]
        found = {number: self._bits(number) for number in range(len(self._sets))}
        return {
            number: tuple((bits & mask).bit_count() for mask in masks)
            for number, bits in found.items()
            if bits & masks[0]
        }

    def named(self, number: int) -> set[str]:
        """Return the ids of a set's tests."""
        return {self.tests[place] for place in self.members(number)}

    def unchanged(self) -> list[str]:
        """List the tests that are as they were when they were recorded."""
        return [self.tests[place] for place in self.there if self.tests[place].partition("[")[0] not in self.new]

    def forget(self, path: str) -> None:
        """Take the tests of a folder or file for new."""
        self.new |= {test for test in (name.partition("[")[0] for name in self.tests) if test.startswith(path)}

    def _is_near(self, test: str, change: Change, files: set[str]) -> bool:
        """Whether a test that was not recorded may reach a change: others of its file do, or its folder is about it."""
        file = test.partition("::")[0]
        return file in files or file.startswith(f"tests/{change.room}/")

    def _rows(self, change: Change, function: dict) -> list[list]:
        if change.file not in self._today:
            self._today[change.file] = recording.digests((ROOT / change.file).read_text())
        start, digest = self._today[change.file][change.function]
        if digest != function["digest"]:
            return function["lines"]
        offset = change.line - start
        around = [row for row in function["lines"] if row[0] <= offset <= row[1]]
        smallest = min((row[1] - row[0] for row in around), default=0)
        return [row for row in around if row[1] - row[0] == smallest]

    def _at_import(self, change: Change) -> list[set[int]]:
        names = set(change.names) or {change.function.rpartition(".")[2]}
        named = self._of_functions(names)
        word = re.compile(r"\b(" + "|".join(map(re.escape, sorted(names))) + r")\b")
        texts = {file for file, text in self._texts.items() if word.search(text)}
        in_text = {place for place, test in enumerate(self.tests) if test.partition("::")[0] in texts}
        module = self._union(row[2] for one in self.files.get(change.file, {}).values() for row in one["lines"])
        pages = {place for place, test in enumerate(self.tests) if test.startswith("tests/house/")}  # made of tables
        general = ("tests/docs/", f"tests/{change.room}/", "tests/test_")
        rest = {place for place, test in enumerate(self.tests) if test.startswith(general)}
        return [self._of_row(change), named & in_text, pages, in_text, named, module, rest]

    def _of_row(self, change: Change) -> set[int]:
        """Find the tests that have the rarest word of the changed line, as the key of a table's row."""
        line = (ROOT / change.file).read_text().splitlines()[change.line - 1]
        of_word = {word: self._with_word[word] for word in _WORD.findall(line) if word in self._with_word}
        rarest = min(of_word.values(), key=len, default=frozenset())
        if len(rarest) > _ROWS_OF_A_WORD:  # such as True: they say nothing of the row
            return set()
        return {place for place, test in enumerate(self.tests) if test.partition("[")[0] in rarest}

    @cached_property
    def _with_word(self) -> dict[str, set[str]]:
        """The test functions that have a word, by the word."""
        found: dict[str, set[str]] = defaultdict(set)
        for file, text in self._texts.items():
            lines = text.splitlines()
            for name, node in _functions(ast.parse(text), file):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                for word in _WORD.findall("\n".join(lines[first - 1 : node.end_lineno])):
                    found[word].add(name)
        return found

    def _of_functions(self, names: set[str]) -> set[int]:
        """Find the tests that reach a function which mentions a name."""
        sets = []
        for file, functions in self._mentioned.items():
            for function, words in functions.items():
                if names & words:
                    sets += [row[2] for row in self.files.get(file, {}).get(function, {"lines": []})["lines"]]
        return self._union(sets)

    @cached_property
    def _mentioned(self) -> dict[str, dict[str, set[str]]]:
        found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for path in core():
            for _, _, name, node in recording.statements(ast.parse(path.read_text())):
                words = found[str(path.relative_to(ROOT))][name]
                for one in ast.walk(node):
                    words |= {getattr(one, field, None) for field in ("id", "attr", "arg")} - {None}
        return found

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}

    def _union(self, sets: Iterable[int]) -> set[int]:
        joined: set[int] = set()
        for number in set(sets):
            joined |= self.members(number)
        return joined

    def members(self, number: int) -> frozenset[int]:
        """Find the places of the tests in a set."""
        if number not in self._read:
            places = enumerate(f"{self._bits(number):b}"[::-1])
            self._read[number] = frozenset(place for place, bit in places if bit == "1")
        return self._read[number]

    def _bits(self, number: int) -> int:
        packed = base64.b85decode(self._sets[number])
        return int.from_bytes(lzma.decompress(packed, lzma.FORMAT_RAW, filters=_FILTERS), "little")

    def _ordered(self, tests: set[int], change: Change) -> list[str]:
        """Order tests: those that name the function, of its module, of its room; quick ones first, few rows of each."""
        named = set().union(*(self._with_word.get(word, set()) for word in change.function.split(".")))
        beginnings = (f"tests/{change.room}/test_{Path(change.file).stem}", f"tests/{change.room}/", "")
        rows: dict[str, int] = defaultdict(int)
        keyed = []
        for name in sorted((self.tests[place] for place in tests), key=lambda one: self.seconds[one]):
            function, seconds = name.partition("[")[0], self.seconds[name] + self.shared[name]
            far = 0 if function in named else 1 + next(i for i, one in enumerate(beginnings) if name.startswith(one))
            keyed.append(
                (min(rows[function], 3) if far > 1 else 0, seconds > (1 if far > 1 else 3), far, seconds, name)
            )
            rows[function] += 1
        return [one[-1] for one in sorted(keyed)]
