"""Read the YAML of `--config` for jsonargparse, and print the help of `hf-compat fit`.

`--help` lists the sections and the most frequent arguments. `--help.args` and `--help.trainer` list everything.
"""

from __future__ import annotations

import dataclasses
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonargparse
import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, get_loader, set_loader  # type: ignore[attr-defined]

from hf_compat.checkpoint.files import first_line, read_text
from hf_compat.cli.scored_weights import MEANING
from hf_compat.errors import ArgumentError, CheckpointError
from hf_compat.hf.argument_values import OWN_ARGUMENTS, ROWS, checks_of
from hf_compat.hf.arguments import Seq2SeqTrainingArguments
from hf_compat.hf.value_types import Unreadable
from hf_compat.plan.argument_support import ELSEWHERE, EQUIVALENTS, PASSED_ON, default_of

MODE = "yaml_with_places"  # jsonargparse's name for this loader
MOST_BYTES = 4 * 2**20

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Loaded = Any  # the content of a YAML text, as nested plain values


def load(text: str, build: Callable[[str], Loaded] | None = None) -> Loaded:
    """Read a YAML text, by default as jsonargparse reads it. A key that stands twice in a mapping is an error."""
    waiting, seen = [yaml.compose(text, Loader=Loader)], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:  # an alias names a node again
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        keys: set[tuple[str, str]] = set()
        for key, value in node.value:
            waiting.append(value)
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name in keys:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value[:60]!r} twice", problem_mark=key.start_mark)
            keys |= {name} if name else set()
    try:
        return (build or get_loader("yaml"))(text)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:  # of a tag as `!!int x`
        raise yaml.YAMLError(f"a value is not of its type ({type(error).__name__})") from error


def register() -> str:
    """Register the loader with jsonargparse. The result is its name."""
    set_loader(MODE, load, exceptions=(yaml.YAMLError,))
    return MODE


class ConfigAction(ActionConfigFile):
    """Read `--config`, a file or its text. Errors name their place."""

    def __call__(  # type: ignore[override]  # argparse knows more kinds of values
        self, parser: ArgumentParser, cfg: Namespace, values: str, option_string: str | None = None
    ) -> None:
        is_file = os.path.lexists(values)
        name = values if is_file else f"`{option_string or '--config'}`"
        try:
            loaded = load_named(name, read_text(values, MOST_BYTES) if is_file else values)
        except CheckpointError as error:
            raise ArgumentError(f"{first_line(error)}\n\nHint: `--config` names a YAML file in UTF-8.") from error
        if is_file and not isinstance(loaded, dict):
            found = "nothing" if loaded is None else f"a {type(loaded).__name__}"
            raise ArgumentError(f"{name} holds {found}, not sections.\n\nHint: begin with `model:`, `data:`, `args:`.")
        for section in ("args", "data", "trainer") if isinstance(loaded, dict) else ():
            if not isinstance(loaded.get(section), dict | None):
                kind = type(loaded[section]).__name__
                raise ArgumentError(f"{name}: `{section}` is a {kind}, not a mapping of names to values.")
        try:
            super().__call__(parser, cfg, values, option_string)  # type: ignore[no-untyped-call]
        except (TypeError, jsonargparse.ArgumentError) as error:
            raise ArgumentError(f"{name}: {error}") from error


def load_named(name: str, text: str, build: Callable[[str], Loaded] | None = None) -> Loaded:
    """Read a YAML text. Errors name its file and the line."""
    try:
        return load(text, build)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ArgumentError(f"{name} is not valid YAML: {error.problem or error.context}{where}.") from None
    except yaml.YAMLError as error:
        raise ArgumentError(f"{name} cannot be read: {first_line(error)}.") from None


Rows = Sequence[tuple[str, str]]  # an option and its meaning

_COLUMN = 50
_WIDTH = 120
_MOST_CHARACTERS = 40  # of an option with its choices. Longer lists of choices are part of the text
_MOST_CHOICES = 12  # in the short help
_FIELDS = {field.name: field for field in dataclasses.fields(Seq2SeqTrainingArguments)}


