"""The README's main job: set up the environment, train two models, draw their curves, say where things are.

    python3 examples/run.py

Needs nothing but Python 3.11 and pip. Safe to repeat: each run gets a folder of its own.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import runpy
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("language_model", "digits")
METRICS = ("eval_loss", "eval_accuracy", "eval_perplexity_per_byte")


def _environment():
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".setup" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    environment = _environment()
    environment.prepare()
    folder = ROOT / "main_job_output" / time.strftime("%Y-%m-%d_%H-%M-%S")
    start = time.time()
    environment.run("examples/run.py", str(folder))
    print(f"\ndone in {time.time() - start:.0f} s (set-up not counted)")
    for name in EXAMPLES:
        results = json.loads((folder / name / "all_results.json").read_text())
        shown = ", ".join(f"{key[5:]} {results[key]:.4f}" for key in sorted(results) if key in METRICS)
        print(f"{name}: {shown}")
        print(f"  curves:      {folder / name / 'curves.png'}, and curves.html for a browser")
        print(f"  model:       {folder / name / 'model.safetensors'}")
        print(f"  checkpoints: {folder / name}/checkpoint-*")


def train_and_draw(folder: Path) -> None:
    """Run the scripts as `python script.py` would, in one process: the packages are imported once.

    Args:
        folder: Each script gets a folder in it.
    """
    # models this small gain nothing from threads, and beside other work these wait for each other for minutes
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # which kernels it lacks for a CPU is nothing to begin with; it is imported where it is installed
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for name in EXAMPLES:
        print(f"\n=== {name} ===", flush=True)
        sys.argv = [f"{name}.py", "--output_dir", str(folder / name)]
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        from hf_compat.tools.commands.plot import plot

        for file in plot([str(folder / name)], str(folder / name / "curves")):
            print(f"written: {file}")


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else train_and_draw(Path(sys.argv[1]))
