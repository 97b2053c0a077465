"""Run every case under one trainer, each in a process of its own, and write what it did.

    python runner.py transformers|hf_compat FOLDER [CASE …]
    python runner.py --adopted …    # both take the arguments of the installed transformers, of whatever release
    python runner.py --mended …     # as above, and an older release's Trainer gets what 5.23's does otherwise

Started by a launcher (torchrun, `hf-compat run`), each of its processes takes part in every case. The process imports
everything once and forks for each case: no case sees another one's seeds, caches or patches.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from helpers.parity.cases import CASES
from helpers.parity.differences import MENDED
from helpers.parity.native_seams import NATIVE
from helpers.parity.seam_cases import SEAMS
from helpers.parity.sharded_seams import SHARDED
from helpers.toy import EVENTS, FLAGS
from hf_compat.checkpoint.reading import is_ours_alone
from sweeps.releases import mends
from sweeps.releases import numbers_of_releases as releases

# Durations, and rates over them, are the machine's.
TIMED = ("_runtime", "_per_second", "_preparation_time")
# What of a state is compared; an older release has not all of it.
STATE = (
    "epoch", "global_step", "max_steps", "num_train_epochs", "total_flos", "best_metric", "best_global_step",
    "num_input_tokens_seen",
)  # fmt: skip
# What our logs hold besides HF's keys: a row of docs/differences.md.
OWN_LOGS = ("nonfinite_steps",)


api_of = importlib.import_module


def tracer(api, trace: list):
    def record(event):
        def method(self, args, state, control, **kwargs):
            flags = tuple(bool(getattr(control, name)) for name in FLAGS)
            shown = tuple(sorted(name for name in kwargs if name != "tokenizer"))
            trace.append((event, state.global_step, state.epoch, flags, shown))

        return method

    return type("Tracer", (api.TrainerCallback,), {event: record(event) for event in EVENTS})


def without_times(value):
    if isinstance(value, dict):
        keys = [key for key in value if str(key).endswith(TIMED)]
        return {k: without_times(v) for k, v in value.items() if k not in keys and k not in OWN_LOGS} | (
            {"timed": sorted(keys)} if keys else {}
        )
    if isinstance(value, (list, tuple)):
        items = [without_times(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def files_under(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and not is_ours_alone(path.name))
    return sorted(str(path.relative_to(folder)) for path in files)


def run_case(api, case: dict, folder: Path) -> dict:
    trace: list = []
    api.set_seed(1)
    keywords = {"train_dataset": case["train"](), "eval_dataset": case["eval"]()}
    if case["model"] is not None:
        keywords["model"] = case["model"]()
    keywords |= case["extra"](api) if "extra" in case else {}
    keywords["callbacks"] = [tracer(api, trace)(), *keywords.get("callbacks", [])]
    trainer_name, arguments_name = case.get("classes", ("Trainer", "TrainingArguments"))
    trainer_class = case["trainer"](api) if "trainer" in case else getattr(api, trainer_name)
    several = {"ddp_backend": "gloo"} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
    chosen = case["args"] | (case["arguments"]() if "arguments" in case else {})
    args = getattr(api, arguments_name)(output_dir=str(folder), **chosen, **several)
    trainer = trainer_class(args=args, **keywords)
    before = case["before"](trainer) if "before" in case else None
    output = trainer.train()
    first_log = without_times(trainer.state.log_history)
    after = case["after"](trainer) if "after" in case else None
    state = trainer.state
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # all files are written
    return {
        "log_history": without_times(state.log_history),
        "first_log": first_log,  # of the first `train`, where `after` trains again
        "output": without_times([output.global_step, output.training_loss, output.metrics]),
        "weights": {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
        "before": without_times(before),
        "after": without_times(after),
        "trace": trace,
        "files": files_under(folder),
        "state": {n: getattr(state, n) for n in STATE if hasattr(state, n)}
        | {"best": state.best_model_checkpoint and Path(state.best_model_checkpoint).name},
        "stateful": dict(state.stateful_callbacks),
        "random": torch.random.get_rng_state(),
    }


def written(result: dict, path: Path) -> None:
    """Write what a case gave, and beside it which mends had something to do."""
    path.write_bytes(pickle.dumps(result))
    if mends.USED:
        path.with_suffix(".mends").write_text("\n".join(sorted(mends.USED)))


def run_in_this_process(api_name: str, name: str, folder: Path, place: str) -> None:
    """Run a case and write what it gave, or its error; the process ends here."""
    status = 1
    try:
        warnings.simplefilter("ignore")
        api = api_of(api_name)
        case = {**CASES, **MENDED, **SEAMS, **NATIVE, **SHARDED}[name]
        result = without_times(case["run"](api, folder / name)) if "run" in case else run_case(api, case, folder / name)
        written(result, folder / f"{name}{place}.pickle")
        status = 0
    except BaseException:
        (folder / f"{name}{place}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(status)


def run_forked(api_name: str, name: str, folder: Path, number: int) -> None:
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0")
    pid = os.fork()
    if pid == 0:
        if world > 1:  # a meeting place of this case's own, beside the launcher's
            # below the ports that the system gives to anybody's connections
            port = 10240 + (int(os.environ["MASTER_PORT"]) * 7 + number) % 22000
            os.environ.update({"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"})
        run_in_this_process(api_name, name, folder, f".{rank}" if world > 1 else "")
    wait_for(pid, folder / f"{name}.error")


def wait_for(child: int, error: Path, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            error.write_text("the process did not end")
            os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("api")
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--adopted", action="store_true")
    parser.add_argument("--mended", action="store_true")
    chosen = parser.parse_args()
    if chosen.adopted or chosen.mended:
        globals()["api_of"] = releases.Api
    api = api_of(chosen.api)
    for package in ("accelerate", "datasets", "deepspeed", "transformers"):  # loaded once, before forking
        if importlib.util.find_spec(package) is not None:
            importlib.import_module(package)
    _ = (api.Trainer, api.TrainingArguments, api.EarlyStoppingCallback)
    if chosen.mended:
        mends.mend()
    torch.set_num_threads(1)
    gc.freeze()  # what is imported: transformers' Trainer collects once a `train()`
    for number, name in enumerate(chosen.cases or CASES):
        (chosen.folder / name).mkdir(parents=True, exist_ok=True)
        run_forked(chosen.api, name, chosen.folder, number)


if __name__ == "__main__":
    main()
