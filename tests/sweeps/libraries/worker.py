"""Run cases in this process's engine, each in a process of its own, and write what each did.

    python worker.py MODELS FOLDER CASE …                  # transformers' engine
    hf-compat run worker.py MODELS FOLDER CASE …           # Lightning's

A case trains, evaluates, and trains again from its checkpoint in the middle.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from hf_compat.checkpoint.reading import is_ours_alone
from sweeps.libraries.library_cases import LIBRARIES

UPDATES, MIDDLE = 30, 15
# Durations are the machine's; the last two are rows of docs/differences.md.
NOT_COMPARED = ("_runtime", "_per_second", "_preparation_time", "step_time", "nonfinite_steps")
LOCK = "hf_compat.lock"  # it goes when the first process is done, which others do not wait for

ARGUMENTS = {
    "max_steps": UPDATES,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "warmup_steps": 3,
    "logging_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "save_strategy": "steps",
    "save_steps": MIDDLE,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 3,
}


def compared(log: dict) -> dict:
    return {name: value for name, value in log.items() if not name.endswith(NOT_COMPARED)}


def result_of(trainer) -> dict:
    return {
        "logs": [compared(log) for log in trainer.state.log_history],
        "weights": {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()},
        "update": trainer.state.global_step,
    }


def without_sums(result: dict) -> dict:
    """Leave out the mean loss of a resumed run: docs/differences.md says what each engine reports."""
    return result | {"logs": [{n: v for n, v in log.items() if n != "train_loss"} for log in result["logs"]]}


def files_under(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return sorted(str(path.relative_to(folder)) for path in files if not is_ours_alone(path.name))


def run_case(name: str, models: Path, folder: Path) -> dict:
    case = LIBRARIES[name]
    args = {**ARGUMENTS, "output_dir": str(folder)}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        args["ddp_backend"] = "gloo"
    trainer = case.make(models, args)
    trainer.train()
    found = {"trained": result_of(trainer), "files": files_under(folder)}
    if getattr(trainer, "eval_dataset", True) is not None:
        found["evaluated"] = compared(trainer.evaluate())
    if case.library in ("SetFit", "FlagEmbedding"):  # no argument to resume by; transformers cannot load its weights
        return found | {"engine": engine_of(getattr(trainer, "engine", trainer))}
    resumed = case.make(models, args)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{MIDDLE}"))
    return found | {"resumed": without_sums(result_of(resumed)), "engine": engine_of(trainer)}


def engine_of(trainer) -> str:
    """Name the package whose Trainer trains."""
    packages = [base.__module__.split(".")[0] for base in type(trainer).__mro__]
    return next(package for package in packages if package in ("hf_compat", "transformers"))


def run_and_write(name: str, models: Path, folder: Path, rank: str) -> int:
    (folder / name).mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    try:
        result = run_case(name, models, folder / name)
        (folder / f"{name}{rank}.pickle").write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"{name}{rank}.error").write_text(traceback.format_exc())
        return 1
    return 0


def run_forked(name: str, models: Path, folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = run_and_write(name, models, folder, "")
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:  # the launcher's processes meet once: one case
        (name,) = chosen.cases
        run_and_write(name, chosen.models, chosen.folder, f".{os.environ['RANK']}")
        return
    for name in chosen.cases:
        LIBRARIES[name].load()
        run_forked(name, chosen.models, chosen.folder)


if __name__ == "__main__":
    main()
