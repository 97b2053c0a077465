"""The oldest release of each package that pyproject.toml admits, installed literally, and tests beside it.

    python tests/sweeps/releases/bounds.py                       # all of them, one after the other
    python tests/sweeps/releases/bounds.py numpy optuna          # those of some packages
    python tests/sweeps/releases/bounds.py lightning==2.6.1 -- tests/native -k resume
    python tests/sweeps/releases/bounds.py --list                # what is tried with what

Each release gets an environment of its own (`environments.py`): pip installs it with what it needs itself, and
everything else is this interpreter's. The bounds are read from pyproject.toml, those of its extras too. The exit status
is 1 where one cannot be installed or a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))

from sweeps.releases.environments import environment

FOLDER = Path(tempfile.gettempdir()) / "hf_compat_bounds"
# Every environment has the package with its dependencies, and what runs tests. Rows name the guests beside them.
TOOLS = ("hf-compat", "pytest", "pytest-timeout", "pytest-xdist", "covertable")
TRANSFORMERS = ("transformers", "accelerate")


@dataclass(frozen=True)
class Row:
    """What is tried with a package's oldest release.

    Args:
        tests: The tests.
        linked: Packages of this interpreter that the tests need, besides the package's own dependencies.
        beside: What pip installs with it, where this interpreter's does not fit. A name alone stands for its bound.
        left_out: Why nothing is run.
    """

    tests: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    left_out: str = ""


FIRST = ("tests/test_smoke.py", "tests/test_lightning_trains.py")
TRAINING = (
    *FIRST, "tests/engine/test_torchmetrics_evaluation.py",
    "tests/engine/test_lean_evaluation.py", "tests/checkpoint/test_resume.py",
)  # fmt: skip
CHECKPOINTS = (
    "tests/checkpoint/test_pickles.py", "tests/checkpoint/test_contents.py", "tests/checkpoint/test_manifest.py",
    "tests/checkpoint/test_old_checkpoints.py",
    "tests/checkpoint/test_reading.py", "tests/checkpoint/test_zero_reader.py", "tests/runtime/test_rng.py",
)  # fmt: skip
ENGINE = (
    "tests/engine", "tests/callbacks/test_lightning_callbacks.py", "tests/callbacks/test_several_sets.py",
    "tests/callbacks/test_both_families.py", "tests/native/test_native.py", "tests/native/test_same_numbers.py",
    "tests/native/test_resume.py", "tests/native/test_trainer_flags.py", "tests/cli/test_fit.py",
    "tests/cli/test_lightning_cli.py", "tests/test_smoke.py", "tests/test_lightning_trains.py",
)  # fmt: skip
COMMAND_LINE = ("tests/cli/test_fit.py", "tests/cli/test_lightning_cli.py", "tests/cli/test_nested_words.py",
                "tests/cli/test_configuration.py", "tests/native/test_first_run.py")  # fmt: skip
SEARCHES = ("tests/trainer_methods/test_hyperparameter_search.py", "tests/trainer_methods/test_search_backends.py")
TRACKERS = ("tests/callbacks/test_trackers.py", "tests/callbacks/test_shipped_loggers.py")
MIGRATION = ("tests/migration", "-k", "not test_scripts")
HUB = ("tests/trainer_methods/test_hub.py", "tests/trainer_methods/test_hub_runs.py")
PAGES = ("tests/docs/test_site.py", "tests/docs/test_public_api.py")
NOTEBOOKS = ("tests/hf/test_notebook.py", "tests/hf/test_notebook_page.py")
ADAPTERS = ("tests/checkpoint/test_adapters.py", "tests/trainer_methods/test_neftune.py")
# What depends on the release of transformers that is beside
RELEASE = ("tests/interop/test_attributes.py", "tests/hf/test_old_attributes.py",
           "tests/trainer_methods/test_former_methods.py", "tests/interop/test_beside_release.py")  # fmt: skip


def optimizer(names: str) -> Row:
    """Make the row of a package of optimizers: its options, and its updates beside transformers' bit for bit."""
    tests = ("tests/optim", "tests/parity/test_optimizers.py", "tests/trainer_methods/test_changed_steps.py")
    return Row((*tests, "-m", "", "-k", names), linked=("hf-compat[optim]", *TRANSFORMERS))


