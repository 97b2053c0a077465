"""`hf-compat fit|validate|test|predict` make a run from a YAML file or a command line, which jsonargparse reads.

The sections are `model`, `data`, `args`, `callbacks`, `trainer` and the functions of a Trainer. The options of an HF
command line (`--learning_rate 5e-5`) set arguments. Names of earlier releases are accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse
import numpy as np
from jsonargparse import ArgumentParser, Namespace
from torch import nn

from hf_compat.cli.ckpt_path import (
    BEST,
    LAST,
    MEANING,
    find_checkpoint,
    load_weights,
    pretrained_source,
    wanted_checkpoint,
)
from hf_compat.cli.configuration import ConfigAction, help_of_arguments, help_of_trainer, register, short_help
from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import checks_of, default_of
from hf_compat.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
from hf_compat.hf.legacy import OLD_NAMES, drop_defaults, read_old
from hf_compat.hf.rows import OWN_ARGUMENTS
from hf_compat.hf.value_types import parts_of
from hf_compat.interop import object_parser
from hf_compat.interop.object_parser import (
    ANYTHING,
    ONE_SPEC,
    SPEC,
    Made,
    add_old_names,
    build,
    build_data,
    build_or_import,
    near_unknown,
    without_secret_values,
)
from hf_compat.plan.argument_support import ELSEWHERE, EQUIVALENTS, PASSED_ON, join
from hf_compat.runtime.seeding import set_seed
from hf_compat.runtime.text import is_secret, without_secrets
from hf_compat.trainer_methods.generation import GenerationSteps

if TYPE_CHECKING:
    from hf_compat.hf.metrics import PredictionOutput
    from hf_compat.trainer import Trainer


COMMANDS = {
    "fit": "train, and evaluate as the arguments say",
    "validate": "evaluate `data.eval_dataset` with the weights of `--ckpt_path`",
    "test": "test `data.test_dataset` with the weights of `--ckpt_path`, and print its metrics",
    "predict": "predict `data.test_dataset` with the weights of `--ckpt_path`, and write predictions.npz",
}
DATA = {
    "train_dataset": "samples to train on",
    "eval_dataset": "samples to evaluate on, or a mapping of such sets",
    "test_dataset": "samples to test on",
    "data_collator": "from a list of samples to a batch",
    "processing_class": "tokenizer or processor, which pads and is saved with the model",
}
# The arguments for generation apply to a `trainer_class` that generates.
FIELDS = {field.name: field for field in dataclasses.fields(Seq2SeqTrainingArguments)}
_DEFAULTS = {name: default_of(field) for name, field in FIELDS.items()}
_CHECKS = checks_of(Seq2SeqTrainingArguments, Seq2SeqTrainingArguments)
_LISTS = {name for name, field in FIELDS.items() if "list" in str(field.type)}
_ARGUMENT_NAMES = {*FIELDS, *OLD_NAMES, *OWN_ARGUMENTS}
FUNCTIONS = {
    "compute_metrics": "function of an EvalPrediction, or a torchmetrics object",
    "compute_loss_func": "from outputs, labels and num_items_in_batch to the loss",
    "preprocess_logits_for_metrics": "applied to logits before they are kept",
    "model_init": "makes the model, in place of `model`",
    "optimizer_cls_and_kwargs": "an optimizer's class path and its keywords, in place of `args.optim`",
}
# Settings of Lightning's trainer that are objects, for which a Trainer has other arguments.
OBJECTS = {
    "callbacks": "further callbacks, as in `callbacks`",
    "logger": "a Lightning logger or several, beside `args.report_to`",
    "plugins": "a CheckpointIO, for Lightning's ModelCheckpoint",
}


# jsonargparse's option for leaving unset values out, `skip_none` before 4.49.
_SKIP = "skip_unset" if [*map(int, jsonargparse.__version__.split(".")[:2])] >= [4, 49] else "skip_none"


class ConfigParser(ArgumentParser):
    """jsonargparse's parser, with short help. It writes no secret to a file or the screen."""

    parse_args = object_parser.parse_args

    def format_help(self, *_: object, **__: object) -> str:  # later releases pass a formatter
        """List the sections, and the arguments that most runs set."""
        command = self.prog.rpartition(" ")[2]
        data = [(f"--data.{name}", meaning) for name, meaning in DATA.items()]
        functions = [(f"--{name}", meaning) for name, meaning in FUNCTIONS.items()]
        return short_help(command, COMMANDS[command], data, functions)

    def dump(self, cfg: Namespace, **kwargs: Any) -> str:  # of jsonargparse
        """Write a configuration as text that makes the same run again.

        Tokens are left out. An argument appears under the name and in the section in which the user gave it.
        """
        text: Namespace = without_secret_values(cfg)
        args, trainer = text.get("args"), text.get("trainer")
        if not (args is None or trainer is None):
            drop_defaults(vars(args), _CHECKS)
            for name, value in vars(trainer).items():
                if value is not None and name in EQUIVALENTS:
                    for argument in EQUIVALENTS[name](value):
                        args.pop(argument, None)
        if kwargs.get(_SKIP, True):
            _drop_unset(text)
        # a None that is left was set by the user, among a class's arguments
        return super().dump(text, **{**kwargs, _SKIP: False})


