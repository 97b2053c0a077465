"""The README's main job: set up the environment, train two models, draw their curves, say where things are.

    python3 examples/run.py

Needs nothing but Python 3.11 and pip. Safe to repeat: each run gets a folder of its own.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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
    for name in ("language_model", "digits"):
        print(f"\n=== {name} ===", flush=True)
        environment.run(f"examples/{name}.py", "--output_dir", str(folder / name))
        picture = ("-o", str(folder / name / "curves"))
        environment.run("-m", "hf_compat.cli.main", "plot", str(folder / name), *picture)
    print(f"\ndone in {time.time() - start:.0f} s (set-up not counted)")
    for name in ("language_model", "digits"):
        results = json.loads((folder / name / "all_results.json").read_text())
        shown = ", ".join(f"{key[5:]} {results[key]:.4f}" for key in sorted(results) if key in METRICS)
        print(f"{name}: {shown}")
        print(f"  curves:      {folder / name / 'curves.png'}, and curves.html for a browser")
        print(f"  model:       {folder / name / 'model.safetensors'}")
        print(f"  checkpoints: {folder / name}/checkpoint-*")


METRICS = ("eval_loss", "eval_accuracy", "eval_perplexity_per_byte")

if __name__ == "__main__":
    main()
