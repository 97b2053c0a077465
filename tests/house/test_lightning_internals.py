"""Internals of Lightning are touched in two files only: found by names, read off both sources.

`engine/internals.py` has a function or base class for each; `engine/window_trainer.py` has Lightning's trainer and
loops.

Private names have a leading underscore; the classes and modules of Lightning's trainer, loops, strategies, precision
plugins and core define them. Undocumented names are what the private classes of trainer and loops (loops, connectors,
progress) offer besides. A name that torch, the standard library or a class of ours offers as well may mean those and is
left out; a loop is out of reach all the same, as the names that lead to one (`fit_loop`, `epoch_loop` …) remain.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch import Trainer

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hf_compat"
HOME = PACKAGE / "engine" / "internals.py"
HOMES = (HOME, PACKAGE / "engine" / "window_trainer.py")
SOURCES = (
    "pytorch/trainer",
    "pytorch/loops",
    "pytorch/strategies",
    "pytorch/plugins/precision",
    "pytorch/core",
    "pytorch/utilities/combined_loader.py",
    "fabric/strategies",
    "fabric/plugins/precision",
)
# (file, name) → why this is no access to an internal of Lightning.
EXCEPTIONS = {
    ("checkpoint/convert.py", "fit_loop"): "a key of Lightning's checkpoint files",
    (
        "checkpoint/validation.py",
        "_load_from_state_dict",
    ): "torch's method of a module, for parts that load by themselves",
    ("hf/arguments_rules.py", "_strategy"): "the end of HF's `eval_strategy` and its siblings",
    ("runtime/module_tree.py", "_modules"): "torch's table of a module's children",
    ("callbacks/bridge.py", "_save_checkpoint"): "HF's method of the Trainer",
    ("training_run/saver.py", "_save_checkpoint"): "HF's method of the Trainer, by name",
    ("training_run/saver.py", "_run"): "the Trainer's record of its run",
    ("training_run/resumer.py", "_run"): "the Trainer's record of its run",
    ("training_run/mirror.py", "_run"): "the Trainer's record of its run",
    ("trainer_methods/dataloaders.py", "_run"): "the Trainer's record of its run",
    ("trainer_methods/evaluator.py", "_run"): "the Trainer's record of its run",
    ("trainer_methods/fit.py", "_run"): "the Trainer's record of its run",
    ("training_run/resumer.py", "_load_from_checkpoint"): "HF's method of the Trainer",
    ("training_run/resumer.py", "_load_state"): "the name of a stage",
    ("cli/ckpt_path.py", "_load_from_checkpoint"): "HF's method of the Trainer",
    ("tools/preflight/update.py", "_load_from_checkpoint"): "HF's method of the Trainer",
    ("tools/ejection/witness.py", "datamodule"): "the command line's, of which its users' own code reads it",
    ("tools/preflight/plan_checks.py", "_strategy"): "the end of HF's `eval_strategy` and `save_strategy`",
    ("tools/migration/overrides.py", "_load_from_checkpoint"): "HF's method of the Trainer, by name",
    ("tools/migration/overrides.py", "_save_checkpoint"): "HF's method of the Trainer, by name",
    ("tools/ejection/own_part.py", "_load_from_checkpoint"): "HF's method of the Trainer, by name",
    ("tools/ejection/own_part.py", "_save_checkpoint"): "HF's method of the Trainer, by name",
    ("native/overrides.py", "_load_from_checkpoint"): "HF's method of the Trainer, by name",
    ("native/overrides.py", "_save_checkpoint"): "HF's method of the Trainer, by name",
    ("interop/former_names.py", "_training_step"): "a method of the Trainer of transformers 3.0",
    ("hub/client.py", "done"): "Python's method of a Future",
    ("hub/pushes.py", "done"): "the same",
    ("runtime/threads.py", "done"): "the same",
    ("optim/optimizers.py", "get_instance"): "bitsandbytes' method of its manager",
}


def files_of(source: str) -> list[Path]:
    path = Path(lightning.__file__).parent / source
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def classes_of(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def is_own(node: ast.AST) -> bool:
    """Return whether a node is an attribute of `self`, `cls` or `super()`."""
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value.func if isinstance(node.value, ast.Call) else node.value
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls", "super")


def names_defined_by(definition: ast.ClassDef) -> set[str]:
    """Return the methods, class attributes and attributes of `self` that a class defines."""
    names = {node.name for node in definition.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    names |= {node.target.id for node in definition.body if isinstance(node, ast.AnnAssign)}
    for node in definition.body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    stored = (node for node in ast.walk(definition) if is_own(node) and isinstance(node.ctx, ast.Store))
    return {name for name in names | {node.attr for node in stored} if not name.startswith("__")}


def private_functions_of(path: Path) -> set[str]:
    functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if node.name.startswith("_")}


NAMES_BY_CLASS: dict[str, set[str]] = defaultdict(set)
PRIVATE: set[str] = set()
for _path in (path for source in SOURCES for path in files_of(source)):
    PRIVATE |= private_functions_of(_path)
    for _definition in classes_of(_path):
        NAMES_BY_CLASS[_definition.name] |= names_defined_by(_definition)
PRIVATE |= {name for names in NAMES_BY_CLASS.values() for name in names if name.startswith("_")}


def package_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path not in HOMES)


def made_of_private_classes() -> set[str]:
    """Return the attributes of a trainer that hold loops and connectors: `self.fit_loop = _FitLoop(self)`."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(Trainer)))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and is_own(node.targets[0]):
            maker = node.value.func
            if isinstance(maker, ast.Name) and maker.id.startswith("_"):
                found.add(node.targets[0].attr)
    return found


