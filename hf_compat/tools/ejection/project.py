"""The whole project: what each file is filled with, and how the folder comes to be."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jinja2
import torch

from hf_compat.errors import ArgumentError, OutputFolderError, UnsupportedArgument
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.interop.transformers_models import is_pretrained_model
from hf_compat.plan.argument_support import lightning_precision
from hf_compat.runtime.seeding import unpack_rng
from hf_compat.tools.ejection.callback_part import CallbackPart, describe_callbacks, logs_by_epoch
from hf_compat.tools.ejection.data_part import DataPart, describe_data
from hf_compat.tools.ejection.evaluation_part import EvaluationPart, describe_evaluation
from hf_compat.tools.ejection.expressions import Expressions, ProjectFiles
from hf_compat.tools.ejection.findings import TODO, CannotBeWritten, Findings
from hf_compat.tools.ejection.imports import import_block
from hf_compat.tools.ejection.loss_part import LossPart, describe_loss, first_batch
from hf_compat.tools.ejection.model_part import ModelPart, describe_model
from hf_compat.tools.ejection.optimizer_part import OptimizerPart, describe_optimizer
from hf_compat.tools.ejection.own_part import OwnPart, describe_own
from hf_compat.tools.ejection.recording import Recorder
from hf_compat.tools.ejection.run_part import RunPart, describe_run, evaluation_interval, prepare
from hf_compat.tools.ejection.secrets import MASKED, hide_tokens, without_secrets
from hf_compat.tools.ejection.sources import UserCode
from hf_compat.tools.ejection.supported import check_arguments
from hf_compat.tools.until_train import CapturedTrain, restore_as_written
from hf_compat.trainer import Trainer

Values = dict[str, object]


@dataclass(frozen=True, slots=True)
class Ejected:
    """What was written.

    Args:
        folder: The project.
        files: Its files, relative to the folder; a folder of data or weights stands for what is in it.
        notes: What it does otherwise than the script.
        todos: What it leaves to its user, each with the file and line of the project where it belongs.
        inexact: Why its losses differ from the script's in the last digits; empty where they are the same bit for bit.
    """

    folder: Path
    files: list[str]
    notes: list[str]
    todos: list[str]
    inexact: list[str]


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something.

    Raises:
        OutputFolderError: It does, or is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputFolderError(
            f"{folder} exists and is not an empty folder; nothing is written over.\n\nHint: name a new folder."
        )


def eject(captured: CapturedTrain, recorder: Recorder, script: str, folder: Path) -> Ejected:
    """Write a run down as a plain Lightning project.

    Args:
        captured: The script's first call of `train()`.
        recorder: How the script's objects were made.
        script: The script's name, for the texts.
        folder: Where the project goes: new, or empty.

    Raises:
        OutputFolderError: The folder holds something.
        UnsupportedArgument: Something of the run cannot be written in plain Lightning; all of it is listed.
    """
    check_folder(folder)
    restore_as_written(captured.trainer.args)
    findings = Findings()
    recorder.settle()
    check_arguments(captured.trainer.args, findings)
    if findings.problems:
        raise _refusal(script, findings)
    project = _Project(captured, recorder, findings, script)
    if findings.problems:
        raise _refusal(script, findings)
    return project.write(folder)


def _refusal(script: str, findings: Findings) -> UnsupportedArgument:
    listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(findings.problems, start=1))
    return UnsupportedArgument(f"{script} cannot be ejected; nothing was written.\n\n{listed}")


class _Project:
    """One ejection: reads the run, then writes it.

    Args:
        captured: The script's first call of `train()`.
        recorder: How the script's objects were made.
        findings: Takes what is found.
        script: The script's name.
    """

    def __init__(self, captured: CapturedTrain, recorder: Recorder, findings: Findings, script: str) -> None:
        self.trainer: Trainer = captured.trainer
        self.findings, self.script = findings, Path(script).name
        self.files = ProjectFiles()
        self.states = prepare(captured, findings)
        self.user = Expressions(recorder, self.files)
        self.code: UserCode = self.user.code
        names = ("model", "data", "module", "callbacks", "hf_events")
        parts = {id(part): f'model.get_submodule("{name}")' for name, part in self.trainer.model.named_modules()}
        known = {**parts, id(self.trainer.model): "model"}
        self.write_of = {
            name: Expressions(recorder, self.files, self.user.code, known if name in ("data", "callbacks") else None)
            for name in names
        }
        if self.states is not None:
            states = self.states
            legacy = unpack_rng(states)
            kept = {"python": repr(legacy["python"]), "torch": states["cpu"], "numpy": states["numpy"]}
            self.files.add("random_state.pt", self.states, lambda path: torch.save(kept, path))
        self._read()

    def _read(self) -> None:
        """Find out what the run consists of, part after part; the random states do not matter any more."""
        trainer, write, findings = self.trainer, self.write_of, self.findings
        trainer.model.eval()  # what is tried below must not move the averages of normalisations
        self.own: OwnPart = describe_own(trainer, write["module"], self.user, findings)
        self.model: ModelPart = describe_model(trainer.model, trainer.args, write["model"], findings)
        self.data: DataPart = describe_data(trainer, write["data"], findings)
        module = write["module"]
        self.loss: LossPart = describe_loss(trainer, first_batch(trainer), self.own, module, findings)
        self.run: RunPart = describe_run(trainer, self.data, self.loss, self.own)
        self.evaluation: EvaluationPart | None = describe_evaluation(
            trainer, self.data, self.loss, self.own, module, findings
        )
        self.optimizer: OptimizerPart = describe_optimizer(trainer, self.run.counts.max_updates, module, findings)
        self.callbacks: CallbackPart = describe_callbacks(trainer, self.run, write["callbacks"], findings)

    def write(self, folder: Path) -> Ejected:
        """Write the project aside, and put it in its place when it is whole."""
        texts = self._texts()
        saved = sorted(name for name in self.files.saves if name != "random_state.pt")
        told = {**self._values(), "files": sorted(texts), "saved": saved}
        texts["README.md"] = _TEMPLATES.get_template("README.md.jinja").render(told)
        self._hide_secrets(texts)
        with TemporaryDirectory() as aside:
            staged = Path(aside) / "project"
            staged.mkdir()
            for name, save in self.files.saves.items():
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                save(staged / name)
            for name, text in texts.items():
                (staged / name).write_text(text, encoding="utf-8")
            _format(staged)
            shutil.copytree(staged, folder, dirs_exist_ok=True)
            todos = [
                f"{file.name}:{line}: {text}" for file in sorted(staged.glob("*.py")) for line, text in _todos(file)
            ]
        files = sorted([*texts, *self.files.saves])
        todos += [
            f"set the variable {name}: the script has a secret of its own there, which is not written down"
            for name in sorted(self.files.secrets)
        ]
        return Ejected(folder, files, self.findings.notes, todos, self.findings.inexact)

    def _texts(self) -> dict[str, str]:
        """Return the text of each file of code and settings."""
        values = self._values()
        names = ["main.py", "model.py", "module.py", "data.py", "callbacks.py", "config.yaml", "pyproject.toml"]
        names += ["random_state.py"] if self.states is not None else []
        names += ["hf_trainer.py"] if self.own.name is not None else []
        if values["compute_metrics"] is not None or "EvalPrediction" in self.code.text():
            names.append("evaluation.py")
        if values["has_events"] or re.search(r"from hf_events\b", self.code.text()):
            names.append("hf_events.py")
        texts = {name: self._rendered(name, values) for name in names}
        if self.code.pieces:
            texts["user_code.py"] = _HEAD.format(script=self.script) + self.code.text()
        if any(re.search(r"from restoring\b", text) for text in texts.values()):
            texts["restoring.py"] = self._rendered("restoring.py", values)
        return texts

    def _hide_secrets(self, texts: dict[str, str]) -> None:
        """Take secrets out of the script's own source: they are read from the environment there."""
        if "user_code.py" in texts:
            text, names = without_secrets(texts["user_code.py"])
            self.files.secrets |= set(names)
            texts["user_code.py"] = text.replace("\n\n", "\n\nimport os\n", 1) if names else text
        texts |= {name: hide_tokens(text) for name, text in texts.items()}

    def _rendered(self, name: str, values: Mapping[str, object]) -> str:
        """Render a template, then put the imports that its text needs at its head."""
        mark = "# imports stand here"
        text = _TEMPLATES.get_template(f"{name}.jinja").render({**values, "imports": mark})
        write = self.write_of.get(name.removesuffix(".py"))
        block = import_block(text.replace(mark, ""), () if write is None else write.imports)
        return text.replace(mark, block).rstrip() + "\n"

    def _values(self) -> Values:
        """Return what the templates are filled with."""
        args = self.trainer.args
        part, callbacks = self.evaluation, self.callbacks
        return {
            **self._values_of_run(),
            **self._values_of_training(),
            **{
                "has_eval": part is not None,
                "evaluates": self.trainer.args.eval_strategy != IntervalStrategy.NO,
                "several": [] if part is None else part.sets,
                "validation_lines": [] if part is None else part.lines,
                "compute_metrics": None if part is None else part.compute_metrics,
                "generation": part is not None and part.generates,
                "fill_to": 0 if part is None else part.fill_to,
                "pad_token": 0 if part is None else part.pad_token,
                "loggers": callbacks.loggers,
                "callbacks": callbacks.callbacks,
                "checkpoints": callbacks.checkpoints,
                "best_metric": callbacks.best_metric,
                "load_best": callbacks.best_metric is not None,
                "early_stopping_threshold": callbacks.threshold,
                "own_callbacks": callbacks.own,
                "callbacks_left": callbacks.left,
                "has_events": bool(callbacks.own or callbacks.left or self.own.name),
                "arguments_given": self._arguments_read(),
                "counts": self.run.counts,
                "prediction_lines": [] if part is None else part.prediction_lines,
            },
            "own": self.own.name,
            "seams": self.own.seams,
            "left": self.own.left,
            "model_is_left": self.model.is_left,
            "data_left": self.data.left,
            "sampler": self.data.sampler,
            "lines": self.model.lines,
            "trained": self.model.trained,
            "collator": self.data.collator,
            "collator_needs_model": "model=model" in self.data.collator or "(model" in self.data.collator,
            "train_set": self.data.train_set,
            "eval_sets": self.data.eval_sets,
            "shuffles": self.data.shuffles,
            "groups": self.data.groups,
            "data_seed": self.data.seed,
            "reads_ahead": self.data.reads_random,
            "streams": self.data.streams,
            "copies": self.data.copies,
            "lengths": self.data.lengths,
            "length_key": self.data.length_key,
            "eval_order_seed": args.seed if args.data_seed is None else args.data_seed,
            "user_code": bool(self.code.pieces),
            "notes": self.findings.notes,
            "todos": self.findings.todos,
            "inexact": self.findings.inexact,
        }

    def _arguments_read(self) -> str:
        """Return those training arguments whose name the script's own code has, as keywords."""
        args, text = self.trainer.args, self.code.text()
        names = {*vars(args), *_PROPERTIES} - {"device"}
        read = sorted(name for name in names if name[0] != "_" and re.search(rf"""(\.|["']){name}\b""", text))
        written: list[str] = []
        for name in read:
            with contextlib.suppress(CannotBeWritten):  # whoever reads it is told that it is not there
                written.append(f"{name}={self.write_of['hf_events'].under(name, getattr(args, name))}")
        return ", ".join(written)

    def _values_of_run(self) -> Values:
        args, run = self.trainer.args, self.run
        interval, at_end = evaluation_interval(self.trainer, run)
        options: Values = {"every_n_steps": None if logs_by_epoch(args) else run.logging_steps}
        if args.logging_first_step:
            options["first"] = True
        return {
            "script_name": self.script,
            "model_name": type(self.trainer.model).__name__,
            "is_pretrained": is_pretrained_model(self.trainer.model) or hasattr(self.trainer.model, "peft_config"),
            "seed": args.seed,
            "random_state": self.states is not None,
            "accelerator": "cpu" if args.device.type == "cpu" else "auto",
            "precision": lightning_precision(args.mixed_precision if args.device.type != "cpu" or args.bf16 else "no"),
            "max_epochs": run.whole_epochs,
            "max_steps": run.counts.max_updates,
            "accumulation": run.window,
            "windows": run.windows,
            "accumulates": run.window > 1 and not run.windows,
            "deterministic": args.full_determinism,
            "eval_every": interval,
            "evaluates_at_end": at_end,
            "logging_steps": run.logging_steps,
            "logs_by_epoch": logs_by_epoch(args),
            "logs_first": args.logging_first_step,
            "log_options": as_yaml(options),
            "batch_size": args.train_batch_size,
            "eval_batch_size": args.eval_batch_size,
            "num_workers": args.dataloader_num_workers,
            "drop_last": args.dataloader_drop_last,
        }

    def _values_of_training(self) -> Values:
        args, loss, optimizer = self.trainer.args, self.loss, self.optimizer
        names = (
            {"part": "part", "items": "num_items"}
            if self.run.windows
            else {"part": "batch", "items": "count_targets(batch)"}
        )
        return {
            "loss_lines": loss.lines,
            "train_loss": loss.train_loss.format(**names),
            "counts_items": loss.counts_items,
            "shifts": loss.shifts,
            "divides": loss.divides,
            "learning_rate": args.learning_rate,
            "weight_decay": args.weight_decay,
            "warmup_steps": args.get_warmup_steps(self.run.counts.max_updates),
            "max_grad_norm": args.max_grad_norm,
            "clips": args.max_grad_norm is not None and args.max_grad_norm > 0,
            "has_decay": optimizer.has_decay,
            "no_decay": optimizer.no_decay,
            "group_lines": optimizer.group_lines,
            "optimizer_call": optimizer.call,
            "schedule": optimizer.schedule,
        }


