"""Rewrite the code cells of a notebook as one source. Magics, outputs and the layout of the file stay."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import libcst as cst

from hf_compat.errors import MigrationError
from hf_compat.tools.migration.python_source import refuse_huge_source
from hf_compat.tools.migration.report import Rewritten, Spot, Target

# Cell magics whose cells are Python.
_PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%memit")
_CELL = "#hf-compat-cell-"
_MAGIC = "#hf-compat-magic-"
_LINE_MAGIC = re.compile(r"\s*[%!?]|.*\?\s*$")
_ASSIGNED_MAGIC = re.compile(r"(\s*[\w., ]+=\s*)[%!].*")
# The beginning of a notebook's JSON: the gap before the first key, and that after its colon.
_LAYOUT = re.compile(r'\s*\{(\s*)"[^"]*"\s*:(\s?)')


class _Cell(NamedTuple):
    """A Python cell. `number` counts all cells from 1, `masked` has its magics as comments."""

    number: int
    held: dict[str, object]
    source: str
    masked: str


def rewrite_notebook(text: str, target: Target, rewrite: Callable[[str, Target], Rewritten]) -> Rewritten:
    """Rewrite the code cells of a notebook."""
    magics: list[str] = []
    findings: list[Spot] = []
    cells: list[_Cell] = []
    notebook, sources = _read(text)
    for number, (held, source) in enumerate(sources, start=1):
        masked = source if held is None or _is_python(source) else _masked(source, magics)
        if held is None or not source.strip() or masked is None:
            continue
        if _is_python(masked):
            cells.append(_Cell(number, held, source, masked))
        else:
            findings.append(Spot(1, source.strip().splitlines()[0][:60], "a syntax error: the cell is left", number))
    result = rewrite("".join(f"{_CELL}{n}\n{cell.masked}\n" for n, cell in enumerate(cells)), target)
    parts = re.split(rf"^{_CELL}\d+\n", result.text, flags=re.MULTILINE)
    if len(parts) != len(cells) + 1 or parts[0]:
        raise MigrationError("the rewritten cells cannot be told apart")
    is_changed = False
    for cell, part in zip(cells, parts[1:], strict=True):
        lines = (line.rpartition(_MAGIC) for line in part.removesuffix("\n").split("\n"))
        source = "\n".join(magics[int(after)] if mark else after for _, mark, after in lines)
        if source != cell.source:
            is_text, is_changed = isinstance(cell.held["source"], str), True
            cell.held["source"] = source if is_text else source.splitlines(keepends=True)
    if is_changed:
        # The layout of the file, as far as `json` has such a layout
        layout = _LAYOUT.match(text)
        gap, space = layout.groups() if layout else ("\n ", " ")
        indent = gap.rpartition("\n")[2] if "\n" in gap else None
        marks = (", " if space and indent is None else ",", f":{space}")
        written = json.dumps(notebook, indent=indent, separators=marks, ensure_ascii=text.isascii())
        text = (written.replace("\n", "\r\n") if "\r\n" in gap else written) + text[len(text.rstrip()) :]
    findings += [_placed(finding, cells) for finding in result.findings]
    mended = tuple(_placed(finding, cells) for finding in result.mended)
    return Rewritten(text, tuple(sorted(findings, key=lambda one: (one.cell or 0, one.line))), mended)


def _read(text: str) -> tuple[object, list[tuple[dict[str, object] | None, str]]]:
    """Read a notebook. Returns it with the source of each cell, and the cell if it is Python code."""
    found: list[tuple[dict[str, object] | None, str]] = []
    try:
        held = json.loads(text)
        metadata = held.get("metadata", {})
        language = metadata.get("language_info", {}).get("name") or metadata.get("kernelspec", {}).get("language")
        for cell in held["cells"]:
            source = "".join(cell["source"])
            is_code = cell["cell_type"] == "code" and bool(source) and language in (None, "python")
            found.append((cell if is_code else None, source))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MigrationError(f"it is not a notebook of format 4: {error!r}") from error
    return held, found


def _is_python(source: str) -> bool:
    refuse_huge_source(source)
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


def _placed(finding: Spot, cells: Sequence[_Cell]) -> Spot:
    line = finding.line
    for cell in cells:
        height = cell.masked.count("\n") + 2
        if line <= height:
            return replace(finding, cell=cell.number, line=line - 1)
        line -= height
    return finding
