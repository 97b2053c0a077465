"""`hf-compat fit --help`: the sections, and the arguments that most runs set, by subject. Text only.

`--help.args` and `--help.trainer` list everything.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence

from hf_compat.cli.scored_weights import MEANING
from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import OWN_ARGUMENTS, ROWS, checks_of
from hf_compat.hf.arguments_seq2seq import Seq2SeqTrainingArguments
from hf_compat.hf.value_types import Unreadable
from hf_compat.plan.argument_support import default_of
from hf_compat.plan.lightning_equivalents import ELSEWHERE, EQUIVALENTS, PASSED_ON

Rows = Sequence[tuple[str, str]]  # an option, and what it means

_COLUMN = 50
_WIDTH = 120
_ROOM = 40  # characters of an option with its choices; more choices stand in the text
_MOST_CHOICES = 12  # in the short help
_FIELDS = {field.name: field for field in dataclasses.fields(Seq2SeqTrainingArguments)}


def short_help(command: str, meaning: str, data: Rows, functions: Rows) -> str:
    """Return the help of a command.

    Args:
        command: `fit`, say.
        meaning: What it does.
        data: The keys of the section `data`.
        functions: The sections that are functions of a Trainer.
    """
    count = len(_FIELDS) + len(OWN_ARGUMENTS)
    lines = [
        f"usage: hf-compat {command} --config run.yaml [--ARGUMENT VALUE …] [--SECTION.KEY VALUE …]",
        "",
        f"{meaning[0].upper()}{meaning[1:]}.",
        "What stands later counts; names of earlier releases are arguments, too.",
        *_part("configuration", _CONFIGURATION),
        *_part("model: {class_path: package.Class, init_args: {…}}", (*_MODEL, *functions[-2:])),
        *_part("data: class paths as for the model", data),
        *_part("functions and callbacks: class paths", (*functions[:-2], _CALLBACKS)),
        *_part(f"arguments (HF's `TrainingArguments`; --help.args lists all {count})", ()),
    ]
    for subject in dict.fromkeys(row.subject for row in ROWS.values() if row.subject is not None):
        names = [name for name, row in (ROWS | OWN_ARGUMENTS).items() if row.subject == subject]
        lines += [f"  {subject}", *_lines([_row(name, _MOST_CHOICES) for name in names], indent=4)]
    lines += _part("trainer: Lightning's words, where you prefer them (--help.trainer)", _TRAINER)
    return "\n".join(lines) + "\n"


_CONFIGURATION = (
    ("-c, --config FILE", "YAML with these sections; several may be given"),
    ("--print_config", "print the whole configuration and end"),
    ("--help.args, --help.trainer", "list every argument, every setting of `trainer`"),
)
_MODEL = (
    ("--model CLASS.PATH", "a class, a function, or `from_pretrained`"),
    ("--ckpt_path PATH|best|last", MEANING.partition(";")[0]),
    ("--trainer_class CLASS.PATH", "hf_compat.Trainer, or a subclass"),
)
_CALLBACKS = ("--callbacks LIST", "HF's, Lightning's, and Lightning's loggers, in any mix")
_TRAINER = (
    ("--trainer.max_epochs, .max_steps, .precision …", "as the argument that says the same"),
    ("--trainer.profiler NAME|CLASS.PATH", "and " + ", ".join(f".{name}" for name in PASSED_ON if name != "profiler")),
    ("--trainer.callbacks, .logger, .plugins CLASS.PATH", "callbacks, loggers, a CheckpointIO"),
)


def help_of_arguments() -> str:
    """Return every argument: what it takes, its default, what it means."""
    rows = [_row(name, len(_choices(name))) for name in _FIELDS] + [_row(name, 0) for name in OWN_ARGUMENTS]
    return "\n".join(["arguments:", *_lines(rows, indent=2)]) + "\n"


def help_of_trainer() -> str:
    """Return every setting of `trainer`, and what it stands for or where it is set instead."""
    settable = [(f"--trainer.{name}", "as the argument that says the same") for name in EQUIVALENTS]
    settable += [(f"--trainer.{name}", "handed to Lightning") for name in PASSED_ON]
    settable += [_TRAINER[-1]]
    objects = ("callbacks", "logger", "plugins")
    elsewhere = [(name, where) for name, where in ELSEWHERE.items() if name not in objects]
    return "\n".join([*_part("trainer", settable)[1:], *_part("set elsewhere, by", elsewhere)]) + "\n"


def _part(title: str, rows: Rows) -> list[str]:
    return ["", f"{title}:", *_lines(rows, indent=2)]


def _lines(rows: Rows, indent: int) -> Iterator[str]:
    """Yield the lines of options: what each means stands beside it."""
    for option, meaning in rows:
        start = " " * indent + option
        start = start.ljust(_COLUMN) if len(start) < _COLUMN else f"{start} "
        yield from textwrap.wrap(
            meaning, _WIDTH, initial_indent=start, subsequent_indent=" " * _COLUMN, break_long_words=False
        )


def _row(name: str, most_choices: int) -> tuple[str, str]:
    """Return an argument's option with what it takes, and its meaning with its default."""
    if name in OWN_ARGUMENTS:
        own = OWN_ARGUMENTS[name]
        return f"--{name}", own.help.rstrip(".") + ("" if own.default is None else f" [{own.default}]")
    default, choices = default_of(_FIELDS[name]), _choices(name)
    meaning = str(_FIELDS[name].metadata["help"]).rstrip(".") + (
        f" [{default}]" if default not in (None, "", []) else ""
    )
    taken = "{" + ",".join(choices) + "}"
    if not choices or len(f"--{name} {taken}") <= _ROOM:
        return f"--{name} {taken}" if choices else f"--{name}", meaning
    more = ", …" if choices[most_choices:] else ""
    return f"--{name}", f"{meaning}: {', '.join(choices[:most_choices])}{more}"


def _choices(name: str) -> list[str]:
    """Return the words that an argument takes, where it takes certain ones: its error names them."""
    if name in OWN_ARGUMENTS:
        return []
    kind = checks_of(Seq2SeqTrainingArguments, Seq2SeqTrainingArguments)[name].kind
    try:
        if kind is not None:
            kind.read("no such word")
    except (Unreadable, ArgumentError) as told:
        return re.findall(r"'([^']+)'", str(told)) if "choose one of" in str(told) else []
    return []