def _drop_unset(section: Namespace) -> None:
    """Leave unset values out of the configuration and of the sections whose keys are known."""
    for name, value in list(vars(section).items()):
        if value is None:
            section.pop(name)
        elif name in ("args", "data", "trainer") and isinstance(value, Namespace):
            _drop_unset(value)


def make_parser(command: str) -> ArgumentParser:
    """Make the parser of a command."""
    parser = ConfigParser(
        prog=f"hf-compat {command}", description=COMMANDS[command], exit_on_error=False, parser_mode=register()
    )
    parser.add_argument("-c", "--config", action=ConfigAction, help="YAML file with the sections below")
    parser.add_argument("--model", type=nn.Module | dict[str, Any] | str | None, help="class path and arguments")
    parser.add_argument("--ckpt_path", type=str | bool | None, default=None, help=MEANING)
    parser.add_argument("--trainer_class", type=str, default="hf_compat.Trainer", help="Trainer, or a subclass's path")
    for name, meaning in {**{f"data.{name}": meaning for name, meaning in DATA.items()}, **FUNCTIONS}.items():
        parser.add_argument(f"--{name}", type=SPEC, default=None, help=meaning)
    parser.add_argument("--callbacks", type=list[ONE_SPEC], default=[], help="HF and Lightning callbacks, in any mix")
    hints = typing.get_type_hints(Seq2SeqTrainingArguments)
    for name, field in FIELDS.items():
        parts, kind = set(parts_of(hints[name])), hints[name]  # the argument itself checks the value
        if parts <= {bool, int, type(None)}:  # they take `1e3` and `1`, too
            kind = ANYTHING
        elif parts <= {str, type(None)}:  # a run may be called 2024
            kind = str | int | float | None
        parser.add_argument(f"--args.{name}", type=kind, default=_DEFAULTS[name], help=field.metadata["help"])
    for name, own in OWN_ARGUMENTS.items():
        parser.add_argument(f"--args.{name}", type=ANYTHING, default=own.default, help=own.help)
    add_old_names(parser, "args.")
    import hf_compat.upstream  # noqa: F401 - loads Lightning, which other commands do without

    # isort: split
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.profilers import Profiler

    # settings that take a class path and its arguments (`--trainer.profiler.dirpath`) have a type
    kinds = {
        **dict.fromkeys((*EQUIVALENTS, *PASSED_ON), ANYTHING),
        **{"profiler": Profiler | str | None, "plugins": CheckpointIO | list[CheckpointIO] | None},
    }
    equivalents = dict.fromkeys(EQUIVALENTS, "as the equivalent argument")
    for name, meaning in {**equivalents, **dict.fromkeys(PASSED_ON, "passed to Lightning"), **OBJECTS}.items():
        parser.add_argument(f"--trainer.{name}", type=kinds.get(name, SPEC), default=None, help=meaning)
    for name in ELSEWHERE.keys() - OBJECTS.keys():  # refused with a hint
        parser.add_argument(f"--trainer.{name}", type=ANYTHING, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def as_sections(words: Sequence[str]) -> list[str]:
    """Turn the options of an HF command line into those of the `args` section.

    `--learning_rate 5e-5`, `--learning-rate=5e-5`, `--bf16` and `--no_bf16` mean the same as in HF.
    """
    turned: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        option, equals, text = word.removeprefix("--").partition("=")
        name = option.replace("-", "_")
        is_off = name not in _ARGUMENT_NAMES and name.removeprefix("no_") in _ARGUMENT_NAMES
        if not word.startswith("--") or not (name in _ARGUMENT_NAMES or is_off):
            turned.append(word)
            continue
        name = name.removeprefix("no_") if is_off else name
        values = ["false"] if is_off else [text] if equals else []
        while waiting and not (equals or is_off or waiting[0].startswith("--")) and (name in _LISTS or not values):
            values.append(waiting.pop(0))
        is_list = name in _LISTS and bool(values) and not (is_off or values[0].startswith("["))
        turned.append(f"--args.{name}={json.dumps(values) if is_list else ''.join(values or ['true'])}")
    return turned


# jsonargparse lists the options of one part by `--args.help`.
_HELP = {
    "--help.args": help_of_arguments, "--args.help": help_of_arguments,
    "--help.trainer": help_of_trainer, "--trainer.help": help_of_trainer,
}  # fmt: skip


class Run:
    """The Trainer and the test data that a configuration describes."""

    def __init__(self, command: str, words: Sequence[str]) -> None:
        self.command = command
        parser = make_parser(command)
        line = as_sections(words)
        try:
            self.config = parser.parse_args(line)
            explicit = parser.parse_args(line, defaults=False).as_dict()
        except jsonargparse.ArgumentError as error:
            told, near = without_secrets(str(error), line), near_unknown(parser, str(error))
            key = re.search(r"\bargs\.(\w+)", told)
            if key is not None and is_secret(key[1]):
                told = f"`{key[1]}` has a value that is not text."
            way_out = f"`hf-compat {command} --help` lists the options."
            if near is not None:
                way_out = f"did you mean `--{near.removeprefix('args.')}`?"
            hint = "" if "Hint:" in told else f"\n\nHint: {way_out}"
            raise ArgumentError(f"{told}{hint}") from None  # without the cause, whose message may hold a token
        given = set(explicit.get("args") or {}) - _override(self.config.args, line)
        self.checkpoint = wanted_checkpoint(command, self.config, line)
        self.trainer_class: type[Trainer] = build_or_import(self.config.trainer_class, "trainer_class")
        generates = isinstance(self.trainer_class, type) and issubclass(self.trainer_class, GenerationSteps)
        kind = Seq2SeqTrainingArguments if generates else TrainingArguments
        self.args = _arguments(self.config.as_dict(), given, kind)
        # random weights of a class or of from_pretrained depend on the seed only
        set_seed(self.args.seed)
        spec, model = self.config.model, None
        if spec is not None:
            model = build({"class_path": spec} if isinstance(spec, str) else spec, "model")
        elif self.config.model_init is None:
            raise ArgumentError(
                "The configuration has no `model`.\n\n"
                "Hint: model: {class_path: package.Class, init_args: {…}}; a function or `from_pretrained` does."
            )
        data = {name: build_data(spec, f"data.{name}") for name, spec in self.config.data.as_dict().items()}
        self.test_dataset = data.pop("test_dataset")
        functions = {name: getattr(self.config, name) for name in FUNCTIONS}
        chosen = functions.pop("optimizer_cls_and_kwargs")
        if chosen is not None:
            is_pair = isinstance(chosen, (list, tuple))
            optimizer, keywords = chosen if is_pair else (chosen["class_path"], chosen.get("init_args", {}))
            data["optimizer_cls_and_kwargs"] = (build_or_import(optimizer, "optimizer_cls_and_kwargs"), dict(keywords))
        data |= {n: build_or_import(spec, n) for n, spec in functions.items() if spec is not None}
        self.trainer = self.trainer_class(model=model, args=self.args, callbacks=self._callbacks(), **data)
        self.trainer.lightning_options = self._lightning_options()
        # the arguments of `fit` name the checkpoint that it resumes from
        self.is_named = self.checkpoint not in (BEST, LAST)
        if self.checkpoint is not None and (self.command, self.checkpoint) != ("fit", LAST):
            self.checkpoint = find_checkpoint(self.trainer, self.checkpoint)
        if self.command == "fit":
            self.config.args.resume_from_checkpoint = "true" if self.checkpoint == LAST else self.checkpoint
            self.config.ckpt_path = None
        self.text = parser.dump(self.config)

    def _callbacks(self) -> list[Made]:
        """Make the callbacks, including the loggers and callbacks of the `trainer` section."""
        made = [build_or_import(spec, f"callbacks[{i}]") for i, spec in enumerate(self.config.callbacks)]
        for name in ("callbacks", "logger"):
            given = self.config.trainer[name]
            if isinstance(given, bool):
                raise ArgumentError(
                    f"`trainer.{name}={given}` is not set here.\n\nHint: `args.report_to` names trackers, or 'none'."
                )
            specs = given if isinstance(given, list) else [] if given is None else [given]
            made += [build_or_import(spec, f"trainer.{name}[{i}]") for i, spec in enumerate(specs)]
        return made

    def _lightning_options(self) -> dict[str, Made]:
        """Make the settings that are passed to Lightning. A class path alone is called."""
        options: dict[str, Made] = {}
        for name in (*PASSED_ON, "plugins"):
            spec = self.config.trainer[name]
            is_path = isinstance(spec, str) and "." in spec and name == "profiler"
            made = build({"class_path": spec} if is_path else spec, f"trainer.{name}")
            if made is not None:
                options[name] = made
        return options

    def execute(self) -> None:
        """Run the command. Commands other than `fit` load the weights first, and print their source."""
        if self.command != "fit":
            if self.checkpoint is not None:
                load_weights(self.trainer, self.checkpoint, self.is_named)
                self._say(f"weights: {self.checkpoint}")
            else:
                source = pretrained_source(self.config.model)
                made = "that `model` makes" if source is None else f"of {source}"
                self._say(f"weights: those {made}; no checkpoint of a run is loaded (`--ckpt_path`)")
        run: Callable[[], None] = getattr(self, self.command)
        run()

    def fit(self) -> None:
        """Train, save the model and its metrics, and evaluate if `do_eval` is set."""
        if self.args.should_save:
            folder, number = Path(str(self.args.output_dir)), 1
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "config.yaml"
            while os.path.lexists(path) and not (path.is_file() and path.read_bytes() == self.text.encode()):
                number += 1
                path = folder / f"config-{number}.yaml"  # the user may have written the other one
            path.write_bytes(self.text.encode())
        trainer = self.trainer
        result = trainer.train(resume_from_checkpoint=True if self.checkpoint == LAST else self.checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        if self.args.do_eval and trainer.eval_dataset is not None:
            self._report("eval", trainer.evaluate())

    def _say(self, text: str) -> None:
        if self.trainer.is_world_process_zero():
            print(text)  # noqa: T201 - the command's answer

    def _report(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print metrics, and write them into the output folder."""
        self.trainer.log_metrics(split, metrics)
        self.trainer.save_metrics(split, metrics)

    def validate(self) -> None:
        """Evaluate, and report the metrics."""
        self._report("eval", self.trainer.evaluate())

    def _tested(self, prefix: str) -> PredictionOutput:
        if self.test_dataset is None:
            raise ArgumentError(f"`hf-compat {self.command}` has no `data.test_dataset`.\n\nHint: add it.")
        return self.trainer.predict(self.test_dataset, metric_key_prefix=prefix)

    def test(self) -> None:
        """Test, and report the metrics."""
        self._report("test", self._tested("test").metrics or {})

    def predict(self) -> None:
        """Write the predictions, and report the metrics."""
        output = self._tested("predict")
        if not self.trainer.is_world_process_zero():
            return
        parts = output.predictions if isinstance(output.predictions, tuple) else (output.predictions,)
        named = {"predictions" if i == 0 else f"predictions_{i}": part for i, part in enumerate(parts)}
        if output.label_ids is not None and not isinstance(output.label_ids, tuple):
            named["labels"] = output.label_ids
        path = os.path.join(str(self.args.output_dir), "predictions.npz")
        os.makedirs(str(self.args.output_dir), exist_ok=True)
        np.savez(path, **named)
        self._say(f"written: {path} ({', '.join(named)})")
        self._report("predict", output.metrics or {})


def _override(args: Namespace, line: Sequence[str]) -> set[str]:
    """Let old names on a command line override a file's values of today's names, and give these names."""
    of_line = {word.removeprefix("--args.").partition("=")[0] for word in line if word.startswith("--args.")}
    overridden: set[str] = set()
    for old in OLD_NAMES.keys() & of_line:
        overridden |= OLD_NAMES[old].translate(read_old(old, args[old], _CHECKS)).keys() - of_line
    for name in overridden:
        args[name] = _DEFAULTS[name]
    return overridden


def _arguments(config: dict[str, Any], given: set[str], kind: type[TrainingArguments]) -> TrainingArguments:
    """Make the training arguments of a configuration."""
    values = config["args"]
    if len(given & set(FIELDS)) > len(FIELDS) / 2:  # a printed configuration, which has the defaults as well
        given = {name for name in given & set(FIELDS) if values[name] != _DEFAULTS[name]}
    known = {name: value for name, value in values.items() if name in FIELDS or name in OWN_ARGUMENTS}
    old = {name: values[name] for name in OLD_NAMES if values.get(name) is not None}
    args = join({n: value for n, value in config["trainer"].items() if n not in OBJECTS}, known, given)
    left_out = {name for name in set(FIELDS) - given if args[name] == _DEFAULTS[name]}
    chosen = {name: value for name, value in args.items() if name not in left_out}
    absent = sorted(set(chosen) - {field.name for field in dataclasses.fields(kind)} - set(OWN_ARGUMENTS))
    if absent:
        raise ArgumentError(
            f"`args.{absent[0]}` is an argument of trainers that generate, and `trainer_class` is "
            f"{config['trainer_class']}.\n\nHint: trainer_class: hf_compat.Seq2SeqTrainer."
        )
    return kind(**chosen, **old)


def main(command: str, words: Sequence[str]) -> int:
    """Run a command, and give its exit status."""
    for word, text in _HELP.items():
        if word in words:
            print(text(), end="")  # noqa: T201 - the command's answer
            return 0
    sys.path.insert(0, os.getcwd())  # the project's own modules, as for a script
    Run(command, words).execute()
    return 0
