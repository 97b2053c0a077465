"""The sections of a configuration, and the parser that reads them from YAML and a command line; what it writes again.

Words of an HF command line (`--learning_rate 5e-5`) are arguments; names of earlier releases are accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jsonargparse
from jsonargparse import ArgumentParser, Namespace
from torch import nn

from hf_compat.cli.configuration import ConfigAction, register
from hf_compat.cli.help import short_help
from hf_compat.cli.parser import Value
from hf_compat.cli.scored_weights import MEANING
from hf_compat.hf.argument_values import OWN_ARGUMENTS, checks_of, read_all
from hf_compat.hf.arguments_seq2seq import Seq2SeqTrainingArguments
from hf_compat.hf.legacy import OLD_NAMES, translate_legacy
from hf_compat.hf.value_types import parts_of
from hf_compat.interop import object_parser
from hf_compat.interop.nested_words import ANYTHING, Hint
from hf_compat.interop.object_parser import SPEC
from hf_compat.interop.todays_words import in_todays_words, read_plain, todays_values
from hf_compat.plan.lightning_equivalents import ELSEWHERE, EQUIVALENTS, PASSED_ON
from hf_compat.runtime.text import is_secret

COMMANDS = {
    "fit": "train, and evaluate where the arguments say so",
    "validate": "evaluate `data.eval_dataset` with the weights of `--ckpt_path`",
    "test": "test `data.test_dataset` with the weights of `--ckpt_path`, and print its metrics",
    "predict": "predict `data.test_dataset` with the weights of `--ckpt_path`, and write predictions.npz",
}
DATA = {
    "train_dataset": "samples to train on",
    "eval_dataset": "samples to evaluate on, or a mapping of such sets",
    "test_dataset": "samples to test on",
    "data_collator": "from a list of samples to a batch",
    "processing_class": "tokenizer or processor: pads, and is saved with the model",
}
# Those of `Seq2SeqTrainingArguments` among them, for a `trainer_class` that generates.
FIELDS = {field.name: field for field in dataclasses.fields(Seq2SeqTrainingArguments)}
_LISTS = {name for name, field in FIELDS.items() if "list" in str(field.type)}
_ARGUMENT_NAMES = {*FIELDS, *OLD_NAMES, *OWN_ARGUMENTS}
FUNCTIONS = {
    "compute_metrics": "function of an EvalPrediction, or a torchmetrics object",
    "compute_loss_func": "from outputs, labels and num_items_in_batch to the loss",
    "preprocess_logits_for_metrics": "applied to logits before they are kept",
    "model_init": "makes the model, in place of `model`",
    "optimizer_cls_and_kwargs": "an optimizer's class path and its keywords, in place of `args.optim`",
}
# Settings of Lightning's trainer that are objects, and have another place among the arguments of a Trainer.
OBJECTS = {
    "callbacks": "further callbacks, as in `callbacks`",
    "logger": "a Lightning logger or several, beside `args.report_to`",
    "plugins": "a CheckpointIO, for Lightning's ModelCheckpoint",
}


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


# jsonargparse's word for leaving out what is not set; `skip_none` before 4.49.
_SKIP = "skip_unset" if _release(jsonargparse.__version__) >= (4, 49) else "skip_none"


class ConfigParser(ArgumentParser):
    """jsonargparse's parser; what it writes, to a file or the screen, holds no secret, and its help is short."""

    parse_args = object_parser.parse_args

    def format_help(self, *_: object, **__: object) -> str:  # later releases hand over a formatter
        """Return the sections, and the arguments that most runs set."""
        command = self.prog.rpartition(" ")[2]
        data = [(f"--data.{name}", meaning) for name, meaning in DATA.items()]
        functions = [(f"--{name}", meaning) for name, meaning in FUNCTIONS.items()]
        return short_help(command, COMMANDS[command], data, functions)

    def dump(self, cfg: Namespace, **kwargs: Any) -> str:  # of jsonargparse
        """Return a configuration as text that makes the same run again.

        Tokens are left out, as a run of that file has to bring its own. Arguments have today's names, and one that the
        `trainer` section decides stands there alone.
        """
        text = _hide(cfg.clone())
        # Let a configuration say everything once: by today's names, and in the section where the user says it
        args, trainer = text.get("args"), text.get("trainer")
        if not (args is None or trainer is None):
            for name in OLD_NAMES:
                if (value := args.pop(name, None)) is not None:
                    for today, said in todays_values(name, value).items():
                        args[today] = said
            for name, value in vars(trainer).items():
                if value is not None and name in EQUIVALENTS:
                    for argument in EQUIVALENTS[name](value):
                        args.pop(argument, None)
        if kwargs.get(_SKIP, True):
            _drop_unset(text)
        # what is not set was left out above; a None among a class's arguments is the user's, and stays
        return super().dump(text, **{**kwargs, _SKIP: False})


def _drop_unset(section: Namespace) -> None:
    """Leave out what is not set, of the configuration and of the sections whose keys are known."""
    for name, value in list(vars(section).items()):
        if value is None:
            section.pop(name)
        elif name in ("args", "data", "trainer") and isinstance(value, Namespace):
            _drop_unset(value)


def _hide(section: Namespace) -> Namespace:
    """Take the values of secrets out of a configuration."""
    for name, value in vars(section).items():
        if isinstance(value, Namespace):
            _hide(value)
        else:
            setattr(section, name, None if is_secret(name) else _without_tokens(value))
    return section


