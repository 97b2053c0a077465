"""The main job's scripts run, and differ from HF scripts in their import only."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_digits_example_and_its_curves(tmp_path):
    script, configured, curves = tmp_path / "script", tmp_path / "configured", str(tmp_path / "curves")
    door = ["-m", "hf_compat.cli.main"]
    for command in (
        ["examples/digits.py", "--output_dir", str(script)],
        [*door, "fit", "--config", "examples/digits.yaml", "--output_dir", str(configured)],
        [*door, "plot", str(script), str(configured), "-o", curves],
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads((run / "eval_results.json").read_text()) for run in (script, configured)]
    assert results[0]["eval_accuracy"] == results[1]["eval_accuracy"] > 0.85
    assert results[0]["eval_loss"] == results[1]["eval_loss"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000 and (tmp_path / "curves.html").is_file()


def test_the_language_model_is_an_hf_script_but_for_one_import(tmp_path):
    """It runs, shortened, with transformers' own names, and gives the same losses."""
    text = (ROOT / "examples" / "language_model.py").read_text()
    short = re.sub(r"max_steps=\d+", "max_steps=4", re.sub(r"_steps=(20|100)\b", "_steps=2", text))
    short = short.replace("for name in sorted(topics)", "for name in sorted(topics)[:30]").replace(
        "warmup_ratio=0.05", "warmup_steps=0.05"
    )
    losses = {}
    for package in ("hf_compat", "transformers"):
        script, out = tmp_path / f"{package}.py", tmp_path / f"out_{package}"
        # one thread: parity is bit for bit
        script.write_text(short.replace("from hf_compat import", f"from {package} import"))
        code = f"import torch, runpy, sys; torch.set_num_threads(1); sys.argv = ['x', '--output_dir', {str(out)!r}]"
        code += f"; runpy.run_path({str(script)!r}, run_name='__main__')"
        # the script builds its model before the Trainer seeds: both start from torch's seed
        done = subprocess.run(
            [sys.executable, "-c", "import torch; torch.manual_seed(0); " + code], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        history = json.loads((out / "trainer_state.json").read_text())["log_history"]
        losses[package] = [log[key] for log in history for key in ("loss", "eval_loss", "grad_norm") if key in log]
    assert losses["hf_compat"] == losses["transformers"]
    assert len(losses["hf_compat"]) >= 6
