"""`HfArgumentParser` makes dataclasses from a command line or a file, with HF's interface."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_compat.errors import ArgumentError, UnknownArgument
from hf_compat.hf.argument_values import NO_DEFAULT, ArgumentCheck, default_of
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.hf.rows import OWN_ARGUMENTS
from hf_compat.hf.value_types import parts_of, plain
from hf_compat.interop.object_parser import Hint, reader_of
from hf_compat.runtime.text import bool_or_none, brief, without_secrets

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    DataclassType = type[DataclassInstance]
    DataclassField = dataclasses.Field[Any]
    # a parser or one of its groups, for which argparse has no common public name
    Options = argparse._ActionsContainer
import yaml

from hf_compat.checkpoint.files import first_line, read_json, read_text
from hf_compat.cli.configuration import MOST_BYTES, load_named
from hf_compat.errors import CheckpointError

Named = dict[str, object]


class MissingFile(ArgumentError, FileNotFoundError):
    """The file of arguments does not exist."""


def read_arguments(path: str | os.PathLike[str], read: Callable[[str], object]) -> Named:
    """Read names and values from a file of at most 4 MiB. YAML has the bounds of `hf-compat fit --config`."""
    name = os.fspath(path)
    if "\0" not in name and not os.path.lexists(name):
        raise MissingFile(f"{brief(name)} cannot be read: the file does not exist.")
    try:
        content = read(name)
    except CheckpointError as error:
        raise ArgumentError(first_line(error)) from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ArgumentError(f"{name} holds {brief(content, 60)}, not names of arguments and their values.")
    return content


Value = Any  # the value of a field, of the type in its hint
Instances = tuple[Any, ...]  # of the user's dataclasses
_OMITTED = object()  # marks an option that the command line omits
# Training arguments that were lists up to 4.40, and so took several words.
_SEVERAL_WORDS = ("report_to",)


def HfArg(  # noqa: N802 - HF's name
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Value = dataclasses.MISSING,
    default_factory: Callable[[], Value] = dataclasses.MISSING,  # type: ignore[assignment]  # as dataclasses has it
    metadata: Mapping[str, object] | None = None,
    **kwargs: Any,  # of `dataclasses.field`
) -> Value:
    """Declare a dataclass field with a help text and further option names.

    Mirrors:
        `transformers.hf_argparser.HfArg`.
    """
    facts = {**(metadata or {}), **({"aliases": aliases} if aliases else {}), **({"help": help} if help else {})}
    return dataclasses.field(metadata=facts, default=default, default_factory=default_factory, **kwargs)


def read_word(word: str | bool, kinds: Collection[Hint]) -> Value:
    """Read a truth value (yes, true, t, y, on, 1 or their opposites), or a text or JSON list if these are allowed."""
    value = bool_or_none(word) if bool in kinds else None
    if value is None and str not in kinds:
        raise argparse.ArgumentTypeError(f"{brief(word)} is not a truth value. Write true or false")
    if isinstance(word, str) and list in kinds and word.lstrip().startswith("["):
        return json.loads(word)
    return word if value is None else value


class HfArgumentParser(argparse.ArgumentParser):
    """Make a command line from the fields of dataclasses, and instances from a command line, dict, JSON or YAML file.

    Args:
        dataclass_types: One dataclass or several, such as `TrainingArguments`.
        kwargs: Options of `argparse.ArgumentParser`.

    Mirrors:
        `transformers.HfArgumentParser`.

    Differs:
        Old names of training arguments are options too (`--evaluation_strategy steps`). A dict may be JSON
        (`--options '{"a": {"b": 1}}'`), and a list a JSON list. Values are checked against the whole type hint.
    """

    def __init__(
        self,
        dataclass_types: DataclassType | Iterable[DataclassType] | None = None,
        **kwargs: Any,  # of argparse
    ) -> None:
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(**kwargs)
        # a class may be iterable, by its metaclass
        is_one = isinstance(dataclass_types, type) or not isinstance(dataclass_types, Iterable)
        given: Any = [dataclass_types] if is_one else dataclass_types
        self.dataclass_types: list[DataclassType] = [] if dataclass_types is None else list(given)
        for kind in self.dataclass_types:
            if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
                raise ArgumentError(
                    f"`HfArgumentParser` got {brief(kind)}, which is not a dataclass.\n\n"
                    "Hint: pass classes, as in `HfArgumentParser((ModelArguments, TrainingArguments))`."
                )
            group: Options = self
            if hasattr(kind, "_argument_group_name"):
                group = self.add_argument_group(kind._argument_group_name)
            try:
                hints: dict[str, Hint] = typing.get_type_hints(kind)
            except NameError as error:
                raise RuntimeError(
                    f"The type hints of {kind.__name__} cannot be resolved: {error}.\n\n"
                    "Hint: declare the class, and the names in its hints, at the top of a module."
                ) from error
            checks = kind._checks() if issubclass(kind, TrainingArguments) else {}
            for field in dataclasses.fields(kind):
                if field.init:
                    _add_field(group, field, hints[field.name], checks.get(field.name))
        ours = [kind for kind in self.dataclass_types if issubclass(kind, TrainingArguments)]
        names = {field.name for kind in ours for field in dataclasses.fields(kind)}
        # the actions of training arguments, with their defaults before `set_defaults`
        self._of_training = [(a, a.default) for a in self._actions if a.dest in names and not a.required]
        for kind in self.dataclass_types:  # last, because the script's own options take precedence
            for name in _other_names(kind):
                if not any(f"--{name}" in action.option_strings for action in self._actions):
                    options = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
                    self.add_argument(
                        *options,
                        nargs="?",
                        const=True,
                        default=argparse.SUPPRESS,
                        help=argparse.SUPPRESS,
                    )

    def parse_args_into_dataclasses(
        self,
        args: list[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> Instances:
        """Parse a command line.

        Args:
            args: The words. None takes those of the process.
            return_remaining_strings: Return words that no option takes, instead of refusing them.
            look_for_args_file: First read the file beside the script with its name and the suffix `.args`.
            args_filename: First read this file instead.
            args_file_flag: An option that names such files. Later values replace earlier ones.

        Returns:
            The instances in the order of the classes. Then a namespace of further options, if there are any, and the
            remaining words, if they are requested.

        Raises:
            ValueError: No option takes some words.
        """
        words = list(sys.argv[1:] if args is None else args)
        beside = [Path(sys.argv[0]).with_suffix(".args")] if look_for_args_file and sys.argv else []
        files = [Path(args_filename)] if args_filename else beside
        if args_file_flag:
            finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            finder.add_argument(args_file_flag, action="append", default=[], dest="files")
            named, words = finder.parse_known_args(words)
            files += map(Path, named.files)
        line = [word for file in files if file.exists() for word in file.read_text(encoding="utf-8").split()] + words
        # training arguments that the command line omits stay out, as an old name may set them
        changed = {action.dest for action, default in self._of_training if action.default is not default}
        omitted = {action.dest: _OMITTED for action, _ in self._of_training if action.dest not in changed}
        namespace, remaining = self.parse_known_args(line, argparse.Namespace(**omitted))
        given = vars(namespace)
        for name in [name for name in omitted if given[name] is _OMITTED]:
            del given[name]
        outputs: list[Value] = [
            kind(**{name: given.pop(name) for name in self._names_of(kind) if name in given})
            for kind in self.dataclass_types
        ]
        if given:
            outputs.append(namespace)
        if return_remaining_strings:
            return (*outputs, remaining)
        if remaining:
            text = f"Some specified arguments are not used by the HfArgumentParser: {remaining}"
            raise UnusedWords(without_secrets(text, words))
        return tuple(outputs)

    def _names_of(self, dtype: DataclassType) -> list[str]:
        """The names that a class accepts, without the fields of another class."""
        taken = {field.name for kind in self.dataclass_types for field in dataclasses.fields(kind)}
        own = [field.name for field in dataclasses.fields(dtype) if field.init]
        return [*own, *(name for name in _other_names(dtype) if name not in taken)]

    def parse_dict(self, args: Mapping[str, Value], allow_extra_keys: bool = False) -> Instances:
        """Make the instances from a dict.

        Raises:
            ValueError: A key is not a field, and extra keys are not allowed.
        """
        unused = set(args)
        outputs = []
        for kind in self.dataclass_types:
            given = {name: args[name] for name in self._names_of(kind) if name in args}
            unused -= set(given)
            outputs.append(kind(**given))
        if unused and not allow_extra_keys:
            raise UnusedWords(f"Some keys are not used by the HfArgumentParser: {sorted(unused)}")
        return tuple(outputs)

    def parse_json_file(self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> Instances:
        """Make the instances from a JSON file of at most 4 MiB."""
        return self.parse_dict(read_arguments(json_file, lambda path: read_json(path, MOST_BYTES)), allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> Instances:
        """Make the instances from a YAML file, with the bounds of `hf-compat fit --config`."""
        content = read_arguments(yaml_file, lambda path: load_named(path, read_text(path, MOST_BYTES), yaml.safe_load))
        return self.parse_dict(content, allow_extra_keys)


class UnusedWords(ArgumentError, UnknownArgument):
    """Words or keys that no option takes."""


def _other_names(dtype: DataclassType) -> list[str]:
    """Names of earlier releases, and our own that are not fields."""
    return [*OLD_NAMES, *OWN_ARGUMENTS] if issubclass(dtype, TrainingArguments) else []


def _add_field(group: Options, field: DataclassField, hint: Hint, check: ArgumentCheck | None) -> None:
    options = list(dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}")))
    keywords: dict[str, Any] = dict(field.metadata)
    aliases = keywords.pop("aliases", [])
    options += [aliases] if isinstance(aliases, str) else list(aliases)
    if isinstance(keywords.get("help"), str):  # argparse formats it, and a lone percent sign is text
        keywords["help"] = re.sub(r"%([(%]?)", lambda found: found[0] if found[1] else "%%", keywords["help"])
    is_flag = _without_none(hint) == (bool,)
    default: dict[str, Value] = {"default": False if hint is bool else None} if is_flag else {"required": True}
    if default_of(field) is not NO_DEFAULT:
        default = {"default": default_of(field)}
    keywords = {**_reading(hint, field), **default, **keywords}
    choices = keywords.pop("choices", None)
    if choices is not None:
        by_name = {str(choice): choice for choice in choices}

        def choose(word: str) -> Value:
            """Find the choice of a word. The argument translates words of older releases."""
            with contextlib.suppress(ArgumentError):  # argparse refuses it, and lists the choices
                return plain(check.read(word)) if check is not None and word not in by_name else by_name.get(word, word)
            return word

        keywords |= {"choices": list(choices), "type": choose}
    elif check is not None and field.name in _SEVERAL_WORDS:
        keywords |= {"nargs": "+", "type": str, "action": _SeveralWords, "takes_text": True}
    try:
        group.add_argument(*options, **keywords)
    except argparse.ArgumentError as error:
        raise ArgumentError(
            f"Two of the dataclasses have a field `{field.name}`: a command line can give it to one of them only.\n\n"
            "Hint: rename your own field. TrainingArguments has gained arguments since your script was written."
        ) from error
    if field.default is True and is_flag:
        off = dict.fromkeys((f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"))
        group.add_argument(*off, action="store_false", dest=field.name, default=False, help=keywords.get("help"))


def _without_none(hint: Hint) -> tuple[Hint, ...]:
    parts: tuple[Hint, ...] = parts_of(hint)
    return parts if len(parts) == 1 else tuple(part for part in parts if part is not type(None))


def _reading(hint: Hint, field: DataclassField) -> dict[str, Any]:
    """Choose argparse's keywords for a value of a type, which are its reader and the number of words."""
    kinds = _without_none(hint)
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    if enums:
        return {"choices": [member.value for member in enums[0]]}
    origins: list[object] = [typing.get_origin(kind) for kind in kinds]
    if origins[0] is Literal:
        return {"choices": [choice for choice in typing.get_args(kinds[0]) if choice is not None]}
    if bool in kinds:
        takes_word = kinds == (bool,) and hint is not bool and field.default in (None, dataclasses.MISSING)
        words = {} if takes_word else {"nargs": "?", "const": True}
        return {"type": partial(read_word, kinds=kinds), **words}
    if str in kinds:
        return {"type": partial(read_word, kinds={str, *origins})}
    if len(kinds) == 1 and list in (kinds[0], origins[0]):
        element = (*typing.get_args(kinds[0]), str)[0]
        return {"nargs": "+", "type": str if element is str else reader_of(element), "action": _SeveralWords}
    return {"type": reader_of(hint)}


class _SeveralWords(argparse.Action):
    """A list as several words, or as one word that is a JSON list. With `takes_text` any other single word is text."""

    def __init__(self, *args: Any, type: Callable[[str], Value], takes_text: bool = False, **kwargs: Any) -> None:
        self.element, self.takes_text = type, takes_text
        super().__init__(*args, **{**kwargs, "type": str})

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = list(values or ())
        if len(words) == 1 and words[0].lstrip().startswith("["):
            words = [v if isinstance(v, str) else json.dumps(v) for v in json.loads(words[0])]
        elif len(words) == 1 and self.takes_text:
            setattr(namespace, self.dest, words[0])
            return
        try:
            setattr(namespace, self.dest, [self.element(word) for word in words])
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise argparse.ArgumentError(self, str(error)) from error