def short_help(command: str, meaning: str, data: Rows, functions: Rows) -> str:
    """Write the help of a command. `functions` are the sections that are functions of a Trainer."""
    count = len(_FIELDS) + len(OWN_ARGUMENTS)
    lines = [
        f"usage: hf-compat {command} --config run.yaml [--ARGUMENT VALUE …] [--SECTION.KEY VALUE …]",
        "",
        f"{meaning[0].upper()}{meaning[1:]}.",
        "Later values replace earlier ones. Names of earlier releases are arguments, too.",
        *_part("configuration", _CONFIGURATION),
        *_part("model: {class_path: package.Class, init_args: {…}}", (*_MODEL, *functions[-2:])),
        *_part("data: class paths as for the model", data),
        *_part("functions and callbacks: class paths", (*functions[:-2], _CALLBACKS)),
        *_part(f"arguments (HF's `TrainingArguments`; --help.args lists all {count})", ()),
    ]
    for subject in dict.fromkeys(row.subject for row in ROWS.values() if row.subject is not None):
        names = [name for name, row in (ROWS | OWN_ARGUMENTS).items() if row.subject == subject]
        lines += [f"  {subject}", *_lines([_row(name, _MOST_CHOICES) for name in names], indent=4)]
    lines += _part("trainer: settings of Lightning's trainer (--help.trainer)", _TRAINER)
    return "\n".join(lines) + "\n"


_CONFIGURATION = (
    ("-c, --config FILE", "YAML with these sections. Several files are merged"),
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
    ("--trainer.max_epochs, .max_steps, .precision …", "as the equivalent argument"),
    ("--trainer.profiler NAME|CLASS.PATH", "and " + ", ".join(f".{name}" for name in PASSED_ON if name != "profiler")),
    ("--trainer.callbacks, .logger, .plugins CLASS.PATH", "callbacks, loggers, a CheckpointIO"),
)


def help_of_arguments() -> str:
    """List every argument with its values, default and meaning."""
    rows = [_row(name, len(_choices(name))) for name in _FIELDS] + [_row(name, 0) for name in OWN_ARGUMENTS]
    return "\n".join(["arguments:", *_lines(rows, indent=2)]) + "\n"


def help_of_trainer() -> str:
    """List every setting of `trainer`, with its meaning or the argument that sets it instead."""
    settable = [(f"--trainer.{name}", "as the equivalent argument") for name in EQUIVALENTS]
    settable += [(f"--trainer.{name}", "passed to Lightning") for name in PASSED_ON]
    settable += [_TRAINER[-1]]
    objects = ("callbacks", "logger", "plugins")
    elsewhere = [(name, where) for name, where in ELSEWHERE.items() if name not in objects]
    return "\n".join([*_part("trainer", settable)[1:], *_part("set elsewhere, by", elsewhere)]) + "\n"


def _part(title: str, rows: Rows) -> list[str]:
    return ["", f"{title}:", *_lines(rows, indent=2)]


def _lines(rows: Rows, indent: int) -> Iterator[str]:
    """Yield the lines of options, each with its meaning beside it."""
    for option, meaning in rows:
        start = " " * indent + option
        start = start.ljust(_COLUMN) if len(start) < _COLUMN else f"{start} "
        yield from textwrap.wrap(
            meaning, _WIDTH, initial_indent=start, subsequent_indent=" " * _COLUMN, break_long_words=False
        )


def _row(name: str, most_choices: int) -> tuple[str, str]:
    """An argument's option with its values, and its meaning with its default."""
    if name in OWN_ARGUMENTS:
        own = OWN_ARGUMENTS[name]
        return f"--{name}", own.help.rstrip(".") + ("" if own.default is None else f" [{own.default}]")
    default, choices = default_of(_FIELDS[name]), _choices(name)
    meaning = str(_FIELDS[name].metadata["help"]).rstrip(".") + (
        f" [{default}]" if default not in (None, "", []) else ""
    )
    taken = "{" + ",".join(choices) + "}"
    if not choices or len(f"--{name} {taken}") <= _MOST_CHARACTERS:
        return f"--{name} {taken}" if choices else f"--{name}", meaning
    more = ", …" if choices[most_choices:] else ""
    return f"--{name}", f"{meaning}: {', '.join(choices[:most_choices])}{more}"


def _choices(name: str) -> list[str]:
    """The words of an argument that accepts certain words only, which its error names."""
    if name in OWN_ARGUMENTS:
        return []
    kind = checks_of(Seq2SeqTrainingArguments, Seq2SeqTrainingArguments)[name].kind
    try:
        if kind is not None:
            kind.read("no such word")
    except (Unreadable, ArgumentError) as told:
        return re.findall(r"'([^']+)'", str(told)) if "choose one of" in str(told) else []
    return []
