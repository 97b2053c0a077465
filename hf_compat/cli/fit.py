"""`hf-compat fit|validate|test|predict`: a run from a YAML file or a command line. jsonargparse reads both.

The sections are `model`, `data`, `args`, `callbacks`, `trainer` and the functions of a Trainer. Words of an HF command
line (`--learning_rate 5e-5`) are arguments; names of earlier releases are accepted.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import jsonargparse
import numpy as np
from torch import nn

from hf_compat.cli.help import help_of_arguments, help_of_trainer
from hf_compat.cli.results import keep, keep_metrics
from hf_compat.cli.scored_weights import (
    BEST,
    LAST,
    find_checkpoint,
    load_weights,
    pretrained_source,
    wanted_checkpoint,
)
from hf_compat.cli.sections import DATA, FIELDS, FUNCTIONS, OBJECTS, as_sections, default_of, make_parser
from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import OWN_ARGUMENTS
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.arguments_seq2seq import Seq2SeqTrainingArguments
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.interop.class_paths import Made, Spec, build, build_data, build_or_import, import_path
from hf_compat.plan.lightning_equivalents import PASSED_ON, join
from hf_compat.runtime.seeding import set_seed
from hf_compat.runtime.text import is_secret, nearest, without_secrets
from hf_compat.trainer_methods.generation import GenerationSteps

if TYPE_CHECKING:
    from hf_compat.hf.outputs import PredictionOutput
    from hf_compat.trainer import Trainer

# `--args.help` is how jsonargparse asks for the options of one part.
_HELP = {
    "--help.args": help_of_arguments, "--args.help": help_of_arguments,
    "--help.trainer": help_of_trainer, "--trainer.help": help_of_trainer,
}  # fmt: skip
Section = dict[str, Any]  # of a configuration: names and the values that the user gave them


def _told(error: Exception, line: list[str]) -> str:
    """Return an error's message without secrets."""
    key = re.search(r"\bargs\.(\w+)", str(error))
    if key is not None and is_secret(key[1]):
        return f"`{key[1]}` has a value that is no text."
    return without_secrets(str(error), line)


