"""Several processes ask for the last checkpoint at once, after a kill: all of them find the same one."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import asdict

import pytest

from helpers import toy
from helpers.forking import run_ranks, start_ranks
from hf_compat import Trainer, TrainingArguments, get_last_checkpoint, set_seed
from hf_compat.checkpoint import run_lock
from hf_compat.checkpoint.run_lock import LOCK_NAME, Owner, RunLock
from hf_compat.errors import OutputFolderError
from hf_compat.runtime.collectives import barrier

READERS, ROUNDS = 4, 10


def make(out, kind=Trainer, **values):
    set_seed(3)
    chosen = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, **values}
    args = TrainingArguments(
        str(out), per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, report_to="none", **chosen
    )
    return kind(toy.Classifier(), args, train_dataset=toy.rows())


class Overridden(Trainer):
    """Is killed while it writes checkpoint-6 in place."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if output_dir.endswith("checkpoint-6"):
            os.kill(os.getpid(), signal.SIGKILL)


def killed_between_manifest_and_rename(out):
    replace = os.replace

    def kill(source, target, **options):
        if os.path.basename(target) == "checkpoint-6":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target, **options)

    os.replace = kill
    make(out).train()


def killed_while_it_replaced_a_checkpoint_in_place(out):
    make(out).train()
    make(out, Overridden, save_steps=6).train()


def killed_before_its_first_save(out):
    out.mkdir()
    RunLock(str(out)).acquire()
    os.kill(os.getpid(), signal.SIGKILL)


KILLED = {
    killed_between_manifest_and_rename: "checkpoint-6",
    killed_while_it_replaced_a_checkpoint_in_place: "checkpoint-6",
    killed_before_its_first_save: None,
}


def left_by(body, tmp_path):
    """Let a run in a process of its own be killed, and give what it has left."""
    (run,) = start_ranks(tmp_path / "logs", lambda rank: body(tmp_path / "left"), world=1)
    _, status = os.waitpid(run, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (tmp_path / "logs" / "rank0.log").read_text()
    assert (tmp_path / "left" / LOCK_NAME).exists()
    return tmp_path / "left"


def ask(folders, start, answers):
    """Ask for the last checkpoint of each folder at the same moment as the other readers, then list the folder."""
    for number, folder in enumerate(folders):
        start.wait(60)
        newest = get_last_checkpoint(folder)
        answers.put((number, newest and os.path.basename(newest), LOCK_NAME in "".join(os.listdir(folder))))


@pytest.mark.parametrize("body", KILLED, ids=lambda body: body.__name__.replace("_", " "))
def test_readers_at_the_same_moment_answer_alike(tmp_path, body):
    left, context = left_by(body, tmp_path), multiprocessing.get_context("fork")
    folders = [shutil.copytree(left, tmp_path / str(number)) for number in range(ROUNDS)]
    start, answers = context.Barrier(READERS), context.Queue()
    readers = [context.Process(target=ask, args=(folders, start, answers)) for _ in range(READERS)]
    for reader in readers:
        reader.start()
    found = [answers.get(timeout=60) for _ in range(READERS * ROUNDS)]
    for reader in readers:
        reader.join()
    # a script ends where the folder is not empty and holds no checkpoint, so no reader may see what another one makes
    assert set(found) == {(number, KILLED[body], False) for number in range(ROUNDS)}


def test_ranks_that_ask_for_the_last_checkpoint_go_on_from_the_same(tmp_path):
    """As in transformers' own scripts: each rank asks by itself, and gives the answer to `train`."""
    out, unlink = left_by(killed_between_manifest_and_rename, tmp_path), os.unlink

    def slowly(path, **options):
        if os.path.basename(path) == LOCK_NAME:
            time.sleep(0.7)
        unlink(path, **options)

    def body(rank):
        os.unlink = slowly  # as a disk may be
        trainer = make(out, max_steps=8)
        barrier()  # they come at the same moment
        last_checkpoint = get_last_checkpoint(out)
        if last_checkpoint is None and len(os.listdir(out)) > 0:
            raise ValueError("the folder is not empty")
        trainer.train(resume_from_checkpoint=last_checkpoint)
        print("from update", trainer._run.updates_before)

    ranks = run_ranks(tmp_path / "ranks", body, seconds=60)
    assert all(rank.status == 0 and "from update 6" in rank.said for rank in ranks), ranks


@pytest.mark.parametrize("act", [get_last_checkpoint, lambda out: RunLock(str(out)).acquire()], ids=["read", "run"])
def test_a_takeover_that_the_disk_refuses_leaves_nothing(tmp_path, monkeypatch, act):
    """In a folder with the sticky bit nobody may remove or replace the lock of another user."""
    monkeypatch.setattr(run_lock, "SILENCE_SECONDS", 0.3)
    (tmp_path / LOCK_NAME).write_text(json.dumps(asdict(Owner(pid=2**22 + 7))))
    before = (tmp_path / LOCK_NAME).read_bytes()

    def refusing(call):
        def refused(*args, **kwargs):
            if any(str(path) == str(tmp_path / LOCK_NAME) for path in args):
                raise PermissionError(1, "Operation not permitted", *args[:1])
            return call(*args, **kwargs)

        return refused

    for name in ("replace", "rename", "unlink"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    for _ in range(2):
        try:
            assert act(tmp_path) is None
        except OutputFolderError as error:
            assert "Operation not permitted" in str(error) and act is not get_last_checkpoint
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME] and (tmp_path / LOCK_NAME).read_bytes() == before
