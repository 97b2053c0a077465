"""From what a configuration says to objects: paths of classes, functions and classmethods, with their arguments.

model:
class_path: transformers.AutoModelForSequenceClassification.from_pretrained
init_args: {pretrained_model_name_or_path: ./model, num_labels: 3}
compute_metrics: my_project.accuracy          # a text is the thing itself, not a call of it
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from jsonargparse import Namespace

from hf_compat.errors import ArgumentError
from hf_compat.runtime.text import nearest

Spec = Any  # a part of a configuration: a mapping, a list, a text, a number
Made = Any  # whatever the user's configuration names

# Where names without a module are looked up.
_HOMES = ("hf_compat", "lightning.pytorch.callbacks", "lightning.pytorch.loggers", "transformers")


def import_path(path: str, where: str) -> Made:
    """Import `package.module.Class.method`; a bare name is looked up here, in Lightning and in transformers.

    Args:
        path: The path.
        where: What it stands for, for errors.

    Raises:
        ArgumentError: There is no such thing.
    """
    parts = path.split(".")
    if len(parts) == 1:
        return _by_name(path, where)
    for count in range(len(parts) - 1, 0, -1):
        module = _import_or_none(".".join(parts[:count]))
        if module is not None:
            # The attribute of a module that the parts after the first `count` name
            found: Made = module
            for index, name in enumerate(parts[count:], start=count):
                if not hasattr(found, name):
                    near = nearest(name, dir(found))
                    hint = f"did you mean {'.'.join([*parts[:index], near])}?" if near else "check the path."
                    raise ArgumentError(f"`{where}`: {'.'.join(parts[:index])} has no {name!r}.\n\nHint: {hint}")
                found = getattr(found, name)
            return found
    raise ArgumentError(
        f"`{where}`: no module named {parts[0]!r} ({path}).\n\n"
        "Hint: install it, or run the command in the folder that holds it."
    )


def _import_or_none(name: str) -> ModuleType | None:
    """Import a module; None where there is none of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not name.startswith(error.name):
            raise  # the module is there, and one that it imports is not
        return None


def _by_name(name: str, where: str) -> Made:
    for home in _HOMES:
        try:
            found = getattr(importlib.import_module(home), name, None)
        except ImportError:
            continue
        if found is not None:
            return found
    raise ArgumentError(
        f"`{where}`: there is no {name!r} in {', '.join(_HOMES)}.\n\nHint: write its whole path, package.module.{name}."
    )


def build(spec: Spec, where: str) -> Made:
    """Make what a part of a configuration says.

    Args:
        spec: A mapping with `class_path` (and `init_args`) is called; lists and mappings are made part by part;
            anything else stays as it is.
        where: Its place in the configuration, for errors.

    Raises:
        ArgumentError: There is no such thing, or it does not take such an argument.
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
    """Make what a mapping says, or take the thing itself that a text names: a function of metrics, a callback class."""
    return import_path(spec, where) if isinstance(spec, str) else build(spec, where)


def build_data(spec: Spec, where: str) -> Made:
    """Make a data set, collator or tokenizer: a text is the path of a thing, and what gives a data set is called."""
    made = build_or_import(spec, where)
    return made() if isinstance(spec, str) and where.endswith("dataset") and callable(made) else made


def check_names(target: Callable[..., Made], arguments: Mapping[str, Made], where: str, path: str) -> None:
    """Refuse arguments that a class or function does not take.

    Raises:
        ArgumentError: There is one; the message has the nearest name.
    """
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # builtins without a signature say it themselves
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            near = nearest(name, parameters)
            hint = f"did you mean {near!r}?" if near else f"it takes {', '.join(parameters)}."
            raise ArgumentError(f"`{where}`: {path} does not take {name!r}.\n\nHint: {hint}")
