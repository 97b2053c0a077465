"""`hf-compat run`: a script that imports transformers' Trainer trains on Lightning, with the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(TESTS)!r})
import torch
torch.set_num_threads(1)
import transformers
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, set_seed
from toy import blocks, tiny_gpt2

class Count(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.seen = state.global_step

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(args.seed)
count = Count()
trainer = Trainer(tiny_gpt2(), args, train_dataset=blocks(16), callbacks=[count])
trainer.train()
losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
is_theirs = isinstance(args, transformers.TrainingArguments)
print("FOUND" + json.dumps([type(trainer).__module__, losses, count.seen, is_theirs]))
"""
WORDS = ["--output_dir", "out", "--use_cpu", "--logging_steps", "1", "--max_steps", "3", "--disable_tqdm", "true"]


def run(folder, *command):
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    return json.loads(line[5:])


def test_the_script_is_not_changed_and_gives_the_same_losses(tmp_path):
    theirs = run(tmp_path, "script.py", *WORDS)
    ours = run(tmp_path, "-m", "hf_compat.cli.main", "run", "script.py", *WORDS)
    assert theirs[0] == "transformers.trainer" and ours[0] == "hf_compat.trainer"
    assert ours[1:] == theirs[1:] and ours[2] == 3 and ours[3] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [(["nowhere.py"], "There is no script nowhere.py"), (["--devices", "many", "script.py"], "no number of processes")],
)
def test_mistakes(tmp_path, words, message):
    (tmp_path / "script.py").write_text("")
    command = [sys.executable, "-m", "hf_compat.cli.main", "run", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_class_that_is_not_here_yet_does_not_train_elsewhere(tmp_path):
    (tmp_path / "script.py").write_text("from transformers import Seq2SeqTrainer\nSeq2SeqTrainer()\n")
    command = [sys.executable, "-m", "hf_compat.cli.main", "run", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "`Seq2SeqTrainer` is not supported" in done.stderr
