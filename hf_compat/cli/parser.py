"""`HfArgumentParser`: a command line from dataclasses, with HF's interface; jsonargparse checks the values."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

from hf_compat.errors import ArgumentError, MissingPackage, UnknownArgument
from hf_compat.hf.arguments import OWN_ARGUMENTS, TrainingArguments
from hf_compat.hf.legacy import OLD_NAMES

_TRUE = ("yes", "true", "t", "y", "1")
_FALSE = ("no", "false", "f", "n", "0")


def HfArg(  # noqa: N802 - HF's name
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Any = dataclasses.MISSING,
    default_factory: Callable[[], Any] = dataclasses.MISSING,  # type: ignore[assignment]  # as dataclasses has it
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Declare a dataclass field with a help text and further option names.

    Mirrors:
        `transformers.hf_argparser.HfArg`, 5.23.
    """
    facts = {**(metadata or {}), **({"aliases": aliases} if aliases else {}), **({"help": help} if help else {})}
    return dataclasses.field(metadata=facts, default=default, default_factory=default_factory, **kwargs)


def read_bool(text: str | bool) -> bool:
    """Read a truth value: yes, true, t, y, 1 or their opposites.

    Raises:
        ArgumentTypeError: It is none of them.
    """
    if isinstance(text, bool):
        return text
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is no truth value; write true or false")


