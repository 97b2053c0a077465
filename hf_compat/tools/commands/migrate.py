"""`hf-compat migrate PATH…`: scripts of earlier releases, rewritten; a diff by default, `--write` applies it.

Exit status: 0 where nothing is left to change, 1 where the diff has something, 2 where a path could not be migrated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_compat.runtime.text import need
from hf_compat.tools.terminal import DIFF, show

if TYPE_CHECKING:
    from hf_compat.tools.migration.report import FileChange, Finding, Migration


def source_parser(command: str, description: str, epilog: str, targets: str) -> argparse.ArgumentParser:
    """Make the parser of a command that reads sources for a target.

    Args:
        command: The command's name.
        description: What it does.
        epilog: Its exit statuses.
        targets: What the targets mean to it.
    """
    parser = argparse.ArgumentParser(prog=f"hf-compat {command}", description=description, epilog=epilog)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a folder that is searched for sources")
    targets = f"{targets} (default: hf_compat)"
    parser.add_argument("--to", choices=("hf_compat", "transformers-5"), default="hf_compat", help=targets)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = source_parser(
        "migrate",
        "Rewrite scripts of any release of transformers: imports, arguments, keywords, overrides.",
        "Exit status: 0 nothing to change or written, 1 the diff has changes, 2 a path could not be migrated.",
        "transformers-5: today's names only, the imports stay with transformers",
    )
    parser.add_argument("--write", action="store_true", help="change the files; without it a diff is printed")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status.

    Raises:
        MissingPackage: libcst is not installed.
    """
    chosen = make_parser().parse_args(list(words))
    need("libcst", "'hf-compat[migrate]'", "`hf-compat migrate`")
    from hf_compat.tools.migration.migrate import migrate
    from hf_compat.tools.migration.report import Target

    result = migrate(chosen.paths, Target(chosen.to), writes=chosen.write)
    if chosen.json:
        _say(json.dumps(_as_json(result), indent=2, ensure_ascii=False))
    else:
        # Print the diff, or what was written; then what needs a person, what was skipped and a count
        for file in result.files:
            if file.written:
                _say(f"written: {file.path}")
            elif file.is_changed:
                show([file.diff], DIFF, end="")
        for file in result.files:
            for finding in file.findings:
                _tell(f"{_place(file, finding)}: {finding.what}: {finding.reason}")
        for one in result.skipped:
            _tell(f"skipped: {one.path}: {one.reason}")
        for one in result.errors:
            _tell(f"error: {one.path}: {one.reason}")
        _tell(_count(result, writes=chosen.write))
    if result.errors:
        return 2
    return 1 if any(file.is_changed and not file.written for file in result.files) else 0


def _place(file: FileChange, finding: Finding) -> str:
    cell = "" if finding.cell is None else f"cell {finding.cell}:"
    return f"{file.path}:{cell}{finding.line}"


def _count(result: Migration, *, writes: bool) -> str:
    changed = sum(file.is_changed for file in result.files)
    left = sum(len(file.findings) for file in result.files)
    verb = "changed" if writes else "to change"
    parts = [f"{changed} of {len(result.files)} files {verb}", f"{left} places for a person"]
    return ", ".join([*parts, *([f"{len(result.errors)} errors"] if result.errors else [])])


def _as_json(result: Migration) -> dict[str, object]:
    return {
        "target": result.target.value,
        "files": [
            {"path": file.path, "changed": file.is_changed, "written": file.written, "diff": file.diff}
            for file in result.files
        ],
        "needs_a_person": [
            {
                "path": file.path,
                "cell": one.cell,
                "line": one.line,
                "what": one.what,
                "reason": one.reason,
                "effect": one.effect.value,
            }
            for file in result.files
            for one in file.findings
        ],
        "skipped": [{"path": one.path, "reason": one.reason} for one in result.skipped],
        "errors": [{"path": one.path, "reason": one.reason} for one in result.errors],
    }


def _say(text: str) -> None:
    print(text)  # noqa: T201 - the command's answer


def _tell(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - beside the diff, which may go to `patch`