ROWS = {
    "fsspec": Row(("tests/faults/test_addresses.py",), linked=TRANSFORMERS),
    "jsonargparse": Row(COMMAND_LINE, linked=(*TRANSFORMERS, "datasets", "tensorboard")),
    "lightning": Row(
        (*ENGINE, "-n", "2", "--dist", "loadfile"), linked=(*TRANSFORMERS, "datasets", "tensorboard", "lomo-optim")
    ),
    "numpy": Row((*TRAINING, *CHECKPOINTS, "tests/data/test_collators.py"), linked=TRANSFORMERS),
    "safetensors": Row((*TRAINING, *CHECKPOINTS)),  # transformers of today needs 0.8
    "torch": Row(left_out="for Python 3.11 there are only builds for CUDA, of several GB"),
    "torchmetrics": Row(TRAINING),
    "tqdm": Row(TRAINING),
    "deepspeed": Row(("tests/distributed/test_deepspeed_schedules.py",), linked=TRANSFORMERS),
    "tensorboard": Row(TRACKERS, linked=(*TRANSFORMERS, "wandb")),
    "wandb": Row(TRACKERS, linked=TRANSFORMERS, beside=("tensorboard",)),  # by their protobuf
    "apollo-torch": optimizer("apollo"),
    "bitsandbytes": optimizer("bnb or 8bit or bitsandbytes"),
    "galore-torch": optimizer("galore"),
    "grokadamw": optimizer("grokadamw"),
    "lomo-optim": optimizer("lomo"),
    "schedulefree": optimizer("schedule_free or schedulefree"),
    "torch-optimi": optimizer("stable_adamw or optimi"),
    "torchao": optimizer("torchao or 4bit or 8bit"),
    "matplotlib": Row(("tests/cli/test_plot.py", "tests/cli/test_plot_inputs.py")),
    "optuna": Row(SEARCHES, linked=(*TRANSFORMERS, "wandb")),
    "ray": Row(("tests/sweeps/ray/run.py",), linked=TRANSFORMERS),
    "isal": Row((*CHECKPOINTS, "tests/checkpoint/test_torch_writer.py")),
    "libcst": Row(MIGRATION, linked=("hf-compat[test]",)),
    "huggingface_hub": Row(HUB, beside=("transformers==5.0.0", "accelerate==1.12.0", "peft==0.18.1")),
    "mkdocs-material": Row(PAGES, linked=("hf-compat[docs]",)),
    "mkdocstrings": Row(PAGES, linked=("hf-compat[docs]",)),
    "ruff": Row(PAGES, linked=("hf-compat[docs]",)),
    "transformers": Row(RELEASE, beside=("accelerate",)),
    "accelerate": Row(RELEASE, beside=("transformers",)),
    "scikit-learn": Row(("tests/examples/test_gallery.py",), linked=("hf-compat[examples]",)),
    "covertable": Row(("tests/distributed/test_seams.py", "-k", "short_window_outside"), linked=TRANSFORMERS),
    "datasets": Row(FIRST),
    "hydra-core": Row(("tests/native/test_hydra.py",)),
    "ipykernel": Row(NOTEBOOKS, linked=("ipython", "nbclient")),
    "ipython": Row(NOTEBOOKS, linked=("ipykernel", "nbclient")),
    "nbclient": Row(NOTEBOOKS, linked=("ipykernel", "ipython")),
    **dict.fromkeys(("flask", "flask-cors", "moto", "s3fs"), Row(left_out="the server of a test, and its client")),
    "mypy": Row(FIRST),
    "peft": Row(ADAPTERS, linked=TRANSFORMERS),
    "pytest": Row(FIRST),
    "pytest-timeout": Row(FIRST),
    "pytest-xdist": Row((*FIRST, "-n", "2")),
    "rich": Row(("tests/cli/test_terminal.py",)),
    "trl": Row(("tests/libraries/test_libraries.py",), linked=("hf-compat[test]",)),
}
# Further releases that are tried: every Lightning up to the one of the constraints, and a pair of packages.
FURTHER = ("lightning==2.6.1", "lightning==2.6.4", "lightning==2.6.5", "transformers==4.42.0")


def bounds(text: str | None = None) -> dict[str, str]:
    """Return the lowest release of each package that pyproject.toml names, in its dependencies and in its extras."""
    project = tomllib.loads(text or (ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = {}
    for line in [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]:
        match = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?(?:>=([\w.]+)(?:,<[\w.]+)?)?", line)
        if match is None or (match[1] != project["name"] and match[2] is None):
            raise ValueError(f"pyproject.toml: {line!r} has no lower bound that this reads")
        if match[1] != project["name"] and found.setdefault(match[1], match[2]) != match[2]:
            raise ValueError(f"pyproject.toml: {match[1]} has two lower bounds")
    return found


def releases() -> list[str]:
    """List what is tried, as pip names it."""
    return [*(f"{name}=={version}" for name, version in bounds().items() if not ROWS[name].left_out), *FURTHER]


def run(release: str, words: list[str]) -> str:
    """Install a release, and run tests beside it; returns what came of it."""
    row = ROWS[release.partition("==")[0]]
    packages = [release, *(one if "==" in one else f"{one}=={bounds()[one]}" for one in row.beside)]
    print(f"\n{', '.join(packages)}:", flush=True)
    try:
        python = environment(FOLDER / release, packages, (*TOOLS, *row.linked))
    except subprocess.CalledProcessError as error:
        return f"not installed (pip: {error.returncode})"
    tests = words or list(row.tests)
    is_program = tests[0].endswith("/run.py")
    # A release of another time warns of the packages of today
    pytest = () if is_program else ("-m", "pytest", "-q", "-n", "0", "-W", "ignore", "-m", "not matrix")
    done = subprocess.run([str(python), *pytest, *tests], env=variables(), cwd=ROOT, check=False)
    return "passed" if done.returncode == 0 else f"failed ({'status' if is_program else 'pytest'}: {done.returncode})"


def variables() -> dict[str, str]:
    """Return the variables of a run: this folder's package, and no network."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="PACKAGE[==VERSION]", help="what is tried (default: all)")
    parser.add_argument("--list", action="store_true", help="say what is tried with what, and what is left out")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    given = words[at + 1 :]
    chosen = parser.parse_args(words[:at])
    wanted = [one for one in releases() if not chosen.names or {one, one.partition("==")[0]} & set(chosen.names)]
    wanted += [name for name in chosen.names if "==" in name and name not in wanted]
    if chosen.list:
        for release in wanted:
            print(f"{release:<24}{' '.join(ROWS[release.partition('==')[0]].tests)}")
        for name, row in ROWS.items():
            if row.left_out:
                print(f"{name:<24}left out: {row.left_out}")
        return 0
    ended = {release: run(release, given) for release in wanted}
    print()
    for release, status in ended.items():
        print(f"{release:<28}{status}")
    return int(any(status != "passed" for status in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
