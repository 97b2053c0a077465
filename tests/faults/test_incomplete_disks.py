"""Disks that lack an operation: a run trains, saves and resumes there, and one warning says what is missing."""

from __future__ import annotations

import errno
import os

import pytest

from helpers import toy
from helpers.forking import run_ranks
from helpers.incomplete_disk import Disk
from helpers.parity.compare import same
from hf_compat import Trainer, TrainerCallback, get_last_checkpoint, set_seed
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.convert import convert
from hf_compat.checkpoint.reading import read_manifest
from hf_compat.errors import CheckpointWriteError, OutputFolderError

FLUSHES = [errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP]
RENAMES = [errno.EXDEV, errno.EACCES, errno.EPERM, errno.ENOSYS]
MISSING = [(f"fsync of a {kind}", number) for kind in ("file", "folder") for number in FLUSHES]
MISSING += [("rename of a folder", number) for number in RENAMES]
LACKS = {"fsync": "does not offer a flush (fsync)", "rename": "does not offer the rename of a folder"}


@pytest.fixture
def disk(tmp_path, monkeypatch):
    return Disk(tmp_path / "out", monkeypatch)


def make(make_args, **values):
    set_seed(3)
    args = make_args(**{"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "save_total_limit": 2, **values})
    return Trainer(toy.Classifier(), args, train_dataset=toy.rows())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("what", "number", "async_save"),
    [*((*one, False) for one in MISSING), *((what, errno.ENOSYS, True) for what in dict(MISSING))],
)
def test_a_run_trains_saves_and_resumes(make_args, tmp_path, disk, caplog, what, number, async_save):
    disk.refused = {what: number}
    out = tmp_path / "out"
    trainer = make(make_args, max_steps=4, async_save=async_save)
    assert names(out) == [] and disk.asked
    (told,) = [record.message for record in caplog.records if "does not offer" in record.message]
    assert LACKS[what.split()[0]] in told and os.strerror(number) in told
    trainer.train()
    assert names(out) == ["checkpoint-2", "checkpoint-4"]
    resumed = make(make_args, async_save=async_save)
    resumed.train(resume_from_checkpoint=True)
    assert resumed._run.updates_before == 4 and names(out) == ["checkpoint-4", "checkpoint-6"]
    assert get_last_checkpoint(out) == str(out / "checkpoint-6")
    assert manifest.problems(str(out / "checkpoint-4")) == [] and "not whole" not in caplog.text
    assert caplog.text.count("does not offer") == 1


def test_a_run_on_a_disk_that_lacks_everything_has_the_same_weights(make_args, tmp_path, disk):
    whole = make(make_args, output_dir=str(tmp_path / "other"), save_strategy="no", lr_scheduler_type="constant")
    whole.train()
    disk.refused = dict.fromkeys(("fsync of a file", "fsync of a folder", "rename of a folder"), errno.ENOSYS)
    make(make_args, max_steps=4, lr_scheduler_type="constant").train()
    resumed = make(make_args, lr_scheduler_type="constant")
    resumed.train(resume_from_checkpoint=True)
    assert same(resumed.model.state_dict(), whole.model.state_dict())


def test_a_trainer_that_saves_nothing_tries_nothing(make_args, disk):
    disk.refused = {"fsync of a file": errno.EIO}
    make(make_args, save_strategy="no").train()
    Trainer(toy.Classifier(), make_args(save_strategy="steps", save_steps=2), eval_dataset=toy.rows()).evaluate()
    assert disk.asked == []
    with pytest.raises(OutputFolderError, match=r"(?s)output_dir=.*cannot be saved to: .*Input/output error.*tried"):
        make(make_args)


def test_a_full_disk_is_left_to_the_save(make_args, disk):
    disk.refused = {"fsync of a file": errno.ENOSPC}
    assert "eval_loss" in make(make_args).evaluate(toy.rows())


def test_an_older_folder_of_that_name_is_replaced_and_keeps_what_is_the_users(make_args, tmp_path, disk):
    out = tmp_path / "out"
    make(make_args, max_steps=2).train()
    (out / "checkpoint-2" / "mine").mkdir()
    (out / "checkpoint-2" / "mine" / "notes.txt").write_text("mine")
    first = read_manifest(out / "checkpoint-2").writer
    disk.refused = {"rename of a folder": errno.EXDEV}
    make(make_args, max_steps=2).train()
    assert read_manifest(out / "checkpoint-2").writer.run != first.run and names(out) == ["checkpoint-2"]
    assert (out / "checkpoint-2" / "mine" / "notes.txt").read_text() == "mine"
    assert manifest.problems(str(out / "checkpoint-2")) == []


def test_a_save_that_fails_gives_the_older_folder_its_name_back(make_args, tmp_path, disk, monkeypatch):
    out = tmp_path / "out"
    make(make_args, max_steps=2).train()
    before = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    disk.refused = {"rename of a folder": errno.EXDEV}

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Trainer, "_save_rng_state", full)
    with pytest.raises(CheckpointWriteError, match=r"(?s)No space left.*Hint: make room there, then"):
        make(make_args, max_steps=2).train()
    assert {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert get_last_checkpoint(out) == str(out / "checkpoint-2")


class Begins(TrainerCallback):
    """Lets the disk refuse an operation once the first checkpoint is written, and before it is flushed."""

    def __init__(self, disk, refused):
        self.disk, self.refused = disk, refused

    def on_save(self, args, state, control, **kwargs):
        self.disk.refused = self.refused


@pytest.mark.parametrize("what", ["fsync of a file", "fsync of a folder", "rename of a folder"])
def test_a_disk_that_no_longer_offers_an_operation_takes_the_rest_of_the_run(make_args, tmp_path, disk, caplog, what):
    trainer = make(make_args)
    trainer.add_callback(Begins(disk, {what: errno.EXDEV if "rename" in what else errno.EINVAL}))
    trainer.train()
    out = tmp_path / "out"
    assert names(out) == ["checkpoint-4", "checkpoint-6"] and caplog.text.count("does not offer") == 1
    assert [manifest.problems(str(path)) for path in sorted(out.iterdir())] == [[], []]
    assert read_manifest(out / "checkpoint-6").writer.run == trainer._run.run_id


@pytest.mark.parametrize(
    ("what", "number", "told"),
    [
        ("fsync of a file", errno.EIO, "Input/output error, when it was forced to the disk: '.*Hint: look for the"),
        ("rename of a folder", errno.EIO, r"Input/output error: '.*saving.*' -> '.*checkpoint-4'.*Hint: look for the"),
        ("rename of a folder", errno.EROFS, "Read-only file system: .*Hint: give write permission there, then resume"),
        ("fsync of a folder", errno.EDQUOT, "quota exceeded.*Hint: make room there, then resume"),
        (
            "rename of a folder",
            errno.ENOTEMPTY,
            "Directory not empty: .*Hint: another program writes there: end it, or",
        ),
        ("fsync of a file", errno.ENFILE, "Too many open files in system.*Hint: raise the limit of open files"),
    ],
)
def test_a_disk_that_fails_later_is_told_as_it_is(make_args, tmp_path, disk, what, number, told):
    trainer = make(make_args)
    trainer.add_callback(Begins(disk, {what: number}))
    is_flush = what.startswith("fsync")  # of the first checkpoint, after the callback has seen it
    with pytest.raises(
        CheckpointWriteError, match=f"(?s)checkpoint-{2 if is_flush else 4} could not be written: .*{told}"
    ):
        trainer.train()
    disk.refused = {}
    assert get_last_checkpoint(tmp_path / "out") == (None if is_flush else str(tmp_path / "out" / "checkpoint-2"))


def test_a_conversion_writes_a_folder_without_a_rename(make_args, tmp_path, disk):
    make(make_args, max_steps=2, output_dir=str(tmp_path / "other")).train()
    convert(str(tmp_path / "other" / "checkpoint-2"), str(tmp_path / "one.ckpt"))
    disk.refused = {"rename of a folder": errno.EXDEV}
    (tmp_path / "out").mkdir()
    convert(str(tmp_path / "one.ckpt"), str(tmp_path / "out" / "folder"))
    assert manifest.problems(str(tmp_path / "out" / "folder")) == [] and names(tmp_path / "out") == ["folder"]


def test_two_ranks_write_to_one_place(make_args, tmp_path, disk):
    disk.refused = {"rename of a folder": errno.EXDEV}

    def body(rank):
        make(make_args, max_steps=2, ddp_timeout=40).train()
        assert bool(disk.asked) == (rank == 0), "one rank gives the folders their names"

    ended = run_ranks(tmp_path / "logs", body, seconds=120)
    assert [rank.status for rank in ended] == [0, 0], [rank.said for rank in ended]
    saved = tmp_path / "out" / "checkpoint-2"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(read_manifest(saved).files) <= set(names(saved))
