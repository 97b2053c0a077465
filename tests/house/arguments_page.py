"""Make `docs/arguments.md` from the code's tables. `pages.py` writes it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import Field, fields
from typing import Any

from hf_compat.cli.configuration import choices_of
from hf_compat.hf.argument_values import checks_of
from hf_compat.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.hf.rows import OWN_ARGUMENTS, ROWS, Row
from hf_compat.plan.argument_support import default_of

_HEAD = """# Arguments

Every argument of `TrainingArguments`: what it does, its default, its values, and where it goes.
`hf-compat fit --help.args` prints the same in a terminal. `hf-compat explain` shows what the arguments of a run become.

Values may be given to the constructor or set later. Numbers and truth values may be text (`"5e-5"`, `"false"`), or
scalars of NumPy and torch. Any other value is an `ArgumentError` that names the argument and its choices.

A setting that has no effect in a run is named, with the reason, in one line when the training begins.

`python tests/house/pages.py` makes this page from `hf_compat/hf/fields.py` and
`hf_compat/hf/legacy.py`.
"""
_REST = "other"  # arguments without a subject


def arguments_page() -> str:
    """Write the page on all current arguments, and on the names of earlier releases."""
    by_subject: dict[str, list[Field[Any]]] = defaultdict(list)
    of_seq2seq = {field.name for field in fields(Seq2SeqTrainingArguments)[len(fields(TrainingArguments)) :]}
    for field in fields(Seq2SeqTrainingArguments):
        subject = "Seq2SeqTrainingArguments" if field.name in of_seq2seq else ROWS[field.name].subject or _REST
        by_subject[subject].append(field)
    parts = [_HEAD]
    for subject in sorted(by_subject, key=lambda one: one == _REST):
        parts.append(f"## {subject[0].upper()}{subject[1:]}\n")
        parts += [
            _entry(one.name, one.metadata["help"], default_of(one), ROWS[one.name]) for one in by_subject[subject]
        ]
    parts.append("## Arguments of hf_compat\n")
    parts += [_entry(name, own.help, own.default, own.row) for name, own in OWN_ARGUMENTS.items()]
    old = [f"| `{name}` | {row.lifetime} | {row.means} |" for name, row in sorted(OLD_NAMES.items())]
    table = ["| old name | releases | means today |", "|---|---|---|", *old]
    parts.append("## Names of earlier releases\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


def _entry(name: str, told: str, default: object, row: Row) -> str:
    kind = checks_of(Seq2SeqTrainingArguments, Seq2SeqTrainingArguments)[name].kind
    words = ", ".join(f"`{word}`" for word in choices_of(name))
    values = "anything" if kind is None else kind.expected.replace("known", f"one of {words}" if words else "text")
    goes = row.to.replace("<", "&lt;")  # `checkpoint-<updates>` would be an HTML tag
    return (
        f"### `{name}`\n\n{told.rstrip('.')}.\n\n- **default**: `{default!r}`\n"
        f"- **values**: {values}\n- **goes to**: {goes}\n{_when_inert(row)}"
    )


def _when_inert(row: Row) -> str:
    reasons = "; ".join(condition.why for condition in row.inert)
    return f"- **no effect if**: {reasons}\n" if reasons else ""
