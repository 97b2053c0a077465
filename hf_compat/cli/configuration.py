"""Check the YAML of `--config` before jsonargparse reads it, and print the help of `hf-compat fit`.

A few YAML aliases can expand to billions of values, and a file can nest without end. Both are refused with their place.
`--help` lists the sections and the most frequent arguments. `--help.args` and `--help.trainer` list everything.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, get_loader, set_loader  # type: ignore[attr-defined]

from hf_compat.checkpoint.files import first_line, read_text
from hf_compat.cli.ckpt_path import MEANING
from hf_compat.errors import ArgumentError, CheckpointError
from hf_compat.hf.argument_values import checks_of
from hf_compat.hf.arguments import Seq2SeqTrainingArguments
from hf_compat.hf.rows import OWN_ARGUMENTS, OWN_ROWS, ROWS
from hf_compat.hf.value_types import Unreadable
from hf_compat.interop.object_parser import near_name
from hf_compat.plan.argument_support import ELSEWHERE, EQUIVALENTS, PASSED_ON, default_of
from hf_compat.runtime.text import brief

MODE = "bounded_yaml"  # jsonargparse's name for this loader
MOST_BYTES = 4 * 2**20
MOST_VALUES = 50_000  # with aliases expanded
MOST_LEVELS = 40  # of lists and mappings within each other
MOST_ITEMS = 1_000  # of a list, as jsonargparse's checks take the square of the number of items
_SECTIONS = ("args", "data", "trainer")  # sections with known keys
_NUMBER = re.compile(r"[-+0-9_:.]{400,}|[-+]?0[xob][0-9a-fA-F_]{400,}")  # read in the square of their length

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Loaded = Any  # the content of a YAML text, as nested plain values


class TooLarge(yaml.YAMLError):
    """A YAML text exceeds a limit, or has a key twice."""


def refuse_huge_yaml(text: str) -> None:
    """Refuse a YAML text that expands to too many values, before any of it is built."""
    level = 0
    try:
        for count, event in enumerate(yaml.parse(text, Loader=Loader)):  # without aliases, as nodes take memory
            level += isinstance(event, yaml.CollectionStartEvent)
            level -= isinstance(event, yaml.CollectionEndEvent)
            _check_size(level, count // 2)  # at most two events a value
        root = yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        # libyaml of PyYAML 6.0.4 reads ahead, and has its own limit of levels
        if "maximum nesting depth" not in str(error.problem):
            raise
        raise TooLarge(f"it nests more than {MOST_LEVELS} levels") from error
    _check_node(root, 0, itertools.count(1))


def _check_size(level: int, count: int) -> None:
    if level > MOST_LEVELS:
        raise TooLarge(f"it nests more than {MOST_LEVELS} levels")
    if count > MOST_VALUES:
        raise TooLarge(f"it stands for more than {MOST_VALUES} values")


def _check_node(node: yaml.Node | None, level: int, counted: Iterator[int]) -> None:
    """Check a node and those in it, each as often as aliases repeat it. A node may contain itself."""
    if node is None:
        return
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.ScalarNode):
        if not node.style and _NUMBER.match(node.value):
            raise TooLarge(f"it has a number of {len(node.value)} digits, line {node.start_mark.line + 1}")
    elif isinstance(node, yaml.MappingNode):
        keys: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in keys:
                raise TooLarge(f"it has the key {brief(key.value[:60])} twice, line {key.start_mark.line + 1}")
            keys.add((key.tag, key.value))
        parts = [part for pair in node.value for part in pair]
    else:
        parts = node.value
    _check_size(level + isinstance(node, yaml.CollectionNode), next(counted))
    for part in parts:
        _check_node(part, level + 1, counted)


def load(text: str, build: Callable[[str], Loaded] | None = None) -> Loaded:
    """Read a YAML text within the limits, by default as jsonargparse reads it."""
    refuse_huge_yaml(text)
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
            text = read_text(values, MOST_BYTES) if is_file else values
        except CheckpointError as error:
            raise ArgumentError(f"{first_line(error)}\n\nHint: `--config` names a YAML file in UTF-8.") from error
        loaded = load_named(name, text)
        if isinstance(loaded, dict):
            _check_keys(name, loaded, parser)
        elif is_file:
            found = "nothing" if loaded is None else f"a {type(loaded).__name__}"
            raise ArgumentError(f"{name} holds {found}, not sections.\n\nHint: begin with `model:`, `data:`, `args:`.")
        super().__call__(parser, cfg, values, option_string)  # type: ignore[no-untyped-call]


def load_named(name: str, text: str, build: Callable[[str], Loaded] | None = None) -> Loaded:
    """Read a YAML text within the limits."""
    try:
        return load(text, build)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ArgumentError(f"{name} is not valid YAML: {error.problem or error.context}{where}.") from None
    except yaml.YAMLError as error:
        raise ArgumentError(f"{name} cannot be read: {first_line(error)}.") from None


def _check_keys(name: str, loaded: Mapping[object, object], parser: ArgumentParser) -> None:
    """Refuse keys that no section has, and long lists."""
    known = {action.dest for action in parser._actions}
    known |= {key.partition(".")[0] for key in known}
    for section, values in loaded.items():
        given = {str(section): values}
        if section in _SECTIONS and values is not None:
            if not isinstance(values, dict):
                kind = type(values).__name__
                raise ArgumentError(f"{name}: `{section}` is a {kind}, not a mapping of names to values.")
            given |= {f"{section}.{key}": value for key, value in values.items()}
        for key, value in given.items():
            if key not in known:
                near = near_name(parser, key)
                hint = f"did you mean `{near}`?" if near else "`hf-compat fit --help` lists the keys."
                raise ArgumentError(f"{name} has `{key[:60]}`, which is not known.\n\nHint: {hint}")
            is_bounded = key == "callbacks" or key.startswith("args.")
            if is_bounded and isinstance(value, (list, dict)) and len(value) > MOST_ITEMS:
                raise ArgumentError(f"{name}: `{key}` has {len(value)} items, more than {MOST_ITEMS}.")


Rows = Sequence[tuple[str, str]]  # an option and its meaning

_COLUMN = 50
_WIDTH = 120
_MOST_CHARACTERS = 40  # of an option with its choices. Longer lists of choices are part of the text
_MOST_CHOICES = 12  # in the short help
_FIELDS = {field.name: field for field in dataclasses.fields(Seq2SeqTrainingArguments)}


def short_help(command: str, meaning: str, data: Rows, functions: Rows) -> str:
    """Write the help of a command. `functions` are the rows of a Trainer's functions, such as `compute_metrics`."""
    count = len(_FIELDS) + len(OWN_ARGUMENTS)
    lines = [
        f"usage: hf-compat {command} --config run.yaml [--ARGUMENT VALUE …] [--SECTION.KEY VALUE …]",
        "",
        f"{meaning[0].upper()}{meaning[1:]}.",
        "Later values replace earlier ones. Names of earlier releases are arguments, too.",
        "Exit status: 0 done, 1 an error of the model, the data or torch, 2 refused with a message.",
        *_part("configuration", _CONFIGURATION),
        *_part("model: {class_path: package.Class, init_args: {…}}", (*_MODEL, *functions[-2:])),
        *_part("data: class paths as for the model", data),
        *_part("functions and callbacks: class paths", (*functions[:-2], _CALLBACKS)),
        *_part(f"arguments (HF's `TrainingArguments`; --help.args lists all {count})", ()),
    ]
    for subject in dict.fromkeys(row.subject for row in ROWS.values() if row.subject is not None):
        names = [name for name, row in (ROWS | OWN_ROWS).items() if row.subject == subject]
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
    rows = [_row(name) for name in (*_FIELDS, *OWN_ARGUMENTS)]
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


