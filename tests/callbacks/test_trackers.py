"""TensorBoard and wandb: a run's files under transformers and under hf_compat are read back and compared."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_compat
from helpers.toy import Classifier, blocks, rows, tiny_gpt2
from hf_compat import Trainer, TrainerCallback
from hf_compat.callbacks import trackers as trackers_module
from hf_compat.errors import ArgumentError, MissingPackage

TIMED = ("runtime", "samples_per_second", "steps_per_second", "preparation_time")
SCRIPT = """
import sys, importlib
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
api = importlib.import_module(sys.argv[1])
from helpers.toy import tiny_gpt2, blocks
folder, tracker, *more = sys.argv[2:]
api.set_seed(3)
args = api.TrainingArguments(
    output_dir=folder, report_to=tracker, run_name="a-run", per_device_train_batch_size=4, num_train_epochs=2,
    logging_steps=2, eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=5, use_cpu=True,
    disable_tqdm=True,
)

class Die(api.TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        if "die" in more and state.global_step == 8:
            import os
            {finish}
            os._exit(9)

trainer = api.Trainer(tiny_gpt2(), args, train_dataset=blocks(24), eval_dataset=blocks(8, seed=9), callbacks=[Die()])
trainer.train(resume_from_checkpoint="resume" in more or None)
if "predict" in more:
    trainer.predict(blocks(8, seed=10))
"""


def run(api, folder, tracker, *more, finish="pass", status=0, **environment):
    folder.mkdir(exist_ok=True)
    script = folder.parent / "script.py"
    tests = str(Path(__file__).resolve().parent.parent)
    script.write_text(SCRIPT.format(tests=tests, finish=finish))
    variables = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", **environment}
    done = subprocess.run(
        [sys.executable, str(script), api, "out", tracker, *more],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done


def tensorboard_of(folder):
    """Read scalars by tag, and the tags of texts, with TensorBoard's reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    scalars = {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    texts = {
        tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in reader.Tensors(tag)]
        for tag in reader.Tags()["tensors"]
    }
    return scalars, texts


def untimed(logged):
    return {tag: points for tag, points in logged.items() if not tag.endswith(TIMED)}


def timed(logged):
    return {tag: [step for step, _ in points] for tag, points in logged.items() if tag.endswith(TIMED)}


def logdir(folder):
    found = list((folder / "out" / "runs").iterdir())
    assert len(found) == 1
    return found[0]


def test_tensorboard_has_the_same_tags_values_and_steps(tmp_path):
    for api in ("transformers", "hf_compat"):
        run(api, tmp_path / f"of_{api}", "tensorboard")
    (theirs, their_texts), (ours, our_texts) = (
        tensorboard_of(logdir(tmp_path / f"of_{api}")) for api in ("transformers", "hf_compat")
    )
    assert untimed(ours) == untimed(theirs) and timed(ours) == timed(theirs)
    assert {"train/loss", "eval/loss", "train/epoch", "train/learning_rate", "train/grad_norm"} <= set(ours)
    assert our_texts.keys() == their_texts.keys() == {"args/text_summary", "model_config/text_summary"}
    (_, mine), (_, reference) = our_texts["args/text_summary"][0], their_texts["args/text_summary"][0]
    assert json.loads(mine) == json.loads(reference)


def records_of(file):
    """Read the records of a .wandb file: LevelDB's log format after seven bytes (wandb 0.31 reads it in Go only)."""
    data, place, parts = file.read_bytes(), 7, []
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # a block's end that is too short for a record
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several parts
            yield b"".join(parts)
            parts = []


