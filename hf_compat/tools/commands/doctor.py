"""`hf-compat doctor PATH…` reads scripts and says what differs silently, what fails and what is fine. Nothing is run.

Exit status: 0 if nothing differs silently or fails, 1 if something does, 2 if a path could not be read.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hf_compat.runtime.text import need
from hf_compat.tools.commands.migrate import source_parser
from hf_compat.tools.terminal import show

if TYPE_CHECKING:
    from hf_compat.tools.migration.report import FileChange, Migration


def make_parser() -> ArgumentParser:
    """Make the parser of the command."""
    return source_parser(
        "doctor",
        "Read scripts and folders, run nothing, and say what would be silently different, what would fail and what is "
        "fine: gravest first.",
        "Exit status: 0 nothing differs silently or fails, 1 something does, 2 a path could not be read.",
        "hf_compat: as `hf-compat run` runs them; transformers-5: as transformers 5 does",
    )


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    chosen = make_parser().parse_args(list(words))
    need("libcst", "[migrate]", "`hf-compat doctor`")
    from hf_compat.tools.migration.migrate import migrate
    from hf_compat.tools.migration.names import looked_up_in
    from hf_compat.tools.migration.report import Effect, Target

    result = migrate(chosen.paths, Target(chosen.to), runs_as_is=True)
    names = looked_up_in(result.target)
    release = "" if names is None else names.version
    verdicts = [*Effect, "fine"]
    scripts = sorted(result.files, key=lambda file: verdicts.index(file.verdict))
    if chosen.json:
        told = {
            "target": result.target.value,
            "transformers": release or None,
            "sound": result.is_sound and not result.errors,
            "scripts": [
                {
                    "path": file.path,
                    "verdict": file.verdict,
                    "mendable": len(file.mended),
                    "findings": [asdict(one) for one in file.by_gravity],
                }
                for file in scripts
            ],
            "skipped": [asdict(one) for one in result.skipped],
            "errors": [asdict(one) for one in result.errors],
        }
        show([json.dumps(told, indent=2, ensure_ascii=False)])
    else:
        show(list(_lines(result, scripts, release)))
    if result.errors:
        return 2
    return 0 if result.is_sound else 1


def _lines(result: Migration, scripts: Sequence[FileChange], release: str) -> Iterator[str]:
    for file in scripts:
        yield f"{file.path}: {file.verdict}"
        for one in file.by_gravity:
            cell = "" if one.cell is None else f"cell {one.cell}, "
            yield f"  {one.effect.value}, {cell}line {one.line}: {one.what}: {one.reason}"
    yield from (f"skipped: {one.path}: {one.reason}" for one in result.skipped)
    yield from (f"error: {one.path}: {one.reason}" for one in result.errors)
    counts = Counter(file.verdict for file in scripts)
    listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "none read"
    looked_up = f"names looked up in transformers {release}"
    if not release:
        looked_up = "no names looked up: no transformers of that generation is installed"
    mendable = sum(len(file.mended) for file in scripts)
    to = "" if result.target == "hf_compat" else f" --to {result.target.value}"
    mended = f"; `hf-compat migrate{to}` rewrites {mendable} places" if mendable else ""
    yield f"{len(scripts)} files: {listed}; {looked_up}{mended}"
