"""Train with everybody's trainers under transformers and under `hf-compat run`, and compare.

    python tests/sweeps/libraries/run.py                     # every case
    python tests/sweeps/libraries/run.py sft dpo-lora        # these
    python tests/sweeps/libraries/run.py --devices 2 sft     # two processes: torchrun, and `hf-compat run --devices 2`
    python tests/sweeps/libraries/run.py --write             # every case, and the table in docs/libraries.md
    python tests/sweeps/libraries/run.py --folder F --only none --write   # the table of the runs that F holds

Each case makes 30 updates of two micro-batches, evaluates at 10, 20 and 30, saves at 15 and 30, evaluates, and trains
again from the checkpoint of update 15. Losses, logged metrics, weights and files are compared bit for bit. The
libraries have to be importable: trl, sentence-transformers, setfit, peft, FlagEmbedding, gliner,
chronos-forecasting, granite-tsfm, adaptive-trainer.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from sweeps.libraries import toys
from sweeps.libraries.library_cases import DIFFERENCES, LIBRARIES

PAGE = HERE.parents[2] / "docs" / "libraries.md"
# Packages whose distribution has another name.
DISTRIBUTIONS = {"chronos": "chronos-forecasting", "tsfm_public": "granite-tsfm"}
HEADING = "## Trainers under both engines"


def command(engine: str, devices: int) -> list[str]:
    """Return the words that start the worker's script under an engine."""
    if engine == "hf_compat":
        return [sys.executable, "-m", "hf_compat", "run", *(["--devices", str(devices)] if devices > 1 else [])]
    if devices == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(devices)]


def run_engine(engine: str, folder: Path, names: list[str], devices: int, timeout: int) -> None:
    """Run cases under an engine; their results lie in the folder."""
    (folder / engine).mkdir(parents=True, exist_ok=True)
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CI": "1", "OMP_NUM_THREADS": "1"}
    offline["PYTHONHASHSEED"] = "0"  # GLiNER draws its negative labels from a set
    for group in [names] if devices == 1 else [[name] for name in names]:
        script = [str(HERE / "worker.py"), str(folder / "models"), str(folder / engine), *group]
        with (folder / f"{engine}.log").open("a") as log:
            words = [*command(engine, devices), *script]
            subprocess.run(words, env={**os.environ, **offline}, stdout=log, stderr=log, timeout=timeout)


def read(folder: Path, engine: str, name: str, devices: int) -> dict | str:
    """Return what a case did, of every process, or its error."""
    ranks = [""] if devices == 1 else [f".{rank}" for rank in range(devices)]
    found = {}
    for rank in ranks:
        result = folder / engine / f"{name}{rank}.pickle"
        if not result.is_file():
            error = result.with_suffix(".error")
            return error.read_text() if error.is_file() else f"ended without a word; see {folder / engine}.log"
        found[rank] = pickle.loads(result.read_bytes())
    return found


def first_difference(here: object, there: object, place: str = "") -> str | None:
    """Name the first place where two results differ, bit for bit."""
    if isinstance(here, dict) and isinstance(there, dict):
        if here.keys() != there.keys():
            return f"{place}: {sorted(map(str, here.keys() ^ there.keys()))[:6]} on one side alone"
        pairs = [(f"{place}/{key}", here[key], there[key]) for key in here]
    elif isinstance(here, (list, tuple)) and isinstance(there, (list, tuple)):
        if len(here) != len(there):
            return f"{place}: {len(here)} entries here, {len(there)} there: {_odd(here, there)}"
        pairs = [(f"{place}/{number}", *pair) for number, pair in enumerate(zip(here, there, strict=True))]
    elif isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor):
        return None if torch.equal(here, there) else f"{place}: tensors differ by {(here - there).abs().max():.3g}"
    else:
        same = here == there or (here != here and there != there)
        return None if same else f"{place}: {here!r} here, {there!r} there"
    return next(filter(None, (first_difference(one, other, at) for at, one, other in pairs)), None)


def _odd(here: list, there: list) -> str:
    return repr(
        [entry for entry in here if entry not in there][:3] + [entry for entry in there if entry not in here][:3]
    )


