"""The map of which tests reach which statement, `tests/reached.json.xz`: writing it, and asking it.

A statement is found by its function and its place in it. Of a function that has changed since the recording, every test
counts that reached any part of it. What runs at the import is reached by all: there the tests come first whose
functions, or whose own text, name what the statement defines.
"""

from __future__ import annotations

import ast
import base64
import json
import lzma
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property

from mutation import recording
from mutation.places import Change, core
from mutation.view import ROOT

MAP = ROOT / "tests" / "reached.json.xz"
SECONDS_UNKNOWN = 3.0


def write(table: list[list], found: list[dict], at_import: bytes) -> None:
    """Write the map from what was recorded."""
    found = sorted(found, key=lambda one: one["test"])
    columns = [recording.unpacked(one["hits"]) for one in found]
    sets: dict[bytes, int] = {}
    files: dict[str, dict[str, dict]] = {}
    for number, (file, name, digest, first, last) in enumerate(table):
        bits = sum(1 << place for place, column in enumerate(columns) if column[number])
        reaching = bits.to_bytes(len(columns) // 8 + 1, "little")
        function = files.setdefault(file, {}).setdefault(name, {"digest": digest, "lines": []})
        row = [first, last, sets.setdefault(reaching, len(sets)), at_import[number]]
        function["lines"].append(row)
    document = {
        "tests": [[one["test"], one["seconds"], sum(column)] for one, column in zip(found, columns, strict=True)],
        "sets": [base64.b85encode(lzma.compress(one, lzma.FORMAT_RAW, filters=_FILTERS)).decode() for one in sets],
        "files": files,
    }
    MAP.write_bytes(lzma.compress(json.dumps(document, separators=(",", ":")).encode(), preset=9))


_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6}]


class Reached:
    """The recorded map, beside today's sources."""

    def __init__(self) -> None:
        document = json.loads(lzma.decompress(MAP.read_bytes()))
        exists = {file: (ROOT / file).is_file() for file in {one[0].partition("::")[0] for one in document["tests"]}}
        self.tests = [one[0] for one in document["tests"]]
        self.there = {place for place, name in enumerate(self.tests) if exists[name.partition("::")[0]]}
        self.seconds = {name: seconds for name, seconds, _ in document["tests"]}
        self.files = document["files"]
        self._sets, self._read, self._today = document["sets"], {}, {}

    def reaching(self, change: Change) -> list[str]:
        """List the tests that reach a change, those first that are likely to notice it soon."""
        tiers: list[set[int]] = []
        function = self.files.get(change.file, {}).get(change.function) if change.is_inside else None
        at_import = function is None
        if function is not None:
            rows = self._rows(change, function)
            tiers.append(self._union(row[2] for row in rows))
            at_import = any(row[3] for row in rows) or not tiers[0]
        if at_import:
            tiers += self._at_import(change)
        ordered: dict[str, None] = {}
        for tier in tiers:
            ordered |= dict.fromkeys(self._ordered(tier & self.there, change))
        return list(ordered)

    def statements(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield file, function, line and the number of the set of tests of each statement; where it is today."""
        for file, functions in self.files.items():
            path = ROOT / file
            today = recording.digests(path.read_text()) if path.is_file() else {}
            for name, function in functions.items():
                if name in today:
                    yield from ((file, name, today[name][0] + row[0], row[2]) for row in function["lines"])

    def named(self, number: int) -> set[str]:
        """Return the ids of a set's tests."""
        return {self.tests[place] for place in self._members(number)}

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
        general = ("tests/docs/", "tests/house/", f"tests/{change.room}/", "tests/test_")
        rest = {place for place, test in enumerate(self.tests) if test.startswith(general)}
        return [named & in_text, in_text, named, module, rest]

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
            joined |= self._members(number)
        return joined

    def _members(self, number: int) -> frozenset[int]:
        if number not in self._read:
            raw = lzma.decompress(base64.b85decode(self._sets[number]), lzma.FORMAT_RAW, filters=_FILTERS)
            bits = int.from_bytes(raw, "little")
            self._read[number] = frozenset(place for place, bit in enumerate(f"{bits:b}"[::-1]) if bit == "1")
        return self._read[number]

    def _ordered(self, tests: set[int], change: Change) -> list[str]:
        """Order tests: the first rows of a function before further ones, quick before slow, the room's own first."""
        rows: dict[str, int] = defaultdict(int)
        keyed = []
        for name in sorted((self.tests[place] for place in tests), key=lambda one: self.seconds[one]):
            function = name.partition("[")[0]
            others = not name.startswith(f"tests/{change.room}/")
            keyed.append((min(rows[function], 3), self.seconds[name] > 1, others, self.seconds[name], name))
            rows[function] += 1
        return [one[-1] for one in sorted(keyed)]
