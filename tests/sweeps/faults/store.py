"""Train into a local object store that is killed at, or fails, and compare what is in it with what was told.

    .venv/bin/python tests/sweeps/faults/store.py kills [NUMBER] [SEED]
    .venv/bin/python tests/sweeps/faults/store.py failing [--only START,START]

`kills` kills a run at random instants, deletes its local folder, and resumes it from the store alone. After each kill
the newest checkpoint that was told as stored has to be whole there. A run that reaches its end is compared with an
uninterrupted one that had no store.

`failing` lets one kind of request fail in one way: once, three times, or always. A run that trains has to end with all
stored, or with an error that names what is not, which `hf-compat upload` stores afterwards. A run that resumes has to
begin with the newest checkpoint, or with an error. Then another machine resumes from the store alone, and has to give
the uninterrupted run.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.filterwarnings("ignore")

import s3fs
import torch

import hf_compat
from helpers import object_store, toy
from helpers.object_store import KINDS, WAYS, Fault
from helpers.parity.compare import first_difference, same
from hf_compat import get_last_checkpoint, set_seed
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.layout import checkpoint_step
from hf_compat.checkpoint.store import CheckpointStore
from hf_compat.cli.main import main as command
from hf_compat.runtime import stores
from sweeps.faults.kill import TIMED
from sweeps.faults.kill_shapes import SHAPES, arguments, classifier

ADDRESS = f"s3://{object_store.BUCKET}/run"
PART_BYTES = 5 * 2**20  # the smallest of an upload in parts


def early_best(folder: str) -> hf_compat.Trainer:
    """A run whose best checkpoint, which is loaded at the end, is not among the newest ones."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True, "eval_steps": 1}
    return classifier(arguments(folder, **best, save_total_limit=2))


class Wide(torch.nn.Module):
    """Two files of its checkpoints are uploaded in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = torch.nn.Embedding(700, 4096), torch.nn.Linear(4096, 3)

    def forward(self, x, labels):
        logits = self.out(self.table((x.sum(-1).abs() * 100).long() % 700))
        return torch.nn.functional.cross_entropy(logits, labels), logits


def wide(folder: str) -> hf_compat.Trainer:
    values = {"num_train_epochs": 1, "max_steps": 3, "eval_strategy": "no", "save_total_limit": 2}
    return hf_compat.Trainer(Wide(), arguments(folder, **values), train_dataset=toy.rows(50))


RUNS = {"plain": SHAPES["plain"], "async_save": SHAPES["async_save"], "early_best": early_best, "wide": wide}


def outcome(trainer: hf_compat.Trainer) -> dict:
    logs = [{k: v for k, v in log.items() if not k.endswith(TIMED)} for log in trainer.state.log_history]
    return {
        "logs": logs,
        "best": (trainer.state.best_metric, Path(trainer.state.best_model_checkpoint or "").name),
        "weights": {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
        "optimizer": trainer.optimizer.state_dict()["state"],
        "drawn next": torch.rand(1),
    }


class Told(logging.Handler):
    """Writes the names of the checkpoints that are told as stored, and the warnings, to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Stored "):
            with open(self._path, "a") as file:
                file.write(text.split()[1] + "\n")


def begin_life(place: Path) -> None:
    """Be a machine of its own: no local folder, no store known."""
    os.environ["XDG_CACHE_HOME"] = str(place)
    stores._STORES.clear()
    package = logging.getLogger("hf_compat")
    package.handlers[:], package.propagate = [Told(place.with_suffix(".told"))], False
    package.setLevel(logging.INFO)
    set_seed(3)


def train(run: str, place: Path, goes_on: bool | None = None) -> dict:
    """One life: go on from the store, or begin."""
    begin_life(place)
    trainer = RUNS[run](ADDRESS)
    has_begun = get_last_checkpoint(ADDRESS) is not None if goes_on is None else goes_on
    trainer.train(resume_from_checkpoint=has_begun)
    return outcome(trainer)