def choices_of(name: str) -> list[str]:
    """List the words that an argument takes. Empty if it takes other values."""
    kind = checks_of(Seq2SeqTrainingArguments, Seq2SeqTrainingArguments)[name].kind
    try:
        if kind is not None:
            kind.read("no such word")
    except (Unreadable, ArgumentError) as told:  # it names them
        return re.findall(r"'([^']+)'", str(told)) if "choose one of" in str(told) else []
    return []


def _row(name: str, most_choices: int | None = None) -> tuple[str, str]:
    """An argument's option with its values, and its meaning with its default."""
    choices: list[str] = []
    if name in OWN_ARGUMENTS:
        default, meaning = OWN_ARGUMENTS[name].default, OWN_ARGUMENTS[name].help
    else:
        default, meaning = default_of(_FIELDS[name]), str(_FIELDS[name].metadata["help"])
        choices = choices_of(name)
    meaning = meaning.rstrip(".") + ("" if default in (None, "", []) else f" [{default}]")
    taken = "{" + ",".join(choices) + "}"
    if not choices or len(f"--{name} {taken}") <= _MOST_CHARACTERS:
        return f"--{name} {taken}" if choices else f"--{name}", meaning
    more = ", …" if len(choices) > (most_choices or len(choices)) else ""
    return f"--{name}", f"{meaning}: {', '.join(choices[:most_choices])}{more}"
