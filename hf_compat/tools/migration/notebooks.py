"""Notebooks: the code cells are one source, in their order; magics, outputs and all else stay byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import libcst as cst

from hf_compat.errors import MigrationError
from hf_compat.tools.migration.bounds import check_bounds
from hf_compat.tools.migration.json_spans import Span, items, members, span_at, spelled_lines
from hf_compat.tools.migration.report import Finding, Rewritten, Target

# Cell magics whose cell is Python all the same.
_PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%memit")
_CELL = "#hf-compat-cell-"
_MAGIC = "#hf-compat-magic-"
_LINE_MAGIC = re.compile(r"\s*[%!?]|.*\?\s*$")
_ASSIGNED_MAGIC = re.compile(r"(\s*[\w., ]+=\s*)[%!].*")


@dataclass(frozen=True, slots=True)
class _Cell:
    """A code cell of Python.

    Args:
        number: Among all cells, from 1.
        span: Of its source, in the notebook's text.
        source: As it is.
        masked: With its magics as comments.
    """

    number: int
    span: Span
    source: str
    masked: str


def rewrite_notebook(text: str, target: Target, rewrite: Callable[[str, Target], Rewritten]) -> Rewritten:
    """Return a notebook with today's names in its code cells.

    Args:
        text: The file's text.
        target: What the result is for.
        rewrite: From the source of all code cells to today's.

    Raises:
        MigrationError: It is no notebook.
    """
    magics: list[str] = []
    findings: list[Finding] = []
    # The code cells of Python; those that cannot be read are listed
    cells: list[_Cell] = []
    for number, (span, source) in enumerate(_sources(text), start=1):
        if span is None or not source.strip():
            continue
        masked = source if _is_python(source) else _masked(source, magics)
        if masked is None:
            continue
        if _is_python(masked):
            cells.append(_Cell(number, span, source, masked))
        else:
            findings.append(Finding(1, source.strip().splitlines()[0][:60], "a syntax error: the cell is left", number))
    joined = "".join(f"{_CELL}{n}\n{cell.masked}\n" for n, cell in enumerate(cells))
    result = rewrite(joined, target)
    parts = _split(result.text, len(cells))
    for cell, part in reversed(list(zip(cells, parts, strict=True))):
        lines = (line.rpartition(_MAGIC) for line in part.split("\n"))
        source = "\n".join(magics[int(after)] if mark else after for _, mark, after in lines)
        if source != cell.source:
            new = spelled_lines(text, cell.span, source.splitlines(keepends=True))
            text = text[: cell.span.start] + new + text[cell.span.end :]
    json.loads(text)
    findings += [_placed(finding, cells) for finding in result.findings]
    mended = tuple(_placed(finding, cells) for finding in result.mended)
    return Rewritten(text, tuple(sorted(findings, key=lambda one: (one.cell or 0, one.line))), mended)


def _sources(text: str) -> list[tuple[Span | None, str]]:
    """Return, for each cell, where its source stands and what it is; no place for a cell that is no code."""
    try:
        held = json.loads(text)
        cells = members(text, span_at(text, 0))["cells"]
        found: list[tuple[Span | None, str]] = []
        for cell, span in zip(held["cells"], items(text, cells), strict=True):
            source = "".join(cell["source"])
            is_code = cell["cell_type"] == "code" and bool(source) and _speaks_python(held)
            found.append((members(text, span)["source"] if is_code else None, source))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MigrationError(f"it is no notebook of format 4: {error!r}") from error
    return found


def _speaks_python(notebook: dict[str, dict[str, dict[str, str]]]) -> bool:
    metadata = notebook.get("metadata", {})
    language = metadata.get("language_info", {}).get("name") or metadata.get("kernelspec", {}).get("language")
    return language in (None, "python")


def _is_python(source: str) -> bool:
    check_bounds(source)
    try:
        cst.parse_module(f"{source}\n")
    except cst.ParserSyntaxError:
        return False
    return True


def _masked(source: str, magics: list[str]) -> str | None:
    """Return a cell with its magics as comments; None for a cell of another language."""
    lines = source.split("\n")
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("%%") and first.split()[0] not in _PYTHON_MAGICS:
        return None
    masked: list[str] = []
    goes_on = False
    for line in lines:
        assigned = _ASSIGNED_MAGIC.fullmatch(line)
        if goes_on or assigned or _LINE_MAGIC.match(line):
            indent = line[: len(line) - len(line.lstrip())]
            statement = f"{assigned[1]}None" if assigned and not goes_on else f"{indent}pass"
            masked.append(f"{statement}  {_MAGIC}{len(magics)}" if not goes_on else f"{indent}{_MAGIC}{len(magics)}")
            goes_on = line.endswith("\\")
            magics.append(line)
        else:
            masked.append(line)
    return "\n".join(masked)


def _split(text: str, count: int) -> list[str]:
    """Return the sources of the cells; what a cell has got at its end is no line more."""
    parts = re.split(rf"^{_CELL}\d+\n", text, flags=re.MULTILINE)
    if len(parts) != count + 1 or parts[0]:
        raise MigrationError("the rewritten cells cannot be told apart")
    return [part.removesuffix("\n") for part in parts[1:]]


def _placed(finding: Finding, cells: Sequence[_Cell]) -> Finding:
    """Return a finding by its cell, and its line in it."""
    line = finding.line
    for cell in cells:
        height = cell.masked.count("\n") + 2
        if line <= height:
            return replace(finding, cell=cell.number, line=line - 1)
        line -= height
    return finding
