"""Write the whole project: the texts of its files, and the folder."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

import jinja2
import torch

from hf_compat.errors import ArgumentError, OutputFolderError, UnsupportedArgument
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.interop.transformers_models import is_pretrained_model
from hf_compat.plan.translate import RunCounts, lightning_precision
from hf_compat.runtime.seeding import unpack_rng, write_rng
from hf_compat.tools.ejection.callback_part import describe_callbacks
from hf_compat.tools.ejection.data_part import describe_data
from hf_compat.tools.ejection.expressions import Expressions, ProjectFiles
from hf_compat.tools.ejection.findings import TODO, CannotBeWritten, Findings
from hf_compat.tools.ejection.model_part import describe_model
from hf_compat.tools.ejection.optimizer_part import describe_optimizer
from hf_compat.tools.ejection.own_part import describe_own
from hf_compat.tools.ejection.proof import Proof
from hf_compat.tools.ejection.recording import Recorder
from hf_compat.tools.ejection.secrets import MASKED, hide_tokens, without_secrets
from hf_compat.tools.ejection.sources import Import
from hf_compat.tools.ejection.training_part import describe_evaluation, describe_loss, describe_run, prepare
from hf_compat.tools.until_train import CapturedTrain, restore_as_written

Part = TypeVar("Part")
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
# The modules of the names that templates use.
_KNOWN = {
    name: Import(module, None if module == name else name, name)
    for module, names in {
        "math": "math",
        "torch": "torch",
        "collections.abc": "Iterable Iterator",
        "itertools": "islice",
        "typing": "Any",
        "pathlib": "Path",
        "lightning.pytorch.cli": "LightningCLI",
        "lightning.pytorch.callbacks": "ModelCheckpoint",
        "safetensors.torch": "save_model",
        "module": "TrainingModule",
        "hf_events": "ARGUMENTS HFEvents TrainerControl TrainerState",
        "dataclasses": "dataclass field",
        "types": "SimpleNamespace",
        "contextlib": "contextlib",
        "lightning.pytorch": "Callback LightningDataModule LightningModule Trainer seed_everything",
        "lightning.pytorch.core.optimizer": "LightningOptimizer",
        "lightning.pytorch.utilities.types": "OptimizerLRSchedulerConfig",
        "torch.optim": "Optimizer",
        "torch.optim.lr_scheduler": "LRScheduler LambdaLR",
        "torch.utils.data": "DataLoader Dataset Sampler",
        "torch.nn.functional": "pad",
        "evaluation": "EvalPrediction join",
        "model": "build_model",
        "random_state": "load_random_state",
    }.items()
    for name in names.split()
} | {"DataModule": Import("data", "DataModule", "DataModule"), "nn": Import("torch", "nn", "nn")}
# The project's own files, whose imports come last.
_OWN = (
    "evaluation", "model", "module", "data", "callbacks", "user_code", "hf_events", "hf_trainer", "random_state",
    "restoring",
)  # fmt: skip


class Ejected(NamedTuple):
    """The written project: its files, its differences from the script, work for its user, and the proof."""

    files: list[str]
    notes: list[str]
    todos: list[str]
    proof: Proof


# Runs the project of a folder beside its script. It is given the run's counts, and why numbers may differ.
Prove = Callable[[Path, RunCounts, Sequence[str]], Proof]


def _format(project: Path) -> None:
    """Sort the imports, and wrap lines of the templates that have become too long, where ruff is installed."""
    ruff = [sys.executable, "-m", "ruff"]
    is_missing = subprocess.run([*ruff, "--version"], capture_output=True, check=False).returncode
    steps = (["check", "--fix", "--select", "F401,I", "--quiet"], ["format", "--quiet"])
    for step in () if is_missing else steps:
        words = [*ruff, *step, "--no-cache", str(project)]
        found = subprocess.run(words, capture_output=True, text=True, check=False)
        if found.returncode:
            raise ArgumentError(f"ruff cannot read what was written: {found.stdout}{found.stderr}")


def check_folder(folder: Path) -> None:
    """Check that a folder is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputFolderError(
            f"{folder} exists and is not an empty folder. Nothing is overwritten.\n\nHint: name a new folder."
        )


