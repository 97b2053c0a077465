"""An environment for a release of transformers: what it needs of its time, on the torch that runs this.

The family (transformers, accelerate, peft, datasets, tokenizers, huggingface_hub) is installed by pip. Everything else
is what this interpreter has: a folder of links to it, which lies outside of the environment, so that pip never removes
a file of it.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
# Installed for each release; never taken from this interpreter.
FAMILY = frozenset({"transformers", "accelerate", "peft", "datasets", "tokenizers", "huggingface-hub", "torchao"})
# Of this interpreter: these, with all that they need.
SHARED = (
    "torch", "lightning", "torchmetrics", "jsonargparse", "typeshed-client", "numpy", "safetensors", "tqdm", "pandas",
    "pyarrow", "scikit-learn", "matplotlib", "pillow", "pyyaml", "regex", "requests", "httpx", "typer", "filelock",
    "psutil", "packaging", "xxhash", "dill", "multiprocess", "fsspec", "setuptools", "jinja2", "aiohttp",
    "pytest", "pytest-timeout", "libcst",
)  # fmt: skip


@dataclass(frozen=True)
class Release:
    """A release of transformers and the packages that went with it.

    Args:
        version: The release.
        companions: What pip installs beside it.
    """

    version: str
    companions: tuple[str, ...]


RELEASES = {
    "4.46": Release("4.46.3", ("accelerate==1.1.1", "peft==0.13.2", "datasets==3.1.0")),
    "4.57": Release("4.57.6", ("accelerate==1.12.0", "peft==0.18.0", "datasets==4.4.1")),
    "5.0": Release("5.0.0", ("accelerate==1.12.0", "peft==0.18.1", "datasets==4.5.0")),
    "5.23": Release("5.23.0", ("accelerate==1.15.0", "peft==0.21.2", "datasets==5.2.0")),
}

# Besides, for what an instance of each class has (`attributes.py`).
OF_ATTRIBUTES = {"4.40": Release("4.40.2", ("accelerate==0.29.3", "peft==0.10.0", "datasets==2.19.0")), **RELEASES}
FOLDER = Path(tempfile.gettempdir()) / "hf_compat_releases"


def python_of(release: Release, folder: Path) -> Path:
    """Return the interpreter of a release's environment, which is made where it is not there yet.

    Args:
        release: The release.
        folder: Where environments lie.
    """
    place = folder / release.version
    python, done = place / "bin" / "python", place / "installed"
    wanted = "\n".join([f"transformers=={release.version}", *release.companions, f"torch=={torch.__version__}"])
    shared = linked_packages(folder)
    if done.is_file() and done.read_text() == wanted:
        return python
    venv.create(place, clear=True, symlinks=True)
    site = next((place / "lib").glob("python3*")) / "site-packages"
    (site / "of_this_interpreter.pth").write_text(f"{shared}\n")
    (folder / "constraints.txt").write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-warn-conflicts"]
    packages = [f"transformers=={release.version}", *release.companions]
    subprocess.run([*install, "--constraint", str(folder / "constraints.txt"), *packages], check=True)
    done.write_text(wanted)
    return python


def linked_packages(folder: Path) -> Path:
    """Make the folder of links to this interpreter's packages, without the family."""
    place = folder / "shared"
    place.mkdir(parents=True, exist_ok=True)
    for name in sorted(_closure(SHARED)):
        for entry in _top_level(importlib.metadata.distribution(name)):
            link = place / entry.name
            if not link.is_symlink():
                link.symlink_to(entry)
    return place


def _closure(names: tuple[str, ...]) -> set[str]:
    """Return packages with all that they need, as far as they are installed."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in found or name in FAMILY or not _is_installed(name):
            continue
        found.add(name)
        needs = (Requirement(one) for one in importlib.metadata.requires(name) or ())
        left += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _top_level(package: importlib.metadata.Distribution) -> set[Path]:
    """Return the files and folders of a package that lie beside those of others."""
    root = Path(os.fspath(package.locate_file("")))
    heads = {Path(file).parts[0] for file in package.files or ()}
    return {root / head for head in heads if head not in ("..", "__pycache__") and (root / head).exists()}
