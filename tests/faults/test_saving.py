"""Saving loses nothing: rotation beside other runs, two runs in one folder, folders that cannot be used."""

from __future__ import annotations

import fractions
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from helpers import toy
from hf_compat import Trainer, TrainerCallback, get_last_checkpoint, set_seed
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.run_lock import LOCK_NAME
from hf_compat.errors import ArgumentError, CallbackError, MetricError, OutputFolderError

TESTS = Path(__file__).resolve().parent.parent


def make(make_args, folder, trainer_class=Trainer, callbacks=(), **values):
    set_seed(3)
    args = make_args(output_dir=str(folder), **{"save_strategy": "steps", "save_steps": 2, "max_steps": 6, **values})
    return trainer_class(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=list(callbacks))


def checkpoints(folder):
    return sorted((path.name for path in folder.iterdir()), key=lambda name: (len(name), name))


def test_an_older_runs_checkpoint_stays_until_one_of_its_name_comes(make_args, tmp_path, caplog):
    out = tmp_path / "out"
    make(make_args, out, max_steps=4, save_steps=4).train()
    with caplog.at_level("WARNING", logger="hf_compat"):
        make(make_args, out).train()
    assert "of an earlier run: checkpoint-4; each stays until this run saves a checkpoint of " in caplog.text
    assert {manifest.read_manifest(path).writer.run for path in out.iterdir()} == {
        manifest.read_manifest(out / "checkpoint-6").writer.run
    }


