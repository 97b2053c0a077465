"""A run that was stopped for long, and lost its folder, comes back: it ends, and changes nothing of the newer run's."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from helpers import toy
from helpers.forking import run_ranks, start_ranks, wait_for_ranks
from hf_compat import Trainer, TrainerCallback, TrainingArguments, get_last_checkpoint, set_seed
from hf_compat.checkpoint import layout, manifest, run_lock
from hf_compat.checkpoint.run_lock import LOCK_NAME
from hf_compat.errors import OutputFolderError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "SILENCE_SECONDS", 0.6)


@pytest.fixture
def elsewhere(monkeypatch):
    """Let this process be one of another host from now on. A run that was forked before stays on this one."""

    def move():
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        run_lock._host.cache_clear()

    yield move
    monkeypatch.undo()
    run_lock._host.cache_clear()


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


class At(TrainerCallback):
    """Does something at the end of an update."""

    def __init__(self, update, act):
        self.update, self.act = update, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.update:
            self.act()


class Overridden(Trainer):
    """Writes its checkpoints in place."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir, "number.txt").write_text("of an override")


def make(out, *callbacks, kind=Trainer, **values):
    set_seed(3)
    chosen = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, **values}
    args = TrainingArguments(
        str(out), per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, report_to="none", **chosen
    )
    return kind(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=list(callbacks))


def start_stopped(tmp_path, body):
    """Start a run in a process of its own, and return when it has stopped itself."""
    (run,) = start_ranks(tmp_path / "logs", lambda rank: body(), world=1)
    _, status = os.waitpid(run, os.WUNTRACED)
    assert os.WIFSTOPPED(status), (tmp_path / "logs" / "rank0.log").read_text()
    return run


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wake(tmp_path, run):
    """Let a stopped run go on, and return what it has written when it has ended, which has to be its loss."""
    os.kill(run, signal.SIGCONT)
    (ended,) = wait_for_ranks(tmp_path / "logs", [run], 30)
    assert ended.status == 1 and "OutputFolderError" in ended.said and "writes nothing more into it" in ended.said
    assert str(tmp_path / "out") in ended.said and "Hint: let the other run end" in ended.said
    return ended.said


