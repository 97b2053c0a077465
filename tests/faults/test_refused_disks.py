"""A disk that refuses what the system had taken: the system says so once, and the checkpoint is never whole again."""

from __future__ import annotations

import errno
import os

import pytest

from helpers import toy
from hf_compat import Trainer, TrainerCallback, get_last_checkpoint
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint import manifest as sealing

REFUSALS = [errno.EIO, errno.ENOSPC, errno.EDQUOT]


@pytest.fixture
def out(make_args, tmp_path, monkeypatch):
    """An output folder whose newest checkpoint was renamed and not flushed when its run was killed."""
    monkeypatch.setattr(sealing, "_HASHED_AT_ONCE", -1)
    trainer(make_args).train()
    writer = manifest.read_manifest(tmp_path / "out/checkpoint-4").writer
    sealing.seal(str(tmp_path / "out" / "checkpoint-4"), writer, flushes=False)
    return tmp_path / "out"


def trainer(make_args):
    args = make_args(save_strategy="steps", save_steps=2, max_steps=4)
    return Trainer(toy.Classifier(), args, train_dataset=toy.rows())


def refuse_once(monkeypatch, number, name="model.safetensors"):
    """Let one flush of a file fail, as the system does: the next one has nothing left to write."""
    fsync, failed = os.fsync, []

    def refusing(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"checkpoint-4/{name}") and not failed:
            failed.append(descriptor)
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    return failed


@pytest.mark.parametrize("number", REFUSALS)
def test_a_checkpoint_that_the_disk_refused_is_passed_over(out, monkeypatch, caplog, number):
    failed = refuse_once(monkeypatch, number)
    for _ in range(2):  # the second look is a later process's: nothing in memory tells it
        assert get_last_checkpoint(out) == str(out / "checkpoint-2")
    said = "model.safetensors could not be written to the disk"
    assert len(failed) == 1 and caplog.text.count(f"is skipped: {said}.") == 2
    assert caplog.text.count(f"{said}: {os.strerror(number)}.") == 1


@pytest.mark.parametrize("takes_the_mark", [True, False])
def test_a_full_disk_that_takes_no_manifest_is_remembered(out, monkeypatch, caplog, takes_the_mark):
    refuse_once(monkeypatch, errno.ENOSPC)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sealing, "write_new", full)
    if not takes_the_mark:
        monkeypatch.setattr(os, "utime", full)
    assert [get_last_checkpoint(out) for _ in range(2)] == [str(out / "checkpoint-2")] * 2


def test_who_names_the_checkpoint_finds_the_refusal_too(out, make_args, monkeypatch):
    refuse_once(monkeypatch, errno.EIO, "optimizer.pt")
    for _ in range(2):
        (wrong,) = manifest.problems(str(out / "checkpoint-4"))
        assert wrong == "optimizer.pt could not be written to the disk"
    with pytest.raises(ValueError, match="could not be written to the disk"):
        trainer(make_args).train(resume_from_checkpoint=str(out / "checkpoint-4"))
    (out / "checkpoint-4" / "optimizer.pt").write_bytes((out / "checkpoint-2" / "optimizer.pt").read_bytes())
    trainer(make_args).train(resume_from_checkpoint=str(out / "checkpoint-4"))  # a file that somebody has put there


def test_a_run_that_goes_on_begins_from_the_checkpoint_before(out, make_args, monkeypatch):
    refuse_once(monkeypatch, errno.EIO)
    begun = []

    class Begun(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)

    resumed = trainer(make_args)
    resumed.add_callback(Begun())
    resumed.train(resume_from_checkpoint=True)
    assert begun == [2] and manifest.problems(str(out / "checkpoint-4")) == []  # written anew


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_is_read_only_has_refused_nothing(out, monkeypatch, number):
    refuse_once(monkeypatch, number)
    assert get_last_checkpoint(out) == str(out / "checkpoint-4")


def test_a_flush_beside_the_training_that_failed_is_found_by_the_next_run(out, monkeypatch):
    refuse_once(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sealing.flush_and_hash(str(out / "checkpoint-4"))
    assert get_last_checkpoint(out) == str(out / "checkpoint-2")