def eject(
    captured: CapturedTrain, recorder: Recorder, script: str, folder: Path, prove: Prove | None = None
) -> Ejected:
    """Write a run down as a plain Lightning project, which `prove` has run beside the script.

    Raises:
        OutputFolderError: The folder holds something.
        UnsupportedArgument: Plain Lightning cannot do something of the run. All reasons are listed.
    """
    check_folder(folder)
    args = captured.trainer.args
    restore_as_written(args)
    findings = Findings()
    recorder.settle()
    findings.check_arguments(args)
    project = None
    if not findings.problems:
        try:
            project = _Project(captured, recorder, findings, script)
        except CannotBeWritten as error:
            findings.forbid(f"{str(error)[0].upper()}{str(error)[1:]}.", "make it in the script, from plain values.")
    if project is None or findings.problems:
        listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(findings.problems, start=1))
        raise UnsupportedArgument(f"{script} cannot be ejected; nothing was written.\n\n{listed}")
    return project.write(folder, prove)


class _Project:
    """One ejection. It reads the run when it is made, and then writes it."""

    def __init__(self, captured: CapturedTrain, recorder: Recorder, findings: Findings, script: str) -> None:
        self.trainer, self.findings, self.script = captured.trainer, findings, Path(script).name
        self.files = ProjectFiles()
        states, is_seeded = prepare(captured, findings)
        user = Expressions(recorder, self.files)
        self.code = user.code
        trainer, model = self.trainer, self.trainer.model
        parts = {id(part): f'model.get_submodule("{name}")' for name, part in model.named_modules()}
        known = {**parts, id(model): "model"}
        write = self.write_of = {
            name: Expressions(recorder, self.files, user.code, known if name in ("data", "callbacks") else None)
            for name in ("model", "data", "module", "callbacks", "hf_events")
        }
        if not is_seeded:
            legacy = unpack_rng(states)
            kept = {"python": repr(legacy["python"]), "torch": states["cpu"], "numpy": states["numpy"]}
            self.files.add("random_state.pt", states, lambda path: torch.save(kept, path))
        model.eval()  # the trials below must not move the averages of normalisations

        def described(describe: Callable[..., Part], *given: object) -> Part:
            write_rng(states)  # what a part tries, or makes again, may seed and draw
            return describe(trainer, *given)

        module = write["module"]
        own = described(describe_own, module, user, findings)
        made = described(describe_model, write["model"], findings)
        data = described(describe_data, write["data"], findings)
        loss = described(describe_loss, own, module, findings)
        run = described(describe_run, data, loss, own)
        self.counts = run.counts
        evaluation = described(describe_evaluation, data, own, module, findings)
        optimizer = described(describe_optimizer, run.max_steps, module, findings)
        callbacks = described(describe_callbacks, run, write["callbacks"], findings)
        names = {"part": "part", "items": "num_items"}
        if not run.windows:
            names = {"part": "batch", "items": "count_targets(batch)"}
        loss.train_loss = loss.train_loss.format(**names)
        # The templates use the names of the parts' fields
        self.values: dict[str, object] = {"random_state": not is_seeded}
        for part in (own, made, data, loss, run, evaluation, optimizer, callbacks):
            self.values |= vars(part)
        args, is_on_cpu = trainer.args, trainer.args.device.type == "cpu"
        logs_by_epoch = args.logging_strategy == IntervalStrategy.EPOCH
        every = {"every_n_steps": None if logs_by_epoch else run.logging_steps}
        self.values |= {
            "args": args,
            "load_best": callbacks.best_metric is not None,
            "has_events": bool(callbacks.own_callbacks or callbacks.callbacks_left or own.own),
            "collator_needs_model": "model=model" in data.collator or "(model" in data.collator,
            "log_options": json.dumps(every | ({"first": True} if args.logging_first_step else {})),
            "script_name": self.script,
            "model_name": type(model).__name__,
            "is_pretrained": is_pretrained_model(model) or hasattr(model, "peft_config"),
            "eval_order_seed": args.seed if args.data_seed is None else args.data_seed,
            "accelerator": "cpu" if is_on_cpu else "auto",
            "precision": lightning_precision("no" if is_on_cpu and not args.bf16 else args.mixed_precision),
            "logs_by_epoch": logs_by_epoch,
            "warmup_steps": args.get_warmup_steps(run.max_steps),
            "clips": args.max_grad_norm is not None and args.max_grad_norm > 0,
        }

    def write(self, folder: Path, prove: Prove | None) -> Ejected:
        """Write the project in a temporary folder, and copy it when it is whole."""
        texts = self._texts()
        if "user_code.py" in texts:  # secrets in the script's own source are read from the environment
            text, names = without_secrets(texts["user_code.py"])
            self.files.secrets |= set(names)
            texts["user_code.py"] = text.replace("\n\n", "\n\nimport os\n", 1) if names else text
        with TemporaryDirectory() as aside:
            staged = Path(aside) / "project"
            staged.mkdir()
            for name, save in self.files.saves.items():
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                save(staged / name)
            for name, text in texts.items():
                (staged / name).write_text(hide_tokens(text), encoding="utf-8")
            _format(staged)
            proof = Proof("none", "not run beside the script (`--updates 0`)")
            if prove is not None:
                proof = prove(staged, self.counts, self.findings.inexact)
            (staged / "README.md").write_text(hide_tokens(self._readme(texts, proof)), encoding="utf-8")
            shutil.copytree(staged, folder, dirs_exist_ok=True)
            todos = []
            for file in sorted(staged.glob("*.py")):
                for line, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                    if text.lstrip().startswith(f"# {TODO}"):
                        todos.append(f"{file.name}:{line}: {text.partition(TODO)[2]}")
                    elif MASKED in text:
                        what = "a secret of the script's is masked here: read it from the environment"
                        todos.append(f"{file.name}:{line}: {what}")
        todos += [
            f"set the variable {name}: the script has a secret of its own there, which is not written down"
            for name in sorted(self.files.secrets)
        ]
        return Ejected(sorted(["README.md", *texts, *self.files.saves]), self.findings.notes, todos, proof)

    def _readme(self, texts: Iterable[str], proof: Proof) -> str:
        saved = sorted(name for name in self.files.saves if name != "random_state.pt")
        told = {**self.values, "files": sorted(texts), "saved": saved, "proof": proof}
        return _TEMPLATES.get_template("README.md.jinja").render(told)

    def _texts(self) -> dict[str, str]:
        # The training arguments whose names the script's own code has
        args, code = self.trainer.args, self.code.text()
        names = {*vars(args), *_PROPERTIES} - {"device"}
        given: list[str] = []
        for name in sorted(names):
            if name[0] != "_" and re.search(rf"""(\.|["']){name}\b""", code):
                with contextlib.suppress(CannotBeWritten):  # code that reads it raises
                    given.append(f"{name}={self.write_of['hf_events'].under(name, getattr(args, name))}")
        code = self.code.text()
        self.values |= {
            "arguments_given": ", ".join(given),
            "user_code": bool(self.code.pieces),
            "notes": self.findings.notes,
            "todos": self.findings.todos,
            "inexact": self.findings.inexact,
        }
        values = self.values
        files = ["main.py", "model.py", "module.py", "data.py", "callbacks.py", "config.yaml", "pyproject.toml"]
        optional = {
            "random_state.py": values["random_state"],
            "hf_trainer.py": values["own"] is not None,
            "evaluation.py": values["compute_metrics"] is not None or "EvalPrediction" in code,
            "hf_events.py": values["has_events"] or re.search(r"from hf_events\b", code),
        }
        files += [name for name, is_needed in optional.items() if is_needed]
        texts = {name: self._rendered(name) for name in files}
        if self.code.pieces:
            texts["user_code.py"] = _HEAD.format(script=self.script) + self.code.text()
        if any(re.search(r"from restoring\b", text) for text in texts.values()):
            texts["restoring.py"] = self._rendered("restoring.py")
        return texts

    def _rendered(self, name: str) -> str:
        mark = "# imports stand here"
        text = _TEMPLATES.get_template(f"{name}.jinja").render({**self.values, "imports": mark})
        write = self.write_of.get(name.removesuffix(".py"))
        # The sorted imports of the names that the text mentions: known ones, and those of its expressions
        code = re.sub(r'"""[\s\S]*?"""|#.*', "", text.replace(mark, ""))
        wanted = {known for name, known in _KNOWN.items() if re.search(rf"(?<![\w.]){name}\b", code)}
        wanted = {one for one in wanted if not re.search(rf"^((class|def) )?{one.known_as}\b", code, re.MULTILINE)}
        more = () if write is None else write.imports
        wanted |= {one for one in more if re.search(rf"(?<![\w.]){re.escape(one.known_as)}\b", code)}
        groups: list[list[str]] = [[], [], []]
        for module in sorted({one.module for one in wanted}, key=str.lower):
            top = module.partition(".")[0]
            group = groups[2 if top in _OWN else 0 if top in sys.stdlib_module_names else 1]
            group += [str(one) for one in wanted if one.module == module and one.name is None]
            named = sorted(str(one).partition(" import ")[2] for one in wanted if one.module == module and one.name)
            group += [f"from {module} import {', '.join(named)}"] if named else []
        blocks = [sorted(group, key=lambda line: (line.startswith("from"), line.lower())) for group in groups if group]
        return text.replace(mark, "\n\n".join("\n".join(block) for block in blocks)).rstrip() + "\n"