def _without_tokens(value: Value) -> Value:
    if isinstance(value, dict):
        return {key: None if is_secret(str(key)) else _without_tokens(item) for key, item in value.items()}
    return [_without_tokens(item) for item in value] if isinstance(value, list) else value


def make_parser(command: str) -> ArgumentParser:
    """Return the parser of a command."""
    parser = ConfigParser(
        prog=f"hf-compat {command}", description=COMMANDS[command], exit_on_error=False, parser_mode=register()
    )
    parser.add_argument("-c", "--config", action=ConfigAction, help="YAML file with the sections below")
    parser.add_argument("--model", type=nn.Module | dict[str, Any] | str | None, help="class path and arguments")
    parser.add_argument("--ckpt_path", type=str | bool | None, default=None, help=MEANING)
    parser.add_argument("--trainer_class", type=str, default="hf_compat.Trainer", help="Trainer, or a subclass's path")
    for name, meaning in DATA.items():
        parser.add_argument(f"--data.{name}", type=SPEC, default=None, help=meaning)
    for name, meaning in FUNCTIONS.items():
        parser.add_argument(f"--{name}", type=SPEC, default=None, help=meaning)
    parser.add_argument("--callbacks", type=list[SPEC], default=[], help="HF and Lightning callbacks, in any mix")
    _add_arguments(parser)
    for name in EQUIVALENTS:
        parser.add_argument(f"--trainer.{name}", type=ANYTHING, default=None, help="as the argument that says the same")
    # The types of settings that take a class path and its arguments (`--trainer.profiler.dirpath`)
    import hf_compat.upstream  # noqa: F401 - loads Lightning, which other commands do without

    # isort: split
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.profilers import Profiler

    kinds = {
        **dict.fromkeys(PASSED_ON, ANYTHING),
        **{"profiler": Profiler | str | None, "plugins": CheckpointIO | list[CheckpointIO] | None},
    }
    for name, meaning in {**dict.fromkeys(PASSED_ON, "handed to Lightning"), **OBJECTS}.items():
        parser.add_argument(f"--trainer.{name}", type=kinds.get(name, SPEC), default=None, help=meaning)
    for name in ELSEWHERE.keys() - OBJECTS.keys():  # refused with a hint
        parser.add_argument(f"--trainer.{name}", type=ANYTHING, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _add_arguments(parser: ArgumentParser) -> None:
    hints = typing.get_type_hints(Seq2SeqTrainingArguments)
    for name, field in FIELDS.items():
        meaning = field.metadata["help"]
        parser.add_argument(f"--args.{name}", type=_kind_of(hints[name]), default=default_of(field), help=meaning)
    for name, own in OWN_ARGUMENTS.items():
        parser.add_argument(f"--args.{name}", type=ANYTHING, default=own.default, help=own.help)
    # accepted, but neither listed nor printed
    for name in OLD_NAMES:
        parser.add_argument(f"--args.{name}", type=ANYTHING, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _kind_of(hint: Hint) -> Hint:
    """Return what the parser takes for an argument, which then checks the value itself."""
    parts = set(parts_of(hint))
    if parts <= {bool, int, type(None)}:  # they take `1e3` and `1`, too
        return ANYTHING
    if parts <= {str, type(None)}:  # a run may be called 2024
        return str | int | float | None
    return hint


def default_of(field: dataclasses.Field[Any]) -> Value:
    """Return the default of an argument."""
    if field.default is not dataclasses.MISSING:
        return field.default
    assert field.default_factory is not dataclasses.MISSING  # every argument has a default
    return field.default_factory()


def as_sections(words: Sequence[str]) -> list[str]:
    """Turn the words of an HF command line into those of the `args` section; others stay.

    `--learning_rate 5e-5`, `--learning-rate=5e-5`, `--bf16` and `--no_bf16` are what they are in HF.

    Raises:
        ArgumentError: An old name and its successor are given different values.
    """
    turned: list[str] = []
    said: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or not {name, name.removeprefix("no_")} & _ARGUMENT_NAMES:
            turned.append(word)
        elif name not in _ARGUMENT_NAMES:
            turned.append(f"--args.{name.removeprefix('no_')}=false")
        else:
            values = [value] if equals else _take_values(rest, takes_many=name in _LISTS)
            said[name] = _as_text(values, name in _LISTS) or "true"
            turned.extend(in_todays_words("args.", name, said[name]))
    _compare_old_and_new(said)
    return turned


def _compare_old_and_new(said: Mapping[str, str]) -> None:
    """Let an old name and its successor contradict each other; of two equal words the last one counts."""
    if not OLD_NAMES.keys() & said.keys():
        return
    checks = checks_of(Seq2SeqTrainingArguments, Seq2SeqTrainingArguments)
    values, _ = read_all(checks, {name: read_plain(text) for name, text in said.items()})  # problems come up later
    with warnings.catch_warnings(action="ignore"):  # as above
        translate_legacy(values, {*FIELDS, *OWN_ARGUMENTS}, checks)


def _take_values(rest: list[str], takes_many: bool) -> list[str]:
    """Take the values of an option from the words after it: all up to the next option, or one."""
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (takes_many or not values):
        values.append(rest.pop(0))
    return values


def _as_text(values: list[str], is_list: bool) -> str:
    return json.dumps(values) if is_list and values and not values[0].startswith("[") else "".join(values)