def _format(folder: Path) -> None:
    """Let ruff format the files, where it is installed: lines that a template fills may be longer than it allows."""
    ruff = [sys.executable, "-m", "ruff"]
    if subprocess.run([*ruff, "--version"], capture_output=True, check=False).returncode:
        return
    for words in (["check", "--fix", "--select", "F401,I", "--quiet"], ["format", "--quiet"]):
        found = subprocess.run([*ruff, *words, "--no-cache", str(folder)], capture_output=True, text=True, check=False)
        if found.returncode:
            raise ArgumentError(f"ruff cannot read what was written: {found.stdout}{found.stderr}")


def _todos(file: Path) -> Iterator[tuple[int, str]]:
    """Yield what a file leaves to do, with the line."""
    for line, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if text.lstrip().startswith(f"# {TODO}"):
            yield line, text.partition(TODO)[2]
        elif MASKED in text:
            yield line, "a secret of the script's is masked here: read it from the environment"


# What code reads of training arguments besides their fields.
_PROPERTIES = (
    "train_batch_size", "eval_batch_size", "world_size", "process_index", "local_process_index", "n_gpu",
    "should_save", "should_log",
)  # fmt: skip
_HEAD = '''"""The script's own code, as it stands in {script}: what the model, the data or the metrics need of it."""

'''
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
    autoescape=False,  # the templates are Python, not HTML
)


def as_yaml(options: Values) -> str:
    """Return options as JSON, which is YAML, too."""
    return json.dumps(options)
