"""Read objects and arguments with jsonargparse, for `hf-compat fit` and LightningCLI.

A configuration names classes, functions and classmethods by their paths. A text alone is not called:

    model:
      class_path: transformers.AutoModelForSequenceClassification.from_pretrained
      init_args: {pretrained_model_name_or_path: ./model, num_labels: 3}
    compute_metrics: my_project.accuracy

Options such as `--data.train_dataset.init_args.n 32` set parts of an object, by the types of its constructor. Old names
of arguments are options, too, and an error for an unknown name suggests the nearest known one.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace
from torch import nn

from hf_compat.errors import ArgumentError, HfCompatError, warn_user
from hf_compat.hf.argument_values import checks_of
from hf_compat.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
from hf_compat.hf.legacy import OLD_NAMES, drop_defaults
from hf_compat.hf.value_types import parts_of
from hf_compat.runtime.launch import environment
from hf_compat.runtime.text import brief, is_secret, nearest

Spec = Any  # a part of a configuration: a mapping, a list, a text, a number
Made = Any  # an object that the user's configuration names

# Where names without a module are looked up.
_HOMES = ("hf_compat", "lightning.pytorch.callbacks", "lightning.pytorch.loggers", "transformers")


def import_path(path: str, where: str) -> Made:
    """Import `package.module.Class.method`. A bare name is looked up here, in Lightning and in transformers."""
    parts = path.split(".")
    if len(parts) == 1:
        return _by_name(path, where)
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            found: Made = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and not module.startswith(error.name):
                raise  # the module exists, and a module that it imports does not
            continue
        for index, name in enumerate(parts[count:], start=count):
            if not hasattr(found, name):
                near = nearest(name, dir(found))
                hint = f"did you mean {'.'.join([*parts[:index], near])}?" if near else "check the path."
                raise ArgumentError(f"`{where}`: {'.'.join(parts[:index])} has no {brief(name)}.\n\nHint: {hint}")
            found = getattr(found, name)
        return found
    raise ArgumentError(
        f"`{where}`: no module named {brief(parts[0])} ({path}).\n\n"
        "Hint: install it, or run the command in the folder that holds it."
    )


def _by_name(name: str, where: str) -> Made:
    for home in _HOMES:
        try:
            found = getattr(importlib.import_module(home), name, None)
        except ImportError:
            continue
        if found is not None:
            return found
    raise ArgumentError(
        f"`{where}`: there is no {brief(name)} in {', '.join(_HOMES)}.\n\n"
        f"Hint: write its whole path, package.module.{name}."
    )


def build(spec: Spec, where: str) -> Made:
    """Make the object of a part of a configuration, whose place is `where`.

    A mapping with `class_path` (and `init_args`) is called. Lists and mappings are made part by part. Other values stay
    unchanged.
    """
    if isinstance(spec, Namespace):
        spec = spec.as_dict()
    if isinstance(spec, (list, tuple)):
        return [build(part, f"{where}[{index}]") for index, part in enumerate(spec)]
    if not isinstance(spec, Mapping):
        return spec
    if "class_path" not in spec:
        return {name: build(part, f"{where}.{name}") for name, part in spec.items()}
    target = import_path(spec["class_path"], where)
    beside = {name: part for name, part in spec.items() if name not in ("class_path", "init_args", "dict_kwargs")}
    # a command line may leave `init_args` out: `--model.class_path X --model.width 8`
    given = {**(spec.get("init_args") or {}), **(spec.get("dict_kwargs") or {}), **beside}
    arguments = {name: build(part, f"{where}.init_args.{name}") for name, part in given.items()}
    check_names(target, arguments, where, spec["class_path"])
    return target(**arguments)


def build_or_import(spec: Spec, where: str) -> Made:
    """Make the object of a mapping, or import a text, such as the path of a metric function or a callback class."""
    return import_path(spec, where) if isinstance(spec, str) else build(spec, where)


def build_data(spec: Spec, where: str) -> Made:
    """Make a data set, collator or tokenizer. A text is a path, and a function that returns a data set is called."""
    made = build_or_import(spec, where)
    return made() if isinstance(spec, str) and where.endswith("dataset") and callable(made) else made


def without_secret_values(spec: Spec) -> Spec:
    """Copy a part of a configuration, with None in place of secrets."""
    if isinstance(spec, list):
        return [without_secret_values(part) for part in spec]
    if not isinstance(spec, (dict, Namespace)):
        return spec
    parts = spec.items() if isinstance(spec, dict) else vars(spec).items()
    kept = {name: None if is_secret(str(name)) else without_secret_values(part) for name, part in parts}
    return kept if isinstance(spec, dict) else Namespace(**kept)  # type: ignore[no-untyped-call]  # theirs


def check_names(target: Callable[..., Made], arguments: Mapping[str, Made], where: str, path: str) -> None:
    """Refuse arguments that a class or function does not take."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # builtins without a signature raise by themselves
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            near = nearest(name, parameters)
            hint = f"did you mean {brief(near)}?" if near else f"it takes {', '.join(parameters)}."
            raise ArgumentError(f"`{where}`: {path} does not take {brief(name)}.\n\nHint: {hint}")


