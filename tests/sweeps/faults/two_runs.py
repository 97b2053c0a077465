"""Start two runs into one output folder at about the same moment, kill one now and then, and look at what is left.

    .venv/bin/python tests/sweeps/faults/two_runs.py [pairs] [seed]

Each run marks its weights and its optimizer with a number of its own, saves at every update and keeps three
checkpoints. After each pair every checkpoint has to be whole and of one run alone, the run that has the folder (or the
one that takes it over from a killed one) ends, and the other one is refused before it writes anything. Prints what was
seen; the exit status is 0 when nothing was lost.
"""

from __future__ import annotations

import json
import os
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
from safetensors.torch import load_file

from helpers import toy
from hf_compat import Trainer, TrainingArguments, get_last_checkpoint, set_seed
from hf_compat.checkpoint import manifest
from hf_compat.errors import OutputFolderError

UPDATES = 12
ENDED, REFUSED, FAILED = 0, 3, 1


class Marked(toy.Classifier):
    def __init__(self, mark: int) -> None:
        super().__init__()
        self.register_buffer("mark", torch.tensor(mark))


def train(folder: str, mark: int, resume: bool) -> None:
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=UPDATES,
        weight_decay=float(mark),
        learning_rate=1e-4,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=3,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    set_seed(3)
    Trainer(Marked(mark), args, train_dataset=toy.rows()).train(resume_from_checkpoint=resume)


def start(folder: Path, mark: int, resume: bool = False) -> int:
    """Fork a run, and return its process."""
    pid = os.fork()
    if pid:
        return pid
    status = FAILED
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the process ends with it
        train(str(folder), mark, resume)
        status = ENDED
    except OutputFolderError:
        status = REFUSED
    except BaseException as error:
        Path(f"{folder}.{mark}.error").write_text(repr(error))
    finally:
        os._exit(status)


def status_of(pid: int) -> int:
    """Return how a run ended: its status, or the negative number of the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def faults(folder: Path) -> list[str]:
    """List what is wrong with the checkpoints of a folder."""
    found = []
    for path in sorted(folder.glob("checkpoint-*")):
        if not path.name.removeprefix("checkpoint-").isdigit():
            continue
        found += [f"{path.name}: {problem}" for problem in manifest.problems(str(path))]
        weights = load_file(path / "model.safetensors")
        optimizer = torch.load(path / "optimizer.pt", weights_only=True)
        marks = {float(weights["mark"]), max(group["weight_decay"] for group in optimizer["param_groups"])}
        if len(marks) > 1:
            found.append(f"{path.name}: weights and optimizer are of two runs: {marks}")
    return found


def pair(folder: Path, chance: random.Random) -> tuple[list[int], list[str]]:
    """Start two runs, kill one sometimes; return how they ended, and what is wrong."""
    pids = [start(folder, 1)]
    time.sleep(chance.choice([0.0, chance.uniform(0.0, 0.5)]))
    pids.append(start(folder, 2))
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0.0, 1.0))
        os.kill(chance.choice(pids), signal.SIGKILL)
    statuses = [status_of(pid) for pid in pids]
    wrong = faults(folder) if folder.is_dir() else []
    if ENDED not in statuses:  # whoever had the folder was killed: a third run goes on
        goes_on = folder.is_dir() and get_last_checkpoint(folder) is not None
        statuses.append(status_of(start(folder, 3, goes_on)))
        wrong += [f"after a kill: {fault}" for fault in faults(folder)]
    if not (folder / f"checkpoint-{UPDATES}").is_dir():
        wrong.append(f"no run came to its end: {statuses}")
    wrong += [path.read_text() for path in folder.parent.glob(f"{folder.name}.*.error")]
    left = {path.name for path in folder.iterdir()} - {f"checkpoint-{UPDATES - back}" for back in range(3)}
    return statuses, wrong + [f"{name} is left" for name in sorted(left)]


def main() -> int:
    pairs, seed = (int(argument) for argument in [*sys.argv[1:], 40, 0][:2])
    torch.set_num_threads(1)
    chance = random.Random(seed)
    base = Path(tempfile.mkdtemp(prefix="hf_compat_two_runs_"))
    counts = {"pairs": pairs, "ended": 0, "refused": 0, "killed": 0, "failed": 0, "faults": 0}
    for number in range(pairs):
        statuses, wrong = pair(base / str(number), chance)
        for status in statuses:
            counts[{ENDED: "ended", REFUSED: "refused", -signal.SIGKILL: "killed"}.get(status, "failed")] += 1
        counts["faults"] += len(wrong)
        for fault in wrong:
            print(f"pair {number}: {fault}")
    print(json.dumps(counts))
    shutil.rmtree(base)
    return 1 if counts["failed"] or counts["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
