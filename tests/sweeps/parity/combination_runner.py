"""Runs rows of `combinations.py` under one api, each in forked processes, as lines on its input ask for.

    python combination_runner.py transformers|hf_compat

A line is `{"features": […], "calls": …, "folder": …, "interrupts": …, "devices": …}`; the answer, a line, says that the
row is done. Each process of the row leaves `answer.RANK.pickle`; what is then in the output folder, `files.pickle`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import random
import socket
import sys
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from helpers.parity.runner import STATE, wait_for
from hf_compat.checkpoint.reading import is_ours_alone
from sweeps.parity import combination_calls
from sweeps.parity.combination_calls import CALLS, Ended, Session, plain
from sweeps.parity.combination_features import FEATURES

LIMIT_SECONDS = 90
EXACT_FILES = ("exact_0.json", "exact_1.json")


def files_of(folder: Path) -> dict[str, object]:
    """Return what is in a folder's files, by their names; of those that are not compared the name at most."""
    found: dict[str, object] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if is_ours_alone(path.name) or path.name in (*EXACT_FILES, "hf_compat.lock", "trackers.json"):
            continue
        found[str(path.relative_to(folder))] = _content(path, folder)
    return found


def _content(path: Path, folder: Path) -> object:
    if path.name == "training_args.bin":
        return None
    if path.suffix == ".json":
        return _relative(plain(json.loads(path.read_text())), folder)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return torch.load(path, weights_only=False)
    return path.read_bytes() if path.suffix == ".txt" else None


def _relative(value, folder: Path):
    """Return a value with the paths in the folder as they are within it."""
    if isinstance(value, dict):
        return {key: _relative(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative(item, folder) for item in value]
    return value.replace(str(folder), "OUT") if isinstance(value, str) else value


def seen(session: Session) -> dict:
    """Return all that a session has left."""
    trainer = session.trainer
    result = {"said": session.said, "trace": session.trace, "begun": session.begun, "found": plain(session.found)}
    if trainer is not None:
        state, optimizer, schedule = trainer.state, trainer.optimizer, trainer.lr_scheduler
        result |= {
            "log_history": plain(state.log_history),
            "weights": {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
            "optimizer": optimizer and optimizer.state_dict(),
            "schedule": schedule and {k: v for k, v in schedule.state_dict().items() if not callable(v)},
            "state": {name: getattr(state, name) for name in (*STATE, "logging_steps", "eval_steps", "save_steps")},
            "best": _relative(state.best_model_checkpoint, session.folder),
            "stateful": dict(state.stateful_callbacks),
            "flags": {name: bool(getattr(trainer.control, name)) for name in combination_calls.FLAGS},
            "modes": [trainer.model.training, trainer.is_in_train],
            "random": [torch.random.get_rng_state(), np.random.get_state()[1], random.random()],
        }
    return result


def run(api_name: str, asked: dict) -> dict:
    api = importlib.import_module(api_name)
    chosen = [FEATURES[name] for name in asked["features"]]
    if api_name == "hf_compat" and any(one.name == "patched" for one in chosen):
        api.patch()
        api = importlib.import_module("transformers")
    calls = CALLS[asked["calls"]]
    args = {}
    if calls.saves and not any("save" in one.places for one in chosen):
        args = {"save_strategy": "steps", "save_steps": 4}
    if asked["devices"] > 1:
        args["ddp_backend"] = "gloo"
    folder = Path(asked["folder"]) / "out"
    session = Session(api, chosen, folder, api_name == "transformers", asked.get("interrupts", True), args)
    try:
        calls.run(session)
    except Exception as error:
        if not isinstance(error, Ended):  # it is the constructor's: what a call raises is kept already
            kinds = [kind.__name__ for kind in type(error).__mro__ if kind not in (object, BaseException)]
            session.said.append(("constructor", "raises", kinds, str(error)))
    return seen(session)


def run_in_this_process(api_name: str, asked: dict, answer: Path) -> None:
    status = 1
    try:
        warnings.simplefilter("ignore")
        log = os.open(answer.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        answer.write_bytes(pickle.dumps(run(api_name, asked)))
        status = 0
    except BaseException:
        answer.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(status)


def place_in_the_row(rank: int, devices: int, port: int) -> None:
    """Say which process of a row this one is, as torchrun does."""
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in said.items()}, MASTER_ADDR="127.0.0.1")


def free_port() -> int:
    """Return a port below those that the system gives to anybody's connections."""
    while True:
        port = random.SystemRandom().randrange(10240, 32000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def run_forked(api_name: str, asked: dict) -> None:
    """Run a row, each of its processes a fork of this one, and keep what it leaves."""
    folder, devices, port = Path(asked["folder"]), asked["devices"], free_port()
    folder.mkdir(parents=True, exist_ok=True)
    forked = {}
    for rank in range(devices):
        answer = folder / f"answer.{rank}.pickle"
        pid = os.fork()
        if pid == 0:
            if devices > 1:
                place_in_the_row(rank, devices, port)
            run_in_this_process(api_name, asked, answer)
        forked[pid] = answer.with_suffix(".error")
    for pid, error in forked.items():
        wait_for(pid, error, LIMIT_SECONDS)
    (folder / "files.pickle").write_bytes(pickle.dumps(files_of(folder / "out")))


def main() -> None:
    api_name = sys.argv[1]
    api = importlib.import_module(api_name)
    for package in ("accelerate", "datasets", "peft", "transformers"):  # loaded once, before forking
        if importlib.util.find_spec(package) is not None:
            importlib.import_module(package)
    _ = (api.Trainer, api.TrainingArguments, api.EarlyStoppingCallback)
    if api_name == "transformers":
        from helpers.parity import exact_resume

        exact_resume.mend()
    torch.set_num_threads(1)
    for line in sys.stdin:
        run_forked(api_name, json.loads(line))
        print("done", flush=True)


if __name__ == "__main__":
    main()
