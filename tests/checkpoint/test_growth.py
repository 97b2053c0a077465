"""What a save costs does not grow with the checkpoints and files that lie beside it."""

from __future__ import annotations

import _thread
import itertools
import os
import threading
import time
from pathlib import Path

import pytest

from helpers import toy
from hf_compat import Trainer, TrainerCallback
from hf_compat.checkpoint import manifest, reading
from hf_compat.checkpoint import manifest as sealing
from hf_compat.runtime.threads import BackgroundWriter


def train(make_args, folder, kind=Trainer, **more):
    args = make_args(output_dir=str(folder), max_steps=4, save_strategy="steps", save_steps=1, **more)
    kind(toy.Classifier(), args, train_dataset=toy.rows(32)).train()


@pytest.fixture
def many(tmp_path):
    """Make an output folder with files and with checkpoints of an earlier run."""
    for number in range(40):
        (tmp_path / f"file-{number}.txt").write_text("beside")
        folder = tmp_path / f"checkpoint-{1000 + number}"
        folder.mkdir()
        (folder / "notes.txt").write_text("of an earlier run")
        manifest.seal(str(folder))
    return tmp_path


def test_files_beside_are_not_linked_where_only_the_package_writes(make_args, many, monkeypatch):
    linked, link = [], os.link
    monkeypatch.setattr(os, "link", lambda source, *where: (linked.append(Path(source).name), link(source, *where))[1])
    train(make_args, many)
    assert not [name for name in linked if name.startswith("file-")]


def test_files_beside_are_there_for_an_override(make_args, many):
    seen = []

    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            beside = Path(output_dir).parent
            seen.append(len(list(beside.glob("file-*.txt"))))
            (beside / "file-0.txt").unlink(missing_ok=True)

    train(make_args, many, Own)
    assert seen == [40, 39, 39, 39] and not (many / "file-0.txt").exists()


@pytest.mark.parametrize("part", ["model", "processor"])
def test_files_beside_are_there_for_a_part_that_saves_itself(make_args, many, part):
    seen = []

    class Own(toy.Classifier):
        def save_pretrained(self, folder, **kwargs):
            seen.append(len(list(Path(folder).parent.glob("file-*.txt"))))

    args = make_args(output_dir=str(many), max_steps=1, save_strategy="steps", save_steps=1)
    model = toy.Classifier()
    processor = Own() if part == "processor" else None
    if part == "model":
        model.config = Own()
    trainer = Trainer(model, args, train_dataset=toy.rows(32), processing_class=processor)
    assert trainer._saver._where_and_when(str(many / "checkpoint-1"))[0]
    trainer.train()
    assert seen == ([40] if part == "processor" else [])


def test_without_a_limit_manifests_of_other_checkpoints_are_read_once_a_run(make_args, many, monkeypatch):
    reads = []
    read = reading.read_json
    monkeypatch.setattr(reading, "read_json", lambda path: (reads.append(str(path)), read(path))[1])
    train(make_args, many)
    of_others = [folder for folder in reads if "checkpoint-10" in folder]
    assert len(of_others) <= 3 * 40, "at the run's beginning, and not at every one of four saves"


def test_with_a_limit_a_save_reads_no_manifest_of_kept_checkpoints(make_args, tmp_path, monkeypatch):
    args = make_args(output_dir=str(tmp_path), max_steps=12, save_strategy="steps", save_steps=1, save_total_limit=50)
    reads, read = [], reading.read_json
    monkeypatch.setattr(reading, "read_json", lambda path: (reads.append(str(path)), read(path))[1])
    by_save = []

    class Noting(TrainerCallback):
        reads_checkpoints = False

        def on_save(self, args, state, control, **kwargs):
            trainer._saver.background.wait()
            by_save.append(len(reads))

    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(32), callbacks=[Noting()])
    trainer.train()
    each = [after - before for before, after in itertools.pairwise(by_save)]
    assert len(each) == 11 and max(each[5:]) <= max(each[:5]) <= 6


def test_every_folder_of_a_nested_file_is_flushed(tmp_path, monkeypatch):
    nested = tmp_path / "checkpoint-1" / "a" / "b" / "c"
    nested.mkdir(parents=True)
    (nested / "w.txt").write_text("of an override")
    flushed = []
    flush = sealing.flush
    monkeypatch.setattr(sealing, "flush", lambda path: (flushed.append(Path(path)), flush(path))[1])
    manifest.seal(str(tmp_path / "checkpoint-1"))
    assert {nested, nested.parent, nested.parent.parent, tmp_path / "checkpoint-1"} <= set(flushed)


def never(thread):
    """Ctrl-C comes before the system has a thread."""


def named(thread):
    """It comes when the thread has a number and has not said that it started: `join` refuses such a thread."""
    thread._ident = threading.get_ident()


def later(thread):
    """It comes when the system has the thread, which has not begun."""
    threading._limbo[thread] = thread
    _thread.start_new_thread(lambda: (time.sleep(0.3), thread._bootstrap()), ())


def running(thread):
    """It comes when the write has begun."""
    begin(thread)
    begun.wait(30)


begin, begun = threading.Thread.start, threading.Event()


@pytest.mark.parametrize("started", [never, named, later, running], ids=lambda started: started.__name__)
def test_a_write_that_ctrl_c_interrupts_while_it_starts_is_settled(monkeypatch, started):
    """It is over when `settle` returns: what resumes then finds no write that goes on."""
    writer, written = BackgroundWriter(), []

    def interrupted(thread):
        started(thread)
        raise KeyboardInterrupt

    def write():
        begun.set()
        time.sleep(0.2)
        written.append("a checkpoint")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.submit(write)
    assert writer.settle() is None
    assert written == (["a checkpoint"] if started is running else [])
    time.sleep(0.6 if started is later else 0)
    assert written == (["a checkpoint"] if started is running else [])
    writer.submit(lambda: written.append("the next"))
    writer.wait()
    assert written[-1] == "the next"