def forked(function, result: Path, seconds: float | None = None, until: Callable[[], bool] | None = None) -> bool:
    """Call a function in a fork, which writes what it returns. Whether it has ended.

    Args:
        function: Takes nothing.
        result: A file for the answer. An error is beside it.
        seconds: Kill it after so long.
        until: Kill it when this is so.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the process ends with it
            result.write_bytes(pickle.dumps(function()))
            status = 0
        except BaseException as error:
            result.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    if until is not None:
        while not until() and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


def called(function, base: Path):
    """Call a function in a fork, as s3fs starts threads."""
    result = base / "called.pickle"
    result.with_suffix(".error").unlink(missing_ok=True)
    assert forked(function, result), result.with_suffix(".error").read_text()
    return pickle.loads(result.read_bytes())


def told_by(place: Path) -> list[str]:
    path = place.with_suffix(".told")
    return path.read_text().split() if path.exists() else []


def what_is_lost(told: list[str], base: Path) -> list[str]:
    """What is wrong with the newest checkpoint that was told as stored, downloaded to another place."""
    held = CheckpointStore(ADDRESS)
    held.look()
    newest = max(told, key=lambda name: checkpoint_step(name) or 0, default=None)
    if newest is None:
        return []
    if newest not in held.whole:
        return [f"{newest} was told as stored; there are {sorted(held.whole)}, not {held.incomplete}"]
    shutil.rmtree(base / "fetched", ignore_errors=True)
    return manifest.problems(held.fetch(newest, str(base / "fetched")))


def reference(run: str, base: Path) -> dict:
    """The uninterrupted run, which has no store."""

    def local() -> dict:
        set_seed(3)
        trainer = RUNS[run](str(base / f"whole-{run}"))
        trainer.train()
        return outcome(trainer)

    return called(local, base)


def kills(server: object_store.Store, base: Path, number: int, seed: int) -> int:
    chance, counts = random.Random(seed), collections.Counter()
    for run in ("plain", "async_save", "early_best"):
        expected, share = reference(run, base), number // 3
        server.reset()
        began = time.perf_counter()
        assert forked(lambda run=run: train(run, base / "first"), base / "first.pickle")
        whole_seconds, done, lives = time.perf_counter() - began, 0, 0
        server.reset()
        while done < share or lives:
            place, result = base / f"{run}-{counts['lives']}", base / f"{run}-{counts['lives']}.pickle"
            seconds = chance.uniform(0.1, 0.9) * whole_seconds if done < share else None
            finished = forked(lambda run=run, place=place: train(run, place), result, seconds)
            counts["lives"] += 1
            lives += 1
            if result.with_suffix(".error").exists():
                print("a life ended by an error:", result.with_suffix(".error").read_text())
                return 1
            told = told_by(place)
            wrong = called(lambda told=told: what_is_lost(told, base), base)
            if wrong:
                print(f"{run}, life {counts['lives']}: lost: {wrong}")
                counts["lost"] += 1
            counts["told as stored"] += len(told)
            shutil.rmtree(place, ignore_errors=True)  # the machine is gone
            if not finished:
                done += 1
                counts["kills"] += 1
                counts["kills after something was stored"] += bool(told)
                continue
            found = pickle.loads(result.read_bytes())
            counts["runs that ended"] += 1
            if same(found, expected):
                counts["equal bit for bit"] += 1
            else:
                print(f"{run} differs{first_difference(expected, found)}")
            server.reset()
            lives = 0
    print(json.dumps(counts))
    return int(counts["lost"] > 0 or counts["runs that ended"] != counts["equal bit for bit"])


def trained_cell(server: object_store.Store, fault: Fault, base: Path, expected: dict) -> str:
    """Train while requests fail, and say how it has ended. What follows `wrong` is a mistake."""
    run, place = "wide" if fault.kind == "multipart" else "plain", base / "machine"
    server.fail(fault)
    ended = forked(lambda: train(run, place, False), base / "cell.pickle")
    server.fail()
    told, path = told_by(place), base / "cell.error"
    error = "" if ended else path.read_text()
    path.unlink(missing_ok=True)
    if error and not error.startswith("StoreError: "):
        return f"wrong: {error}"
    if error and "not stored" in error:
        way_out = re.search(r"`hf-compat (upload [^`]*)`", error)[1].split()
        if not Path(way_out[1]).is_dir():
            return f"wrong: no local folder: {error}"
        if called(lambda: command(way_out), base) != 0:
            return f"wrong: the way out fails: {error}"
    wrong = called(lambda: what_is_lost(told, base), base)
    if wrong:
        return f"wrong: lost: {wrong}"
    found = called(lambda: train(run, base / "elsewhere"), base)
    if not same(found, expected[run]):
        return f"wrong: differs{first_difference(expected[run], found)}"
    if not error:
        return "all stored"
    return "not all stored, uploaded later" if "not stored" in error else "did not begin"


def resumed_cell(server: object_store.Store, fault: Fault, base: Path, expected: dict) -> str:
    """Resume while requests fail."""

    def newest() -> tuple:
        begin_life(base / "machine")
        trainer = RUNS["plain"](ADDRESS)
        trainer.train(resume_from_checkpoint=True)
        return outcome(trainer), trainer._run.updates_before

    machine = base / "machine"
    forked(lambda: train("plain", machine, False), base / "cell.pickle", until=lambda: len(told_by(machine)) >= 2)
    told = max(map(checkpoint_step, told_by(machine)))
    shutil.rmtree(machine)
    server.fail(fault)
    ended = forked(newest, base / "cell.pickle")
    server.fail()
    path = base / "cell.error"
    if not ended:
        error = path.read_text()
        path.unlink()
        return "refused" if error.startswith("StoreError: ") else f"wrong: {error}"
    found, updates = pickle.loads((base / "cell.pickle").read_bytes())
    if updates < told:
        return f"wrong: resumed from update {updates}, and {told} was told as stored"
    is_equal = same(found, expected["plain"])
    return "resumed" if is_equal else f"wrong: differs{first_difference(expected['plain'], found)}"


def failing(server: object_store.Store, base: Path, only: str) -> int:
    stores.PAUSES = (0.05, 0.1, 0.2)
    own = s3fs.S3FileSystem._put_file
    s3fs.S3FileSystem._put_file = functools.partialmethod(own, chunksize=PART_BYTES)
    expected = {run: reference(run, base) for run in ("plain", "wide")}
    cells = [("trains", trained_cell, kind) for kind in KINDS]
    cells += [("resumes", resumed_cell, kind) for kind in ("get", "list", "head")]
    table: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    wrong = 0
    for (name, cell, kind), way, count in itertools.product(cells, WAYS, (1, 3, 10**9)):
        words = f"{name} {kind} {way} {count if count < 10**9 else 'always'}"
        if not any(words.startswith(start) for start in only.split(",")):
            continue
        server.reset()
        for path in base.glob("*"):
            shutil.rmtree(path) if path.is_dir() and not path.name.startswith("whole") else None
        for path in base.glob("*.told"):
            path.unlink()
        began = time.perf_counter()
        said = cell(server, Fault(kind, way, after=3 if name == "trains" else 1, count=count), base, expected)
        wrong += said.startswith("wrong")
        table[f"{name}: {kind}"][said.partition(":")[0]] += 1
        print(f"{words}: {said} ({time.perf_counter() - began:.1f} s)", flush=True)
    for row, counts in table.items():
        print(row, dict(counts))
    print(json.dumps({"cells": sum(sum(counts.values()) for counts in table.values()), "wrong": wrong}))
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("kills", "failing"))
    parser.add_argument("number", type=int, nargs="?", default=30)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    base = Path(tempfile.mkdtemp(prefix="hf_compat_store_"))
    with object_store.serving() as server, object_store.reached(server):
        if asked.part == "kills":
            status = kills(server, base, asked.number, asked.seed)
        else:
            status = failing(server, base, asked.only)
    shutil.rmtree(base)
    return status


if __name__ == "__main__":
    sys.exit(main())