def _way_out(command: str, error: Exception) -> str:
    """The nearest name where a word is unknown, or where the names are listed."""
    unknown = re.search(r"unrecognized arguments: --([\w.-]+)", str(error))
    sections = (
        "config",
        "model",
        "ckpt_path",
        "trainer_class",
        "callbacks",
        *(f"data.{name}" for name in DATA),
        *FUNCTIONS,
    )
    near = nearest(unknown[1].replace("-", "_"), [*FIELDS, *OLD_NAMES, *sections]) if unknown else None
    return f"did you mean `--{near}`?" if near else f"`hf-compat {command} --help` lists what there is."


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
            hint = "" if "Hint:" in str(error) else f"\n\nHint: {_way_out(command, error)}"
            raise ArgumentError(f"{_told(error, line)}{hint}") from None
        self.checkpoint = wanted_checkpoint(command, self.config, line)
        self.trainer_class: type[Trainer] = build_or_import(self.config.trainer_class, "trainer_class")
        generates = isinstance(self.trainer_class, type) and issubclass(self.trainer_class, GenerationSteps)
        self.args = _arguments(
            self.config.as_dict(),
            set(explicit.get("args") or {}),
            Seq2SeqTrainingArguments if generates else TrainingArguments,
        )
        # weights that a class or from_pretrained makes at random follow from the seed alone
        set_seed(self.args.seed)
        model = self._model()
        sources = self.config.data.as_dict()
        data = {name: build_data(spec, f"data.{name}") for name, spec in sources.items()}
        self.test_dataset = data.pop("test_dataset")
        self.trainer = self._trainer(model, data)
        # Find the checkpoint that is meant; what `fit` goes on from stands among the arguments that it keeps
        self.is_named = self.checkpoint not in (BEST, LAST)
        if self.checkpoint is not None and (self.command, self.checkpoint) != ("fit", LAST):
            self.checkpoint = find_checkpoint(self.trainer, self.checkpoint)
        if self.command == "fit":
            self.config.args.resume_from_checkpoint = "true" if self.checkpoint == LAST else self.checkpoint
            self.config.ckpt_path = None
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
        functions = {name: getattr(self.config, name) for name in FUNCTIONS}
        chosen = {n: _function(spec, n) for n, spec in functions.items() if spec is not None}
        trainer = self.trainer_class(model=model, args=self.args, callbacks=self._callbacks(), **data, **chosen)
        trainer.lightning_options = self._lightning_options()
        return trainer

    def _callbacks(self) -> list[Made]:
        """Make callbacks, and the loggers and callbacks of the `trainer` section: a Trainer has one list."""
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
        """Make what is handed to Lightning; a class path alone is called."""
        options: dict[str, Made] = {}
        for name in (*PASSED_ON, "plugins"):
            spec = self.config.trainer[name]
            is_path = isinstance(spec, str) and "." in spec and name == "profiler"
            made = import_path(spec, f"trainer.{name}") if is_path else build(spec, f"trainer.{name}")
            if made is not None:
                options[name] = made() if isinstance(made, type) else made
        return options

    def execute(self) -> None:
        """Do what the command says."""
        actions: dict[str, Callable[[], None]] = {
            "fit": self._fit,
            "validate": self._validate,
            "test": self._test,
            "predict": self._predict,
        }
        if self.command != "fit":
            # Load the weights that are to be scored, and say which ones they are
            if self.checkpoint is not None:
                load_weights(self.trainer, self.checkpoint, self.is_named)
                self._say(f"weights: {self.checkpoint}")
            else:
                source = pretrained_source(self.config.model)
                made = "that `model` makes" if source is None else f"of {source}"
                self._say(f"weights: those {made}; no checkpoint of a run is loaded (`--ckpt_path`)")
        actions[self.command]()

    def _fit(self) -> None:
        if self.args.should_save:
            keep(str(self.args.output_dir), "config.yaml", self.text.encode())
        trainer = self.trainer
        result = trainer.train(resume_from_checkpoint=True if self.checkpoint == LAST else self.checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        if self.args.do_eval and trainer.eval_dataset is not None:
            metrics = trainer.evaluate()
            trainer.log_metrics("eval", metrics)
            trainer.save_metrics("eval", metrics)

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
        # Name the arrays of a prediction as they stand in its file
        parts = output.predictions if isinstance(output.predictions, tuple) else (output.predictions,)
        named = {"predictions" if i == 0 else f"predictions_{i}": part for i, part in enumerate(parts)}
        if output.label_ids is not None and not isinstance(output.label_ids, tuple):
            named["labels"] = output.label_ids
        content = io.BytesIO()
        np.savez(content, **named)
        path = keep(str(self.args.output_dir), "predictions.npz", content.getvalue())
        self._say(f"written: {path} ({', '.join(named)})")
        self._report("predict", output.metrics or {})


def _arguments(config: Section, given: set[str], kind: type[TrainingArguments]) -> TrainingArguments:
    """Make the training arguments of a configuration.

    Args:
        config: The whole configuration.
        given: Names of arguments that the user gave; a default gives way to an old name.
        kind: Their class.

    Raises:
        ArgumentError: One is set that the class does not have: its trainer does not generate.
    """
    values = config["args"]
    if len(given & set(FIELDS)) > len(FIELDS) / 2:  # nobody writes so many: it was printed, defaults as well
        given = {name for name in given & set(FIELDS) if values[name] != default_of(FIELDS[name])}
    known = {name: value for name, value in values.items() if name in FIELDS or name in OWN_ARGUMENTS}
    old = {name: values[name] for name in OLD_NAMES if values.get(name) is not None}
    args = join({n: value for n, value in config["trainer"].items() if n not in OBJECTS}, known, given)
    left_out = {name for name in set(FIELDS) - given if args[name] == default_of(FIELDS[name])}
    chosen = {name: value for name, value in args.items() if name not in left_out}
    absent = sorted(set(chosen) - {field.name for field in fields(kind)} - set(OWN_ARGUMENTS))
    if absent:
        raise ArgumentError(
            f"`args.{absent[0]}` is an argument of trainers that generate, and `trainer_class` is "
            f"{config['trainer_class']}.\n\nHint: trainer_class: hf_compat.Seq2SeqTrainer."
        )
    return kind(**chosen, **old)


def _function(spec: Spec, where: str) -> Made:
    if where == "optimizer_cls_and_kwargs":
        kind, keywords = spec if isinstance(spec, (list, tuple)) else (spec["class_path"], spec.get("init_args", {}))
        return build_or_import(kind, where), dict(keywords)
    return build_or_import(spec, where)


def main(command: str, words: Sequence[str]) -> int:
    """Run a command; returns the exit status."""
    for word, text in _HELP.items():
        if word in words:
            print(text(), end="")  # noqa: T201 - the command's answer
            return 0
    sys.path.insert(0, os.getcwd())  # the project's own modules, as for a script
    Run(command, words).execute()
    return 0
