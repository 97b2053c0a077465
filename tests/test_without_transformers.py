"""The core needs nothing of transformers: here importing it, and its kin, is an error."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_python

SCRIPT = """
import builtins
import sys

BLOCKED = ("transformers", "accelerate", "datasets", "peft", "tokenizers", "huggingface_hub")

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())

importers, real_import = set(), builtins.__import__

def noting_import(name, globals=None, *rest, **named):
    importer = (globals or {}).get("__name__", "")
    own = ("matplotlib", "mpl_toolkits", "__main__")  # the last is what its compiled parts give
    if name.split(".")[0] == "matplotlib" and not importer.startswith(own):
        importers.add(importer)
    return real_import(name, globals, *rest, **named)

builtins.__import__ = noting_import
sys.path.insert(0, sys.argv[2])
from helpers import toy
from hf_compat import Trainer, TrainingArguments, EarlyStoppingCallback

args = TrainingArguments(
    sys.argv[1], num_train_epochs=2,
    per_device_train_batch_size=4, gradient_accumulation_steps=2, eval_strategy="epoch",
    save_strategy="epoch", load_best_model_at_end=True, use_cpu=True, disable_tqdm=True, label_smoothing_factor=0.1,
)
trainer = Trainer(
    toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(9), callbacks=[EarlyStoppingCallback(3)],
    compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
)
result = trainer.train()
trainer.predict(toy.rows(5))
trainer.save_model()
assert result.global_step == 14, result
assert not any(name.split(".")[0] in BLOCKED for name in sys.modules)
print("trained", trainer.evaluate()["eval_accuracy"])
print("matplotlib is imported by", *sorted(importers))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train once in a process of its own: what it printed, and its output folder."""
    folder = tmp_path_factory.mktemp("trained")
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), str(folder / "out"), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, folder / "out"


def test_training_where_transformers_cannot_be_imported(trained):
    printed, out = trained
    assert "trained" in printed
    assert (out / "model.safetensors").is_file()


def test_a_training_leaves_matplotlib_to_torchmetrics(trained):
    """Lightning needs torchmetrics, which imports matplotlib where it is installed (docs/operations.md)."""
    (line,) = [line for line in trained[0].splitlines() if line.startswith("matplotlib is imported by")]
    assert set(line.removeprefix("matplotlib is imported by").split()) <= {"torchmetrics.utilities.plot"}


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, hf_compat; print([m for m in ('torch', 'lightning', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
