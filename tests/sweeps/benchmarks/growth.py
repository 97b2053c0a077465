"""How costs grow with what lies beside a save, with evaluation sets, histories and callbacks; transformers beside.

    .venv/bin/python tests/sweeps/benchmarks/growth.py [ROUNDS] [--only WORD]

Each figure is the smallest processor time of the rounds, contestants in turn. The exponent is that between the two
largest sizes: 1 means that twice as many cost twice as much.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.filterwarnings("ignore")

import torch
import transformers

import hf_compat
from helpers import toy

Run = Callable[[object, Path, int], float]  # api, folder, size → seconds


def trainer(api, folder: Path, kind=None, callbacks=(), **more):
    settings = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "max_steps": 10, "save_strategy": "no",
                "logging_strategy": "no"}  # fmt: skip
    args = api.TrainingArguments(str(folder / "out"), **{**settings, **more})
    sets = {"train_dataset": toy.rows(), "eval_dataset": toy.rows(8, 5)}
    return (kind or api.Trainer)(toy.Classifier(), args, **sets, callbacks=list(callbacks))


def timed(call: Callable[[], object]) -> float:
    os.sync()  # a save would pay for the files that the benchmark has just made, as it flushes its own
    began = time.process_time()
    call()
    return time.process_time() - began


def saves(api, folder: Path, kind=None, **more) -> float:
    return timed(trainer(api, folder, kind, save_strategy="steps", save_steps=2, **more).train)


def beside_checkpoints(api, folder: Path, size: int) -> float:
    for number in range(size):
        (folder / "out" / f"checkpoint-{1000 + number}").mkdir(parents=True)
    return saves(api, folder)


def beside_checkpoints_with_a_limit(api, folder: Path, size: int) -> float:
    for number in range(size):
        (folder / "out" / f"checkpoint-old-{number}").mkdir(parents=True)
    return saves(api, folder, save_total_limit=2)


def _files(folder: Path, size: int) -> None:
    (folder / "out").mkdir()
    for number in range(size):
        (folder / "out" / f"file-{number}.txt").write_text("")


def beside_files(api, folder: Path, size: int) -> float:
    _files(folder, size)
    return saves(api, folder)


def beside_files_with_an_override(api, folder: Path, size: int) -> float:
    _files(folder, size)

    class Own(api.Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)

    return saves(api, folder, Own)


def evaluation_sets(api, folder: Path, size: int) -> float:
    made = trainer(api, folder)
    sets = {f"set{number}": toy.rows(8, number) for number in range(size)}
    made.evaluate(toy.rows(8, 5))
    return timed(lambda: made.evaluate(sets))


def history(api, folder: Path, size: int) -> float:
    class Long(api.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            state.log_history = [{"loss": 1.0, "step": step} for step in range(size)]

    made = trainer(api, folder, callbacks=[Long()], save_strategy="steps", save_steps=2)
    return timed(made.train)


def callbacks(api, folder: Path, size: int) -> float:
    kinds = [type(f"Own{number}", (api.TrainerCallback,), {}) for number in range(size)]
    made = trainer(api, folder, callbacks=[kind() for kind in kinds])
    return timed(made.train)


SUBJECTS: dict[str, tuple[Run, tuple[int, ...]]] = {
    "five saves beside checkpoints": (beside_checkpoints, (0, 200, 1600)),
    "five saves with a limit beside folders": (beside_checkpoints_with_a_limit, (0, 200, 1600)),
    "five saves beside files": (beside_files, (0, 4000, 32000)),
    "five saves of an overridden _save beside files": (beside_files_with_an_override, (0, 4000, 32000)),
    "one evaluation of sets": (evaluation_sets, (1, 16, 128)),
    "five saves with a history": (history, (0, 4000, 32000)),
    "ten updates with callback classes": (callbacks, (0, 400, 4000)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other take processor time, too
    apis = {"transformers": transformers, "hf_compat": hf_compat}
    print("| subject | sizes | transformers | hf_compat | ratios | exponent | last × first |")
    print("|---|---|---|---|---|---|---|")
    for name, (run, sizes) in SUBJECTS.items():
        if asked.only not in name:
            continue
        found = {(api, size): math.inf for api in apis for size in sizes}
        for _ in range(asked.rounds):
            for api, size in found:
                with tempfile.TemporaryDirectory(prefix="hf_compat_growth_") as folder:
                    found[api, size] = min(found[api, size], run(apis[api], Path(folder), size))
        theirs, ours = ([found[api, size] for size in sizes] for api in apis)
        exponent = math.log(ours[-1] / ours[-2]) / math.log(sizes[-1] / sizes[-2])
        ratios = ", ".join(f"{own / other:.2f}" for own, other in zip(ours, theirs, strict=True))
        shown = [", ".join(f"{value:.2f}" for value in values) for values in (theirs, ours)]
        row = [name, ", ".join(map(str, sizes)), *shown, ratios, f"{exponent:.2f}", f"{ours[-1] / ours[0]:.2f}"]
        print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
