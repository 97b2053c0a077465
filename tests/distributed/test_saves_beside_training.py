"""Several processes of one machine: a checkpoint is flushed and hashed beside the training, as with one process."""

from __future__ import annotations

import threading

import pytest

from helpers import toy
from helpers.forking import run_ranks
from hf_compat import Trainer, TrainerCallback, TrainingArguments, get_last_checkpoint, set_seed
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint import manifest as sealing
from hf_compat.checkpoint.reading import read_manifest


class Looks(TrainerCallback):
    """Notes at the third update what the first checkpoint has no hashes of, and lets it be flushed."""

    def __init__(self, out):
        self.out, self.unhashed, self.has_looked = out, [], threading.Event()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            listed = read_manifest(self.out / "checkpoint-2").files
            self.unhashed = [name for name, facts in listed.items() if "sha256" not in facts]
            self.has_looked.set()


def train(out, callbacks, **values):
    set_seed(3)
    args = TrainingArguments(
        str(out), per_device_train_batch_size=2, max_steps=6, save_steps=2, save_total_limit=1, use_cpu=True,
        disable_tqdm=True, report_to="none", ddp_timeout=40, **values,
    )  # fmt: skip
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(24), callbacks=callbacks)
    trainer.train()
    return trainer


def test_a_save_of_two_processes_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    out, finish, flushed = tmp_path / "out", sealing.flush_and_hash, []
    monkeypatch.setattr(sealing, "_HASHED_AT_ONCE", -1)

    def body(rank):
        looks = Looks(out)

        def finish_later(folder):
            assert looks.has_looked.wait(30)
            flushed.append(folder)
            finish(folder)

        monkeypatch.setattr(sealing, "flush_and_hash", finish_later)
        train(out, [looks])
        assert rank or {"model.safetensors", "optimizer.pt"} <= set(looks.unhashed)
        assert len(flushed) == (3 if rank == 0 else 0), "one process flushes what both have written"

    ended = run_ranks(tmp_path / "logs", body, seconds=120)
    assert [rank.status for rank in ended] == [0, 0], [rank.said for rank in ended]
    last = get_last_checkpoint(out)
    listed = read_manifest(out / "checkpoint-6").files
    assert last == str(out / "checkpoint-6") and manifest.problems(last) == []
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= set(listed)
    assert all("sha256" in facts for facts in listed.values())


@pytest.mark.parametrize("part", ["flush", "seal"])
def test_a_disk_that_fails_while_the_others_train_on_ends_all_processes(tmp_path, monkeypatch, part):
    """Beside the training, or after the others have written their files. All hear of it at the next save."""
    out, work = tmp_path / "out", getattr(sealing, part)

    def fail(path, *others, **named):
        if "checkpoint-4" in str(path) and (part == "seal" or path.name == "optimizer.pt"):
            raise OSError(5, "Input/output error")
        work(path, *others, **named)

    monkeypatch.setattr(sealing, part, fail)
    ended = run_ranks(tmp_path / "logs", lambda rank: train(out, []), seconds=120)
    assert all(rank.status == 1 for rank in ended), ended
    assert "CheckpointWriteError" in ended[0].said and "checkpoint-4 could not be written" in ended[0].said
    assert "ProcessError" in ended[1].said and "rank 0: CheckpointWriteError" in ended[1].said
    assert get_last_checkpoint(out) == str(out / "checkpoint-2")
