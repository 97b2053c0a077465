"""The YAML of `--config`: bounded before anything builds on it, its keys checked against what there is. Text only.

YAML lets a line name another part of the file again, so that a few of them stand for billions of values; a file may
nest without end, or be no file at all. Each is refused here, with its place, before jsonargparse reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, get_loader, set_loader  # type: ignore[attr-defined]

from hf_compat.checkpoint.files import first_line, read_text
from hf_compat.errors import ArgumentError, CheckpointError
from hf_compat.runtime.text import nearest

MODE = "bounded_yaml"  # jsonargparse's name for a way to read values
MOST_BYTES = 4 * 2**20
MOST_VALUES = 50_000  # aliases written out
MOST_LEVELS = 40  # of lists and mappings within each other
MOST_ITEMS = 1_000  # of a list whose items jsonargparse checks one by one: that takes the square of their number
_SECTIONS = ("args", "data", "trainer")  # whose keys are known
_NUMBER = re.compile(r"[-+0-9_:.]{400,}|[-+]?0[xob][0-9a-fA-F_]{400,}")  # reading one takes the square of its length

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Loaded = Any  # what a text of YAML says: nested plain values


class TooLarge(yaml.YAMLError):
    """A text of YAML passes a bound, or says something twice."""


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end is still to come.

    Args:
        anchor: The name by which aliases call it.
        is_mapping: Whether its values are keys and values in turn.
        values: Values in it so far, itself among them, aliases written out.
        levels: Levels below it.
        parts: Nodes directly in it.
        keys: Its keys that are plain.
    """

    anchor: str | None
    is_mapping: bool
    values: int = 1
    levels: int = 0
    parts: int = 0
    keys: set[tuple[str | None, str]] = field(default_factory=set)

    def add(self, values: int, levels: int) -> None:
        self.values += values
        self.levels = max(self.levels, levels + 1)
        self.parts += 1