def verdict(folder: Path, name: str, devices: int) -> str:
    """Compare a case under both engines: `equal`, or what differs."""
    ours, theirs = (read(folder, engine, name, devices) for engine in ("hf_compat", "transformers"))
    if isinstance(theirs, str):
        return f"transformers fails: {theirs.strip().splitlines()[-1]}"
    if isinstance(ours, str):
        return f"fails: {ours.strip().splitlines()[-1]}"
    for found, engine in ((ours, "hf_compat"), (theirs, "transformers")):
        used = {rank.pop("engine") for rank in found.values()}
        if used != {engine}:
            return f"was run by {used}, not by {engine}"
    return first_difference(ours, theirs) or "equal"


def is_known(name: str, found: str) -> bool:
    """Return whether a case is equal, or differs where it is known to."""
    where, _ = DIFFERENCES.get(name, ("", ""))
    return found == "equal" or (bool(where) and (found.startswith(where) or found.split("/")[2:3] == [where]))


def goes_on(folder: Path, name: str) -> str:
    """Say whether our resumed run ends with the weights of the uninterrupted one."""
    ours = read(folder, "hf_compat", name, 1)
    if isinstance(ours, str) or "resumed" not in ours[""]:
        return "not run"
    weights = [ours[""][part]["weights"] for part in ("trained", "resumed")]
    return "yes" if first_difference(*weights) is None else "no"


def table(folder: Path, verdicts: dict[str, str]) -> str:
    """Return the page's table of what the cases gave."""
    rows = [
        "| library | trainer | variant | updates | losses, metrics, weights | resumed as uninterrupted |",
        "|---" * 6 + "|",
    ]
    for name, found in verdicts.items():
        case = LIBRARIES[name]
        told = "equal bit for bit" if found == "equal" else DIFFERENCES[name][1]
        release = (
            f" {importlib.metadata.version(DISTRIBUTIONS.get(case.module, case.module))}"
            if case.library != "as in optimum"
            else ""
        )
        updates = "none" if found.startswith("fails") else "30"
        cells = (case.library + release, case.trainer, case.variant, updates, told, goes_on(folder, name))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def write(folder: Path, verdicts: dict[str, str]) -> None:
    """Put the table in the page."""
    before, _, rest = PAGE.read_text().partition(f"{HEADING}\n")
    _, _, after = rest.partition("\n## ")
    following = f"\n## {after}" if after else ""
    PAGE.write_text(f"{before}{HEADING}\n\n{table(folder, verdicts)}{following}")


def forget(folder: Path, engine: str, names: list[str]) -> None:
    """Remove what an earlier run of these cases has left."""
    for name in names:
        shutil.rmtree(folder / engine / name, ignore_errors=True)
        for old in (folder / engine).glob(f"{name}.*"):
            old.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names; every case by default")
    parser.add_argument("--devices", type=int, default=1, help="processes")
    parser.add_argument("--folder", type=Path, help="where runs are kept (a temporary folder that goes)")
    parser.add_argument("--only", choices=["hf_compat", "transformers", "none"], help="run this engine alone")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for an engine's run")
    parser.add_argument("--write", action="store_true", help="write the table in the docs")
    parser.add_argument("--list", action="store_true", help="list the cases")
    chosen = parser.parse_args()
    names = chosen.cases or list(LIBRARIES)
    if chosen.list:
        print("\n".join(names))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        if not (folder / "models").is_dir():
            toys.make_models(folder / "models")
        for engine in {None: ["transformers", "hf_compat"], "none": []}.get(chosen.only, [chosen.only]):
            forget(folder, engine, names)
            run_engine(engine, folder, names, chosen.devices, chosen.timeout)
        verdicts = {name: verdict(folder, name, chosen.devices) for name in names}
        if chosen.write and all(is_known(*one) for one in verdicts.items()):
            write(folder, verdicts)
    for name, found in verdicts.items():
        print(f"{name:20} {found}")
    return not all(is_known(*one) for one in verdicts.items())


if __name__ == "__main__":
    sys.exit(main())
