"""Environments for other releases of packages, on the torch that runs this.

pip installs those. Everything else is what this interpreter has: a folder of links to it, which lies outside of the
environment, so that pip never removes a file of it. For a release of transformers pip installs the family of its time
(accelerate, peft, datasets, tokenizers, huggingface_hub).
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
# Installed for each release; never taken from this interpreter.
FAMILY = frozenset({"transformers", "accelerate", "peft", "datasets", "tokenizers", "huggingface-hub", "torchao"})
# Of this interpreter: these, with all that they need.
SHARED = (
    "torch", "lightning", "torchmetrics", "jsonargparse", "typeshed-client", "numpy", "safetensors", "tqdm", "pandas",
    "pyarrow", "scikit-learn", "matplotlib", "pillow", "pyyaml", "regex", "requests", "httpx", "typer", "filelock",
    "psutil", "packaging", "xxhash", "dill", "multiprocess", "fsspec", "setuptools", "jinja2", "aiohttp",
    "pytest", "pytest-timeout", "libcst", "covertable",
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
    packages = [f"transformers=={release.version}", *release.companions]
    return environment(folder / release.version, packages, SHARED, FAMILY)


def environment(place: Path, packages: Sequence[str], linked: Sequence[str], without: Collection[str] = ()) -> Path:
    """Return an environment's interpreter. The environment is made where it is not there yet, or holds something else.

    Args:
        place: Its folder.
        packages: What pip installs there.
        linked: The packages of this interpreter that it has, with all that they need.
        without: Those that are not taken from this interpreter, whoever needs them.
    """
    python, done = place / "bin" / "python", place / "installed"
    wanted = "\n".join([*packages, f"torch=={torch.__version__}", *linked, *sorted(without)])
    if done.is_file() and done.read_text() == wanted:
        return python
    venv.create(place, clear=True, symlinks=True)
    links = place.with_name(f"{place.name}-links")
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir()
    for name in sorted(_closure(linked, without)):
        for entry in _top_level(importlib.metadata.distribution(name)):
            link = links / entry.name
            if not link.is_symlink():
                link.symlink_to(entry)
    site = next((place / "lib").glob("python3*")) / "site-packages"
    (site / "of_this_interpreter.pth").write_text(f"{links}\n")
    (place / "constraints.txt").write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-warn-conflicts"]
    subprocess.run([*install, "--constraint", str(place / "constraints.txt"), *packages], check=True)
    done.write_text(wanted)
    return python


def _closure(names: Sequence[str], without: Collection[str]) -> set[str]:
    """Return packages with all that they need, as far as they are installed. Names may have extras."""
    found: set[str] = set()
    left = [Requirement(name) for name in names]
    seen: set[tuple[str, str]] = set()
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        new = {(name, extra) for extra in ("", *one.extras)} - seen
        if not new or name in without or not _is_installed(name):
            continue
        found.add(name)
        seen |= new
        needs = (Requirement(need) for need in importlib.metadata.requires(name) or ())
        left += [
            need
            for need in needs
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for _, extra in new)
        ]
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