SHAPES = {
    "": {},
    "async_save": {"async_save": True},
    "in place": {"kind": Overridden},
    "with a limit": {"save_total_limit": 2},
    "no save to come": {"max_steps": 3, "save_steps": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_that_comes_back_after_the_winner_has_ended_leaves_its_files(tmp_path, elsewhere, shape):
    out = tmp_path / "out"

    def lost():
        trainer = make(out, At(3, stop), **SHAPES[shape])
        trainer.train()
        trainer.save_model()

    run = start_stopped(tmp_path, lost)
    elsewhere()
    winner = make(out)
    winner.train()
    winner.save_model()
    before = contents(out)
    assert LOCK_NAME not in before
    wake(tmp_path, run)
    assert contents(out) == before and get_last_checkpoint(out) == str(out / "checkpoint-6")


def test_a_run_that_comes_back_does_not_take_over_the_lock_of_a_killed_winner(tmp_path, elsewhere):
    out = tmp_path / "out"
    run = start_stopped(tmp_path, lambda: make(out, At(3, stop)).train())
    elsewhere()
    killed = At(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    (winner,) = start_ranks(tmp_path / "winner", lambda rank: make(out, killed).train(), world=1)
    os.waitpid(winner, 0)
    before = contents(out)
    assert "checkpoint-4/manifest.json" in before and LOCK_NAME in before
    said = wake(tmp_path, run)
    assert f"process {winner} on elsewhere" in said
    assert contents(out) == before and get_last_checkpoint(out) == str(out / "checkpoint-4")


def test_a_run_learns_of_its_loss_at_an_update_and_not_only_at_its_next_save(tmp_path, elsewhere):
    out = tmp_path / "out"

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            print("update", state.global_step, flush=True)
            time.sleep(0.05)

    run = start_stopped(tmp_path, lambda: make(out, At(3, stop), Slow(), save_steps=400, max_steps=400).train())
    elsewhere()
    make(out).train()
    said = wake(tmp_path, run)
    assert "update 3" in said and "update 200" not in said


def stop_before(owner, name, when=lambda *args: True):
    """Let this process stop itself just before it calls a function for the first time that it should."""
    call = getattr(owner, name)

    def stopping(*args, **kwargs):
        if when(*args):
            setattr(owner, name, call)
            stop()
        return call(*args, **kwargs)

    setattr(owner, name, stopping)


def stop_at_rename(name):
    """Stop before the system is asked to give or take the name of a checkpoint."""
    stop_before(os, "replace", lambda source, target: Path(target).name == name or Path(source).name == name)


# What a run was about to do when it was stopped: it had looked at its lock, and found it to be its own
INSTANTS = {
    "name a checkpoint": (lambda: stop_at_rename("checkpoint-4"), {}),
    "replace a checkpoint": (lambda: stop_before(manifest.SavingPlace, "_set_aside"), {}),
    "carry the user's files over": (lambda: stop_before(manifest, "_carry_over"), {}),
    "name a checkpoint in place": (lambda: stop_at_rename("checkpoint-4"), {"kind": Overridden}),
    "list what an override wrote": (
        lambda: stop_before(manifest, "_replace_manifest", lambda root, *_: root.name == "checkpoint-4"),
        {"kind": Overridden},
    ),
    "remove a checkpoint": (lambda: stop_before(manifest, "_take_out"), {"save_total_limit": 1}),
    "list a checkpoint with its hashes": (
        lambda: stop_before(os, "replace", lambda source, target: target == "manifest.json"),
        {},
    ),
}


@pytest.mark.parametrize("instant", INSTANTS)
def test_what_a_run_was_about_to_do_when_it_was_stopped_changes_nothing(tmp_path, elsewhere, instant):
    out = tmp_path / "out"
    prepare, values = INSTANTS[instant]
    if instant in ("replace a checkpoint", "carry the user's files over"):
        make(out, max_steps=4, save_steps=4).train()
        (out / "checkpoint-4" / "notes.txt").write_text("mine")

    def lost():
        prepare()
        make(out, **values).train()

    run = start_stopped(tmp_path, lost)
    elsewhere()
    make(out).train()
    before = contents(out)
    wake(tmp_path, run)
    assert contents(out) == before and get_last_checkpoint(out) == str(out / "checkpoint-6")
    assert not manifest.problems(str(out / "checkpoint-4"))


def lose(out):
    """Let another run take the folder, train to its end, and give the lock back."""
    (out / LOCK_NAME).unlink()
    (out / "model.safetensors").write_text("the winner's")


def test_what_is_written_after_a_training_is_not_written_into_a_lost_folder(make_args, tmp_path):
    out = tmp_path / "out"
    trainer = make(out, At(3, lambda: lose(out)))
    with pytest.raises(OutputFolderError, match=f"{out} is no longer this run's"):
        trainer.train()
    before = contents(out)
    for write in (
        trainer.save_model,
        trainer.save_state,
        trainer.create_model_card,
        lambda: trainer.save_metrics("train", {"loss": 1.0}),
        lambda: trainer.save_model(str(out / "final")),
        lambda: trainer._save_checkpoint(trainer.model, None),
    ):
        with pytest.raises(OutputFolderError, match=f"{out} is no longer this run's"):
            write()
    assert contents(out) == before
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert (tmp_path / "elsewhere" / "model.safetensors").exists()


def test_a_folder_that_is_lost_after_the_last_save_is_not_written_to_either(tmp_path):
    out = tmp_path / "out"

    class AtTheEnd(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            lose(out)

    trainer = make(out, AtTheEnd(), max_steps=2)
    assert trainer.train().global_step == 2
    with pytest.raises(OutputFolderError, match=f"{out} is no longer this run's"):
        trainer.save_model()
    assert (out / "model.safetensors").read_text() == "the winner's"


@pytest.mark.parametrize("again", ["the same Trainer", "another one"])
def test_a_training_after_a_lost_one_is_a_turn_of_its_own(tmp_path, again):
    out = tmp_path / "out"
    callback = At(3, lambda: lose(out))
    trainer = make(out, callback)
    with pytest.raises(OutputFolderError):
        trainer.train()
    trainer.remove_callback(callback)
    trainer = trainer if again == "the same Trainer" else make(out)
    assert trainer.train(resume_from_checkpoint=True).global_step == 6 and trainer._run.updates_before == 2
    trainer.save_model()
    assert trainer._run.turn == 2 and get_last_checkpoint(out) == str(out / "checkpoint-6")
    assert LOCK_NAME not in contents(out)


@pytest.mark.parametrize("values", [{}, {"max_steps": 3, "save_steps": 2}], ids=["a save to come", "no save to come"])
def test_all_ranks_end_with_the_loss_that_the_first_one_has_found(tmp_path, values):
    out = tmp_path / "out"

    def body(rank):
        make(out, At(3, lambda: lose(out) if rank == 0 else None), **values).train()

    ranks = run_ranks(tmp_path / "logs", body, seconds=60)
    assert [rank.status for rank in ranks] == [1, 1]
    assert all(f"{out} is no longer this run's" in rank.said for rank in ranks)
    assert "rank 0: OutputFolderError" in ranks[1].said


def test_a_hidden_folder_that_is_taken_is_gone_before_the_first_of_its_files_is(tmp_path, monkeypatch):
    """Its owner may come back at any instant of the removal."""
    place = layout.make_hidden(str(tmp_path), layout.SAVING, run_lock.Owner(host="elsewhere"))
    Path(place, "checkpoint-4").mkdir()
    remove, seen = layout.shutil.rmtree, []
    monkeypatch.setattr(layout.shutil, "rmtree", lambda path: (seen.append(os.path.exists(place)), remove(path)))
    manifest.recover(str(tmp_path), has_lock=True)
    assert seen == [False] and list(tmp_path.iterdir()) == []
