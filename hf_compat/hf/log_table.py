"""Logs as lines of a table, for a person at a terminal. Without one, callbacks print dicts, which scripts may read."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_compat.hf.arguments import TrainingArguments

# Times of an evaluation have no column. `log_history` and the trackers have them.
_TIMES = ("_runtime", "_per_second", "_preparation_time")
_FIRST = ("update", "epoch", "loss")
_LAST = ("grad_norm", "learning_rate")
_USUAL_WIDTH = 9  # of a number with four digits, such as 4.327e-05
_COUNTS, _COUNT_WIDTH = ("update", "epoch"), 6  # columns that are narrower
_LONGEST_TEXT = 20  # characters
_LINES_BETWEEN_HEADS = 40


def prints_table(args: TrainingArguments) -> bool:
    """Whether logs are printed as a table: as `log_format` says, or where the output is a terminal."""
    chosen = getattr(args, "log_format", None)  # transformers' arguments, in its own Trainer, lack it
    if chosen is not None:
        return bool(chosen == "table")
    is_terminal = getattr(sys.stdout, "isatty", None)  # a script may have put an object of its own there
    return is_terminal is not None and bool(is_terminal())


class LogTable:
    """A table that grows by a line with each log, and gains a column with each new name."""

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}
        self._lines = 0

    def lines(self, update: int, logs: Mapping[str, object]) -> list[str]:
        """Write a log as a line. A line of names comes first, and again where a name or a wider value is new.

        Columns that the terminal has no room for are counted at the end of the line of names.
        """
        if "train_runtime" in logs:  # the summary of a training has a line of its own
            return ["  ".join(f"{name} {_cell(value)}" for name, value in logs.items() if name != "total_flos")]
        cells = {"update": str(update)}
        cells |= {name: _cell(value) for name, value in logs.items() if name != "total_flos"}
        cells = {name: cell for name, cell in cells.items() if not name.endswith(_TIMES)}
        wanted = {
            name: max(
                self._widths.get(name, 0), len(name), len(cell), _COUNT_WIDTH if name in _COUNTS else _USUAL_WIDTH
            )
            for name, cell in cells.items()
        }
        is_new = wanted != {name: self._widths.get(name) for name in wanted}
        self._widths |= wanted
        names, left_out = self._with_room(shutil.get_terminal_size().columns)
        line = "  ".join(f"{cells.get(name, ''):>{self._widths[name]}}" for name in names).rstrip()
        self._lines += 1
        if not is_new and self._lines % _LINES_BETWEEN_HEADS:
            return [line]
        head = "  ".join(f"{name:>{self._widths[name]}}" for name in names)
        return [head + (f"  +{left_out}" if left_out else ""), line]

    def _with_room(self, columns: int) -> tuple[list[str], int]:
        """The names of the columns that fit into the terminal, and the number of the others."""
        places = {name: index for index, name in enumerate(_FIRST)} | {name: len(_FIRST) + 1 for name in _LAST}
        ordered = sorted(self._widths, key=lambda name: places.get(name, len(_FIRST)))
        names, taken = ordered[:1], self._widths[ordered[0]]
        for name in ordered[1:]:
            taken += 2 + self._widths[name]
            if taken > columns - 4:  # room for the count
                break
            names.append(name)
        return names, len(ordered) - len(names)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
