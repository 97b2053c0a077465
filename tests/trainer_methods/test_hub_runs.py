"""Pushes of whole runs: adapters, several processes, the end of a process, a server that stops responding."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import transformers
from peft import LoraConfig, get_peft_model

import hf_compat
from helpers import (
    forking,  # noqa: F401 - files that fork run first
    toy,
)
from helpers.hub_runs import TOKEN, make, make_model, pushed_by
from helpers.hub_server import running_hub, talked_to
from hf_compat import HFDataModule, HFModule
from hf_compat.checkpoint.reading import is_ours_alone
from hf_compat.hub import client

pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # huggingface_hub's own call
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's
]

SCRIPT = """
import os, signal, sys
from huggingface_hub import constants
constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = os.environ["HUB"], False, True
from helpers import toy
from hf_compat import Trainer, TrainerCallback, TrainingArguments

class Interrupts(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and sys.argv[2:] == ["interrupt"]:
            os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    args = TrainingArguments(
        sys.argv[1], max_steps=4, save_steps=2, per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True,
        report_to="none", push_to_hub=True, hub_always_push=True, hub_token="hf_aSecretOfMine",
    )
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(16), callbacks=[Interrupts()])
    trainer.train()
    trainer.push_to_hub("Last words", blocking=False)
"""


def start(tmp_path, hub, *words, launcher=()):
    (tmp_path / "script.py").write_text(SCRIPT)
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    variables = {"HUB": hub.url, "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([os.path.dirname(tests), tests])
    command = [sys.executable, *launcher, str(tmp_path / "script.py"), str(tmp_path / "run"), *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables})


@pytest.mark.matrix
def test_two_processes_push_once_and_their_end_waits_for_the_last_push(tmp_path):
    with running_hub(slow_seconds=0.1) as hub:
        job = start(tmp_path, hub, launcher=["-m", "hf_compat.cli.main", "run", "--devices", "2"])
        said = job.communicate(timeout=240)[1]
    assert job.returncode == 0, said[-3000:]
    steps = [f"Training in progress, step {step}" for step in (2, 4)]
    assert hub.messages() == [*steps, "Last words"]
    assert {token for token in hub.tokens if token is not None} == {f"Bearer {TOKEN}"} and TOKEN not in said


def test_ctrl_c_ends_the_wait_for_a_push_and_sends_no_further_one(tmp_path):
    """The process then ends when the request at hand does, as under transformers: the server answers in the end."""
    answered = threading.Event()

    def fail(number, method, path):
        return 400 if "/preupload/" in path and answered.wait(60) else None

    def read_until(words):
        said = ""
        while words not in said:
            line = job.stderr.readline()
            assert line, said
            said += line
        return said

    with running_hub(fail=fail) as hub:
        job = start(tmp_path, hub, "interrupt")
        assert "KeyboardInterrupt" in read_until("Waiting for the push")
        job.send_signal(signal.SIGINT)
        read_until("you have stopped it")
        answered.set()
        job.communicate(timeout=60)
    assert job.returncode != 0 and hub.commits == []
    assert (tmp_path / "run" / "checkpoint-2" / "manifest.json").is_file()


def test_a_server_that_has_gone_silent_holds_up_a_run_for_so_long(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(client, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(client, "PROGRESS_SECONDS", 0.1)
    with running_hub() as hub, talked_to(monkeypatch, hub):
        released = threading.Event()
        hub.fail = lambda number, method, path: released.wait(60) and 400 if "/preupload/" in path else None
        trainer = make(tmp_path, hub_always_push=True)
        started = time.monotonic()
        trainer.train()
        assert time.monotonic() - started < 30
        assert "Waiting for the push 'Training in progress, step 2' to me/run (2 to go" in caplog.text
        assert "the Hub has not taken it in" in caplog.text
        released.set()
        hub.fail = None
        trainer.push_to_hub()
        assert hub.messages() == ["End of training"]
    assert [path.name for path in (tmp_path / "run").glob("_*")] == []


def test_a_large_push_is_waited_for_as_long_as_a_slow_connection_needs(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(client, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(client, "PROGRESS_SECONDS", 0.1)
    monkeypatch.setattr(client, "SLOWEST_BYTES_PER_SECOND", 100)  # a minute and more for the files of a checkpoint
    with running_hub() as hub, talked_to(monkeypatch, hub):
        hub.fail = lambda number, method, path: time.sleep(0.5) if "/preupload/" in path else None
        make(tmp_path, hub_always_push=True).train()
        assert "the Hub has not taken it in" not in caplog.text and "Training in progress, step 2" in hub.messages()


def test_a_forked_process_waits_for_no_push_of_its_parent(tmp_path, monkeypatch):
    released = threading.Event()
    with running_hub() as hub, talked_to(monkeypatch, hub):
        hub.fail = lambda number, method, path: released.wait(60) and None if "/commit/" in path else None
        trainer = make(tmp_path, push_to_hub=False)
        future = trainer.push_to_hub(blocking=False)
        child = multiprocessing.get_context("fork").Process(target=int)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of any fork beside threads
            child.start()
        child.join(30)
        assert child.exitcode == 0 and not future.done()
        released.set()
        future.result(30)


def test_what_goes_while_it_is_set_aside_is_left_out(tmp_path):
    for name in ("config.json", "events"):
        (tmp_path / name).write_text(name)
    files = {name: str(tmp_path / name) for name in ("config.json", "events", "gone.tmp")}
    stage = Path(client.set_aside(files, str(tmp_path), {"config.json": files["config.json"]}))
    assert sorted(p.name for p in stage.glob("[!.]*")) == ["config.json", "events"]
    assert os.path.samefile(stage / "config.json", files["config.json"])
    (tmp_path / "events").write_text("more")
    assert (stage / "events").read_text() == "events" and stage.name.startswith("_hub_push-")
    with pytest.raises(FileNotFoundError):
        client.set_aside(files, str(tmp_path), {"gone.tmp": files["gone.tmp"]})


def adapted():
    return get_peft_model(make_model(), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))


def in_shards():
    model = make_model()
    model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size="1KB")
    return model


@pytest.mark.parametrize(
    ("model", "arriving"), [(adapted, "adapter_model.safetensors"), (in_shards, "model.safetensors.index.json")]
)
def test_adapters_and_shards_arrive_as_upstreams(tmp_path, monkeypatch, model, arriving):
    values = {"hub_strategy": "checkpoint", "save_steps": 4}
    theirs, _ = pushed_by(transformers, tmp_path / "theirs", monkeypatch, model, **values)
    ours, _ = pushed_by(hf_compat, tmp_path / "ours", monkeypatch, model, **values)
    assert [commit.message for commit in ours] == [commit.message for commit in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert {name for name in mine.files if not is_ours_alone(name)} == set(other.files)
        same = [name for name in other.files if name.endswith((".md", ".safetensors", "adapter_config.json"))]
        assert [name for name in same if mine.files[name] != other.files[name]] == []
    assert arriving in ours[0].files


def test_a_lightning_trainer_of_ones_own_says_that_it_pushes_nothing(tmp_path, make_args):
    args = make_args(push_to_hub=True, max_steps=1, save_strategy="steps")
    module = HFModule(toy.Classifier(), args)
    trainer = pl.Trainer(max_steps=1, logger=False, enable_checkpointing=False, accelerator="cpu", barebones=False)
    with pytest.warns(UserWarning, match=r"no effect, because .*`push_to_hub` \(huggingface_hub's `upload_folder`\)"):
        trainer.fit(module, HFDataModule(train_dataset=toy.rows(8), args=args))
