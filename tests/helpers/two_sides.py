"""Cases of `helpers/parity` under transformers and under hf_compat, in one process or on two ranks each.

Two ranks are started by torchrun there and by `hf-compat run` here.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

RUNNER = Path(__file__).resolve().parent / "parity" / "runner.py"
LAUNCHERS = {
    "transformers": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "hf_compat": ["-m", "hf_compat.cli.main", "run", "--devices", "2"],
}


def run_both(folder: Path, names: dict[str, Sequence[str]], ranks: int = 2) -> Callable[..., dict]:
    """Run cases under both at the same time; returns what reads a package's result of a case, and of a rank of two.

    Args:
        folder: Where results lie.
        names: Of each package's cases.
        ranks: One or two.
    """
    runs = {}
    for api, launcher in LAUNCHERS.items():
        (folder / api).mkdir()
        command = [sys.executable, *(launcher if ranks == 2 else []), str(RUNNER), api, str(folder / api), *names[api]]
        with (folder / f"{api}.log").open("w") as log:
            runs[api] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for api, process in runs.items():
            assert process.wait() == 0, (folder / f"{api}.log").read_text()[-3000:]
    finally:
        for process in runs.values():
            process.terminate()  # the launcher ends its ranks

    def read(api: str, name: str, rank: int | None = None) -> dict:
        for error in (folder / api).glob(f"{name}.*error"):
            pytest.fail(f"{error.name} under {api}:\n{error.read_text()}")
        return pickle.loads((folder / api / f"{name}{'' if rank is None else f'.{rank}'}.pickle").read_bytes())

    return read
