"""SIGTERM and Ctrl-C: a checkpoint where it was asked for, the right exit status, an exact resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from helpers import toy
from helpers.parity.compare import same
from hf_compat import Trainer, TrainerCallback, get_last_checkpoint, set_seed
from hf_compat.runtime.signals import is_requeued, requeue

SCRIPT = """
import os, sys, time
sys.path.insert(0, {tests!r})
import torch
from helpers import toy
torch.set_num_threads(1)
from hf_compat import Trainer, TrainerCallback, TrainingArguments, set_seed

class Slow(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            print("in the fourth update", flush=True)
            time.sleep(0.5)

set_seed(3)
args = TrainingArguments({out!r}, **{options!r})
trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=[Slow])
trainer.train()
print("went on after training")
"""
OPTIONS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "use_cpu": True,
}


def interrupted(tmp_path, number, **options):
    script = tmp_path / "script.py"
    values = {"tests": str(Path(__file__).parents[1]), "out": str(tmp_path / "out"), "options": {**OPTIONS, **options}}
    script.write_text(textwrap.dedent(SCRIPT).format(**values))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "fourth" in process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert "went on" not in out
    return process.returncode, err


def finish(make_args, folder, resume):
    set_seed(3)
    trainer = Trainer(toy.Classifier(), make_args(output_dir=str(folder), **OPTIONS), train_dataset=toy.rows())
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.state_dict()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_checkpoint_is_written_at_the_end_of_the_update(make_args, tmp_path, number, status):
    returned, err = interrupted(tmp_path, number, enable_jit_checkpoint=True)
    assert returned == status, err[-2000:]
    last = get_last_checkpoint(tmp_path / "out")
    assert last is not None and last.endswith("checkpoint-4")
    assert same(finish(make_args, tmp_path / "b", last), finish(make_args, tmp_path / "c", None))


def test_handlers_are_put_back(make_args, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    Trainer(toy.Classifier(), make_args(enable_jit_checkpoint=True), train_dataset=toy.rows()).train()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_slurm_job_is_queued_again_and_goes_on(make_args, tmp_path, monkeypatch):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    scontrol = bin_folder / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho $* >> "{tmp_path}/asked"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    returned, err = interrupted(tmp_path, signal.SIGUSR1)
    assert returned == 128 + signal.SIGUSR1, err[-2000:]
    assert (tmp_path / "asked").read_text() == "requeue 17\n"

    monkeypatch.setenv("SLURM_JOB_ID", "18")  # another job begins anew
    with Trainer(toy.Classifier(), make_args(output_dir=str(tmp_path / "out")))._resumer.choosing_checkpoint(
        None
    ) as found:
        assert found is None
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    resumed = finish(make_args, tmp_path / "out", None)
    assert not (tmp_path / "out" / "requeued.json").exists()
    monkeypatch.delenv("SLURM_JOB_ID")
    assert same(resumed, finish(make_args, tmp_path / "c", None))


def test_a_refusal_of_slurm_is_told(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "3")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    monkeypatch.setenv("PATH", str(tmp_path))
    requeue(str(tmp_path))
    assert "scontrol requeue 3_4" in caplog.text
    assert is_requeued(str(tmp_path))


def test_a_handler_that_is_there_already_is_kept(make_args, monkeypatch):
    """submitit and others requeue by handlers of their own."""

    class Send(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    seen = []
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        trainer = Trainer(toy.Classifier(), make_args(max_steps=4), train_dataset=toy.rows(), callbacks=[Send])
        trainer.train()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1] and trainer.state.global_step == 4
