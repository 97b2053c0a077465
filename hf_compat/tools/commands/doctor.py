"""`hf-compat doctor PATH…`: what would be silently different in scripts, what would fail, what is fine; nothing is run.

Exit status: 0 where nothing differs silently or fails, 1 where something does, 2 where a path could not be read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hf_compat.runtime.text import need
from hf_compat.tools.commands.migrate import source_parser
from hf_compat.tools.terminal import show

if TYPE_CHECKING:
    from hf_compat.tools.migration.diagnosis import Diagnosis, ScriptDiagnosis


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    return source_parser(
        "doctor",
        "Read scripts and folders, run nothing, and say what would be silently different, what would fail and what is "
        "fine: gravest first.",
        "Exit status: 0 nothing differs silently or fails, 1 something does, 2 a path could not be read.",
        "hf_compat: as `hf-compat run` runs them; transformers-5: as transformers 5 does",
    )


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status.

    Raises:
        MissingPackage: libcst is not installed.
    """
    chosen = make_parser().parse_args(list(words))
    need("libcst", "'hf-compat[migrate]'", "`hf-compat doctor`")
    from hf_compat.tools.migration.diagnosis import diagnose
    from hf_compat.tools.migration.report import Target

    result = diagnose(chosen.paths, Target(chosen.to))
    show([json.dumps(_as_json(result), indent=2, ensure_ascii=False)] if chosen.json else list(_lines(result)))
    if result.errors:
        return 2
    return 0 if result.is_sound else 1


def _lines(result: Diagnosis) -> Iterator[str]:
    for script in result.scripts:
        yield f"{script.path}: {script.verdict}"
        for one in script.findings:
            cell = "" if one.cell is None else f"cell {one.cell}, "
            yield f"  {one.effect.value}, {cell}line {one.line}: {one.what}: {one.reason}"
    yield from (f"skipped: {one.path}: {one.reason}" for one in result.skipped)
    yield from (f"error: {one.path}: {one.reason}" for one in result.errors)
    yield _summary(result)


def _summary(result: Diagnosis) -> str:
    counts: dict[str, int] = {}
    for script in result.scripts:
        counts[script.verdict] = counts.get(script.verdict, 0) + 1
    release = f"names looked up in transformers {result.release}" if result.release else "no names looked up"
    why = "" if result.release else ": no transformers of that generation is installed"
    parts = [f"{count} {verdict}" for verdict, count in counts.items()]
    mendable = sum(script.mendable for script in result.scripts)
    to = "" if result.target == "hf_compat" else f" --to {result.target.value}"
    mended = f"; `hf-compat migrate{to}` rewrites {mendable} places" if mendable else ""
    return f"{len(result.scripts)} files: {', '.join(parts) or 'none read'}; {release}{why}{mended}"


def _as_json(result: Diagnosis) -> dict[str, object]:
    return {
        "target": result.target.value,
        "transformers": result.release or None,
        "sound": result.is_sound and not result.errors,
        "scripts": [_script_as_json(script) for script in result.scripts],
        "skipped": [{"path": one.path, "reason": one.reason} for one in result.skipped],
        "errors": [{"path": one.path, "reason": one.reason} for one in result.errors],
    }


def _script_as_json(script: ScriptDiagnosis) -> dict[str, object]:
    findings = [
        {"cell": one.cell, "line": one.line, "what": one.what, "effect": one.effect.value, "reason": one.reason}
        for one in script.findings
    ]
    return {"path": script.path, "verdict": script.verdict, "mendable": script.mendable, "findings": findings}