def undocumented_names() -> set[str]:
    loops = {definition.name for source in SOURCES[:2] for path in files_of(source) for definition in classes_of(path)}
    offered = {n for kind in loops if kind.startswith("_") for n in NAMES_BY_CLASS[kind]}
    public = {n for kind, names in NAMES_BY_CLASS.items() for n in names if not kind.startswith("_")}
    known = (dict, list, str, re.Match, subprocess, torch, torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    generic = {name for kind in (*known, torchmetrics.Metric) for name in dir(kind)}
    ours = {n for path in package_files() for definition in classes_of(path) for n in names_defined_by(definition)}
    return offered - public - generic - ours


ENTRIES = PRIVATE | made_of_private_classes()
INTERNALS = ENTRIES | undocumented_names()


def internals_of_bases(path: Path, definition: ast.ClassDef) -> set[str]:
    """Return the private names of the classes of Lightning that a class of ours inherits from."""
    if not definition.bases:
        return set()
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    made = getattr(importlib.import_module(name), definition.name, None)
    assert made is not None, f"{path}: the bases of {definition.name} are out of sight: put it at the top of its module"
    bases = (base for base in made.__mro__ if base.__module__.startswith("lightning"))
    return {name for base in bases for name in NAMES_BY_CLASS[base.__name__]} & PRIVATE


def accesses(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of every access to an internal of Lightning, of every override of one among them."""
    tree = ast.parse(path.read_text())
    of_ours: set[ast.AST] = set()
    for definition in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        inherited = internals_of_bases(path, definition)
        for name in names_defined_by(definition) & inherited:
            yield definition.lineno, name
        of_ours |= {n for n in ast.walk(definition) if is_own(n) and n.attr not in inherited and n.attr in PRIVATE}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in INTERNALS and node not in of_ours:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ENTRIES:
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
            private = [a.name for a in node.names if a.name.startswith("_")]
            yield from ((node.lineno, name) for name in private + [p for p in node.module.split(".") if p[0] == "_"])


@pytest.fixture(scope="module")
def touched() -> list[tuple[str, int, str]]:
    """Return file, line and name of every access outside the homes, the exceptions included."""
    files = {str(path.relative_to(PACKAGE)): path for path in package_files()}
    return [(file, line, name) for file, path in files.items() for line, name in accesses(path)]


def test_no_file_touches_internals_of_lightning(touched):
    offenders = [f"{file}:{line} {name}" for file, line, name in touched if (file, name) not in EXCEPTIONS]
    assert offenders == [], "\n".join(["move to engine/internals.py:", *offenders])


def test_every_exception_is_needed(touched):
    needed = {(file, name) for file, _, name in touched}
    offenders = [f"{file} does not touch {name} any more" for file, name in EXCEPTIONS if (file, name) not in needed]
    assert offenders == [], "\n".join(offenders)


def test_the_search_finds_what_it_should():
    loops = {"fit_loop", "validate_loop", "epoch_loop", "val_loop", "batch_progress", "optim_step_progress"}
    private = {"_logger_connector", "_ddp_kwargs", "_after_closure", "_current_fx_name", "_lightning_module"}
    assert loops | private <= INTERNALS
    found = {name for _, name in accesses(HOME)}
    # a method that is overridden, one that is called, a function, attributes, and a name in a text
    assert {"_setup_model", "_init_optimizers", "_call_callback_hooks", "_ddp_kwargs", "fit_loop"} <= found
    assert "_current_fx_name" in found


def test_everything_in_internals_is_used():
    elsewhere = "".join(path.read_text() for path in package_files())
    for node in ast.parse(HOME.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert node.name in elsewhere or HOME.read_text().count(node.name) > 1, f"nothing uses {node.name}"
