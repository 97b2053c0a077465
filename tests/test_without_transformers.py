"""The core needs nothing of transformers: here importing it, and its kin, is an error."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_python

SCRIPT = """
import sys

BLOCKED = ("transformers", "accelerate", "datasets", "peft", "tokenizers", "huggingface_hub")

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[2])
import toy
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
"""


def test_training_where_transformers_cannot_be_imported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), str(tmp_path / "out"), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, hf_compat; print([m for m in ('torch', 'lightning', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