class SavedAreThere(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        assert Path(args.output_dir, f"checkpoint-{state.global_step}").is_dir(), "the checkpoint just written is gone"


def test_an_older_runs_checkpoints_go_before_fresh_ones(make_args, tmp_path, caplog):
    out = tmp_path / "out"
    make(make_args, out, max_steps=12, save_steps=12).train()
    assert checkpoints(out) == ["checkpoint-12"]
    with caplog.at_level("WARNING", logger="hf_compat"):
        make(make_args, out, save_total_limit=2, callbacks=[SavedAreThere()]).train()
    assert checkpoints(out) == ["checkpoint-4", "checkpoint-6"]
    assert caplog.text.count("of an earlier run: checkpoint-12; `save_total_limit=2` removes them first") == 1
    assert make(make_args, out, save_total_limit=2).train(resume_from_checkpoint=True).global_step == 6


def test_the_last_run_goes_on_and_not_an_earlier_one_with_more_updates(make_args, tmp_path, caplog):
    out = tmp_path / "out"
    make(make_args, out, max_steps=12, save_steps=12).train()
    make(make_args, out, max_steps=4).train()
    assert checkpoints(out) == ["checkpoint-2", "checkpoint-4", "checkpoint-12"]
    with caplog.at_level("WARNING", logger="hf_compat"):
        assert get_last_checkpoint(out) == str(out / "checkpoint-4")
    assert "checkpoint-4 is taken: the last run wrote it. Of an earlier run: checkpoint-12." in caplog.text
    trainer = make(make_args, out, max_steps=6)
    assert trainer.train(resume_from_checkpoint=True).global_step == 6 and trainer._run.updates_before == 4


def test_what_transformers_wrote_after_a_run_goes_on_by_its_number(make_args, tmp_path):
    out = tmp_path / "out"
    make(make_args, out, max_steps=8).train()
    make(make_args, out, max_steps=2).train()
    (out / "checkpoint-6" / "manifest.json").unlink()
    assert get_last_checkpoint(out) == str(out / "checkpoint-6")


def test_a_limit_of_one_keeps_the_fresh_one(make_args, tmp_path):
    make(make_args, tmp_path / "out", max_steps=12, save_steps=12).train()
    make(make_args, tmp_path / "out", save_total_limit=1, callbacks=[SavedAreThere()]).train()
    assert checkpoints(tmp_path / "out") == ["checkpoint-6"]


def test_a_run_that_goes_on_rotates_what_it_wrote_before(make_args, tmp_path, caplog):
    out = tmp_path / "out"
    make(make_args, out, max_steps=4).train()
    with caplog.at_level("WARNING", logger="hf_compat"):
        make(make_args, out, max_steps=8, save_total_limit=2).train(resume_from_checkpoint=True)
    assert checkpoints(out) == ["checkpoint-6", "checkpoint-8"] and "another run" not in caplog.text


def test_a_checkpoint_before_runs_had_ids_is_the_resumed_runs_own(make_args, tmp_path, caplog):
    out = tmp_path / "out"
    make(make_args, out, max_steps=4).train()
    for path in out.glob("*/manifest.json"):
        content = json.loads(path.read_text())
        del content["run"], content["turn"]
        path.write_text(json.dumps(content))
    with caplog.at_level("WARNING", logger="hf_compat"):
        make(make_args, out, max_steps=8, save_total_limit=2).train(resume_from_checkpoint=True)
    assert checkpoints(out) == ["checkpoint-6", "checkpoint-8"] and "another run" not in caplog.text


def test_a_run_taken_back_keeps_its_new_branch(make_args, tmp_path):
    out = tmp_path / "out"
    make(make_args, out, max_steps=8).train()
    again = make(make_args, out, max_steps=7, save_total_limit=2, callbacks=[SavedAreThere()])
    again.train(resume_from_checkpoint=str(out / "checkpoint-4"))
    assert checkpoints(out) == ["checkpoint-6", "checkpoint-7"]


def test_the_best_checkpoint_is_never_another_runs(make_args, tmp_path):
    """An old folder of the best update's name, in a run that saves at other updates, has other weights."""
    out = tmp_path / "out"
    make(make_args, out, save_steps=3, max_steps=3).train()
    set_seed(3)
    args = make_args(
        output_dir=str(out), save_strategy="steps", save_steps=2, max_steps=4, eval_strategy="steps", eval_steps=3,
        metric_for_best_model="one", greater_is_better=True,
    )  # fmt: skip
    data = {"train_dataset": toy.rows(), "eval_dataset": toy.rows(5)}
    trainer = Trainer(toy.Classifier(), args, compute_metrics=lambda _: {"one": 1.0}, **data)
    trainer.train()
    assert trainer.state.best_global_step == 3 and trainer.state.best_model_checkpoint is None


@pytest.mark.parametrize("why", ["linked", "no permission"])
def test_a_rotation_that_fails_warns_and_training_goes_on(make_args, tmp_path, why, caplog, monkeypatch):
    out = tmp_path / "out"
    make(make_args, out, max_steps=2).train()
    old = out / "checkpoint-2"
    if why == "linked":
        old.rename(tmp_path / "moved")
        old.symlink_to(tmp_path / "moved")
    else:

        def refuse(path, may_write):
            raise PermissionError(1, "Operation not permitted", path)

        monkeypatch.setattr(manifest, "remove", refuse)
    with caplog.at_level("WARNING", logger="hf_compat"):
        make(make_args, out, save_total_limit=1).train(resume_from_checkpoint=True)
    assert "checkpoint-2 could not be removed: " in caplog.text
    assert get_last_checkpoint(out) == str(out / "checkpoint-6")
    assert manifest.problems(str(old)) == []


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800"])
def test_what_names_no_folder_is_found_when_the_arguments_are_made(make_args, tmp_path, name):
    with pytest.raises(ArgumentError, match=r"(?s)`output_dir=.*Hint:"):
        make(make_args, f"{tmp_path}/{name}" if name else "")


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300])
def test_an_unusable_folder_is_found_when_the_trainer_is_made(make_args, tmp_path, name):
    (tmp_path / "file").write_text("not a folder")
    folder = f"{tmp_path}/{name}"
    with pytest.raises(OutputFolderError, match=r"(?s)`output_dir=.*` cannot be saved to: .*Hint:"):
        make(make_args, folder)
    if name == "file":
        with pytest.raises(OutputFolderError, match=r"(?s)`output_dir=.*` cannot be saved to: .*Hint:"):
            make(make_args, folder, save_strategy="no")
        return
    trainer = make(make_args, folder, save_strategy="no", max_steps=1)
    assert trainer.train().global_step == 1


def test_the_folder_is_made_and_left_empty(make_args, tmp_path):
    make(make_args, tmp_path / "no", save_strategy="no")
    make(make_args, tmp_path / "yes")
    assert [sorted(path.iterdir()) for path in sorted(tmp_path.iterdir())] == [[], []]


RUN = """
import os, sys
sys.path.insert(0, {tests!r})
from helpers import toy
from hf_compat import Trainer, TrainerCallback, TrainingArguments, set_seed

class Wait(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            print(os.getpid(), flush=True)
            sys.stdin.readline()

set_seed(3)
args = TrainingArguments({out!r}, per_device_train_batch_size=4, max_steps=6, save_strategy="steps", save_steps=2,
                         use_cpu=True, disable_tqdm=True, report_to="none")
trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=[Wait])
trainer.train()
"""


