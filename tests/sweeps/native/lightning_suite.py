"""Lightning's own tests, with every LightningModule made an `HFModule`, and with an HF callback in every trainer.

    python tests/sweeps/native/lightning_suite.py pytorch-lightning                  # all three modes
    python tests/sweeps/native/lightning_suite.py pytorch-lightning --mode update --only core/test_saving.py

The argument is a clone of Lightning-AI/pytorch-lightning, bare or not. Nothing of it is kept here: the tests are laid
out in a folder (`--folder`), with packages that only they use. The modes are those of `lightning_swap.py`. `plain` runs
first, once: the tests that pass there judge the modes.

`lightning_differences.txt` lists what may differ: a line has the modes, the test and the reason. A test that fails and
is not there is printed, and so is an entry that passes. Then the status is 1. A mode takes three minutes on two idle
cores.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DIFFERENCES = HERE / "lightning_differences.txt"
MODES = ("module", "update", "adapter")
REVISION = "2.6.5"  # the newest tag beside the Lightning that is installed
# Packages that only Lightning's tests use. The environment itself stays as it is.
PACKAGES = ("tensorboardX", "pytest-rerunfailures")
# The files of `tests/tests_pytorch` that make modules or trainers.
FILES = (
    "models/test_hooks.py", "core", "trainer/optimization", "loops", "models/test_restore.py", "models/test_hparams.py",
    "checkpointing", "callbacks", "trainer/logging_", "trainer/flags", "trainer/test_trainer.py",
    "trainer/test_config_validator.py", "trainer/connectors/test_callback_connector.py",
    "trainer/connectors/test_checkpoint_connector.py", "trainer/connectors/test_data_connector.py",
    "trainer/connectors/test_signal_connector.py", "trainer/properties", "trainer/test_states.py", "test_cli.py",
    "trainer/test_dataloaders.py", "trainer/dynamic_args", "tuner", "models/test_cpu.py",
    "models/test_fabric_integration.py", "models/test_torchscript.py", "models/test_amp.py",
    "utilities/test_model_summary.py", "utilities/test_compile.py", "utilities/test_parameter_tying.py",
    "utilities/test_model_helpers.py", "serve", "overrides", "plugins/test_checkpoint_io_plugin.py",
    "plugins/test_amp_plugins.py", "plugins/precision/test_amp_integration.py", "plugins/precision/test_double.py",
    "plugins/precision/test_half.py", "profilers", "loggers", "strategies/test_single_device.py",
    "strategies/test_common.py", "strategies/test_custom_strategy.py", "helpers/test_models.py",
)  # fmt: skip
# Lightning's own settings of pytest, without the doctests of its sources.
SETTINGS = """[pytest]
addopts = --strict-markers --disable-pytest-warnings --color=no
markers =
    cloud: not run
filterwarnings =
    error::FutureWarning
    ignore::FutureWarning:onnxscript
    ignore:You are using `torch.load` with `weights_only=False`.*:FutureWarning
    ignore::FutureWarning:torch.distributed.algorithms.ddp_comm_hooks
    ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated.*:FutureWarning
xfail_strict = true
"""


# Python imports it in every process. Those that a trainer spawns import the tests, and no plugin of pytest.
IN_EVERY_PROCESS = """import sys
if "--multiprocessing-fork" in sys.orig_argv:
    import lightning_swap
    lightning_swap.swap_in_spawned_process()
"""


def lay_out(repository: str, revision: str, folder: Path) -> None:
    """Lay Lightning's tests out in a folder, with the packages that they use."""
    if (folder / "pytest.ini").is_file():
        return
    paths = ("tests/tests_pytorch", "tests/legacy", "pyproject.toml")
    # A snapshot may lack large files that the tests do not need. Then git writes the rest, and complains
    packed = subprocess.run(["git", "-C", repository, "archive", revision, *paths], capture_output=True, check=False)
    if not packed.stdout:
        sys.exit(f"{repository} has no {revision}: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout), mode="r|") as archive:
        try:
            archive.extractall(folder, filter="data")
        except tarfile.ReadError as error:  # where git has stopped
            print(f"{repository}: {error}")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*install, *PACKAGES], check=True)
    (folder / "site" / "sitecustomize.py").write_text(IN_EVERY_PROCESS)
    (folder / "pytest.ini").write_text(SETTINGS)


