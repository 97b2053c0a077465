"""`hf-compat fit|validate|test|predict`: a run from a YAML file or a command line. jsonargparse reads both.

The sections are `model`, `data`, `args`, `callbacks`, `trainer` and the functions of a Trainer. Words of an HF command
line (`--learning_rate 5e-5`) are arguments; names of earlier releases are accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jsonargparse
import numpy as np
from jsonargparse import ArgumentParser, Namespace
from torch import nn

from hf_compat.cli.class_paths import Made, Spec, build, build_or_import
from hf_compat.cli.configuration import ConfigAction, register
from hf_compat.cli.parser import Value, read_plain
from hf_compat.cli.results import keep, keep_metrics
from hf_compat.cli.scored_weights import (
    LAST,
    MEANING,
    find_checkpoint,
    load_weights,
    pretrained_source,
    wanted_checkpoint,
)
from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import checks_of
from hf_compat.hf.arguments import OWN_ARGUMENTS, TrainingArguments
from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES, read_old
from hf_compat.hf.value_types import parts_of, plain
from hf_compat.plan.lightning_equivalents import ELSEWHERE, EQUIVALENTS, PASSED_ON, join
from hf_compat.runtime.seeding import set_seed
from hf_compat.runtime.text import is_secret, without_secrets

if TYPE_CHECKING:
    from hf_compat.hf.outputs import PredictionOutput
    from hf_compat.trainer import Trainer

Section = dict[str, Any]  # of a configuration: names and the values that the user gave them

ANYTHING = Any  # a value that its reader checks, not the parser
COMMANDS = {
    "fit": "train, and evaluate where the arguments say so",
    "validate": "evaluate `data.eval_dataset` with the weights of `--ckpt_path`",
    "test": "test `data.test_dataset` with the weights of `--ckpt_path`, and print its metrics",
    "predict": "predict `data.test_dataset` with the weights of `--ckpt_path`, and write predictions.npz",
}
_DATA = {
    "train_dataset": "samples to train on",
    "eval_dataset": "samples to evaluate on, or a mapping of such sets",
    "test_dataset": "samples to test on",
    "data_collator": "from a list of samples to a batch",
    "processing_class": "tokenizer or processor: pads, and is saved with the model",
}
_FIELDS = {field.name: field for field in dataclasses.fields(TrainingArguments)}
_LISTS = {name for name, field in _FIELDS.items() if "list" in str(field.type)}
_ARGUMENT_NAMES = {*_FIELDS, *OLD_NAMES, *OWN_ARGUMENTS}
_FUNCTIONS = {
    "compute_metrics": "function of an EvalPrediction, or a torchmetrics object",
    "compute_loss_func": "from outputs, labels and num_items_in_batch to the loss",
    "preprocess_logits_for_metrics": "applied to logits before they are kept",
    "model_init": "makes the model, in place of `model`",
    "optimizer_cls_and_kwargs": "an optimizer's class path and its keywords, in place of `args.optim`",
}


class ConfigParser(ArgumentParser):
    """jsonargparse's parser; what it writes, to a file or the screen, holds no secret."""

    def dump(self, cfg: Namespace, **kwargs: Any) -> str:  # of jsonargparse
        """Return a configuration as text; tokens are left out, as a run of that file has to bring its own."""
        text = _hide(cfg.clone())
        return super().dump(text, **kwargs)


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
    for name, meaning in _DATA.items():
        parser.add_argument(f"--data.{name}", type=ANYTHING, default=None, help=meaning)
    for name, meaning in _FUNCTIONS.items():
        parser.add_argument(f"--{name}", type=ANYTHING, default=None, help=meaning)
    parser.add_argument("--callbacks", type=list[Any], default=[], help="HF and Lightning callbacks, in any mix")
    _add_arguments(parser)
    _add_trainer(parser)
    return parser


