"""The oldest release of each dependency that pyproject.toml admits, and every Lightning since: tests beside each.

    python tests/sweeps/releases/bounds.py                       # all of them, one after the other
    python tests/sweeps/releases/bounds.py lightning             # those of one package
    python tests/sweeps/releases/bounds.py lightning==2.6.1 -- tests/native -k resume

Each release is installed by itself into a folder that Python searches first; everything else is this environment's.
The oldest transformers and accelerate have a command of their own: `matrix.py`. The exit status
is 1 where a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(tempfile.gettempdir()) / "hf_compat_bounds"
# Releases of Lightning that came after the oldest one, up to the one that the constraints name.
LIGHTNING = ("2.6.1", "2.6.4", "2.6.5")
ENGINE = (
    "tests/engine", "tests/callbacks/test_lightning_callbacks.py", "tests/callbacks/test_several_sets.py",
    "tests/callbacks/test_both_families.py", "tests/native/test_native.py", "tests/native/test_same_numbers.py",
    "tests/native/test_resume.py", "tests/native/test_trainer_flags.py", "tests/cli/test_fit.py",
    "tests/cli/test_lightning_cli.py", "tests/test_smoke.py", "tests/test_lightning_trains.py",
)  # fmt: skip
COMMAND_LINE = ("tests/cli/test_fit.py", "tests/cli/test_lightning_cli.py", "tests/cli/test_nested_words.py",
                "tests/cli/test_configuration.py", "tests/native/test_first_run.py")  # fmt: skip
TRAINING = ("tests/test_smoke.py", "tests/test_lightning_trains.py", "tests/engine/test_torchmetrics_evaluation.py")
# Which tests each package's releases are tried with. torch is left out: its other releases for Python 3.11 are builds
# for CUDA of several GB. Oldest releases of what transformers itself needs newer ones of are left out, too.
SUITES = {"lightning": ENGINE, "jsonargparse": COMMAND_LINE, "torchmetrics": TRAINING, "tqdm": TRAINING}
LEFT_OUT = {
    "torch": "builds of several GB",
    "numpy": "scikit-learn needs 1.26.4",
    "safetensors": "transformers needs 0.8",
}


def oldest() -> dict[str, str]:
    """Return the lowest release of each dependency that pyproject.toml admits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = (re.match(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)", line) for line in project["dependencies"])
    return {match[1]: match[2] for match in found if match is not None}


def releases() -> list[str]:
    """List what is tried, as pip names it."""
    listed = [f"{name}=={version}" for name, version in oldest().items() if name in SUITES]
    return [*listed, *(f"lightning=={version}" for version in LIGHTNING)]


def run(release: str, words: list[str]) -> int:
    """Install a release, and run tests beside it; returns pytest's exit status."""
    place = FOLDER / release
    if not place.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), release]
        subprocess.run(pip, check=True)
    variables = {**os.environ, "PYTHONPATH": str(place)}
    chosen = words or list(SUITES[release.partition("==")[0]])
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not matrix", "-n", "2", "--dist", "loadfile", *chosen]
    print(f"{release}:", flush=True)
    return subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="PACKAGE[==VERSION]", help="what is tried (default: all)")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    given = words[at + 1 :]
    chosen = parser.parse_args(words[:at])
    wanted = [one for one in releases() if not chosen.names or {one, one.partition("==")[0]} & set(chosen.names)]
    wanted += [name for name in chosen.names if "==" in name and name not in wanted]
    statuses = {release: run(release, given) for release in wanted}
    for release, status in statuses.items():
        print(f"{release:<24}{'passed' if status == 0 else f'failed (pytest: {status})'}")
    return int(any(statuses.values()))


if __name__ == "__main__":
    sys.exit(main())
