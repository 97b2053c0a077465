"""`hf-compat compare script.py ARGS…` runs a script under transformers and here, and shows the differences."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_compat.errors import ArgumentError
from hf_compat.hf.arguments_rules import PROFILES
from hf_compat.tools.commands.isolated import add_options, add_script
from hf_compat.tools.terminal import say, show


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-compat compare",
        description="Run a script, unchanged, under transformers and on Lightning's engine, one after the other, and "
        "compare numbers, events and files to the last bit. Exit status: 0 equal, 1 different, 2 not compared.",
    )
    parser.add_argument("--max-steps", type=int, default=20, help="updates of each training (20); 0: all")
    parser.add_argument("--devices", type=int, default=1, help="processes, of each side (default: 1)")
    parser.add_argument("--against", metavar="[RELEASE:]PYTHON", help="interpreter with another transformers")
    parser.add_argument("--compat", choices=tuple(PROFILES), help="generation whose defaults count here")
    parser.add_argument("--output", metavar="FOLDER", help="new or empty; all that is written goes there")
    parser.add_argument("--clean", action="store_true", help="remove what the runs have left at the end")
    add_options(parser)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="a side that takes longer is stopped")
    parser.add_argument("--json", metavar="FILE", help="also write the report as JSON; - prints it, and no table")
    parser.add_argument("--quiet", action="store_true", help="no lines while the sides run")
    add_script(parser)
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    chosen = make_parser().parse_args(list(words))
    from hf_compat.runtime.launch import read_launch
    from hf_compat.tools.comparison.compared import compare
    from hf_compat.tools.comparison.report import as_json, as_parts
    from hf_compat.tools.comparison.running import Limits
    from hf_compat.tools.until_train import UserScript

    for name, value, least in (("max-steps", chosen.max_steps, 0), ("devices", chosen.devices, 1)):
        if value < least:
            raise ArgumentError(f"`--{name} {value}` is not a number from {least} on.\n\nHint: leave it out.")
    if chosen.timeout is not None and not chosen.timeout > 0:
        raise ArgumentError(f"`--timeout {chosen.timeout}` is not a time.\n\nHint: seconds above 0, or leave it out.")
    if read_launch().world_size > 1:
        raise ArgumentError(
            f"A launcher has started {read_launch().world_size} processes, and a comparison starts its own.\n\n"
            "Hint: start it alone, with `--devices N`."
        )
    limits = Limits(max_steps=chosen.max_steps, timeout_seconds=chosen.timeout, devices=chosen.devices)
    script = UserScript(path=chosen.script, arguments=tuple(chosen.arguments), is_module=chosen.module)
    shown = _Progress(quiet=chosen.quiet)
    found = compare(
        script, limits, chosen.against, chosen.output, tuple(chosen.allow_writes), chosen.copy_limit, chosen.compat,
        shown.update, lambda line: shown.say(f"{line}\n"),
    )  # fmt: skip
    shown.end()
    if chosen.json not in (None, "-"):
        Path(chosen.json).write_text(as_json(found, limits) + "\n", encoding="utf-8")
    show([as_json(found, limits)] if chosen.json == "-" else as_parts(found, limits))
    folder = found.theirs.folder.parent
    if not chosen.clean:
        say(f"kept: {folder} (each side's log.txt, output/, files/, record/)")
        return found.status
    for side in ("transformers", "hf_compat", "again"):
        shutil.rmtree(folder / side, ignore_errors=True)
    if chosen.output is None:
        folder.rmdir()
    return found.status


class _Progress:
    """Lines on the standard error while the sides run. On a terminal, one line is updated."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty()
        self._last = ("", -1, -1)

    def update(self, side: str, training: int, updates: int) -> None:
        now = (side, training, updates)
        if now == self._last or (not self._is_terminal and side == self._last[0]):
            return
        if side != self._last[0] and self._last[0] and self._is_terminal:
            self.say("\n")
        self._last = now
        number = f", training {training}" if training > 1 else ""
        count = f"{number}: {updates} updates" if training else ": the script starts"
        self.say(f"\r{side}{count} " if self._is_terminal else f"{side} runs\n")

    def end(self) -> None:
        self.say("\n\n" if self._is_terminal else "")

    def say(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", file=sys.stderr, flush=True)  # noqa: T201 - the command's answer
