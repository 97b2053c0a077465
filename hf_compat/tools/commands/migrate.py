"""`hf-compat migrate PATH…` rewrites scripts of earlier releases: a diff by default, `--write` applies it.

Exit status: 0 if nothing is left to change, 1 if the diff has changes, 2 if a path could not be migrated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from hf_compat.runtime.text import need
from hf_compat.tools.terminal import DIFF, say, show


def source_parser(command: str, description: str, epilog: str, targets: str) -> argparse.ArgumentParser:
    """Make the parser of a command that reads sources for a target."""
    parser = argparse.ArgumentParser(prog=f"hf-compat {command}", description=description, epilog=epilog)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a folder that is searched for sources")
    targets = f"{targets} (default: hf_compat)"
    parser.add_argument("--to", choices=("hf_compat", "transformers-5"), default="hf_compat", help=targets)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = source_parser(
        "migrate",
        "Rewrite scripts of any release of transformers: imports, arguments, keywords, overrides.",
        "Exit status: 0 nothing to change or written, 1 the diff has changes, 2 a path could not be migrated.",
        "transformers-5: today's names only, the imports stay with transformers",
    )
    parser.add_argument("--write", action="store_true", help="change the files; without it a diff is printed")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    chosen = make_parser().parse_args(list(words))
    need("libcst", "[migrate]", "`hf-compat migrate`")
    from hf_compat.tools.migration.migrate import migrate
    from hf_compat.tools.migration.report import Target

    result = migrate(chosen.paths, Target(chosen.to), writes=chosen.write)
    left = [(file, finding) for file in result.files for finding in file.findings]
    changed = sum(file.is_changed for file in result.files)
    if chosen.json:
        told = {
            "target": result.target.value,
            "files": [
                {"path": file.path, "changed": file.is_changed, "written": file.written, "diff": file.diff}
                for file in result.files
            ],
            "needs_a_person": [{"path": file.path, **asdict(finding)} for file, finding in left],
            "skipped": [asdict(one) for one in result.skipped],
            "errors": [asdict(one) for one in result.errors],
        }
        show([json.dumps(told, indent=2, ensure_ascii=False)])
    else:
        for file in result.files:
            if file.written:
                show([f"written: {file.path}"])
            elif file.is_changed:
                show([file.diff], DIFF, end="")
        # The rest goes to the standard error, because the diff may go to `patch`
        for file, one in left:
            say(f"{file.path}:{'' if one.cell is None else f'cell {one.cell}:'}{one.line}: {one.what}: {one.reason}")
        for path in (*result.skipped, *result.errors):
            say(f"{'error' if path in result.errors else 'skipped'}: {path.path}: {path.reason}")
        parts = [f"{changed} of {len(result.files)} files {'changed' if chosen.write else 'to change'}"]
        parts += [f"{len(left)} places for a person", *([f"{len(result.errors)} errors"] if result.errors else [])]
        say(", ".join(parts))
    if result.errors:
        return 2
    return 1 if any(file.is_changed and not file.written for file in result.files) else 0