def _add_arguments(parser: ArgumentParser) -> None:
    hints = typing.get_type_hints(TrainingArguments)
    for name, field in _FIELDS.items():
        meaning = field.metadata["help"]
        # counts and truth values are read by the arguments themselves, which take `1e3` and `1` for them, too
        kind = ANYTHING if {bool, int, type(None)}.issuperset(parts_of(hints[name])) else hints[name]
        parser.add_argument(f"--args.{name}", type=kind, default=_default_of(field), help=meaning)
    for name, meaning in OWN_ARGUMENTS.items():
        parser.add_argument(f"--args.{name}", type=ANYTHING, default=False, help=meaning)
    # accepted, but neither listed nor printed
    for name in OLD_NAMES:
        parser.add_argument(f"--args.{name}", type=ANYTHING, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_trainer(parser: ArgumentParser) -> None:
    for name in EQUIVALENTS:
        parser.add_argument(f"--trainer.{name}", type=ANYTHING, default=None, help="as the argument that says the same")
    for name in PASSED_ON:
        parser.add_argument(f"--trainer.{name}", type=ANYTHING, default=None, help="handed to Lightning")
    for name in ELSEWHERE:  # refused with a hint
        parser.add_argument(f"--trainer.{name}", type=ANYTHING, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def as_sections(words: Sequence[str]) -> list[str]:
    """Turn the words of an HF command line into those of the `args` section; others stay.

    `--learning_rate 5e-5`, `--learning-rate=5e-5`, `--bf16` and `--no_bf16` are what they are in HF.
    """
    turned: list[str] = []
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
            turned.extend(_in_todays_words(name, _as_text(values, name in _LISTS) or "true"))
    return turned


def _take_values(rest: list[str], takes_many: bool) -> list[str]:
    """Take the values of an option from the words after it: all up to the next option, or one."""
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (takes_many or not values):
        values.append(rest.pop(0))
    return values


def _as_text(values: list[str], is_list: bool) -> str:
    return json.dumps(values) if is_list and values and not values[0].startswith("[") else "".join(values)


def _in_todays_words(name: str, text: str) -> list[str]:
    """Return an argument's word; of an old name, the words of today: they override a configuration file's."""
    row = OLD_NAMES.get(name)
    today = {} if row is None or row.inert or name in ATTRIBUTES_ONLY else row.translate(_value_of_old(name, text))
    if not today:
        return [f"--args.{name}={text}"]
    values = {n: plain(value) for n, value in today.items()}
    return [f"--args.{n}={value if isinstance(value, str) else json.dumps(value)}" for n, value in values.items()]


def _value_of_old(name: str, text: str) -> Value:
    return read_old(name, read_plain(text), checks_of(TrainingArguments, TrainingArguments))


def _told(error: Exception, line: list[str]) -> str:
    """Return an error's message without secrets."""
    key = re.search(r"\bargs\.(\w+)", str(error))
    if key is not None and is_secret(key[1]):
        return f"`{key[1]}` has a value that is no text."
    return without_secrets(str(error), line)


class Run:
    """What a configuration describes: a Trainer, and data to test on.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        words: The command line after it.

    Raises:
        ArgumentError: The configuration cannot work; the message names the place and the way out.
    """

    def __init__(self, command: str, words: Sequence[str]) -> None:
        self.command = command
        parser = make_parser(command)
        line = as_sections(words)
        try:
            self.config = parser.parse_args(line)
            explicit = parser.parse_args(line, defaults=False).as_dict()
        except jsonargparse.ArgumentError as error:
            # without the cause: its message may hold a token
            raise ArgumentError(
                f"{_told(error, line)}\n\nHint: `hf-compat {command} --help` lists what there is."
            ) from None
        self.checkpoint = wanted_checkpoint(command, self.config, line)
        self.args = _arguments(self.config.as_dict(), set(explicit.get("args") or {}))
        # weights that a class or from_pretrained makes at random follow from the seed alone
        set_seed(self.args.seed)
        model = self._model()
        sources = self.config.data.as_dict()
        data = {name: _data(spec, f"data.{name}") for name, spec in sources.items()}
        self.test_dataset = data.pop("test_dataset")
        self.trainer = self._trainer(model, data)
        self._find_checkpoint()
        self.text = parser.dump(self.config)

    def _model(self) -> nn.Module | None:
        spec = self.config.model
        if spec is None:
            if self.config.model_init is None:
                raise ArgumentError(
                    "The configuration has no `model`.\n\n"
                    "Hint: model: {class_path: package.Class, init_args: {…}}; a function or `from_pretrained` does."
                )
            return None
        model: nn.Module = build({"class_path": spec} if isinstance(spec, str) else spec, "model")
        return model

    def _trainer(self, model: nn.Module | None, data: dict[str, Made]) -> Trainer:
        functions = {name: getattr(self.config, name) for name in _FUNCTIONS}
        chosen = {n: _function(spec, n) for n, spec in functions.items() if spec is not None}
        callbacks = [build_or_import(spec, f"callbacks[{i}]") for i, spec in enumerate(self.config.callbacks)]
        trainer_class: type[Trainer] = build_or_import(self.config.trainer_class, "trainer_class")
        trainer = trainer_class(model=model, args=self.args, callbacks=callbacks, **data, **chosen)
        trainer.lightning_options = {
            name: build_or_import(value, f"trainer.{name}") if name == "profiler" and "." in str(value) else value
            for name, value in self.config.trainer.as_dict().items()
            if name in PASSED_ON and value is not None
        }
        return trainer

    def _find_checkpoint(self) -> None:
        """Find the checkpoint that is meant; what `fit` goes on from stands among the arguments that it keeps."""
        if self.checkpoint is not None and (self.command, self.checkpoint) != ("fit", LAST):
            self.checkpoint = find_checkpoint(self.trainer, self.checkpoint)
        if self.command == "fit":
            self.config.args.resume_from_checkpoint = "true" if self.checkpoint == LAST else self.checkpoint
            self.config.ckpt_path = None

    def execute(self) -> None:
        """Do what the command says."""
        actions: dict[str, Callable[[], None]] = {
            "fit": self._fit,
            "validate": self._validate,
            "test": self._test,
            "predict": self._predict,
        }
        if self.command != "fit":
            self._load_weights()
        actions[self.command]()

    def _fit(self) -> None:
        self._keep_config()
        trainer = self.trainer
        result = trainer.train(resume_from_checkpoint=True if self.checkpoint == LAST else self.checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        if self.args.do_eval and trainer.eval_dataset is not None:
            metrics = trainer.evaluate()
            trainer.log_metrics("eval", metrics)
            trainer.save_metrics("eval", metrics)

    def _keep_config(self) -> None:
        """Write the configuration beside the results; one that is there and differs is kept."""
        if self.args.should_save:
            keep(str(self.args.output_dir), "config.yaml", self.text.encode())

    def _load_weights(self) -> None:
        """Load the weights that are to be scored, and say which ones they are."""
        if self.checkpoint is not None:
            load_weights(self.trainer, self.checkpoint)
            self._say(f"weights: {self.checkpoint}")
            return
        source = pretrained_source(self.config.model)
        made = "that `model` makes" if source is None else f"of {source}"
        self._say(f"weights: those {made}; no checkpoint of a run is loaded (`--ckpt_path`)")

    def _say(self, text: str) -> None:
        if self.trainer.is_world_process_zero():
            print(text)  # noqa: T201 - the command's answer

    def _report(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print metrics and write them beside what the run has written."""
        self.trainer.log_metrics(split, metrics)
        if self.trainer.is_world_process_zero():
            self._say(f"written: {keep_metrics(str(self.args.output_dir), split, metrics)}")

    def _validate(self) -> None:
        self._report("eval", self.trainer.evaluate())

    def _tested(self, prefix: str) -> PredictionOutput:
        if self.test_dataset is None:
            raise ArgumentError(f"`hf-compat {self.command}` has no `data.test_dataset`.\n\nHint: add it.")
        return self.trainer.predict(self.test_dataset, metric_key_prefix=prefix)

    def _test(self) -> None:
        self._report("test", self._tested("test").metrics or {})

    def _predict(self) -> None:
        output = self._tested("predict")
        if not self.trainer.is_world_process_zero():
            return
        named = _named_arrays(output)
        content = io.BytesIO()
        np.savez(content, **named)  # type: ignore[arg-type]  # numpy's own keyword is `allow_pickle`
        path = keep(str(self.args.output_dir), "predictions.npz", content.getvalue())
        self._say(f"written: {path} ({', '.join(named)})")
        self._report("predict", output.metrics or {})


def _named_arrays(output: PredictionOutput) -> dict[str, np.ndarray]:
    """Name the arrays of a prediction as they stand in its file."""
    parts = output.predictions if isinstance(output.predictions, tuple) else (output.predictions,)
    named = {"predictions" if i == 0 else f"predictions_{i}": part for i, part in enumerate(parts)}
    if output.label_ids is not None and not isinstance(output.label_ids, tuple):
        named["labels"] = output.label_ids
    return named


def _arguments(config: Section, given: set[str]) -> TrainingArguments:
    """Make the training arguments of a configuration.

    Args:
        config: The whole configuration.
        given: Names of arguments that the user gave; a default gives way to an old name.
    """
    values = config["args"]
    if given >= set(_FIELDS):  # a printed configuration holds the defaults as well
        given = {name for name in given & set(_FIELDS) if values[name] != _default_of(_FIELDS[name])}
    known = {name: value for name, value in values.items() if name in _FIELDS or name in OWN_ARGUMENTS}
    old = {name: values[name] for name in OLD_NAMES if values.get(name) is not None}
    args = join(config["trainer"], known, given)
    left_out = {name for name in set(_FIELDS) - given if args[name] == _default_of(_FIELDS[name])}
    return TrainingArguments(**{name: value for name, value in args.items() if name not in left_out}, **old)


def _default_of(field: dataclasses.Field[Any]) -> Value:
    if field.default is not dataclasses.MISSING:
        return field.default
    assert field.default_factory is not dataclasses.MISSING  # every argument has a default
    return field.default_factory()


def _data(spec: Spec, where: str) -> Made:
    """Make a data set, collator or tokenizer: a text is the path of a function or class that is called."""
    if isinstance(spec, str):
        made = build_or_import(spec, where)
        return made() if where.endswith("dataset") and callable(made) else made
    return build(spec, where)


def _function(spec: Spec, where: str) -> Made:
    if where == "optimizer_cls_and_kwargs":
        kind, keywords = spec if isinstance(spec, (list, tuple)) else (spec["class_path"], spec.get("init_args", {}))
        return build_or_import(kind, where), dict(keywords)
    return build_or_import(spec, where)


def main(command: str, words: Sequence[str]) -> int:
    """Run a command; returns the exit status."""
    sys.path.insert(0, os.getcwd())  # the project's own modules, as for a script
    Run(command, words).execute()
    return 0
