"""What rank 0 pays as the ranks become more: Python calls and collectives of each phase, beside transformers.

    .venv/bin/python tests/sweeps/benchmarks/ranks.py [RANKS …]

One process believes that it is rank 0: torch's fake process group answers every exchange at once, with this rank's own
data. Nothing is timed, so each figure can be counted again on any machine. Calls are those of Python functions, in the
thread that trains; `beside` has those of all other threads during a run. Collectives are those that Python code asks
for. DDP's own, from C++, are the same on both sides.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers import toy
from hf_compat.runtime.collectives import GATHER

RANKS = (8, 64, 512, 4096)
SIDES = {"ours": "hf_compat", "transformers": "transformers"}
# Collectives of tensors; those of pickled objects, which make two of the former; barriers; and new groups
KINDS = {
    "collectives": (
        *("all_reduce", "all_gather", GATHER, "broadcast", "reduce", "gather", "scatter", "all_to_all"),
        *("reduce_scatter", "reduce_scatter_tensor", "all_to_all_single"),
    ),
    "objects": ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    "barriers": ("barrier", "monitored_barrier"),
    "groups": ("new_group",),
}
LIGHTNING = "of Lightning"  # all of its own
SETTINGS = {
    "use_cpu": True, "disable_tqdm": True, "report_to": "none", "per_device_train_batch_size": 1, "logging_steps": 4,
    "per_device_eval_batch_size": 1, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps",
    "save_steps": 5, "max_steps": 11,
}  # fmt: skip
# Each phase lies between two events of two updates: after update 6 the run evaluates, after update 8 it logs …
PHASES = {
    "start": (("call", 0), ("on_step_begin", 1)),
    "update": (("on_step_begin", 7), ("on_step_end", 7)),
    "read": (("on_step_end", 7), ("on_step_begin", 8)),
    "log": (("on_step_end", 8), ("on_step_begin", 9)),
    "first evaluation": (("on_step_end", 3), ("on_step_begin", 4)),
    "evaluation": (("on_step_end", 6), ("on_step_begin", 7)),
    "save": (("on_step_end", 10), ("on_step_begin", 11)),
    "beside": (("call", 0), ("return", 0)),
}
OF_BEST = {"eval_steps": 2, "save_steps": 2, "logging_steps": 50, "max_steps": 3, "load_best_model_at_end": True}
END = {"end": (("on_save", 3), ("return", 0))}


class Rows(torch.utils.data.Dataset):
    """So many samples, none of which is kept."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((8,), (index % 7) / 7), "labels": torch.tensor(index % 3)}


class Counting:
    """Counts calls and collectives between the events of a run. Both `CallbackHandler`s announce them by a method."""

    def __init__(self, call_event: object) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.seen: dict[tuple[str, int], collections.Counter[str]] = {}
        self.calls_beside = 0
        self._event = call_event.__code__
        self._kinds = {}
        for kind, names in KINDS.items():
            for name in names:
                function = getattr(distributed_c10d, name)
                self._kinds[inspect.unwrap(function).__code__] = kind

    def note(self, event: str, update: int) -> None:
        self.seen.setdefault((event, update), self.counts.copy())

    def profile_beside(self, frame, kind: str, argument: object) -> None:
        self.calls_beside += kind == "call"

    def profile(self, frame, kind: str, argument: object) -> None:
        if kind != "call":
            return
        self.counts["calls"] += 1
        code = frame.f_code
        if code is self._event:
            told = frame.f_locals
            self.note(told["event"], told["state"].global_step + (told["event"] == "on_step_begin"))
        elif code in self._kinds:
            self.counts[LIGHTNING if _is_lightnings(frame) else self._kinds[code]] += 1

    def between(self, phases) -> dict[str, dict[str, int]]:
        found = {}
        for name, (begin, end) in phases.items():
            counts = collections.Counter(self.seen[end])
            counts.subtract(self.seen[begin])
            found[name] = {kind: counts[kind] for kind in ("calls", *KINDS, LIGHTNING)}
        if "beside" in found:
            found["beside"] = {"calls": self.calls_beside}
        return found


def _is_lightnings(frame) -> bool:
    """Whether Lightning asks for a collective."""
    while frame.f_globals["__name__"].startswith(("torch.distributed", "typing_extensions")):
        frame = frame.f_back
    return frame.f_globals["__name__"].startswith("lightning.")


def pretend(ranks: int) -> None:
    """Let this process be rank 0 of so many on one machine."""
    places = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    make, wrap = distributed.new_group, DistributedDataParallel.__init__
    distributed.new_group = lambda *args, **options: make(*args, **{**options, "backend": "fake"})

    def wrap_and_answer(self, *args, **options):
        wrap(self, *args, **options)
        self.register_comm_hook(None, _answer)  # what the fake group gives back is no gradient

    DistributedDataParallel.__init__ = wrap_and_answer


def _answer(state, bucket):  # DDP reads annotations, which are texts here
    answer = torch.futures.Future()
    answer.set_result(bucket.buffer())
    return answer


def count(api, ranks: int, folder: Path) -> dict[str, dict[str, int]]:
    """Train twice on a process group that is there, and count each phase."""
    found = {}
    for phases, more in ((PHASES, {}), (END, OF_BEST)):
        settings = {**SETTINGS, **more}
        args = api.TrainingArguments(str(folder / "-".join(phases)), **settings)
        sets = {"train_dataset": Rows(ranks * 16), "eval_dataset": Rows(ranks * 2)}
        trainer = api.Trainer(toy.Classifier(), args, **sets)
        counting = Counting(type(trainer.callback_handler).call_event)
        threading.setprofile(counting.profile_beside)
        sys.setprofile(counting.profile)
        try:
            counting.note("call", 0)
            trainer.train()
            counting.note("return", 0)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        found |= counting.between(phases)
    return found


def count_here(side: str, ranks: int) -> dict[str, dict[str, int]]:
    """Count a side in this process, which can do it only once."""
    warnings.filterwarnings("ignore")
    import importlib

    api = importlib.import_module(SIDES[side])
    pretend(ranks)
    with tempfile.TemporaryDirectory() as folder:
        return count(api, ranks, Path(folder))


def table(found: dict[tuple[str, int], dict[str, dict[str, int]]], sizes: list[int]) -> str:
    lines = [f"{'calls':<18}" + "".join(f"{f'{side}, {size}':>22}" for side in SIDES for size in sizes)]
    phases = list(next(iter(found.values())))
    for phase in phases:
        lines.append(f"{phase:<18}" + "".join(f"{found[s, n][phase]['calls']:>22,}" for s in SIDES for n in sizes))
    lines += ["", f"{'collectives':<18}" + "".join(f"{f'{side}, {sizes[0]}':>60}" for side in SIDES)]
    for phase in phases:
        cells = []
        for side in SIDES:
            counts = found[side, sizes[0]][phase]
            told = [f"{counts[kind]} {kind}" for kind in (*KINDS, LIGHTNING) if counts.get(kind)]
            cells.append(", ".join(told) or "none")
        lines.append(f"{phase:<18}" + "".join(f"{cell:>60}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--side", choices=SIDES, help="count one side in this process, and print it as JSON")
    given = parser.parse_args()
    if given.side:
        print(json.dumps(count_here(given.side, *given.ranks)))
        return
    found = {}
    for side in SIDES:
        for ranks in given.ranks:
            words = [sys.executable, __file__, str(ranks), "--side", side]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            found[side, ranks] = json.loads(done.stdout.splitlines()[-1])
    print(table(found, list(given.ranks)))


if __name__ == "__main__":
    main()
