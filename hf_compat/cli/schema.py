"""`hf-compat schema` prints a JSON schema, by which an editor completes and checks a YAML configuration.

jsonargparse (4.53) makes one of a parser, too. It lists every subclass of `Module` for `model`, and knows no words or
bounds of arguments, which are checked when the arguments are made.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from hf_compat.cli.ckpt_path import MEANING
from hf_compat.cli.configuration import choices_of
from hf_compat.cli.fit import DATA, FIELDS, FUNCTIONS, OBJECTS
from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import checks_of, default_of
from hf_compat.hf.arguments import Seq2SeqTrainingArguments
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.hf.rows import OWN_ARGUMENTS
from hf_compat.hf.value_types import Unreadable, ValueType
from hf_compat.plan.argument_support import EQUIVALENTS, PASSED_ON

Schema = dict[str, Any]  # of JSON

_NUMBER = r"^[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)([eE][-+]?[0-9]+)?$"
_CHECKS = checks_of(Seq2SeqTrainingArguments, Seq2SeqTrainingArguments)
_OBJECT: Schema = {
    "type": "object",
    "required": ["class_path"],
    "properties": {
        "class_path": {"type": "string", "description": "a class, a function or a classmethod by its path"},
        "init_args": {"type": "object", "description": "its arguments"},
        "dict_kwargs": {"type": "object", "description": "further arguments"},
    },
}
_OBJECT_OR_PATH: Schema = {"anyOf": [{"$ref": "#/$defs/object"}, {"type": ["string", "null"]}]}
_ANYTHING: Schema = {}


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    return argparse.ArgumentParser(
        prog="hf-compat schema",
        description="Print the JSON schema of a YAML configuration of `hf-compat fit`. Exit status: 0.",
        epilog="Editors read it by a first line of the YAML: # yaml-language-server: $schema=FILE",
    )


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    make_parser().parse_args(list(words))
    print(json.dumps(schema(), indent=1))  # noqa: T201 - the command's answer
    return 0


def schema() -> Schema:
    """Make the schema of a configuration. `$defs/arguments` is that of its arguments alone."""
    data = {name: {"description": meaning, **_ANYTHING} for name, meaning in DATA.items()}
    functions = {name: {"description": meaning, **_OBJECT_OR_PATH} for name, meaning in FUNCTIONS.items()}
    functions["optimizer_cls_and_kwargs"] = {"description": FUNCTIONS["optimizer_cls_and_kwargs"]}  # also a pair
    trainer = {
        name: {"description": meaning}
        for names, meaning in ((EQUIVALENTS, "as the equivalent argument"), (PASSED_ON, "passed to Lightning"))
        for name in names
    } | {name: {"description": meaning} for name, meaning in OBJECTS.items()}
    sections = {
        "model": {"description": "a class, a function or `from_pretrained`", **_OBJECT_OR_PATH},
        "ckpt_path": {"description": MEANING, "type": ["string", "boolean", "null"]},
        "trainer_class": {"description": "hf_compat.Trainer, or a subclass", "type": "string"},
        "data": _section("class paths, as for the model", data),
        **functions,
        "callbacks": {
            "description": "HF's and Lightning's callbacks and loggers",
            "type": ["array", "null"],
            "items": _OBJECT_OR_PATH,
        },
        "args": {"$ref": "#/$defs/arguments"},
        "trainer": _section("settings of Lightning's trainer", trainer),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A configuration of hf-compat fit",
        **_section("", sections),
        "$defs": {"object": _OBJECT, "arguments": _arguments()},
    }


def _section(meaning: str, properties: Schema) -> Schema:
    described = {"description": meaning} if meaning else {}
    return {**described, "type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _arguments() -> Schema:
    """The schema of the arguments, of which those of earlier releases take anything."""
    properties: Schema = {
        name: {"description": f"{row.lifetime}. Today: {row.means}", "deprecated": True, **_ANYTHING}
        for name, row in OLD_NAMES.items()
    }
    for name, field in FIELDS.items():
        default = default_of(field)
        is_plain = isinstance(default, (bool, int, float, str, list))
        properties[name] = {
            "description": field.metadata["help"],
            **({"default": default} if is_plain else {}),
            **_values(_CHECKS[name].kind, choices_of(name), default is None),
        }
    for name, own in OWN_ARGUMENTS.items():
        properties[name] = {"description": own.help, "default": own.default}
    return _section("HF's `TrainingArguments`", properties)


def _values(kind: ValueType | None, words: Sequence[str], is_unset: bool) -> Schema:
    """The schema of an argument's values, found by reading samples. `is_unset` says that None is its default."""
    if kind is None:
        return _ANYTHING

    def takes(*samples: object) -> bool:
        return any(_reads(kind, sample) for sample in samples)

    is_text = not words and (kind.takes_text or "path" in kind.expected or "JSON" in kind.expected)
    is_number = takes(0.5, 2)  # a truth value may be 0 or 1
    types = {
        "null": is_unset or takes(None),
        "boolean": takes(True, False),
        "number": takes(0.5),
        "integer": takes(2) and not takes(0.5),
        "string": is_text,
        "array": not words and takes(["a"], [0.5]),
        "object": takes({}),
    }
    some: list[Schema] = [{"type": [name for name, is_taken in types.items() if is_taken]}]
    if words:
        some.append({"enum": [*words, *([""] if takes("") else [])]})
    if words and takes(words[:1]):
        some.append({"type": "array", "items": {"enum": list(words)}})
    if takes(" ".join(words[:2])) and len(words) > 1:
        some.append({"type": "string", "pattern": f"^({'|'.join(words)})( ({'|'.join(words)}))*$"})
    if is_number and not is_text:
        some.append({"type": "string", "pattern": _NUMBER})  # YAML 1.1 takes `5e-5` for a text
    if types["boolean"] and not is_number and not is_text and takes("true"):
        some.append({"enum": ["true", "false", "yes", "no", "on", "off"]})  # as YAML 1.2 has them
    some = [one for one in some if one.get("type") != []]
    return some[0] if len(some) == 1 else {"anyOf": some}


def _reads(kind: ValueType, sample: object) -> bool:
    try:
        kind.read(sample)
    except (Unreadable, ArgumentError):
        return False
    return True