def environment(folder: Path) -> dict[str, str]:
    """The variables of a run, with what `lay_out` has put into the folder."""
    paths = [folder / "tests", folder / "site", HERE, HERE.parents[1], HERE.parents[2]]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline",
    }  # fmt: skip


def run(mode: str, folder: Path, files: list[str]) -> dict[str, dict[str, str]]:
    """Run a mode's tests, and return what the plugin tells of each."""
    baseline, report, log = folder / "baseline.txt", folder / f"{mode}.jsonl", folder / f"{mode}.log"
    report.write_text("")
    variables = {**environment(folder), "SWAP": mode, "SWAP_REPORT": str(report)}
    if mode != "plain":
        variables["SWAP_IDS"] = str(baseline)
    command = [
        *(sys.executable, "-m", "pytest", "-c", str(folder / "pytest.ini"), "--rootdir", ".", "-q", "--tb=short"),
        *("-p", "lightning_swap", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--timeout", "300"),
        *("--basetemp", str(folder / f"tmp_{mode}"), *files),
    ]  # fmt: skip
    with open(log, "wb") as out:
        tests = folder / "tests" / "tests_pytorch"
        subprocess.run(command, cwd=tests, env=variables, stdout=out, stderr=subprocess.STDOUT, check=False)
    told = {entry["id"]: entry for entry in map(json.loads, report.read_text().splitlines())}
    if mode == "plain":
        passed = sorted(name for name, entry in told.items() if entry["outcome"] == "passed")
        baseline.write_text("".join(f"{name}\n" for name in passed))
    return told


def expected(mode: str) -> dict[str, str]:
    """The tests that may fail in a mode, with the reasons."""
    rows = (line.split("\t") for line in DIFFERENCES.read_text(encoding="utf-8").splitlines() if "::" in line)
    return {name: reason for modes, name, reason in rows if mode in modes.split(",")}


def judge(mode: str, folder: Path, told: dict[str, dict[str, str]], files: list[str]) -> bool:
    """Compare a mode with what is expected of it."""
    known = expected(mode)
    wanted = [name for name in (folder / "baseline.txt").read_text().splitlines() if name.startswith(tuple(files))]
    passed = {name for name in wanted if told.get(name, {}).get("outcome") == "passed"}
    new = [name for name in wanted if name not in passed and name not in known]
    gone = [name for name in known if name in passed or (name.startswith(tuple(files)) and name not in wanted)]
    for name in new:
        why = told.get(name, {}).get("why", "it did not run").replace("\n", " ")[:300]
        print(f"{mode}: FAILS AND IS NOT EXPECTED TO: {name}\n    {why}")
    for name in gone:
        print(f"{mode}: EXPECTED TO FAIL, AND DOES NOT: {name}\n    {known[name]}")
    print(f"{mode}: {len(passed)} of {len(wanted)} tests pass that pass with Lightning's own classes", flush=True)
    return not new and not gone


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("repository", help="a clone of Lightning's repository, or its git directory")
    parser.add_argument("--revision", default=REVISION, help=f"a tag or commit of it; by default {REVISION}")
    parser.add_argument("--mode", choices=MODES, action="append", help="only this one; may be repeated")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="only these files of tests_pytorch")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / f"lightning_{REVISION}")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lay_out(given.repository, given.revision, folder)
    if not (folder / "baseline.txt").is_file():
        run("plain", folder, list(FILES))
    files = given.only or list(FILES)
    differing = [mode for mode in given.mode or MODES if not judge(mode, folder, run(mode, folder, files), files)]
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