class _Measure:
    """Follows the events of a text, of which nothing is built yet, and holds them to the bounds."""

    def __init__(self) -> None:
        self.open: list[_Open] = [_Open(None, is_mapping=False)]
        self.sizes: dict[str, tuple[int, int]] = {}  # of what has an anchor: values, and levels

    def take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.CollectionStartEvent):
            self.open.append(_Open(event.anchor, isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.CollectionEndEvent):
            closed = self.open.pop()
            self._add(event, closed.anchor, closed.values, closed.levels)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.sizes:
                raise TooLarge(f"`*{event.anchor}` stands for nothing that is complete before it{_at(event)}")
            self._add(event, None, *self.sizes[event.anchor])
        elif isinstance(event, yaml.ScalarEvent):
            if not event.style and _NUMBER.match(event.value):
                raise TooLarge(f"it has a number of {len(event.value)} digits{_at(event)}")
            around = self.open[-1]
            if around.is_mapping and around.parts % 2 == 0:
                key = (event.tag, event.value)
                if key in around.keys:
                    raise TooLarge(f"{event.value[:60]!r} stands there twice{_at(event)}")
                around.keys.add(key)
            self._add(event, event.anchor, 1, 0)
        if len(self.open) > MOST_LEVELS + 1:
            raise TooLarge(f"it nests more than {MOST_LEVELS} levels{_at(event)}")

    def _add(self, event: yaml.Event, anchor: str | None, values: int, levels: int) -> None:
        around = self.open[-1]
        around.add(values, levels)
        if anchor is not None:
            self.sizes[anchor] = (values, levels)
        if len(self.open) + levels > MOST_LEVELS + 1:
            raise TooLarge(f"it nests more than {MOST_LEVELS} levels{_at(event)}")
        if sum(part.values for part in self.open) > MOST_VALUES:
            raise TooLarge(f"it stands for more than {MOST_VALUES} values{_at(event)}")


def _at(event: yaml.Event) -> str:
    return f", line {event.start_mark.line + 1}" if event.start_mark is not None else ""


def check_bounds(text: str) -> None:
    """Refuse a text of YAML that stands for too much, before anything of it is built.

    Raises:
        YAMLError: It is no YAML, or passes a bound.
    """
    measure = _Measure()
    try:
        for event in yaml.parse(text, Loader=Loader):
            measure.take(event)
    except yaml.MarkedYAMLError as error:
        # libyaml of PyYAML 6.0.4 reads ahead, and has a bound of its own on levels
        if "maximum nesting depth" not in str(error.problem):
            raise
        raise TooLarge(f"it nests more than {MOST_LEVELS} levels") from error


def load(text: str) -> Loaded:
    """Read a text of YAML whose size has bounds, as jsonargparse reads it.

    Raises:
        YAMLError: It is no YAML, or passes a bound.
    """
    check_bounds(text)
    try:
        return get_loader("yaml")(text)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:  # of a tag as `!!int x`
        raise yaml.YAMLError(f"a value is not of its type ({type(error).__name__})") from error


def register() -> str:
    """Teach jsonargparse this way to read; returns its name."""
    set_loader(MODE, load, exceptions=(yaml.YAMLError,))
    return MODE


class ConfigAction(ActionConfigFile):
    """`--config`: a file, or its text. What is wrong with it is told with its place."""

    def __call__(  # type: ignore[override]  # argparse knows more kinds of values
        self, parser: ArgumentParser, cfg: Namespace, values: str, option_string: str | None = None
    ) -> None:
        is_file = os.path.lexists(values)
        name = values if is_file else f"`{option_string or '--config'}`"
        loaded = _load_named(name, _read(values) if is_file else values)
        if isinstance(loaded, dict):
            _check_keys(name, loaded, {action.dest for action in parser._actions})
        elif is_file:
            found = "nothing" if loaded is None else f"a {type(loaded).__name__}"
            raise ArgumentError(f"{name} holds {found}, not sections.\n\nHint: begin with `model:`, `data:`, `args:`.")
        super().__call__(parser, cfg, values, option_string)  # type: ignore[no-untyped-call]


def _read(path: str) -> str:
    try:
        return read_text(path, MOST_BYTES)
    except CheckpointError as error:
        raise ArgumentError(f"{first_line(error)}\n\nHint: `--config` names a file of YAML, in UTF-8.") from error


def _load_named(name: str, text: str) -> Loaded:
    try:
        return load(text)
    except yaml.MarkedYAMLError as error:  # its text may quote the file, a token in it say
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ArgumentError(f"{name} is no valid YAML: {error.problem or error.context}{where}.") from None
    except yaml.YAMLError as error:
        raise ArgumentError(f"{name} cannot be read: {first_line(error)}.") from None


def _check_keys(name: str, loaded: Mapping[object, object], known: Collection[str]) -> None:
    """Refuse keys that no section has.

    Raises:
        ArgumentError: There is one; the message says which is meant.
    """
    for section, values in loaded.items():
        if section not in {key.partition(".")[0] for key in known} | set(known):
            raise _unknown(name, str(section), known)
        _check_lengths(name, section, values)
        inside = {key.partition(".")[2] for key in known if key.startswith(f"{section}.")}
        if section not in _SECTIONS or values is None:
            continue
        if not isinstance(values, dict):
            raise ArgumentError(f"{name}: `{section}` is a {type(values).__name__}, not a mapping of names to values.")
        for key in values:
            if key not in inside:
                raise _unknown(name, f"{section}.{key}", known)


def _check_lengths(name: str, section: object, values: object) -> None:
    lists = {section: values} if section == "callbacks" else {}
    if section == "args" and isinstance(values, dict):
        lists = {f"args.{key}": value for key, value in values.items()}
    for key, value in lists.items():
        if isinstance(value, (list, dict)) and len(value) > MOST_ITEMS:
            raise ArgumentError(f"{name}: `{key}` has {len(value)} items, more than {MOST_ITEMS}.")


def _unknown(name: str, key: str, known: Collection[str]) -> ArgumentError:
    last = key.rpartition(".")[2]
    near = next(_elsewhere(last, known), None) or nearest(key, known)
    hint = f"did you mean `{near}`?" if near else "`hf-compat fit --help` lists what there is."
    return ArgumentError(f"{name} has `{key[:60]}`, which is not known.\n\nHint: {hint}")


def _elsewhere(last: str, known: Collection[str]) -> Iterator[str]:
    return (key for key in sorted(known) if key.rpartition(".")[2] == last)
