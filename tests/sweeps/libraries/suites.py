"""Judge the Trainer by other libraries' own tests: each under transformers, then under hf_compat.

    python tests/sweeps/libraries/suites.py FOLDER                  # every suite that FOLDER holds
    python tests/sweeps/libraries/suites.py FOLDER trl peft         # these
    python tests/sweeps/libraries/suites.py FOLDER trl -- -k dpo    # with further words for pytest

FOLDER/SUITE holds a library's tests, FOLDER/home_SUITE or FOLDER/home_st an `HF_HOME` with what they load from the Hub,
and FOLDER/site further packages. A data set of the Hub is HF_HOME/datasets_local/NAME/CONFIG/SPLIT.parquet. Nothing of
this is in the repository. FOLDER/runs gets the results, one JSON line a test, and pytest's output.

A test that passes under transformers and not under hf_compat is named, with its message, and the exit status is 1.
`expected_suites.txt` names those that have a reason.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
ENGINES = ("transformers", "hf_compat")


class Suite(NamedTuple):
    """A library's tests that train: the files below `tests`, and pytest's `-k`.

    Left out is what needs a GPU, the Hub or images.
    """

    files: tuple[str, ...]
    chosen: str = ""


_NOT_HERE = ("vllm", "vlm", "vision", "Conditional")
_TEN_MINUTES_EACH = ("with_tools", "tool_calls", "environment")  # of CPU, in either engine
SUITES = {
    "trl": Suite(
        ("test_callbacks.py", *(f"test_{one}_trainer.py" for one in ("reward", "sft", "dpo", "kto", "grpo", "rloo"))),
        " and ".join(f"not {word}" for word in (*_NOT_HERE, *_TEN_MINUTES_EACH)),
    ),
    "st": Suite(
        (
            *(f"{one}/test_trainer.py" for one in ("base", "cross_encoder", "sparse_encoder", "multi_vector_encoder")),
            "sentence_transformer/test_trainer.py",
            "sentence_transformer/test_training_args.py",
        )
    ),
    "setfit": Suite(("test_trainer.py", "test_training_args.py", "test_trainer_distillation.py")),
    "peft": Suite(
        ("test_cpt.py", "test_helpers.py", "test_decoder_models.py"),
        "model_training_random or model_batch_training or Monteclora or prefix_tuning_mistral",
    ),
}


class Report:
    """Write one JSON line for each test: its id, outcome, seconds and message."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.rows: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        new = {"id": report.nodeid, "outcome": "passed", "seconds": 0.0, "message": ""}
        row = self.rows.setdefault(report.nodeid, new)
        row["seconds"] += report.duration
        if report.outcome != "passed" and row["outcome"] != "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            row |= {"outcome": report.outcome, "message": crash.message if crash else str(report.longrepr)[-800:]}
        if report.when == "teardown":
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def load_data_sets_of(folder: Path) -> None:
    """Let `load_dataset(NAME, CONFIG)` read FOLDER/NAME/CONFIG/SPLIT.parquet where it exists."""
    import datasets.load

    original = datasets.load_dataset

    def load_dataset(path: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        files = {one.stem: str(one) for one in sorted((folder / str(path) / (name or "default")).glob("*.parquet"))}
        if files:
            return original("parquet", *args, data_files=files, **kwargs)
        return original(path, name, *args, **kwargs)

    datasets.load_dataset = datasets.load.load_dataset = load_dataset


def give_names_of_trl() -> None:
    """Give TRL the names that tests of another release import and do not need here."""
    from trl import import_utils
    from trl.trainer import sft_trainer

    def is_available(name: str) -> Any:
        if name.startswith("is_") and name.endswith("_available"):
            return lambda: importlib.util.find_spec(name[3:-10]) is not None
        raise AttributeError(name)

    import_utils.__getattr__ = is_available
    for name in ("_chunked_cross_entropy_loss", "_patch_chunked_ce_lm_head", "dft_loss"):
        setattr(sft_trainer, name, getattr(sft_trainer, name, None))


def give_names_of_peft() -> None:
    """PEFT's `test_helpers.py` imports diffusers, which one test needs that is not run here."""
    sys.modules["diffusers"] = ModuleType("diffusers")
    sys.modules["diffusers"].StableDiffusionPipeline = None


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a suite's process: this module is pytest's plugin there."""
    if os.environ["SUITE_ENGINE"] == "hf_compat":
        import hf_compat

        hf_compat.patch()
    load_data_sets_of(Path(os.environ["HF_HOME"]) / "datasets_local")
    prepare = {"trl": give_names_of_trl, "peft": give_names_of_peft}.get(os.environ["SUITE"])
    if prepare:
        prepare()
    config.pluginmanager.register(Report(os.environ["SUITE_REPORT"]))
    for name in ("slow", "low_priority", "invariant"):
        config.addinivalue_line("markers", f"{name}: a mark of a suite")


def run(folder: Path, suite: str, engine: str, words: list[str]) -> dict[str, dict[str, Any]]:
    """Run a suite under an engine, in a copy of its files; return the row of each test."""
    runs, work = folder / "runs", folder / "work" / f"{suite}.{engine}"
    runs.mkdir(exist_ok=True)
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder / suite, work)  # some tests write beside themselves
    home = folder / f"home_{suite}"
    report = runs / f"{suite}.{engine}.jsonl"
    variables = {
        "HF_HOME": str(home if home.is_dir() else folder / "home_st"),
        "HF_DATASETS_CACHE": str(folder / "caches" / f"{suite}.{engine}"),
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], folder / "site", HERE.parents[2]))),
        "SUITE": suite,
        "SUITE_ENGINE": engine,
        "SUITE_REPORT": str(report),
        **{"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"},
    }
    chosen = [*(f"tests/{file}" for file in SUITES[suite].files), "-k", SUITES[suite].chosen]
    command = [sys.executable, "-m", "pytest", "-p", f"sweeps.libraries.{Path(__file__).stem}", *chosen, *words]
    command += ["-p", "no:rerunfailures", "-p", "no:cacheprovider", "-o", "addopts=", "--continue-on-collection-errors"]
    command += ["-q", "--tb=short", "-W", "ignore", "--timeout", "900"]
    print(f"{suite} under {engine}: {report}", flush=True)
    report.write_text("")
    with report.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=work, env=os.environ | variables, stdout=log, stderr=log)
    return {row["id"]: row for row in map(json.loads, report.read_text().splitlines())}


def expected() -> dict[str, str]:
    """Return the tests that may differ, SUITE and id, and why."""
    lines = (HERE / "expected_suites.txt").read_text().splitlines()
    return dict(line.split(" ## ") for line in lines if line)


def judge(suite: str, theirs: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]]) -> int:
    """Print what differs; return 0 if no test fails here alone without a reason, and if any passed."""
    reasons, unexpected = expected(), 0
    for engine, rows in zip(ENGINES, (theirs, ours), strict=True):
        counts = collections.Counter(row["outcome"] for row in rows.values())
        print(f"  {engine}: {', '.join(f'{number} {outcome}' for outcome, number in sorted(counts.items()))}")
    passed = [one for one, row in theirs.items() if row["outcome"] == "passed"]
    for one in passed:
        row = ours.get(one, {"outcome": "absent", "message": ""})
        if row["outcome"] == "passed":
            continue
        reason = reasons.get(f"{suite} {one}")
        unexpected += reason is None
        print(f"  {row['outcome']} {one}\n    {reason or row['message'][:400]}")
    for one, row in theirs.items():
        if row["outcome"] == "failed" and ours.get(one, {}).get("outcome") == "passed":
            print(f"  passes under hf_compat alone: {one}\n    {row['message'][:160]}")
    print(f"  {len(passed)} pass under transformers; {unexpected} of them fail here without a reason", flush=True)
    if not passed:
        print("  none ran: see the .log beside the results", flush=True)
    return unexpected or not passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)} (default: those that FOLDER holds)")
    words = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    chosen = parser.parse_args(sys.argv[1 : sys.argv.index("--")] if words else None)
    folder = chosen.folder.resolve()
    suites = chosen.suites or [one for one in SUITES if (folder / one).is_dir()]
    if not suites or not all((folder / one).is_dir() and one in SUITES for one in suites):
        parser.error(f"{folder} holds {[one for one in SUITES if (folder / one).is_dir()]} of {list(SUITES)}")
    unexpected = [judge(suite, *(run(folder, suite, engine, words) for engine in ENGINES)) for suite in suites]
    sys.exit(any(unexpected))


if __name__ == "__main__":
    main()