def wandb_of(folder):
    """Read history, summary, configuration and run facts of an offline run's file, in wandb's own messages."""
    from wandb.proto import wandb_internal_pb2

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    history, summary, config, runs, metrics, artifacts = [], {}, {}, [], [], []
    for file in files:
        for data in records_of(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                history.append({k: v for k, v in items.items() if not k.startswith("_")})
            elif kind == "summary":
                for i in record.summary.update:
                    summary[i.key or "/".join(i.nested_key)] = json.loads(i.value_json)
            elif kind == "config":
                for i in record.config.update:
                    config[i.key or "/".join(i.nested_key)] = json.loads(i.value_json)
            elif kind == "run":
                runs.append((record.run.run_id, record.run.display_name, record.run.project))
                for i in record.run.config.update:
                    config[i.key or "/".join(i.nested_key)] = json.loads(i.value_json)
            elif kind == "metric":
                metrics.append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
            elif kind == "artifact":
                artifacts.append((record.artifact.type, sorted(set(record.artifact.aliases) - {"latest"})))
    return history, summary, config, runs, metrics, artifacts


def without_time(row):
    return {k: v for k, v in row.items() if not k.endswith(TIMED)}


def test_wandb_has_the_same_history_summary_and_configuration(tmp_path):
    for api in ("transformers", "hf_compat"):
        run(api, tmp_path / f"of_{api}", "wandb", "predict", WANDB_PROJECT="a-project", WANDB_LOG_MODEL="end")
    theirs, ours = (wandb_of(tmp_path / f"of_{api}") for api in ("transformers", "hf_compat"))
    assert [without_time(row) for row in ours[0]] == [without_time(row) for row in theirs[0]]
    assert [sorted(row) for row in ours[0]] == [sorted(row) for row in theirs[0]]
    assert any("test/loss" in row for row in ours[0])
    summaries = [{k: v for k, v in without_time(one[1]).items() if not k.startswith("_")} for one in (ours, theirs)]
    assert summaries[0] == summaries[1] and "train_loss" in summaries[0]
    configurations = [{k: v for k, v in one[2].items() if not k.startswith("_")} for one in (ours, theirs)]
    assert configurations[0] == configurations[1]
    assert configurations[0]["model/num_parameters"] > 0
    assert [run[1:] for run in ours[3]][:1] == [run[1:] for run in theirs[3]][:1] == [("a-run", "a-project")]
    assert set(ours[4]) == set(theirs[4])
    assert ours[5] == theirs[5] == [("model", ["base_model"]), ("model", ["final_model"])]


@pytest.mark.matrix
def test_wandb_uploads_the_model_where_the_variable_asks(tmp_path):
    for mode, aliases in (("end", ["final_model"]), ("checkpoint", ["checkpoint_global_step_5", "epoch_0.83"])):
        run("hf_compat", tmp_path / mode, "wandb", WANDB_LOG_MODEL=mode)
        logged = wandb_of(tmp_path / mode)[5]
        assert ("model", ["base_model"]) in logged and ("model", aliases) in logged


@pytest.mark.matrix
def test_a_resumed_run_goes_on_in_tensorboard_without_a_step_backwards(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run("hf_compat", whole, "tensorboard")
    run("hf_compat", cut, "tensorboard", "die", status=9)
    assert max(step for step, _ in tensorboard_of(logdir(cut))[0]["train/loss"]) == 8
    run("hf_compat", cut, "tensorboard", "resume")  # from update 5
    resumed, uninterrupted = tensorboard_of(logdir(cut))[0], tensorboard_of(logdir(whole))[0]
    keys = [tag for tag in untimed(uninterrupted) if tag != "train/train_loss"]
    assert {tag: resumed[tag] for tag in keys} == {tag: uninterrupted[tag] for tag in keys}


def test_a_resumed_run_goes_on_in_wandb_without_a_step_backwards(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run("hf_compat", whole, "wandb")
    run("hf_compat", cut, "wandb", "die", finish="import wandb; wandb.finish()", status=9)
    run("hf_compat", cut, "wandb", "resume")
    history, _, _, runs, _, _ = wandb_of(cut)
    assert len({run_id for run_id, *_ in runs}) == 1, "one run, in two files"
    steps = [row["train/global_step"] for row in history]
    assert steps == sorted(steps)
    assert [without_time(row) for row in history] == [without_time(row) for row in wandb_of(whole)[0]]


def make(make_args, tmp_path, callbacks=(), **values):
    args = make_args(num_train_epochs=1, logging_steps=1, **values)
    return Trainer(Classifier(), args, train_dataset=rows(12), eval_dataset=rows(4), callbacks=list(callbacks))


def test_a_subclass_writes_histograms_as_the_page_shows(make_args, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Histograms(hf_compat.TensorBoardCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            for name, parameter in kwargs["model"].named_parameters():
                self.experiment(args, state).add_histogram(name, parameter.grad, state.global_step + 1)

    make(make_args, tmp_path, [Histograms()]).train()
    reader = EventAccumulator(str(logdir(tmp_path)), size_guidance={"histograms": 0})
    reader.Reload()
    assert [event.step for event in reader.Histograms("outer.bias")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("argument", "variable", "chosen"),
    [("mine", None, "mine"), (None, "theirs", "theirs"), ("mine", "theirs", "mine"), (None, None, "runs")],
)
@pytest.mark.filterwarnings("ignore:`logging_dir")
def test_tensorboards_files_are_where_the_argument_or_the_variable_says(
    make_args, tmp_path, monkeypatch, argument, variable, chosen
):
    monkeypatch.chdir(tmp_path)
    if variable is not None:
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", variable)
    place = {} if argument is None else {"logging_dir": argument}
    make(make_args, tmp_path, report_to="tensorboard", output_dir=".", **place).train()
    found = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("events.out.*")}
    assert found == {chosen}


def test_any_lightning_logger_may_be_passed(make_args, tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    loggers = [CSVLogger(tmp_path, "a", version=0), CSVLogger(tmp_path, "b", version=0)]
    trainer = make(make_args, tmp_path, [loggers[1]], report_to=loggers[0], eval_strategy="epoch")
    trainer.train()
    header, *lines = (tmp_path / "a" / "version_0" / "metrics.csv").read_text().splitlines()
    assert {"train/loss", "eval/loss", "train/global_step", "step"} <= set(header.split(","))
    assert (tmp_path / "b" / "version_0" / "metrics.csv").read_text().splitlines()[0] == header
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    column = header.split(",").index("train/loss")
    assert [float(line.split(",")[column]) for line in lines if line.split(",")[column]] == losses
    assert "learning_rate" in (tmp_path / "a" / "version_0" / "hparams.yaml").read_text()
    assert json.loads(trainer.args.to_json_string())["report_to"] == ["CSVLogger"]


def test_names_rules_and_missing_packages(make_args, monkeypatch):
    assert make_args(report_to="none").report_to == [] and make_args(report_to=None).report_to == []
    assert {"tensorboard", "wandb"} <= set(make_args(report_to="all").report_to)
    assert make_args(report_to=["tensorboard"]).report_to == ["tensorboard"]
    monkeypatch.setenv("WANDB_DISABLED", "true")
    assert "wandb" not in make_args(report_to="all").report_to
    with pytest.raises(ArgumentError, match=r"'tensorbord'.*not known"):
        make_args(report_to="tensorbord")
    for name, package in (("mlflow", "mlflow"), ("comet_ml", "comet_ml"), ("trackio", "trackio")):
        with pytest.raises(MissingPackage, match=rf"needs the package {package}\.\n\nHint: pip install"):
            Trainer(Classifier(), make_args(report_to=name), train_dataset=rows(4))


def test_a_missing_tensorboard_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingPackage, match=r"pip install 'tensorboard>="):
        trackers_module.TensorBoardCallback()


def test_values_of_ones_own_stand_beside_the_loss(make_args):
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            right = (outputs["logits"].argmax(-1) == inputs["labels"]).float()
            self.log_metric("accuracy", right.mean(), weight=len(right))
            self.seen.append((model.training, right.mean().item(), len(right)))
            return (loss, outputs) if return_outputs else loss

    args = make_args(
        num_train_epochs=1, logging_steps=2, gradient_accumulation_steps=2, eval_strategy="epoch", max_steps=4
    )
    trainer = Own(Classifier(), args, train_dataset=rows(32), eval_dataset=rows(10, seed=1))
    trainer.seen = []
    trainer.train()
    train = [(value, n) for training, value, n in trainer.seen if training]
    logged = [log["accuracy"] for log in trainer.state.log_history if "accuracy" in log]
    expected = [sum(v * n for v, n in train[i : i + 4]) / 16 for i in (0, 4)]
    assert logged == pytest.approx(expected, rel=1e-6)
    evaluated = [(value, n) for training, value, n in trainer.seen if not training]
    found = [log["eval_accuracy"] for log in trainer.state.log_history if "eval_accuracy" in log]
    assert found == [pytest.approx(sum(v * n for v, n in evaluated) / 10, rel=1e-6)]
    with pytest.raises(ArgumentError, match="use another name"):
        trainer.log_metric("loss", 1.0)


def test_hidden_losses_are_counted(make_args):
    from helpers.toy import NanAt

    trainer = Trainer(NanAt((3, 4)), make_args(logging_steps=2, num_train_epochs=1), train_dataset=rows(32))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log.get("nonfinite_steps") for log in logs] == [None, 2, 2, 2]
    assert all(math.isfinite(log["loss"]) for log in logs)


def test_a_reporter_sees_logs_of_the_model_too(make_args):
    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            self.model = model

    look = Look()
    trainer = Trainer(tiny_gpt2(), make_args(max_steps=1), train_dataset=blocks(4), callbacks=[look])
    trainer.train()
    assert look.model is trainer.model and torch.isfinite(torch.tensor(trainer.state.log_history[-1]["train_loss"]))


def test_a_tracker_tells_whether_it_reads_checkpoints(monkeypatch):
    """A save does not wait for a tracker that reads no checkpoints. A subclass may read some."""

    class Copies(trackers_module.WandbCallback):
        def on_save(self, args, state, control, **kwargs): ...

    monkeypatch.delenv("WANDB_LOG_MODEL", raising=False)
    assert not trackers_module.WandbCallback().reads_checkpoints and Copies().reads_checkpoints
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    assert trackers_module.WandbCallback().reads_checkpoints


@pytest.mark.parametrize("name", ["mlflow", "comet_ml", "neptune"])
def test_a_tracker_of_transformers_says_that_it_needs_transformers(make_args, tmp_path, monkeypatch, name):
    monkeypatch.setattr("hf_compat.callbacks.loggers.is_installed", lambda module: True)
    monkeypatch.setattr("hf_compat.callbacks.loggers.reporting_callback", lambda wanted: None)
    with pytest.raises(MissingPackage, match=rf"report_to='{name}'(.|\n)*pip install 'transformers>="):
        make(make_args, tmp_path, report_to=name)
