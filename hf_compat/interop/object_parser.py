"""What `hf-compat fit` and LightningCLI have in common: how a parser of jsonargparse reads objects and arguments.

Parts of objects whose type is open are typed by the constructor that they go to, arguments have their old names as
well, and an unknown name is told with the nearest known one. The functions are methods of a parser's class.
"""

from __future__ import annotations

import argparse
import re
import sys
import typing
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn
from weakref import WeakKeyDictionary

from jsonargparse import ArgumentParser, Namespace
from torch import nn

from hf_compat.errors import ArgumentError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.hf.value_types import parts_of
from hf_compat.interop.class_paths import Spec
from hf_compat.interop.nested_words import ANYTHING, Hint, put_in, take_words
from hf_compat.interop.todays_words import in_todays_words, todays_values
from hf_compat.runtime.text import nearest, shown

# What `build` makes something of. A parser leaves it as it is written: it would fill in None for what a class needs.
SPEC = bool | int | float | dict | list | str | None  # type: ignore[type-arg]  # the parser looks into dict[str, …]
_UNKNOWN = re.compile(r"(?:unrecognized arguments: --|option ')([\w.-]+)", re.IGNORECASE)
# By parser: the places of training arguments in it, "" for their own parser, "args." for a group.
_ARGUMENTS: WeakKeyDictionary[ArgumentParser, list[str]] = WeakKeyDictionary()


def parse_args(self: ArgumentParser, args: Sequence[str] | None = None, *further: Spec, **options: Spec) -> Namespace:
    """Parse a command line, whose words may be about parts of objects and have old names of arguments."""
    words = _with_todays_names(sys.argv[1:] if args is None else args, _ARGUMENTS.get(self, []))
    open_types = dict(_open_types(self))
    # another word about a model may be the name of a known class, or a file
    sections = {place: type(None) in parts_of(hint) and not _is_model(hint) for place, hint in open_types.items()}
    try:
        line, of_objects = take_words(words, sections)
        given = {word.section for word in of_objects if word.path in ((), ("class_path",))}
        with _not_required(self, given):
            config: Namespace = ArgumentParser.parse_args(self, line, *further, **options)
        put_in(config, of_objects)
    except ArgumentError as wrong:
        self.error(str(wrong), wrong)
    return config


def parse_object(self: ArgumentParser, obj: Namespace | dict[str, Spec], *further: Spec, **options: Spec) -> Namespace:
    """Parse what a file or a script says, in which arguments may have old names."""
    if "" in _ARGUMENTS.get(self, []):
        values = dict(vars(obj) if isinstance(obj, Namespace) else obj)
        for name in [name for name in values if name in OLD_NAMES]:
            for today, said in todays_values(name, values[name]).items():
                if values.setdefault(today, said) != said:
                    raise ArgumentError(
                        f"`{shown(name, values[name])}` is an old name for `{shown(today, said)}`, but "
                        f"`{shown(today, values[today])}` was given too.\n\nHint: keep `{today}` only."
                    )
            if todays_values(name, values[name]):
                del values[name]
        obj = Namespace(values) if isinstance(obj, Namespace) else values  # type: ignore[no-untyped-call]  # theirs
    parsed: Namespace = ArgumentParser.parse_object(self, obj, *further, **options)
    return parsed


def add_class_arguments(
    self: ArgumentParser, class_type: type, nested_key: str | None = None, *further: Spec, **options: Spec
) -> list[str]:
    """Add the arguments of a class; those of training arguments under their old names, too, which no help lists."""
    added: list[str] = ArgumentParser.add_class_arguments(self, class_type, nested_key, *further, **options)
    if isinstance(class_type, type) and issubclass(class_type, TrainingArguments):
        prefix = f"{nested_key}." if nested_key else ""
        _ARGUMENTS.setdefault(self, []).append(prefix)
        for name in OLD_NAMES:
            self.add_argument(f"--{prefix}{name}", type=ANYTHING, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return added


def error(self: ArgumentParser, message: str, ex: Exception | None = None) -> NoReturn:
    """Refuse a command line or a file; of an unknown name, the nearest known one is told."""
    unknown = _UNKNOWN.search(message)
    if unknown is not None and "Hint:" not in message:
        near = _near_name(self, unknown[1].replace("-", "_"))
        message += f"\n\nHint: did you mean `{near}`?" if near else ""
    ArgumentParser.error(self, message, ex)


@contextmanager
def _not_required(parser: ArgumentParser, given: Collection[str]) -> Iterator[None]:
    """Let a line be parsed without the objects that words beside it give."""
    actions = [action for action in parser._actions if action.dest in given and action.required]
    for action in actions:
        action.required = False
    try:
        yield
    finally:
        for action in actions:
            action.required = True


def _near_name(parser: ArgumentParser, name: str) -> str | None:
    """Return the known name that is meant: first by its last part, of several by the whole."""
    known: dict[str, list[str]] = {}
    for action in (one for one in parser._actions if not one.dest.endswith(".help")):
        names = [action.dest]
        if TrainingArguments in parts_of(getattr(action, "_typehint", None)):
            names += [f"{action.dest}.{argument}" for argument in (*TrainingArguments.__dataclass_fields__, *OLD_NAMES)]
        for one in names:
            known.setdefault(one.rpartition(".")[2], []).append(one)
    place, _, last = name.rpartition(".")
    near = nearest(last, known)
    if near is None:
        return None
    return nearest(name, known[near], cutoff=0) if place else known[near][0]


def _open_types(parser: ArgumentParser) -> Iterator[tuple[str, Hint]]:
    """Yield the places of objects about whose parts the parser knows nothing, and their types."""
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if hint is not None and not action.dest.endswith(".help") and (_says_nothing(hint) or _is_model(hint)):
            yield action.dest, hint


def _says_nothing(hint: Hint) -> bool:
    """Whether a type lets a parser know nothing: there is none, or any value has it."""
    parts = parts_of(hint)
    return hint == SPEC or any(p in (ANYTHING, object) or type(p).__name__ == "UnvalidatedType" for p in parts)


def _is_model(hint: Hint) -> bool:
    """Whether a value is a model, or what `build` makes one of."""
    parts = parts_of(hint)
    is_spec = any(part is dict or typing.get_origin(part) is dict for part in parts)
    return is_spec and any(isinstance(part, type) and issubclass(part, nn.Module) for part in parts)


def _with_todays_names(words: Sequence[str], prefixes: Sequence[str]) -> list[str]:
    turned: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        option, equals, text = word.partition("=")
        found = next((p for p in prefixes if option.removeprefix(f"--{p}") in OLD_NAMES and option[:2] == "--"), None)
        if found is None:
            turned.append(word)
            continue
        if not equals:
            text = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        turned += in_todays_words(found, option.removeprefix(f"--{found}"), text)
    return turned
