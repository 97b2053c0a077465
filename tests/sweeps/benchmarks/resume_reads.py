"""What a resume reads of its checkpoint on each rank: bytes, opened files and calls of the file system.

    .venv/bin/python tests/sweeps/benchmarks/resume_reads.py [ROW …] [--ranks N …] [--calls]

Each rank is a process of its own under strace, on gloo. Counted are calls between `train()` and the first update that
name the run's folder or a descriptor in it. Bytes are those of `read` and its kin; mapped files are told beside them,
as no call says how much of a mapping is read. Nothing is timed.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from helpers import toy
from helpers.forking import free_port

WIDTH, LAYERS = 512, 8
WEIGHTS = 4 * WIDTH * WIDTH * LAYERS  # bytes of the wide layers
SHARDS = {
    "fsdp": True,
    "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["Linear"]},
}
WHOLE = {"fsdp": True, "fsdp_config": {**SHARDS["fsdp_config"], "state_dict_type": "FULL_STATE_DICT"}}
ROWS = {  # by name: package, arguments
    "ours, DDP": ("hf_compat", {}),
    "transformers, DDP": ("transformers", {}),
    "ours, shards": ("hf_compat", SHARDS),
    "ours, FSDP 2 whole": ("hf_compat", WHOLE),
}
BEGIN, END = "/resume-begins", "/resume-has-ended"  # names that the processes ask for, so that the trace has them
_BEGUN = " <unfinished ...>"
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+|0x[0-9a-f]+)")
_READS = ("read", "pread64", "preadv", "preadv2", "readv")


class Wide(torch.nn.Module):
    """A few large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.toy = toy.Classifier()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        wide = torch.zeros(1, WIDTH)
        for layer in self.layers:
            wide = layer(wide)
        found = self.toy(x, labels)
        return {**found, "loss": found["loss"] + wide.sum()}


def asked_for(name: str) -> None:
    """Leave a mark in the trace."""
    os.path.exists(name)


def train(row: str, folder: Path, resume: str) -> None:
    """Be one rank: train two updates and save, or resume for a third."""
    warnings.filterwarnings("ignore")
    package, strategy = ROWS[row]
    api = importlib.import_module(package)

    class Marks(api.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            asked_for(END)

    args = api.TrainingArguments(
        str(folder / "run"), max_steps=3 if resume else 2, use_cpu=True, disable_tqdm=True, report_to="none",
        save_strategy="no" if resume else "steps", save_steps=2, **strategy,
    )  # fmt: skip
    trainer = api.Trainer(Wide(), args, train_dataset=toy.Table(toy.rows()), callbacks=[Marks()])
    asked_for(BEGIN)
    checkpoint = {"": None, "True": True, "name": str(folder / "run" / "checkpoint-2")}[resume]
    trainer.train(resume_from_checkpoint=checkpoint)


def run(row: str, ranks: int, folder: Path, resume: str = "") -> list[str]:
    """Run all ranks. Return the trace of each resumed one."""
    port, started = free_port(), []
    for rank in range(ranks):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        more = {**{name: str(value) for name, value in places.items()}, "MASTER_ADDR": "127.0.0.1"}
        trace = ["strace", "-f", "-y", "-e", "trace=%file,%desc", "-o", str(folder / f"trace{rank}")] if resume else []
        words = [*trace, sys.executable, __file__, "--rank-of", row, str(folder), resume]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **more}
        with open(folder / f"log{rank}{resume}", "w") as log:
            started.append(subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT))
    if max(process.wait() for process in started):
        raise RuntimeError("\n".join((folder / f"log{rank}{resume}").read_text()[-3000:] for rank in range(ranks)))
    return [(folder / f"trace{rank}").read_text(errors="replace") for rank in range(ranks)] if resume else []


def counted(trace: str, folder: str) -> tuple[dict[str, int], list[str]]:
    """Count a rank's calls between the marks, and list them."""
    inside = trace.partition(f'"{BEGIN}"')[2].partition(f'"{END}"')[0]
    counts: collections.Counter[str] = collections.Counter(calls=0, opens=0, bytes=0, mapped=0)
    lines = []
    begun: dict[str, str] = {}  # by thread, what it has called while another one called, too
    for line in inside.splitlines():
        thread, _, call = line.partition(" ")
        if call.endswith(_BEGUN):
            begun[thread] = call.removesuffix(_BEGUN)
            continue
        if "resumed>" in call:
            call = begun.pop(thread, "") + call.partition("resumed>")[2]
        found = _CALL.match(call.strip())
        if found is None or folder not in found[2]:
            continue
        name, words, result = found[1], found[2], int(found[3], 0)
        lines.append(line.replace(folder, "RUN"))
        counts["calls"] += 1
        is_file = "manifest" in words or "/checkpoint-" in words
        counts["opens"] += name in ("open", "openat") and result >= 0 and is_file and "O_DIRECTORY" not in words
        counts["bytes"] += result if name in _READS else 0
        counts["mapped"] += int(words.split(", ")[1]) if name == "mmap" else 0
    return counts, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"of {list(ROWS)}; by default all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--calls", action="store_true", help="print the calls of the first rank, too")
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        row, folder, resume = given.rank_of
        train(row, Path(folder), resume)
        return
    print(f"{'':<22}{'by':<6}{'rank':>5}{'calls':>8}{'opens':>8}{'bytes':>14}{'mapped':>14}")
    for row in given.rows or ROWS:
        for ranks in given.ranks:
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place).resolve()
                run(row, ranks, folder)
                for resume in ("True", "name"):
                    for rank, trace in enumerate(run(row, ranks, folder, resume)):
                        counts, lines = counted(trace, str(folder / "run"))
                        told = (
                            f"{counts['calls']:>8,}{counts['opens']:>8,}{counts['bytes']:>14,}{counts['mapped']:>14,}"
                        )
                        print(f"{row:<22}{resume:<6}{f'{rank}/{ranks}':>5}{told}", flush=True)
                        if given.calls and rank == 0:
                            print("\n".join(lines))


if __name__ == "__main__":
    main()
