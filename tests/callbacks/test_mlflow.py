"""MLflow over restarts: transformers' `MLflowCallback` continues a resumed training's run, and its status is right.

Where MLflow is not installed, a stand-in for the package takes its place. transformers' callback is the real one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import toy
from hf_compat import Trainer, TrainerCallback
from hf_compat.callbacks import trackers

HERE = Path(__file__).resolve().parent
TRAIN = """
import json, os, signal, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import mlflow
from helpers import toy
from hf_compat import Trainer, TrainerCallback, TrainingArguments, set_seed
how, resume = sys.argv[1:]
if resume == "True":
    exec({read!r})

class End(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step == 8 and how == "raise":
            raise ValueError("mine")
        if state.global_step == 8 and how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        if state.global_step == 8 and how == "SIGKILL":
            flush = getattr(mlflow, "flush_async_logging", lambda: None)
            flush()
            os.kill(os.getpid(), signal.SIGKILL)

set_seed(3)
args = TrainingArguments(
    "out", report_to="mlflow", per_device_train_batch_size=4, num_train_epochs=2, logging_steps=2,
    eval_strategy="steps", eval_steps=4, save_steps=5, use_cpu=True, disable_tqdm=True, enable_jit_checkpoint=True,
)
data = {{"train_dataset": toy.blocks(24), "eval_dataset": toy.blocks(8, seed=9)}}
trainer = Trainer(toy.tiny_gpt2(), args, callbacks=[End()], **data)
trainer.train(resume_from_checkpoint=resume == "True")
print("LOGS", json.dumps(trainer.state.log_history))
"""
READ = """
import json, mlflow
client = mlflow.MlflowClient()
history = lambda run: {n: [(p.step, p.value) for p in client.get_metric_history(run, n)] for n in ("loss", "eval_loss")}
runs = mlflow.search_runs(output_format="list")
print("RUNS", json.dumps([(run.info.run_id, run.info.status, history(run.info.run_id)) for run in runs]))
"""


@pytest.fixture(params=["stand-in", pytest.param("mlflow", marks=pytest.mark.matrix)])
def live(request, tmp_path):
    """Return a function that runs one life of a training; one that resumes prints MLflow's runs of the life before."""
    if request.param == "mlflow" and importlib.util.find_spec("mlflow") is None:
        pytest.skip("MLflow is not installed: pip install mlflow-skinny")
    place = [str(HERE / "mlflow_stand_in")] if request.param == "stand-in" else []
    path = os.pathsep.join([*place, *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(how="whole", resume=False, status=0, text=None):
        script = tmp_path / "script.py"
        script.write_text(text or TRAIN.format(tests=str(HERE.parent), read=READ))
        variables = {**os.environ, "PYTHONPATH": path, "MLFLOW_TRACKING_URI": f"file://{tmp_path / 'runs'}",
                     "MLFLOW_ALLOW_FILE_STORE": "true"}  # fmt: skip
        command = [sys.executable, str(script), how, str(resume)]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr[-3000:]
        return done

    return run


def said(done: subprocess.CompletedProcess, what: str) -> list:
    line = next(line for line in done.stdout.splitlines() if line.startswith(what))
    return json.loads(line.removeprefix(what))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("how", "exit_status", "shown"),
    [
        pytest.param("SIGKILL", -9, "RUNNING", marks=pytest.mark.matrix),
        pytest.param("raise", 1, "FAILED", marks=pytest.mark.matrix),
        ("SIGTERM", 143, "KILLED"),
    ],
)
def test_a_resumed_run_is_continued_and_its_status_says_how_it_ended(live, how, exit_status, shown):
    live(how, status=exit_status)
    resumed = live(resume=True)
    [[begun, status, cut]] = said(resumed, "RUNS")
    assert status == shown and [step for step, _ in cut["loss"]] == [2, 4, 6, 8]
    [[run, status, history]] = said(live(text=READ), "RUNS")
    assert (run, status) == (begun, "FINISHED")
    logs = said(resumed, "LOGS")
    expected = {key: [[log["step"], log[key]] for log in logs if key in log] for key in ("loss", "eval_loss")}
    assert history == expected and len(history["loss"]) == 6, "no value is there twice, and none lacks"


@pytest.mark.matrix
def test_a_run_that_mlflow_no_longer_has_is_begun_anew(live, tmp_path):
    live("SIGKILL", status=-9)
    record = tmp_path / "out" / "trackers.json"
    record.write_text(json.dumps({"mlflow": {"id": "0123456789abcdef0123456789abcdef"}}))
    done = live(resume=True)
    runs = said(live(text=READ), "RUNS")
    assert sorted(status for _, status, _ in runs) == ["FINISHED", "RUNNING"]
    assert "names MLflow's run 0123456789abcdef0123456789abcdef, and a new run is started" in done.stderr
    assert json.loads(record.read_text())["mlflow"]["id"] in [run for run, status, _ in runs if status == "FINISHED"]


@pytest.fixture
def stand_in(monkeypatch):
    """The stand-in for MLflow, in this process."""
    known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "mlflow"}
    for name in known:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(HERE / "mlflow_stand_in"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlflow"]:
        del sys.modules[name]
    sys.modules.update(known)


@pytest.mark.usefixtures("stand_in")
def test_a_training_that_goes_on_in_this_process_goes_on_in_its_run(tmp_path, monkeypatch, make_args):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'runs'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logs = []
    for epochs, checkpoint in ((2, None), (3, "checkpoint-2")):  # updates 3 to 6 are made, and logged, twice
        same = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
        args = make_args(report_to="mlflow", logging_steps=1, num_train_epochs=epochs, **same)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(12))
        trainer.train(resume_from_checkpoint=checkpoint and os.path.join(args.output_dir, checkpoint))
        logs.append(trainer.state.log_history)
    client = importlib.import_module("mlflow").MlflowClient()
    [run] = importlib.import_module("mlflow").search_runs(output_format="list")
    losses = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")]
    assert run.info.status == "FINISHED"
    assert losses == [(log["step"], log["loss"]) for log in logs[-1] if "loss" in log] and len(losses) == 9


class Fails(TrainerCallback):
    def __init__(self, error):
        self.error = error

    def on_log(self, args, state, control, **kwargs):
        if self.error is not None:
            raise self.error


@pytest.mark.usefixtures("stand_in")
def test_a_run_that_fails_is_marked_and_one_that_is_gone_is_begun_anew(tmp_path, monkeypatch, make_args, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'runs'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = importlib.import_module("mlflow")

    def train(error, resume=None):
        args = make_args(report_to="mlflow", logging_steps=2, max_steps=4, save_strategy="steps", save_steps=1)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8), callbacks=[Fails(error)])
        with contextlib.suppress(type(error) if error else ()):
            trainer.train(resume_from_checkpoint=resume)
        return {run.info.run_id: run.info.status for run in mlflow.search_runs(output_format="list")}

    [(first, status)] = train(ValueError("mine")).items()
    assert status == "FAILED"
    checkpoint = os.path.join(make_args().output_dir, "checkpoint-1")
    assert train(KeyboardInterrupt(), checkpoint) == {first: "KILLED"}
    assert train(None, checkpoint) == {first: "FINISHED"} and "names MLflow's run" not in caplog.text
    assert [point.step for point in mlflow.MlflowClient().get_metric_history(first, "loss")] == [2, 4]
    record = Path(make_args().output_dir) / "trackers.json"
    record.write_text(json.dumps({"mlflow": {"id": "0" * 32}}))
    found = train(None, checkpoint)
    assert sorted(found.values()) == ["FINISHED"] * 2 and f"names MLflow's run {'0' * 32}" in caplog.text
    assert json.loads(record.read_text())["mlflow"]["id"] in found.keys() - {first}


