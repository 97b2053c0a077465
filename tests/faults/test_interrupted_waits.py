"""Ctrl-C into a process that waits for the threads of a save: it ends after them, and gives its folder back then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from helpers import toy
from helpers.signalled import ended, forked, wait_for
from hf_compat import Trainer, TrainerCallback, get_last_checkpoint
from hf_compat.checkpoint import manifest, torch_writer
from hf_compat.checkpoint.run_lock import LOCK_NAME

# A function that a thread of a save calls, and whether the save is one of `async_save`
WRITES = {"the files": (manifest, "seal", True), "the hashes": (manifest, "flush_and_hash", False)}
WRITES["the optimizer"] = (torch_writer._Archive, "_write", False)


class Saying(TrainerCallback):
    """Says when the update has ended whose save waits for the one before."""

    def __init__(self, mark):
        self.mark = mark

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.mark.touch()


@pytest.mark.parametrize("presses", [1, 3])
@pytest.mark.parametrize("what", WRITES)
def test_ctrl_c_ends_a_training_once_no_thread_writes(make_args, tmp_path, monkeypatch, what, presses):
    owner, name, async_save = WRITES[what]
    write, writing, goes_on, pressed = getattr(owner, name), tmp_path / "writing", tmp_path / "go", tmp_path / "pressed"
    begun, written = [], []

    def slow(*args, **kwargs):
        begun.append(threading.current_thread().name)
        writing.touch()
        wait_for(goes_on)
        write(*args, **kwargs)
        written.append(threading.current_thread().name)

    monkeypatch.setattr(owner, name, slow)
    monkeypatch.setattr(torch_writer, "_WRITTEN_AT_ONCE", 0)
    waits = tmp_path / "waits"
    args = make_args(save_strategy="steps", save_steps=2, max_steps=6, async_save=async_save)

    def body():
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=[Saying(waits)])
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert goes_on.exists() and sorted(written) == sorted(begun) != [], "the training ends after what it has begun"
        assert not (tmp_path / "out" / LOCK_NAME).exists()
        assert sorted(written)[0] != "MainThread"
        pressed.touch()
        begins = 0 if what == "the optimizer" else 2
        trainer.train(resume_from_checkpoint=bool(begins))
        assert trainer._run.updates_before == begins and trainer.state.global_step == 6

    pid = forked(body)
    wait_for(writing)
    if what != "the optimizer":
        wait_for(waits)
    for _ in range(presses):
        time.sleep(0.2)
        os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    assert not pressed.exists()
    goes_on.touch()
    assert ended(pid, within=60) == 0
    assert get_last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-6")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"checkpoint-{n}" for n in (2, 4, 6)]


AT_THE_END = """
import sys, threading, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from helpers import toy
from helpers.signalled import wait_for
from hf_compat import Trainer, TrainerCallback, TrainingArguments
from hf_compat.checkpoint import torch_writer

place, write = Path({place!r}), torch_writer._Archive._write
torch_writer._WRITTEN_AT_ONCE = 0

def slow(*args):
    (place / "writing").touch()
    wait_for(place / "go")
    write(*args)

class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            threading.Event().wait()

torch_writer._Archive._write = slow
args = TrainingArguments(str(place / "out"), max_steps=6, save_strategy="steps", save_steps=2, async_save=True,
                         use_cpu=True, disable_tqdm=True, report_to="none")
trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=[Stops])
threading.Thread(target=trainer.train, daemon=True).start()
wait_for(place / "writing")
print("the main thread ends", flush=True)
"""


@pytest.mark.real_python
def test_ctrl_c_at_the_end_of_the_process_ends_it_after_the_write(make_args, tmp_path):
    """Python waits for the thread, and forgets it at Ctrl-C. The files need threads of their own, too."""
    script = tmp_path / "script.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(textwrap.dedent(AT_THE_END).format(tests=tests, place=str(tmp_path)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert "ends" in process.stdout.readline()
        for _ in range(2):
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        (tmp_path / "go").touch()
        process.wait(60)
    assert get_last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")
    trainer = Trainer(toy.Classifier(), make_args(max_steps=6, learning_rate=5e-5), train_dataset=toy.rows())
    assert trainer.train(resume_from_checkpoint=True).global_step == 6 and trainer._run.updates_before == 2
