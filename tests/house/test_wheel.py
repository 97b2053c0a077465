"""The wheel, in an environment where transformers and its kin are not installed: it holds the package and does its job.

What the package needs (torch, lightning and so on) is lent from the test environment, package by package: the new
environment sees links to what the wheel's own dependencies require, and to nothing else. A dependency that is missing
from pyproject.toml, or a guest that is imported, fails here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.real_python

ROOT = Path(__file__).resolve().parents[2]
GUESTS = ("transformers", "accelerate", "peft", "datasets", "tokenizers", "huggingface_hub", "deepspeed")
PLAIN = """
import torch

class Net(torch.nn.Module):
    def __init__(self, features: int = 4):
        super().__init__()
        self.linear = torch.nn.Linear(features, 2)

    def forward(self, x, labels=None):
        logits = self.linear(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

def rows(count: int = 8):
    return [{"x": torch.randn(4), "labels": i % 2} for i in range(count)]
"""
CONFIG = """
model: {class_path: plain.Net}
data:
  train_dataset: {class_path: plain.rows}
  eval_dataset: {class_path: plain.rows, init_args: {count: 4}}
args: {max_steps: 3, per_device_train_batch_size: 2, eval_strategy: "no", save_strategy: steps, save_steps: 2,
       use_cpu: true, report_to: none}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy: setuptools leaves a `build` folder behind."""
    import shutil

    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("hf_compat", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True)
    (built,) = folder.glob("*.whl")
    return built


def requirements_of(found: Distribution, extras: set[str]) -> list[Requirement]:
    wanted = [Requirement(text) for text in found.requires or ()]
    contexts = [{"extra": extra} for extra in ("", *extras)]
    return [r for r in wanted if r.marker is None or any(r.marker.evaluate(context) for context in contexts)]


def closure(requirements: list[Requirement]) -> dict[str, Distribution]:
    """Return what a list of requirements brings, with what that requires in turn."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    while requirements:
        wanted = requirements.pop()
        name = wanted.name.lower().replace("_", "-")
        key = (name, frozenset(wanted.extras))
        if key not in seen:
            seen.add(key)
            found[name] = distribution(name)
            requirements += requirements_of(found[name], wanted.extras)
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The Python of a new environment that holds the wheel and links to what it requires."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (info,) = site.glob("hf_compat-*.dist-info")
    for lent in closure(requirements_of(Distribution.at(info), set())).values():
        for file in lent.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                os.symlink(Path(lent.locate_file(top)), site / top)
    return python


def run(python: Path, *words: str, folder: Path) -> str:
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(python), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_it_holds_the_package_with_its_types_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "hf_compat/py.typed" in names and "hf_compat/trainer.py" in names
    assert {name.split("/")[0] for name in names if not name.startswith("hf_compat-")} == {"hf_compat"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_compat").rglob("*.py")}
    assert sources <= set(names)


def test_every_extra_that_an_error_names_is_one(wheel):
    sources = "".join(path.read_text() for path in (ROOT / "hf_compat").rglob("*.py"))
    named = set(re.findall(r"[\"']\[([a-z]+)\][\"']", sources))
    (path,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    offered = set(re.findall(r"^Provides-Extra: (\w+)$", zipfile.ZipFile(wheel).read(path).decode(), re.MULTILINE))
    assert {"transformers", "plot"} <= named <= offered
    assert "cli" in offered, "what users have written down goes on installing"


def test_no_guest_is_there(installed, tmp_path):
    code = f"from importlib.util import find_spec; print([name for name in {GUESTS!r} if find_spec(name)])"
    assert run(installed, "-c", code, folder=tmp_path).strip() == "[]"


def test_every_public_name_loads(installed, tmp_path):
    code = "from hf_compat import *; import hf_compat; print(hf_compat.__file__, Trainer, TrainingArguments)"
    shown = run(installed, "-c", code, folder=tmp_path)
    assert str(installed.parents[1]) in shown, "it is the wheel's that was imported"


def test_the_commands_explain_and_fit(installed, tmp_path):
    command = str(installed.with_name("hf-compat"))
    assert "accumulat" in run(installed, command, "explain", "gradient_accumulation_steps=4", folder=tmp_path)
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "run.yaml").write_text(CONFIG)
    run(installed, command, "fit", "--config", "run.yaml", "--output_dir", "out", folder=tmp_path)
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").is_file()
    assert (tmp_path / "out" / "model.safetensors").is_file()