class Asked:
    """Stands in for transformers' callback: it starts a run, or takes the one that `MLFLOW_RUN_ID` names."""

    def setup(self, args, state, model):
        self.told.append(("setup", os.environ.pop("MLFLOW_RUN_ID", None)))
        if self.fails and len(self.told) == 1:
            self.active = "broken" if self.fails == "within" else None
            raise RuntimeError("of another server")
        self.active = self.active or "new"

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.told.append(("log", state.global_step))


class Tracked(trackers.MLflowRuns, Asked):
    """A callback beside an MLflow of the test's own."""

    def __init__(self, active=None, fails="", ends=True, points=()):
        self.told, self.active, self.fails, self._auto_end_run, self._initialized = [], active, fails, ends, False
        history = [SimpleNamespace(step=step) for step in points]
        self._ml_flow = SimpleNamespace(
            active_run=lambda: self.active and SimpleNamespace(info=SimpleNamespace(run_id=self.active)),
            MlflowClient=lambda: SimpleNamespace(get_metric_history=lambda run, name: history),
            end_run=lambda status: self.told.append(status),
        )


@pytest.mark.parametrize(
    ("done", "searches", "first", "stored", "variable", "active", "continues"),
    [
        (3, False, True, "old", None, None, True),
        (1, False, True, "old", None, None, True),
        (0, False, True, "old", None, None, False),
        (3, True, True, "old", None, None, False),
        (3, False, False, "old", None, None, False),
        (3, False, True, None, None, None, False),
        (3, False, True, "old", "given", None, False),
        (3, False, True, "old", None, "begun", False),
    ],
)
@pytest.mark.parametrize("ends", [False, True])
def test_which_mlflow_run_is_used(
    done, searches, first, stored, variable, active, continues, ends, tmp_path, monkeypatch
):
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    if variable:
        monkeypatch.setenv("MLFLOW_RUN_ID", variable)
    args = SimpleNamespace(output_dir=str(tmp_path))
    if stored:
        (tmp_path / "trackers.json").write_text(json.dumps({"mlflow": {"id": stored}}))
    state = SimpleNamespace(global_step=done, is_hyper_param_search=searches, is_world_process_zero=first)
    callback = Tracked(active, ends=ends, points=[1, 1, 2])
    callback.setup(args, state, None)
    assert callback.told == [("setup", stored if continues else variable)]
    assert sum(callback._has.values()) == (3 if continues else 0)
    known = trackers.RunMemory(str(tmp_path), "mlflow").read().get("id")
    assert known == ((active or "new") if first and ends and not continues else stored)


