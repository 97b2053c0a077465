"""Words of a command line about a part of an object: `--data.train_dataset.init_args.n 32`.

The constructor that a value goes to says what is read: `n: int` gets 32, `name: str` gets '32', `shuffle: bool` False.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonargparse
from jsonargparse import Namespace

from hf_compat.errors import ArgumentError
from hf_compat.interop.class_paths import Spec, check_names, import_path

Hint = Any  # a type hint: a class, a union, a `Literal` …; typing has no common type of these
ANYTHING = Any  # a value that its reader checks, not the parser

_AROUND = ("class_path", "init_args", "dict_kwargs")


@dataclass(frozen=True, slots=True)
class Word:
    """A word about a part of an object of the configuration.

    Args:
        section: The object's place: `model`, `data.train_dataset` …
        path: The keys that lead to the value; none for the whole object.
        text: The value as it was written.
    """

    section: str
    path: tuple[str, ...]
    text: str


def take_words(line: Sequence[str], sections: Mapping[str, bool]) -> tuple[list[str], list[Word]]:
    """Take the words about objects out of a command line.

    Args:
        line: The words.
        sections: The places of the objects, and whether any word about the whole of one is taken; else a parser reads
            those that are no JSON.

    Returns:
        The other words, and those that were taken, in order.
    """
    rest, taken, waiting = [], [], list(line)
    while waiting:
        word = waiting.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        found = next((s for s in sections if name == s or name.startswith(f"{s}.")), None)
        if not word.startswith("--") or found is None or name.endswith(".help"):
            rest.append(word)
            continue
        if not equals and not waiting:
            raise ArgumentError(f"`--{name}` has no value.\n\nHint: `--{name} VALUE`.")
        words = [word] if equals else [word, waiting.pop(0)]
        text = text if equals else words[1]
        path = () if name == found else tuple(name.removeprefix(f"{found}.").split("."))
        if path or sections[found] or text.lstrip().startswith("{"):
            taken.append(Word(found, path, text))
        else:
            rest += words
    return rest, taken


def put_in(config: Namespace, words: Sequence[Word]) -> None:
    """Put the values of words into a configuration.

    Raises:
        ArgumentError: A constructor does not take such an argument, or not such a value.
    """
    for word in words:
        config[word.section] = _changed(config.get(word.section), word.path, word.text, word.section)


def _changed(spec: Spec, path: tuple[str, ...], text: str, where: str) -> Spec:
    """Return a part of a configuration, of the kind that it was, with a value put into it."""
    if not path:
        return _read(text, ANYTHING, where)
    kind = Namespace if isinstance(spec, Namespace) else dict
    held = {"class_path": spec} if isinstance(spec, str) else _items(spec)
    key, *rest = path
    if key == "class_path":
        return spec if held.get("class_path") == text else {"class_path": text}
    if "class_path" not in held:  # a mapping of several
        part = held.get(key)
        return {
            **held,
            key: _changed(part, tuple(rest), text, f"{where}.{key}") if rest else _read(text, ANYTHING, where),
        }
    if key in ("init_args", "dict_kwargs"):
        key, *rest = rest or [""]
    place = "init_args" if key not in _items(held.get("dict_kwargs")) else "dict_kwargs"
    beside = {name: value for name, value in held.items() if name not in _AROUND}
    given = {**beside, **_items(held.get(place))}
    target = import_path(held["class_path"], where)
    check_names(target, {key: text}, where, held["class_path"])
    at = f"{where}.init_args.{key}"
    given[key] = _changed(given.get(key), tuple(rest), text, at) if rest else _read(text, _hint(target, key), at)
    return kind(**{**{name: value for name, value in held.items() if name in _AROUND}, place: kind(**given)})


def _items(spec: Spec) -> dict[str, Spec]:
    if isinstance(spec, Namespace):
        return dict(vars(spec))
    return dict(spec) if isinstance(spec, Mapping) else {}


def _hint(target: Callable[..., object], name: str) -> Hint:
    """What a parameter takes: its type hint, or the type of its default."""
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]  # of the class itself
    parameter = inspect.signature(target).parameters.get(name)
    try:
        hint = typing.get_type_hints(function).get(name)
    except (NameError, TypeError, AttributeError):  # names that only a type checker has, or no function
        hint = None
    if hint is not None or parameter is None:
        return ANYTHING if hint is None else hint
    kinds = {bool: bool, int: int | float, float: float, str: str}
    return kinds.get(type(parameter.default), ANYTHING)


def _read(text: str, hint: Hint, where: str) -> Spec:
    """Read a value as a type says; as YAML does where the type is none that the parser knows."""
    reader = jsonargparse.ArgumentParser(exit_on_error=False)
    try:
        reader.add_argument("--value", type=hint)
    except ValueError:
        reader = jsonargparse.ArgumentParser(exit_on_error=False)
        reader.add_argument("--value", type=ANYTHING)
    try:
        value = reader.parse_args([f"--value={text}"]).value
    except jsonargparse.ArgumentError as error:
        kind = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint)
        raise ArgumentError(
            f"`{where}`: {text!r} is not of the type {kind}.\n\nHint: see the class's signature."
        ) from error
    return value.as_dict() if isinstance(value, Namespace) else value
