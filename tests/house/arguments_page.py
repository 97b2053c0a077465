"""Make `docs/arguments.md` from the code's tables.

python tests/house/arguments_page.py docs/arguments.md
"""

from __future__ import annotations

import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from hf_compat.hf.argument_values import OWN_ARGUMENTS, ROWS, Row, checks_of
from hf_compat.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.plan.argument_support import default_of

_HEAD = """# Arguments

This page lists every argument: its default, the values that it takes, where it goes, and when it has no effect.
`python tests/house/arguments_page.py docs/arguments.md` makes the page from `hf_compat/hf/arguments.py`
and `hf_compat/hf/legacy.py`.

- **values** holds for the constructor and for setting a field later. Numbers and truth values may be text (`"5e-5"`,
  `"false"`) or scalars of NumPy and torch. Any other value is an `ArgumentError` that names the argument, and the
  choices if it has some.
- **no effect if**: such a setting is named, with the reason, in one line when the training begins.
"""


def arguments_page() -> str:
    """Write the page on all current arguments, and on the names of earlier releases."""
    head = ["", "| argument | default | values | where it goes | no effect if |", "|---|---|---|---|---|"]
    of_seq2seq = fields(Seq2SeqTrainingArguments)[len(fields(TrainingArguments)) :]
    lines = [*_HEAD.splitlines(), *head, *map(_row_of_field, fields(TrainingArguments))]
    lines += ["", "## What Seq2SeqTrainingArguments adds", *head, *map(_row_of_field, of_seq2seq)]
    of_ours = ["", "| argument | default | meaning | no effect if |", "|---|---|---|---|"]
    lines += ["", "## Arguments of hf_compat", *of_ours]
    lines += [
        f"| `{name}` | `{own.default!r}` | {own.help} | {_reasons(own.row)} |" for name, own in OWN_ARGUMENTS.items()
    ]
    lines += ["", "## Names of earlier releases", "", "| old name | releases | means today |", "|---|---|---|"]
    lines += [f"| `{name}` | {row.lifetime} | {row.means} |" for name, row in sorted(OLD_NAMES.items())]
    return "\n".join(lines) + "\n"


def _row_of_field(field: Field[Any]) -> str:
    row = ROWS[field.name]
    kind = checks_of(Seq2SeqTrainingArguments, Seq2SeqTrainingArguments)[field.name].kind
    values = ("anything" if kind is None else kind.expected).replace("known", "words of a closed set")
    # `checkpoint-<updates>` would be an HTML tag
    becomes = row.to.replace("<", "&lt;")
    return f"| `{field.name}` | `{default_of(field)!r}` | {values} | {becomes} | {_reasons(row)} |"


def _reasons(row: Row) -> str:
    return "; ".join(condition.why for condition in row.inert)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(arguments_page(), encoding="utf-8")