@pytest.mark.parametrize("fails", ["before", "within"])
def test_an_mlflow_run_that_cannot_go_on_is_named(fails, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    (tmp_path / "trackers.json").write_text(json.dumps({"mlflow": {"id": "old"}}))
    args = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=3, is_hyper_param_search=False, is_world_process_zero=True)
    callback = Tracked(fails=fails)
    with pytest.raises(RuntimeError, match="another server") if fails == "within" else contextlib.nullcontext():
        callback.setup(args, state, None)
    is_new = fails == "before"
    assert callback.told == [("setup", "old"), *[("setup", None)] * is_new]
    assert ("names MLflow's run old, and a new run is started: of another server" in caplog.text) is is_new
    assert trackers.RunMemory(str(tmp_path), "mlflow").read() == {"id": "new" if is_new else "old"}


def test_logs_that_a_continued_mlflow_run_has_are_skipped(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    (tmp_path / "trackers.json").write_text(json.dumps({"mlflow": {"id": "old"}}))
    args = SimpleNamespace(output_dir=str(tmp_path))
    callback = Tracked(points=[3, 3, 4])
    for step in (3, 3, 3, 4, 4, 5):
        state = SimpleNamespace(global_step=step, is_hyper_param_search=False, is_world_process_zero=True)
        callback.on_log(args, state, None, logs={})
        callback._initialized = True
    assert callback.told == [("setup", "old"), ("log", 3), ("log", 4), ("log", 5)]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("active", [None, "run"])
def test_an_mlflow_run_ends_where_it_was_started(ends, active):
    callback = Tracked(active, ends=ends)
    callback._initialized = True
    callback.finalize("FAILED")
    is_ended = ends and active is not None
    assert callback.told == ["FAILED"] * is_ended and callback._initialized is not is_ended