Hint = Any  # a type hint: a class, a union, a `Literal` …; typing has no common type of these
ANYTHING = Any  # a value that its reader checks, not the parser

_AROUND = ("class_path", "init_args", "dict_kwargs")


# An option for a part of an object: the object's place in the configuration, such as `data.train_dataset`, the keys
# that lead from there to the value, and the value as it was written. Without keys it is the whole object.
Word = tuple[str, tuple[str, ...], str]


def take_words(line: Sequence[str], sections: Mapping[str, bool]) -> tuple[list[str], list[Word]]:
    """Separate the options of objects from a command line."""
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
            taken.append((found, path, text))
        else:
            rest += words
    return rest, taken


def _changed(spec: Spec, path: tuple[str, ...], text: str, where: str) -> Spec:
    """Copy a part of a configuration, in plain values, with a value put into it."""
    if not path:
        return _read(text, ANYTHING, where)
    held: dict[str, Spec] = {"class_path": spec} if isinstance(spec, str) else {}
    if isinstance(spec, Mapping):
        held = dict(spec)
    key, *rest = path
    if key == "class_path":
        return spec if held.get(key) == text else {key: text}
    hint, given, at = ANYTHING, held, f"{where}.{key}"  # of a mapping of several
    if "class_path" in held:
        if key in ("init_args", "dict_kwargs"):
            key, *rest = rest or [""]
        place = "dict_kwargs" if key in (held.get("dict_kwargs") or {}) else "init_args"
        target = import_path(held["class_path"], where)
        check_names(target, {key: text}, where, held["class_path"])
        hint, at = _hint(target, key), f"{where}.init_args.{key}"
        given = {name: held.pop(name) for name in [*held] if name not in _AROUND}
        given |= held.get(place) or {}
        held[place] = given
    given[key] = _changed(given.get(key), tuple(rest), text, at) if rest else _read(text, hint, at)
    return held


def _hint(target: Callable[..., object], name: str) -> Hint:
    """The type of a parameter, from its hint or its default."""
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
    """Read a value by its type, or as YAML if the parser does not know the type."""
    try:
        read = reader_of(hint)
    except ValueError:
        read = reader_of(ANYTHING)
    try:
        value = read(text)
    except argparse.ArgumentTypeError as error:
        raise ArgumentError(f"`{where}`: {error}.\n\nHint: see the class's signature.") from error
    return value.as_dict() if isinstance(value, Namespace) else value


def reader_of(hint: Hint) -> Callable[[str], Spec]:
    """Make a function that reads one word by a type hint, through jsonargparse."""
    reader = ArgumentParser(exit_on_error=False)
    reader.add_argument("--value", type=hint)

    def read(word: str) -> Spec:
        try:
            return reader.parse_args([f"--value={word}"]).value
        except Exception as error:  # jsonargparse has several kinds
            name = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise argparse.ArgumentTypeError(f"{brief(word)} is not of the type {name}") from error

    return read


# The input of `build`. The parser leaves it as written, as it would set None for required parameters.
# In a list, one with `list` would make `+=` put each text into a list of its own.
ONE_SPEC = bool | int | float | dict | str | None  # type: ignore[type-arg]  # the parser looks into dict[str, …]
SPEC = ONE_SPEC | list  # type: ignore[type-arg]
_UNKNOWN = re.compile(r"(?:unrecognized arguments: --|option ')([\w.-]+)", re.IGNORECASE)
_NO_CALLBACK = re.compile(r"Import path ([\w.]+) does not correspond to a subclass of Callback")


