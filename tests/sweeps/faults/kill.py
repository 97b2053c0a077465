"""Kill a training run at random instants, resume it each time, and compare what comes out with an uninterrupted run.

    .venv/bin/python tests/sweeps/faults/kill.py [kills] [seed] [--shape NAME]

`kill_shapes.py` has the runs. Each saves at every update, so most of its time, and most of the kills, are within saves.
Each life is a process of its own (forked after the imports) that ends by SIGKILL. Where a run reaches its end it is
compared and begun anew. Prints what was seen; the exit status is 0 when every run that ended was equal.

A kill may come after the last save, when early stopping has ended the training already. Resumed from there a run trains
until its callback stops it again, here as under transformers. It is compared with an uninterrupted run whose last
checkpoint was resumed from as often.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.filterwarnings("ignore")

import torch

from helpers.parity.compare import first_difference, same
from hf_compat import set_seed
from hf_compat.checkpoint.layout import checkpoint_step, list_checkpoints
from sweeps.faults.kill_shapes import SHAPES

TIMED = ("_runtime", "_per_second", "_time")


def train(shape: str, folder: str, result: str) -> None:
    """One life: go on from the newest good checkpoint, or begin."""
    set_seed(3)
    trainer = SHAPES[shape](folder)
    has_begun = any(Path(folder).glob("checkpoint-*")) if Path(folder).is_dir() else False
    try:
        trainer.train(resume_from_checkpoint=has_begun)
    except ValueError as error:  # killed before its first checkpoint was whole
        if "No valid checkpoint found" not in str(error):
            raise
        trainer.train()
    logs = [{k: v for k, v in log.items() if not k.endswith(TIMED)} for log in trainer.state.log_history]
    found = {
        "logs": logs,
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "weights": {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
        "optimizer": trainer.optimizer.state_dict()["state"],
        "drawn next": torch.rand(1),
    }
    Path(result).write_bytes(pickle.dumps(found))


def wait_for_a_save(folder: str, seconds: float) -> None:
    """Wait until a save is under way, at most so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until and not any(Path(folder).glob(".saving-*")):
        time.sleep(0.0005)


def live(shape: str, folder: str, result: str, seconds: float | None, within_save: bool = False) -> bool:
    """Fork a life and kill it after `seconds`; says whether it ended by itself.

    The clock starts when the life begins to train, or, with `within_save`, when a save does some time after that.
    """
    ready, announce = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the process ends with it
            os.write(announce, b".")
            train(shape, folder, result)
            status = 0
        except BaseException as error:
            Path(result + ".error").write_text(repr(error))
        finally:
            os._exit(status)
    os.close(announce)
    os.read(ready, 1)
    os.close(ready)
    if seconds is not None:
        time.sleep(seconds)
        if within_save:
            wait_for_a_save(folder, 1.0)
            time.sleep(random.uniform(0.0, 0.01))  # a save takes about this long
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


def last_update(folder: Path) -> int:
    """The updates of the newest checkpoint, 0 without one."""
    return max(map(checkpoint_step, list_checkpoints(folder)), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=200)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--shape", choices=SHAPES, default="plain")
    asked = parser.parse_args()
    kills, shape = asked.kills, asked.shape
    torch.set_num_threads(1)
    chance = random.Random(asked.seed)
    base = Path(tempfile.mkdtemp(prefix="hf_compat_kill_"))
    start = time.perf_counter()
    assert live(shape, str(base / "whole"), str(base / "whole.pickle"), None), (base / "whole.pickle.error").read_text()
    whole_seconds = time.perf_counter() - start
    expected = pickle.loads((base / "whole.pickle").read_bytes())
    last = last_update(base / "whole")
    references = [expected]  # the uninterrupted run, then what resuming from its last checkpoint gives
    done = ended = equal = within_saves = 0
    run, begun_at_end = 0, set[int]()
    while done < kills or ended == 0:
        folder, result = base / f"run{run}", base / f"run{run}.pickle"
        begun_at_end |= {last_update(folder)} - set(range(last))  # a killed save may be among them
        seconds = None if done >= kills else chance.uniform(0.0, 0.6 * whole_seconds)
        finished = live(shape, str(folder), str(result), seconds, chance.random() < 0.6)
        if Path(f"{result}.error").exists():
            print("a life ended by an error:", Path(f"{result}.error").read_text())
            return 1
        if not finished:
            done += 1
            within_saves += any(folder.glob(".saving-*"))
            continue
        ended += 1
        found = pickle.loads(result.read_bytes())
        while len(references) <= len(begun_at_end):
            again = base / "whole.pickle"
            assert live(shape, str(base / "whole"), str(again), None), Path(f"{again}.error").read_text()
            references.append(pickle.loads(again.read_bytes()))
        if any(same(found, reference) for reference in references[: len(begun_at_end) + 1]):
            equal += 1
        else:
            print(f"run {run} differs{first_difference(references[len(begun_at_end)], found)}")
        shutil.rmtree(folder)
        run, begun_at_end = run + 1, set()
    counts = {"kills": done, "within saves": within_saves, "runs that ended": ended, "equal bit for bit": equal}
    print(json.dumps({"shape": shape, **counts}))
    shutil.rmtree(base)
    return 0 if ended == equal else 1


if __name__ == "__main__":
    sys.exit(main())
