"""Rewrite the code cells of a notebook as one source. Magics, outputs and all else stay byte for byte.

`nbformat` would write the whole file anew, so the places of the cells are found in the JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import libcst as cst

from hf_compat.errors import MigrationError
from hf_compat.tools.migration.python_source import check_bounds
from hf_compat.tools.migration.report import Finding, Rewritten, Target

# Cell magics whose cells are Python.
_PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%memit")
_CELL = "#hf-compat-cell-"
_MAGIC = "#hf-compat-magic-"
_LINE_MAGIC = re.compile(r"\s*[%!?]|.*\?\s*$")
_ASSIGNED_MAGIC = re.compile(r"(\s*[\w., ]+=\s*)[%!].*")
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class _Span(NamedTuple):
    start: int
    end: int


class _Cell(NamedTuple):
    """A Python cell. `number` counts all cells from 1, `masked` has its magics as comments."""

    number: int
    span: _Span
    source: str
    masked: str


def rewrite_notebook(text: str, target: Target, rewrite: Callable[[str, Target], Rewritten]) -> Rewritten:
    """Rewrite the code cells of a notebook."""
    magics: list[str] = []
    findings: list[Finding] = []
    cells: list[_Cell] = []
    for number, (span, source) in enumerate(_sources(text), start=1):
        masked = source if span is None or _is_python(source) else _masked(source, magics)
        if span is None or not source.strip() or masked is None:
            continue
        if _is_python(masked):
            cells.append(_Cell(number, span, source, masked))
        else:
            findings.append(Finding(1, source.strip().splitlines()[0][:60], "a syntax error: the cell is left", number))
    result = rewrite("".join(f"{_CELL}{n}\n{cell.masked}\n" for n, cell in enumerate(cells)), target)
    parts = re.split(rf"^{_CELL}\d+\n", result.text, flags=re.MULTILINE)
    if len(parts) != len(cells) + 1 or parts[0]:
        raise MigrationError("the rewritten cells cannot be told apart")
    for cell, part in reversed(list(zip(cells, parts[1:], strict=True))):
        lines = (line.rpartition(_MAGIC) for line in part.removesuffix("\n").split("\n"))
        source = "\n".join(magics[int(after)] if mark else after for _, mark, after in lines)
        if source != cell.source:
            new = _spelled_lines(text, cell.span, source.splitlines(keepends=True))
            text = text[: cell.span.start] + new + text[cell.span.end :]
    json.loads(text)
    findings += [_placed(finding, cells) for finding in result.findings]
    mended = tuple(_placed(finding, cells) for finding in result.mended)
    return Rewritten(text, tuple(sorted(findings, key=lambda one: (one.cell or 0, one.line))), mended)


def _sources(text: str) -> list[tuple[_Span | None, str]]:
    """List the source of each cell and its position. The position is None for a cell that is not Python code."""
    found: list[tuple[_Span | None, str]] = []
    try:
        held = json.loads(text)
        metadata = held.get("metadata", {})
        language = metadata.get("language_info", {}).get("name") or metadata.get("kernelspec", {}).get("language")
        for cell, span in zip(held["cells"], _items(text, _members(text, _span_at(text, 0))["cells"]), strict=True):
            source = "".join(cell["source"])
            is_code = cell["cell_type"] == "code" and bool(source) and language in (None, "python")
            found.append((_members(text, span)["source"] if is_code else None, source))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MigrationError(f"it is not a notebook of format 4: {error!r}") from error
    return found


def _is_python(source: str) -> bool:
    check_bounds(source)
    try:
        cst.parse_module(f"{source}\n")
    except cst.ParserSyntaxError:
        return False
    return True


def _masked(source: str, magics: list[str]) -> str | None:
    """Turn the magics of a cell into comments. None for a cell of another language."""
    first = next((line.strip() for line in source.split("\n") if line.strip()), "")
    if first.startswith("%%") and first.split()[0] not in _PYTHON_MAGICS:
        return None
    masked: list[str] = []
    continues = False
    for line in source.split("\n"):
        assigned = _ASSIGNED_MAGIC.fullmatch(line)
        if continues or assigned or _LINE_MAGIC.match(line):
            indent = line[: len(line) - len(line.lstrip())]
            statement = "" if continues else f"{assigned[1]}None  " if assigned else f"{indent}pass  "
            masked.append(f"{statement or indent}{_MAGIC}{len(magics)}")
            continues = line.endswith("\\")
            magics.append(line)
        else:
            masked.append(line)
    return "\n".join(masked)


def _placed(finding: Finding, cells: Sequence[_Cell]) -> Finding:
    line = finding.line
    for cell in cells:
        height = cell.masked.count("\n") + 2
        if line <= height:
            return replace(finding, cell=cell.number, line=line - 1)
        line -= height
    return finding


def _span_at(text: str, start: int) -> _Span:
    begin = _skip(text, start)
    return _Span(begin, _DECODER.raw_decode(text, begin)[1])


def _members(text: str, span: _Span) -> dict[str, _Span]:
    found: dict[str, _Span] = {}
    place = _skip(text, span.start + 1)
    while text[place] != "}":
        key, place = _DECODER.raw_decode(text, place)
        found[str(key)] = value = _span_at(text, _skip(text, place) + 1)
        place = _after_comma(text, value.end)
    return found


def _items(text: str, span: _Span) -> Iterator[_Span]:
    place = _skip(text, span.start + 1)
    while text[place] != "]":
        value = _span_at(text, place)
        yield value
        place = _after_comma(text, value.end)


def _skip(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def _after_comma(text: str, place: int) -> int:
    place = _skip(text, place)
    return _skip(text, place + 1) if text[place] == "," else place


def _spelled_lines(text: str, span: _Span, lines: Sequence[str]) -> str:
    """Write lines as the JSON value that they replace: an array or a text. Unchanged lines keep their spelling."""
    is_ascii = text.isascii()
    if text[span.start] == '"':
        return json.dumps("".join(lines), ensure_ascii=is_ascii)
    spans = list(_items(text, span))
    held = {_DECODER.raw_decode(text, one.start)[0]: text[one.start : one.end] for one in spans}
    spelled = [held.get(line) or json.dumps(line, ensure_ascii=is_ascii) for line in lines]
    before, after = text[span.start : spans[0].start], text[spans[-1].end : span.end]
    between = text[spans[0].end : spans[1].start] if len(spans) > 1 else "," + before[1:]
    return before + between.join(spelled) + after