class HfArgumentParser(argparse.ArgumentParser):
    """Make a command line from the fields of dataclasses, and instances from a command line, dict, JSON or YAML file.

    Args:
        dataclass_types: One dataclass or several, `TrainingArguments` among them perhaps.
        kwargs: Options of `argparse.ArgumentParser`.

    Raises:
        MissingPackage: jsonargparse is not installed.

    Mirrors:
        `transformers.HfArgumentParser`, 5.23.

    Differs:
        Old names of training arguments are options too (`--evaluation_strategy steps`); a dict may be JSON
        (`--options '{"a": {"b": 1}}'`), a list a JSON list; values are checked against the whole type hint.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(**kwargs)
        if dataclass_types is None:
            dataclass_types = []
        elif dataclasses.is_dataclass(dataclass_types) or not isinstance(dataclass_types, Iterable):
            dataclass_types = [dataclass_types]
        self.dataclass_types: list[Any] = list(dataclass_types)
        for kind in self.dataclass_types:
            self._add_dataclass_arguments(kind)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        group: Any = self
        if hasattr(dtype, "_argument_group_name"):
            group = self.add_argument_group(dtype._argument_group_name)
        hints = _hints_of(dtype)
        for field in dataclasses.fields(dtype):
            if field.init:
                _add_field(group, field, hints[field.name])
        for name in _other_names(dtype):
            if not any(f"--{name}" in action.option_strings for action in self._actions):
                options = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
                group.add_argument(
                    *options, nargs="?", const=True, type=read_plain, default=argparse.SUPPRESS, help=argparse.SUPPRESS
                )

    def parse_args_into_dataclasses(
        self,
        args: list[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Parse a command line.

        Args:
            args: The words; those of the process where none are given.
            return_remaining_strings: Return words that no option takes, instead of refusing them.
            look_for_args_file: Read a file beside the script, with its name and the suffix `.args`, first.
            args_filename: Read this file first, instead.
            args_file_flag: An option that names such files; what comes later counts.

        Returns:
            The instances in the order of the classes, a namespace of options that were added by hand where there are
            any, and the remaining words where they are asked for.

        Raises:
            ValueError: Words that no option takes.
        """
        words = list(sys.argv[1:] if args is None else args)
        files = []
        if args_filename:
            files.append(Path(args_filename))
        elif look_for_args_file and sys.argv:
            files.append(Path(sys.argv[0]).with_suffix(".args"))
        if args_file_flag:
            finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            finder.add_argument(args_file_flag, action="append", default=[], dest="files")
            named, words = finder.parse_known_args(words)
            files.extend(Path(name) for name in named.files)
        from_files = [word for file in files if file.exists() for word in file.read_text(encoding="utf-8").split()]
        line = [*from_files, *words]
        namespace, remaining = self.parse_known_args(line)
        outputs = self._instances(self._without_defaults(namespace, line))
        if vars(namespace):
            outputs.append(namespace)
        if return_remaining_strings:
            return (*outputs, remaining)
        if remaining:
            raise UnusedWords(f"Some specified arguments are not used by the HfArgumentParser: {remaining}")
        return tuple(outputs)

    def _without_defaults(self, namespace: argparse.Namespace, line: list[str]) -> argparse.Namespace:
        """Leave out training arguments that the line does not give: an old name may stand in for them."""
        fields = {
            field.name
            for kind in self.dataclass_types
            if issubclass(kind, TrainingArguments)
            for field in dataclasses.fields(kind)
            if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        }
        defaults = {action.dest: action.default for action in self._actions if action.dest in fields}
        for name in fields & set(vars(namespace)):
            if not self._is_given(name, line) and getattr(namespace, name) == defaults.get(name):
                delattr(namespace, name)
        return namespace

    def _is_given(self, name: str, line: list[str]) -> bool:
        options = {option for action in self._actions if action.dest == name for option in action.option_strings}
        return any(word.partition("=")[0] in options for word in line)

    def _instances(self, namespace: argparse.Namespace) -> list[Any]:
        outputs = []
        for kind in self.dataclass_types:
            names = [n for n in _names_of(kind) if hasattr(namespace, n)]
            given = {name: getattr(namespace, name) for name in names}
            for name in names:
                delattr(namespace, name)
            outputs.append(kind(**given))
        return outputs

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Make the instances from a dict.

        Raises:
            ValueError: A key that is no field, unless they are allowed.
        """
        unused = set(args)
        outputs = []
        for kind in self.dataclass_types:
            given = {name: args[name] for name in _names_of(kind) if name in args}
            unused -= set(given)
            outputs.append(kind(**given))
        if unused and not allow_extra_keys:
            raise UnusedWords(f"Some keys are not used by the HfArgumentParser: {sorted(unused)}")
        return tuple(outputs)

    def parse_json_file(self, json_file: Any, allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Make the instances from a JSON file."""
        return self.parse_dict(json.loads(Path(json_file).read_text(encoding="utf-8")), allow_extra_keys)

    def parse_yaml_file(self, yaml_file: Any, allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Make the instances from a YAML file."""
        import yaml

        return self.parse_dict(yaml.safe_load(Path(yaml_file).read_text(encoding="utf-8")), allow_extra_keys)


class UnusedWords(ArgumentError, UnknownArgument):
    """Words or keys that no option takes."""


def _hints_of(dtype: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(dtype)
    except NameError as error:
        raise RuntimeError(
            f"The type hints of {dtype.__name__} cannot be resolved: {error}.\n\n"
            "Hint: declare the class, and what its hints name, at the top of a module."
        ) from error


def _other_names(dtype: Any) -> list[str]:
    """Names besides the fields: those of earlier releases, and our own."""
    return [*OLD_NAMES, *OWN_ARGUMENTS] if issubclass(dtype, TrainingArguments) else []


def _names_of(dtype: Any) -> list[str]:
    return [*(field.name for field in dataclasses.fields(dtype) if field.init), *_other_names(dtype)]


def _add_field(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    options = list(dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}")))
    keywords: dict[str, Any] = dict(field.metadata)
    aliases = keywords.pop("aliases", [])
    options += [aliases] if isinstance(aliases, str) else list(aliases)
    if isinstance(keywords.get("help"), str):  # argparse formats it: a lone percent sign is meant
        keywords["help"] = re.sub(r"%(?![(%])", "%%", keywords["help"])
    keywords = {**_reading(hint, field), **_default(field), **keywords}
    choices = keywords.pop("choices", None)
    if choices is not None:
        keywords |= {"choices": list(choices), "type": _choose(choices)}
    group.add_argument(*options, **keywords)
    if field.default is True and _without_none(hint) == (bool,):
        off = dict.fromkeys((f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"))
        group.add_argument(*off, action="store_false", dest=field.name, default=False, help=keywords.get("help"))


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    if field.default is not dataclasses.MISSING:
        return {"default": field.default}
    if field.default_factory is not dataclasses.MISSING:
        return {"default": field.default_factory()}
    return {"default": False} if field.type in (bool, "bool") else {"required": True}


def _without_none(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(part for part in typing.get_args(hint) if part is not type(None))
    return (hint,)


def _reading(hint: Any, field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Say how argparse reads a value of a type: the function, and how many words."""
    kinds = _without_none(hint)
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    if enums:
        return {"choices": [member.value for member in enums[0]]}
    if typing.get_origin(kinds[0]) is Literal:
        return {"choices": [choice for choice in typing.get_args(kinds[0]) if choice is not None]}
    if bool in kinds:
        optional = field.default is None or (len(kinds) > 1 and str not in kinds)
        words = {} if optional and kinds == (bool,) else {"nargs": "?", "const": True}
        return {"type": _bool_or_text if str in kinds else read_bool, **words}
    if str in kinds:
        lists = any(typing.get_origin(kind) is list for kind in kinds)
        return {"type": _text_or_list if lists else str}
    if len(kinds) == 1 and (kinds[0] is list or typing.get_origin(kinds[0]) is list):
        element = (*typing.get_args(kinds[0]), str)[0]
        return {"nargs": "+", "type": str if element is str else _checked(element), "action": _OneListOrMany}
    return {"type": _checked(hint)}


class _OneListOrMany(argparse.Action):
    """A list as several words, or as one word that is a JSON list."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.element = kwargs["type"]
        super().__init__(*args, **{**kwargs, "type": str})

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if len(values) == 1 and values[0].lstrip().startswith("["):
            values = [v if isinstance(v, str) else json.dumps(v) for v in json.loads(values[0])]
        try:
            setattr(namespace, self.dest, [self.element(value) for value in values])
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise argparse.ArgumentError(self, str(error)) from error


def _checked(hint: Any) -> Callable[[str], Any]:
    """Return a function that reads one word as a type hint says, through jsonargparse."""
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise MissingPackage(
            "HfArgumentParser reads values with jsonargparse, which is not installed.\n\n"
            "Hint: pip install 'hf-compat[cli]'"
        ) from error
    reader = ArgumentParser(exit_on_error=False)
    reader.add_argument("--value", type=hint)

    def read(word: str) -> Any:
        try:
            return reader.parse_args([f"--value={word}"]).value
        except Exception as error:  # jsonargparse's own, by its several names
            raise argparse.ArgumentTypeError(f"{word!r} is no {_name_of(hint)}") from error

    return read


def _name_of(hint: Any) -> str:
    return getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint).replace("typing.", "")  # type: ignore[return-value]


def _choose(choices: Iterable[Any]) -> Callable[[str], Any]:
    by_name = {str(choice): choice for choice in choices}
    return lambda word: by_name.get(word, word)


def _bool_or_text(word: str | bool) -> str | bool:
    lowered = str(word).lower()
    return lowered in _TRUE if lowered in (*_TRUE, *_FALSE) else word


def _text_or_list(word: str) -> Any:
    return json.loads(word) if word.lstrip().startswith("[") else word


def read_plain(word: str | bool) -> Any:
    """Read the value of an old name: a truth value, a number, or text."""
    if isinstance(word, bool) or word.lower() in ("true", "false"):
        return str(word).lower() == "true"
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return word
