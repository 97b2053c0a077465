"""Run configurations on a pretended GPU under transformers and under hf_compat, and compare all that they leave.

    .venv/bin/python tests/sweeps/device/device_matrix.py [NAME …] [--jobs 2] [--kind cuda]
    .venv/bin/python tests/sweeps/device/device_matrix.py --kind real         # on the GPU that this machine has

Without names: all parity configurations, and those that only a device has (`device_cases.py`). Prints what differs, the
counts. `waits.py` has the table of what an update, a log, an evaluation and a save wait for.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import gc
import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from helpers.device_cases import DEVICE_CASES, NOT_COMPARED
from helpers.parity.cases import CASES
from helpers.parity.compare import first_difference, same
from helpers.parity.differences import IN_ONE_PROCESS, MENDED, names_to_run, resumed
from helpers.parity.runner import run_case, wait_for
from helpers.pretended import pretended_device

APIS = ("transformers", "hf_compat")
ALL = {**CASES, **DEVICE_CASES, **MENDED}
DIFFERENCES = {**IN_ONE_PROCESS, "fp16_overflow_resumed": resumed()}
FORKING = threading.Lock()  # filelock refuses a fork during another one


def on_device(case: dict) -> dict:
    """The configuration without what keeps it on the CPU."""
    args = {name: value for name, value in case["args"].items() if name != "use_cpu"}
    return {**case, "args": {**args, **case.get("device_args", {})}}


def run_one(api_name: str, name: str, folder: Path, kind: str) -> dict:
    """Run a configuration in this process; the result has no tensor of the device."""
    warnings.simplefilter("ignore")
    api = importlib.import_module(api_name)
    with of_kind(kind) as machine:
        result = run_case(api, on_device(ALL[name]), folder)
        result["devices"] = {key: str(value.device) for key, value in result["weights"].items()}
        result["device random"] = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        result = to_host(result)
        counts, where = (dict(machine.count), dict(machine.where)) if machine else ({}, {})
    return {"result": result, "counts": counts, "where": where}


@contextlib.contextmanager
def of_kind(kind: str):
    """A pretended device; or the real one, with kernels that add in one order."""
    if kind != "real":
        with pretended_device(kind) as machine:
            yield machine
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield None
    finally:
        torch.use_deterministic_algorithms(False)


def to_host(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_host(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def run_forked(api_name: str, name: str, folder: Path, kind: str) -> None:
    """Run a configuration in a fork, which writes what it gave or its error."""
    if (folder / f"{name}.pickle").exists():
        return
    (folder / f"{name}.error").unlink(missing_ok=True)
    with FORKING:
        pid = os.fork()
    if pid == 0:
        try:
            output = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            found = run_one(api_name, name, folder / name, kind)
            (folder / f"{name}.pickle").write_bytes(pickle.dumps(found))
        except BaseException:
            (folder / f"{name}.error").write_text(traceback.format_exc())
        finally:
            os._exit(0)
    wait_for(pid, folder / f"{name}.error", 600)


def run_all(names: list[str], folder: Path, jobs: int, kind: str) -> None:
    """Run all names under both trainers."""
    for package in ("accelerate", "datasets", "peft", "torchmetrics"):
        if importlib.util.find_spec(package) is not None:
            importlib.import_module(package)
    torch.set_num_threads(1)
    work = []
    for api_name in APIS:
        api = importlib.import_module(api_name)
        _ = (api.Trainer, api.TrainingArguments, api.Seq2SeqTrainer, api.EarlyStoppingCallback)
        (folder / api_name).mkdir(parents=True, exist_ok=True)
        work += [(api_name, name) for name in names_to_run(api_name, names, _differences(names))]
    places = {name: place for place, name in enumerate(names)}
    work.sort(key=lambda one: places.get(one[1], -1))  # what is compared runs side by side
    gc.freeze()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda one: run_forked(one[0], one[1], folder / one[0], kind), work))


def run_apart(folder: Path, names: Iterable[str], kind: str = "cuda") -> None:
    """Run configurations from a process of their own, for a test whose process has threads: a fork inherits locks."""
    command = [sys.executable, __file__, "--kind", kind, "--keep", str(folder), *names]
    subprocess.run(command, check=False, capture_output=True, timeout=500)  # `verdict` says what differs


def _differences(names: list[str]) -> dict:
    return {name: difference for name, difference in DIFFERENCES.items() if name in names}


def read(folder: Path, api: str, name: str) -> dict | str:
    """Return what a configuration gave, or its error."""
    error = folder / api / f"{name}.error"
    return error.read_text() if error.exists() else pickle.loads((folder / api / f"{name}.pickle").read_bytes())


def verdict(folder: Path, name: str, kind: str = "cuda") -> tuple[str, str]:
    """Return `equal`, `explained`, `not compared` or `DIFFERENT`, and what there is to say."""
    found = _found(folder, name)
    reason = NOT_COMPARED.get(kind, {}).get(name)
    if reason is None:
        return found
    if found[0] == "DIFFERENT":
        return "not compared", reason
    return "DIFFERENT", f"not compared without a reason: {reason}"


def _found(folder: Path, name: str) -> tuple[str, str]:
    theirs, ours = (read(folder, api, name) for api in APIS)
    for api, found in zip(APIS, (theirs, ours), strict=True):
        if isinstance(found, str):
            return "DIFFERENT", f"{api}: {found[-1500:]}"
    difference = DIFFERENCES.get(name)
    expected = theirs["result"]
    if difference is not None:
        mended = read(folder, "transformers", difference.mended)["result"] if difference.mended else None
        expected = difference.expect(expected, mended)
    if same(expected, ours["result"]):
        return ("explained", difference.heading) if difference else ("equal", "")
    return "DIFFERENT", first_difference(expected, ours["result"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="configurations; all of them without names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kind", default="cuda", help="cuda, mps: pretended; real: the GPU of this machine")
    parser.add_argument("--keep", type=Path, help="write results here, and run only what is not there yet")
    chosen = parser.parse_args()
    names = chosen.names or [*DEVICE_CASES, *CASES]
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        run_all(names, folder, chosen.jobs, chosen.kind)
        counts: collections.Counter[str] = collections.Counter()
        for name in names:
            word, text = verdict(folder, name, chosen.kind)
            counts[word] += 1
            if word != "equal":
                print(f"{word:10} {name}: {text}", flush=True)
        place = "a real GPU" if chosen.kind == "real" else f"a pretended {chosen.kind}"
        print(f"{len(names)} configurations on {place}: {dict(counts)}")
    return 1 if counts["DIFFERENT"] else 0


if __name__ == "__main__":
    sys.exit(main())