def parse_args(self: ArgumentParser, args: Sequence[str] | None = None, *further: Spec, **options: Spec) -> Namespace:
    """Parse a command line, which may have options for parts of objects."""
    open_types: dict[str, Hint] = {}  # the places of objects whose parts the parser does not know
    for action in self._actions:
        hint = getattr(action, "_typehint", None)
        if hint is None or action.dest.endswith(".help"):
            continue
        takes_anything = any(p in (ANYTHING, object) or type(p).__name__ == "UnvalidatedType" for p in parts_of(hint))
        if hint == SPEC or takes_anything or _is_model(hint):
            open_types[action.dest] = hint
    # another word for a model may be the name of a known class, or a file
    sections = {place: type(None) in parts_of(hint) and not _is_model(hint) for place, hint in open_types.items()}
    try:
        line, of_objects = take_words(sys.argv[1:] if args is None else args, sections)
        # these options give required objects, too
        given = {section for section, path, _ in of_objects if path in ((), ("class_path",))}
        required = [action for action in self._actions if action.dest in given and action.required]
        try:
            for action in required:
                action.required = False
            config: Namespace = ArgumentParser.parse_args(self, line, *further, **options)
        finally:
            for action in required:
                action.required = True
        for section, path, text in of_objects:
            spec = config.get(section)
            config[section] = _changed(spec.as_dict() if isinstance(spec, Namespace) else spec, path, text, section)
    except ArgumentError as wrong:
        self.error(str(wrong), wrong)
    if self.default_env:
        _tell_of_unread_variables(self)
    if config.get("lr_scheduler") is not None and "optimizer" in config and config.optimizer is None:
        warn_user(
            "LightningCLI ignores `--lr_scheduler` without `--optimizer`.\n\nHint: give both, or set "
            "`lr_scheduler_type` in the arguments of an HFModule."
        )
    return config


def _tell_of_unread_variables(parser: ArgumentParser) -> None:
    """Warn of environment variables for a part of an object. jsonargparse reads variables for whole options only."""
    prefix = f"{parser.env_prefix.replace('-', '_')}_" if isinstance(parser.env_prefix, str) else ""
    known = {f"{prefix}{action.dest}".replace(".", "__").upper() for action in parser._actions}
    for name in sorted(environment.keys() - known):
        whole = max((one for one in known if name.startswith(f"{one}__")), key=len, default=None)
        if whole is not None:
            value = "…"
            for key in reversed(name.removeprefix(f"{whole}__").lower().split("__")):
                value = f"{{{key}: {value}}}"
            warn_user(f"The environment variable {name} is not read.\n\nHint: {whole}='{value}'")


def add_class_arguments(
    self: ArgumentParser, class_type: type, nested_key: str | None = None, *further: Spec, **options: Spec
) -> list[str]:
    """Add the arguments of a class, and for training arguments their old names."""
    added: list[str] = ArgumentParser.add_class_arguments(self, class_type, nested_key, *further, **options)
    if isinstance(class_type, type) and issubclass(class_type, TrainingArguments):
        add_old_names(self, f"{nested_key}." if nested_key else "")
    return added


def add_old_names(parser: ArgumentParser, prefix: str) -> None:
    """Add the options of training arguments' old names. Configurations hold those that were given."""
    for name, row in OLD_NAMES.items():
        meaning = f"{row.lifetime}. Today: {row.means}"
        parser.add_argument(f"--{prefix}{name}", type=ANYTHING, default=argparse.SUPPRESS, help=meaning)


def instantiate_classes(self: ArgumentParser, cfg: Namespace, **options: Spec) -> Namespace:
    """Make the objects of a configuration. An error of this package is raised without jsonargparse's dump of values."""
    cfg = cfg.clone()
    checks = checks_of(Seq2SeqTrainingArguments, Seq2SeqTrainingArguments)
    for section in (cfg, *(part for _, part in cfg.items(branches=True) if isinstance(part, Namespace))):
        drop_defaults(vars(section), checks)
    try:
        made: Namespace = ArgumentParser.instantiate_classes(self, cfg, **options)
    except (TypeError, ValueError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, HfCompatError):
            cause = cause.__cause__
        raise error if cause is None else cause from None
    return made


def error(self: ArgumentParser, message: str, ex: Exception | None = None) -> NoReturn:
    """Refuse a command line or a file. For an unknown name, suggest the nearest known one."""
    callback = _NO_CALLBACK.search(message)
    if callback is not None:
        message = (
            f"{callback[1]} is not a callback of Lightning.\n\nHint: if it is one of HF, give it to an adapter: "
            f"{{class_path: hf_compat.HFCallbackAdapter, init_args: {{callbacks: [{{class_path: {callback[1]}}}]}}}}."
        )
    near = near_unknown(self, message)
    message += f"\n\nHint: did you mean `{near}`?" if near else ""
    ArgumentParser.error(self, message, ex)


def near_unknown(parser: ArgumentParser, message: str) -> str | None:
    """Find the nearest name to the one that jsonargparse's message calls unknown."""
    unknown = _UNKNOWN.search(message)
    return None if unknown is None or "Hint:" in message else near_name(parser, unknown[1].replace("-", "_"))


def near_name(parser: ArgumentParser, name: str) -> str | None:
    """Find the nearest known name by its last part, and among several by the whole."""
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


def _is_model(hint: Hint) -> bool:
    """Whether a type is a model's, or that of a mapping from which `build` makes a model."""
    parts = parts_of(hint)
    is_spec = any(part is dict or typing.get_origin(part) is dict for part in parts)
    return is_spec and any(isinstance(part, type) and issubclass(part, nn.Module) for part in parts)
