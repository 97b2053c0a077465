"""Run every parity configuration with and without `compile_update`, and name those that differ in a bit.

    .venv/bin/python tests/sweeps/parity/compiled_update.py [case …]

The backend is `eager`, whose graphs run torch's own kernels. Each run is a process of its own. The last column is the
reason for which updates ran uncompiled.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hf_compat
from helpers.parity.cases import CASES
from helpers.parity.compare import first_difference, same
from helpers.parity.runner import run_case

COMPILED = {"compile_update": True, "torch_compile_backend": "eager"}


def run(name: str, compiled: bool, folder: Path) -> tuple[object, list[str]]:
    """Run a case in a fork. Return what it gave, or its error, and what was said of compilation."""
    result = folder / f"{name}.{compiled}"
    child = os.fork()
    if child == 0:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("hf_compat.engine.compiled_update").addHandler(handler)
        case = CASES[name]
        try:
            warnings.simplefilter("ignore")
            with Path(os.devnull).open("w") as sys.stdout:
                torch.set_num_threads(1)
                given = run_case(
                    hf_compat, {**case, "args": case["args"] | (COMPILED if compiled else {})}, folder / name
                )
        except BaseException:
            given = traceback.format_exc(limit=-3)
        result.write_bytes(pickle.dumps((given, said)))
        os._exit(0)
    os.waitpid(child, 0)
    return pickle.loads(result.read_bytes()) if result.exists() else ("no result", [])


def main() -> int:
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or [name for name, case in CASES.items() if "run" not in case]:
            (plain, _), (compiled, said) = (run(name, one, Path(folder)) for one in (False, True))
            is_same = same(plain, compiled)
            differing += not is_same
            found = "equal" if is_same else f"DIFFERS {first_difference(plain, compiled)[:300]}"
            print(f"| {name} | {found} | {said[0].partition(chr(10))[0] if said else 'compiled'} |", flush=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