@pytest.fixture
def live_run(tmp_path):
    """A run that has saved once, and waits after its third update: what was started, and the id of its process."""
    words = [sys.executable, "-c", RUN.format(tests=str(TESTS), out=str(tmp_path / "out"))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process, int(process.stdout.readline())
        process.kill()


def test_two_runs_in_one_folder(make_args, tmp_path, live_run):
    out, (started, pid) = tmp_path / "out", live_run
    while '"boot"' in (out / "checkpoint-2" / "manifest.json").read_text():  # its hashes come beside the training
        time.sleep(0.05)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    trainer = make(make_args, out)
    with pytest.raises(OutputFolderError, match=rf"(?s)saves into {out}: process {pid} on .*Hint: .*output_dir"):
        trainer.train()
    assert trainer.state.global_step == 0 and not trainer.is_in_train
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    started.communicate("\n")
    assert started.returncode == 0 and checkpoints(out) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert trainer.train().global_step == 6


def test_a_killed_run_goes_on_at_once(make_args, tmp_path, live_run, caplog):
    out, (started, pid) = tmp_path / "out", live_run
    os.kill(pid, signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    assert (out / LOCK_NAME).exists()
    with caplog.at_level("WARNING", logger="hf_compat"):
        trainer = make(make_args, out, learning_rate=5e-5)  # as the process that was killed
        assert trainer.train(resume_from_checkpoint=True).global_step == 6
    assert f"the lock of process {pid}" in caplog.text and "taken over" in caplog.text
    assert checkpoints(out) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_save_without_training_takes_the_folder_as_well(make_args, tmp_path, live_run):
    trainer = make(make_args, tmp_path / "out", save_strategy="no")
    with pytest.raises(OutputFolderError, match="Another run saves into"):
        trainer._save_checkpoint(trainer.model, None)


def test_a_checkpoint_that_user_code_asks_for_is_finished_when_it_is_there(make_args, tmp_path, monkeypatch):
    """It may be copied or changed at once, so its hashes do not come beside the training."""

    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (1, 3):
                trainer._save_checkpoint(trainer.model, None)

    beside, finish = [], manifest.flush_and_hash
    monkeypatch.setattr(manifest, "flush_and_hash", lambda folder: (beside.append(Path(folder).name), finish(folder)))
    trainer = make(make_args, tmp_path / "out", callbacks=[Asks()], save_steps=2, max_steps=4)
    trainer.train()
    assert beside == ["checkpoint-2", "checkpoint-4"]


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise ZeroDivisionError("in a callback")


def test_an_exception_waits_for_the_write_under_way(make_args, tmp_path, monkeypatch):
    seal, begun = manifest.seal, threading.Event()

    def slow(*args):
        begun.set()
        time.sleep(1.0)
        seal(*args)

    monkeypatch.setattr(manifest, "seal", slow)
    trainer = make(make_args, tmp_path / "out", async_save=True, callbacks=[Fails()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert begun.is_set() and get_last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")
    assert checkpoints(tmp_path / "out") == ["checkpoint-2"], "the lock is given back"


def test_the_exception_of_training_comes_before_that_of_the_write(make_args, tmp_path, monkeypatch):
    def fail(*args):
        time.sleep(1.0)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "seal", fail)
    trainer = make(make_args, tmp_path / "out", async_save=True, callbacks=[Fails()])
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.train()
    assert any("No space left" in note for note in caught.value.__notes__)
    monkeypatch.undo()
    trainer.pop_callback(Fails)
    assert trainer.train().global_step == 6


def test_an_error_of_any_kind_leaves_no_half_of_a_checkpoint(make_args, tmp_path, monkeypatch):
    class Stateful(TrainerCallback):
        def state(self):
            return {"args": {}, "attributes": {"seen": {1, 2}}}

        @classmethod
        def from_state(cls, state):
            return cls()

    with pytest.raises(CallbackError, match=r"(?s)Stateful\.state\(\) returned something that JSON.*set.*Hint"):
        make(make_args, tmp_path / "out", callbacks=[Stateful()]).train()
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.setattr(Stateful, "state", lambda self: [1])
    with pytest.raises(CallbackError, match=r"(?s)Stateful\.state\(\) returned \[1\], which cannot be read back.*Hint"):
        make(make_args, tmp_path / "out", callbacks=[Stateful()]).train()


@pytest.mark.parametrize("async_save", [False, True])
def test_a_history_that_cannot_be_saved_is_named(make_args, tmp_path, async_save):
    class Appends(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            state.log_history.append({"words": {"a"}})

    with pytest.raises(CallbackError, match=r"(?s)`state\.log_history` cannot be saved: .*set.*Hint: .*trainer\.log"):
        make(make_args, tmp_path / "out", async_save=async_save, callbacks=[Appends()]).train()
    assert list((tmp_path / "out").iterdir()) == []


def with_metrics(make_args, metrics, **values):
    set_seed(3)
    args = make_args(
        **{
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "max_steps": 4,
            **values,
        }
    )
    return Trainer(
        toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(5), compute_metrics=lambda _: metrics
    )


def test_tensors_and_arrays_become_numbers_before_the_save(make_args, tmp_path):
    import numpy as np

    metrics = {
        "tensor": torch.tensor(0.5, requires_grad=True),
        "matrix": torch.eye(2),
        "scalar": np.float32(0.25),
        "array": np.arange(3),
        "nested": {"bfloat16": torch.tensor([1.0], dtype=torch.bfloat16), "pair": (np.int64(1), None)},
        "text": "fine",
        "exact": fractions.Fraction(1, 4),
    }
    trainer = with_metrics(make_args, metrics, metric_for_best_model="tensor", greater_is_better=True)
    trainer.train()
    log = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"][-1]
    assert (
        log["eval_matrix"] == [[1.0, 0.0], [0.0, 1.0]] and log["eval_scalar"] == 0.25 and log["eval_array"] == [0, 1, 2]
    )
    assert log["eval_nested"] == {"bfloat16": 1.0, "pair": [1, None]} and log["eval_text"] == "fine"
    assert log["eval_exact"] == 0.25
    assert trainer.state.best_metric == 0.5


itself: dict = {"parts": []}
itself["parts"].append(itself["parts"])
REFUSED = [
    ({"words": {"a"}}, {}, "compute_metrics.*'words'"),
    ({"parts": [1, {2}]}, {}, r"compute_metrics.*parts\[1\]"),
    ({"z": 1j}, {}, "compute_metrics.*'z'"),
    ({3: 1.0}, {}, "name 3"),
    (itself, {}, "contains itself"),
    ([0.5], {}, "compute_metrics.*not a mapping"),
    (None, {}, "compute_metrics.*not a mapping"),
    ({"f": [0.1, 0.2]}, {"metric_for_best_model": "f"}, "'eval_f'.*metric_for_best_model.*not a number"),
    ({"f": "high"}, {"metric_for_best_model": "f"}, "'eval_f'.*metric_for_best_model.*not a number"),
]


@pytest.mark.parametrize(("metrics", "values", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_metrics_that_cannot_be_saved_are_refused_at_once(make_args, tmp_path, metrics, values, message):
    with pytest.raises(MetricError, match=f"(?s){message}.*Hint"):
        with_metrics(make_args, metrics, **values).train()
    assert list((tmp_path / "out").iterdir()) == []


class ReturnsNothing(Trainer):
    def evaluate(self, *args, **kwargs):
        super().evaluate(*args, **kwargs)


def test_an_evaluation_that_returns_nothing_is_named_where_it_is_compared(make_args):
    values = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    data = {"train_dataset": toy.rows(), "eval_dataset": toy.rows(5)}
    assert ReturnsNothing(toy.Classifier(), make_args(**values), **data).train().global_step == 4
    args = make_args(**values, metric_for_best_model="loss")
    with pytest.raises(MetricError, match=r"(?s)`evaluate` returned None.*not a mapping.*Hint"):
        ReturnsNothing(toy.Classifier(), args, **data).train()


def test_a_run_whose_folder_was_taken_over_does_not_write_into_it(make_args, tmp_path):
    out = tmp_path / "out"

    class TakenOver(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                other = {**json.loads((out / LOCK_NAME).read_text()), "token": "ffffffff", "pid": os.getppid()}
                (out / LOCK_NAME).write_text(json.dumps({**other, "started": None}))

    with pytest.raises(OutputFolderError, match=f"Another run saves into .*: process {os.getppid()} on "):
        make(make_args, out, callbacks=[TakenOver()]).train()
    assert checkpoints(out) == ["checkpoint-2", LOCK_NAME]


def test_a_folder_that_is_deleted_while_a_run_trains_is_made_again(make_args, tmp_path):
    out = tmp_path / "out"

    class Deletes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            while state.global_step == 3 and out.exists():  # again where a file was put in while it was emptied
                shutil.rmtree(out, ignore_errors=True)

    make(make_args, out, callbacks=[Deletes()]).train()
    assert checkpoints(out) == ["checkpoint-4", "checkpoint-6"]


def test_what_a_log_cannot_hold_is_left_out_with_a_warning(make_args, tmp_path):
    class Logs(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.log({"norm": torch.tensor(2.0), "picture": object()})

    trainer = make(make_args, tmp_path / "out", max_steps=2, callbacks=[Logs()])
    with pytest.warns(UserWarning, match="'picture' is a object"):
        trainer.train()
    history = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert history[0]["norm"] == 2.0 and "picture" not in history[0]
