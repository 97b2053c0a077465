"""Print the answers of commands as plain text, or on a terminal with rich in tables and colours.

rich leaves colours out if NO_COLOR is set.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_compat.runtime.text import is_installed

# Words that a person looks for first, as regular expressions, with their styles of rich.
MARKS: Mapping[str, str] = {
    r"(?m)^(error|refused)\b|\d+ differ\b|^Different\.": "bold red",
    r"(?m)^warning\b|differs silently|\bfails\b": "bold yellow",
    r"(?m)^note\b|^  (not )?checked\b|to look at": "cyan",
    r"(?m)equal bit for bit|^Equal, bit for bit\.|nothing found": "green",
}
DIFF: Mapping[str, str] = {
    r"(?m)^(\+\+\+|---).*": "bold",
    r"(?m)^@.*": "cyan",
    r"(?m)^\+(?!\+\+).*": "green",
    r"(?m)^-(?!--).*": "red",
}


class ShownAsPrinted:
    """Show an object in notebooks and at a prompt as `print` does. Dataclasses need `repr=False`."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre style='font-family: monospace'>{html.escape(str(self))}</pre>"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Table:
    """A table."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: frozenset[int] = frozenset()

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        lines = []
        for row in (self.head, *self.rows):
            cells = [
                f"{cell:{'>' if place in self.numbers else '<'}{width}}"
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def show(parts: Sequence[str | Table], marks: Mapping[str, str] = MARKS, end: str = "\n") -> None:
    """Print the parts of an answer below each other."""
    if not (sys.stdout.isatty() and is_installed("rich")):
        print(*parts, sep="\n", end=end)  # noqa: T201 - a command's answer
        return
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    def marked(text: str) -> Text:
        shown = Text(text)
        for pattern, style in marks.items():
            shown.highlight_regex(pattern, style)
        return shown

    console = Console(highlight=False)
    for part in parts:
        if isinstance(part, str):
            console.print(marked(part), soft_wrap=True, end=end if part is parts[-1] else "\n")
            continue
        table = RichTable()
        for place, name in enumerate(part.head):
            table.add_column(name, justify="right" if place in part.numbers else "left")
        for row in part.rows:
            table.add_row(*map(marked, row))
        console.print(table)


def say(text: str) -> None:
    """Print a line on the standard error, beside the answer of a command."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - for a person
