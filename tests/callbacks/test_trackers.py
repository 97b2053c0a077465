"""TensorBoard and wandb: a run's files under transformers and under hf_compat are read back and compared."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import hf_compat
from helpers.toy import Classifier, rows, tiny_gpt2
from hf_compat import Trainer, TrainerState
from hf_compat.callbacks import trackers as trackers_module
from hf_compat.callbacks.loggers import LoggerCallback, mark_as_failed
from hf_compat.callbacks.trackers import MLflowRuns
from hf_compat.errors import ArgumentError, MissingPackage
from hf_compat.hf import enums

TIMED = ("runtime", "samples_per_second", "steps_per_second", "preparation_time")
RUNS = Path(__file__).resolve().parents[1] / "helpers" / "tracked_runs.py"


def run(folder, tracker, *runs, **environment):
    """Make runs one after another: package, folder, and what else is done. Each is a process of its own."""
    variables = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", **environment}
    command = [sys.executable, str(RUNS), tracker, json.dumps(runs)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
    run(tmp_path, "tensorboard", *((api, f"of_{api}") for api in ("transformers", "hf_compat")))
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


@pytest.fixture(scope="module")
def of_wandb(tmp_path_factory):
    """What wandb has of an uninterrupted run of each package, and of one of ours that died and was resumed."""
    folder = tmp_path_factory.mktemp("wandb")
    runs = [("transformers", "theirs", "predict"), ("hf_compat", "ours", "predict")]
    runs += [("hf_compat", "cut", "die"), ("hf_compat", "cut", "resume", "predict")]
    run(folder, "wandb", *runs, WANDB_PROJECT="a-project", WANDB_LOG_MODEL="end")
    return {name: wandb_of(folder / name) for name in ("theirs", "ours", "cut")}


def test_wandb_has_the_same_history_summary_and_configuration(of_wandb):
    theirs, ours = of_wandb["theirs"], of_wandb["ours"]
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
def test_a_resumed_run_goes_on_in_tensorboard_without_a_step_backwards(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(tmp_path, "tensorboard", ("hf_compat", "whole"), ("hf_compat", "cut", "die"))
    assert max(step for step, _ in tensorboard_of(logdir(cut))[0]["train/loss"]) == 8
    run(tmp_path, "tensorboard", ("hf_compat", "cut", "resume"))  # from update 5
    resumed, uninterrupted = tensorboard_of(logdir(cut))[0], tensorboard_of(logdir(whole))[0]
    keys = [tag for tag in untimed(uninterrupted) if tag != "train/train_loss"]
    assert {tag: resumed[tag] for tag in keys} == {tag: uninterrupted[tag] for tag in keys}


def test_a_resumed_run_goes_on_in_wandb_without_a_step_backwards(of_wandb):
    history, _, _, runs, _, _ = of_wandb["cut"]
    assert len(runs) == 2 and len({run_id for run_id, *_ in runs}) == 1, "one run, in two files"
    steps = [row["train/global_step"] for row in history]
    assert steps == sorted(steps)
    assert [without_time(row) for row in history] == [without_time(row) for row in of_wandb["ours"][0]]


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


class Recorded:
    """Takes every call, and remembers it with its arguments."""

    def __init__(self, calls, name):
        self._calls, self._name = calls, name

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self._calls.append((f"{self._name}.{name}", args, kwargs))

        return call


class WandbStandIn:
    """Wandb as a callback sees it: what it is asked for is remembered, and nothing is written."""

    def __init__(self, begun):
        self.calls, self.summary = [], {"train/loss": 0.5, "name": "text", "_runtime": 3}
        self.run = self._run("begun") if begun else None
        self.config = Counts(self.calls)

    def __getattr__(self, name):
        return getattr(Recorded(self.calls, "wandb"), name)

    def _run(self, name):
        run = Recorded(self.calls, "run")
        vars(run).update(id="the-id", name=name, summary={}, url="", _label=lambda **facts: None)
        return run

    def init(self, **options):
        self.calls.append(("init", (), options))
        self.run = self._run(options.get("name", "named-by-wandb"))

    def finish(self):
        self.calls.append(("finish", (), {}))
        self.run = None

    def Artifact(self, **facts):
        artifact = Recorded(self.calls, "artifact")
        vars(artifact).update(new_file=self._file)
        self.calls.append(("Artifact", (), facts))
        return artifact

    def _file(self, name, mode="w"):
        self.calls.append(("new_file", (name,), {}))
        return io.BytesIO() if "b" in mode else io.StringIO()

    def found(self):
        """Return the calls, the objects among them by their kind."""
        shown = [(name, [type(one).__name__ if isinstance(one, (Recorded, torch.nn.Module)) else one for one in args])
                 for name, args, _ in self.calls]  # fmt: skip
        calls = [(*one, kwargs) for one, (_, _, kwargs) in zip(shown, self.calls, strict=True)]
        return [one for one in calls if one[0] != "wandb.termwarn"], dict(self.config)


class Counts(dict):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def update(self, values, allow_val_change=False):
        self.calls.append(("config", (allow_val_change,), {})) if len(values) > 1 else None
        super().update(values)


def model_of(kind):
    model = tiny_gpt2() if "plain" not in kind else Classifier()
    if kind == "plain with a dict":
        model.config = {"hidden": 3}
    if kind == "adapters":
        model.peft_config = {"default": "lora"}
    return model


@pytest.mark.parametrize(
    ("variables", "values", "state", "model"),
    [
        ({}, {}, {}, "gpt2"),
        ({"WANDB_PROJECT": "mine"}, {"run_name": "a-run"}, {}, "plain"),
        ({"WANDB_WATCH": "all"}, {"logging_steps": 250}, {}, "plain with a dict"),
        ({"WANDB_WATCH": "gradients"}, {"logging_steps": 5}, {}, "adapters"),
        ({"WANDB_WATCH": "some"}, {}, {"trial_name": "trial-3", "is_hyper_param_search": True}, "gpt2"),
        ({}, {"run_name": "a-run"}, {"trial_name": "trial-3"}, "gpt2"),
        ({}, {}, {"is_hyper_param_search": True}, "gpt2"),
        ({"WANDB_LOG_MODEL": "checkpoint"}, {"run_name": "a-run"}, {}, "gpt2"),
        ({"WANDB_LOG_MODEL": "checkpoint"}, {}, {}, "plain"),
        ({"WANDB_LOG_MODEL": "other"}, {}, {}, "plain"),
        ({"WANDB_LOG_MODEL": "end"}, {"run_name": "out"}, {}, "adapters"),
        ({"WANDB_LOG_MODEL": "checkpoint"}, {}, {"is_world_process_zero": False}, "gpt2"),
        ({}, {}, {"begun": True}, "gpt2"),
        ({}, {}, {"events": ("predict", "log")}, "gpt2"),
        ({}, {}, {"events": ("log", "predict")}, "gpt2"),
    ],
)
def test_wandb_is_asked_for_what_upstream_asks(tmp_path, monkeypatch, variables, values, state, model):
    events = state.get("events", ("begin", "log", "last", "save", "predict"))
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_PROJECT", "WANDB_WATCH", "WANDB_LOG_MODEL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = {}
    for api in ("transformers", "hf_compat"):
        package = __import__(api)
        callback = (package if api == "hf_compat" else package.integrations).WandbCallback()
        wandb = callback._wandb = WandbStandIn("begun" in state)
        args = package.TrainingArguments("out", use_cpu=True, **values)
        now = package.TrainerState(global_step=4, epoch=0.83456, logging_steps=int(args.logging_steps))
        for name, value in state.items():
            setattr(now, name, value)
        control, given = package.TrainerControl(), model_of(model)
        for event in events:
            match event:
                case "begin":
                    callback.on_train_begin(args, now, control, model=given)
                case "log":
                    callback.on_log(args, now, control, model=given, logs={"loss": 1.0, "eval_loss": 2, "test_a": 3})
                case "last":
                    callback.on_log(
                        args, now, control, model=given, logs={"train_loss": 1.0, "total_flos": 2.0, "a": 3}
                    )
                case "save":
                    callback.on_save(args, now, control)
                case "predict":
                    callback.on_predict(args, now, control, model=given, metrics={"test_loss": 1.0})
        calls, config = wandb.found()
        summary = None if wandb.run is None else wandb.run.summary
        found[api] = calls, {name: config[name] for name in config if name not in args.to_dict()}, summary
    assert found["hf_compat"] == found["transformers"]
    assert bool(found["hf_compat"][0]) == state.get("is_world_process_zero", True)


def of_ours(tmp_path, **facts):
    args = hf_compat.TrainingArguments(str(tmp_path), use_cpu=True, metric_for_best_model="loss")
    return args, hf_compat.TrainerState(**{"logging_steps": 5, "epoch": 1.0, **facts}), hf_compat.TrainerControl()


def test_a_continued_wandb_run_gets_the_logs_that_it_lacks(tmp_path):
    (tmp_path / "trackers.json").write_text(json.dumps({"wandb": {"id": "the-id", "step": 4, "logs": 2}}))
    callback = hf_compat.WandbCallback()
    wandb = callback._wandb = WandbStandIn(False)
    args, state, control = of_ours(tmp_path, global_step=2)
    callback.on_train_begin(args, state, control, model=Classifier())
    for step, loss in ((3, 0), (4, 1), (4, 2), (4, 3), (5, 4)):
        state.global_step = step
        callback.on_log(args, state, control, logs={"loss": loss})
    calls = wandb.found()[0]
    assert calls[0] == ("init", [], {"project": "huggingface", "id": "the-id", "resume": "allow"})
    assert [args[0]["train/loss"] for name, args, _ in calls if name == "wandb.log"] == [3, 4]
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": {"id": "the-id", "step": 5, "logs": 1}}


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("asked", ["end", "checkpoint", "false"])
def test_wandb_gets_the_model_at_the_end_with_the_best_metric_or_the_last(tmp_path, monkeypatch, asked, best):
    monkeypatch.setenv("WANDB_LOG_MODEL", asked)
    args, state, control = of_ours(tmp_path, global_step=2, best_metric=0.25, total_flos=9)
    args.load_best_model_at_end = best
    callback, saved = hf_compat.WandbCallback(), []
    trainer = SimpleNamespace(save_model=saved.append)
    callback._wandb = WandbStandIn(True)
    callback.on_train_end(args, state, control, trainer=trainer)
    assert not callback._wandb.calls, "it was not set up"
    callback.on_train_begin(args, state, control, model=Classifier())
    callback._wandb.calls.clear()
    for trainer_of_run, is_first in ((None, True), (trainer, False), (trainer, True)):
        state.is_world_process_zero = is_first
        callback.on_train_end(args, state, control, trainer=trainer_of_run)
    calls = callback._wandb.found()[0]
    of_best = {"eval/loss": 0.25, "train/total_floss": 9, "model/num_parameters": None}
    facts = {**(of_best if best else {"train/loss": 0.5}), "final_model": True}
    assert [kwargs["metadata"] for name, _, kwargs in calls if name == "Artifact"] == [facts] * (asked != "false")
    assert [args for name, args, _ in calls if name == "artifact.add_dir"] == [[folder] for folder in saved]
    assert [kwargs["aliases"] for name, _, kwargs in calls if name == "run.log_artifact"] == [["final_model"]] * len(
        saved
    )
    assert len(saved) == (asked != "false")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("begins", [True, False])
def test_a_given_writer_is_asked_for_what_upstream_asks(tmp_path, begins, is_first):
    found = {}
    for api in ("transformers", "hf_compat"):
        package, calls = __import__(api), []
        logs = {"loss": 1.0, "eval_count": 2, "test_name": "a", "odd": [1], "on": True}
        writer = Recorded(calls, "writer")
        callback = (package if api == "hf_compat" else package.integrations).TensorBoardCallback(writer)
        args = package.TrainingArguments("out", use_cpu=True)
        args.to_json_string = lambda: "arguments"
        state, control = package.TrainerState(global_step=4, is_world_process_zero=is_first), package.TrainerControl()
        if begins:
            callback.on_train_begin(args, state, control, model=tiny_gpt2())
        callback.on_log(args, state, control, logs=logs)
        if begins:
            callback.on_train_end(args, state, control)
        found[api] = calls
    assert found["hf_compat"] == found["transformers"]
    assert len(found["hf_compat"]) == (8 if begins else 5) * is_first + (begins and not is_first)


def test_a_writer_of_its_own_goes_on_in_the_newest_folder_and_is_closed_outside_of_a_training(tmp_path, monkeypatch):
    made, calls = [], []
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", lambda **facts: made.append(facts) or writer)
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    writer = Recorded(calls, "writer")
    for number, name in enumerate(("newest", "older", "a file")):
        (tmp_path / "runs" / name).mkdir(parents=True) if "file" not in name else (tmp_path / "runs" / name).touch()
        os.utime(tmp_path / "runs" / name, (100, 100 - number if "file" not in name else 200))
    of_step = {}
    for step, trial in ((0, None), (3, None), (0, "trial-1"), (0, "")):
        facts = {"global_step": step, "trial_name": trial, "is_hyper_param_search": trial is not None}
        callback = hf_compat.TensorBoardCallback()
        args, state, control = of_ours(tmp_path, **facts)
        callback.on_log(args, state, control, logs={"loss": 1.0})
        of_step[step, trial] = Path(made[-1]["log_dir"]).relative_to(tmp_path / "runs"), made[-1]["purge_step"]
        callback.on_train_begin(args, state, control)
        callback.on_log(args, state, control, logs={"loss": 1.0})
        callback.on_train_end(args, state, control)
        callback.on_log(args, state, control, logs={"loss": 1.0})
    assert of_step[3, None] == (Path("newest"), 4)
    assert of_step[0, "trial-1"][0].name == "trial-1" and of_step[0, "trial-1"][1] is None
    assert [len(of_step[key][0].parts) for key in of_step] == [1, 1, 2, 1] and of_step[0, None][0].name != "newest"
    ends = [name.partition(".")[2] for name, _, _ in calls if name.endswith(("close", "flush"))]
    assert ends == ["close", "flush", "close", "close"] * 4 and len(made) == 8


def test_a_lightning_logger_gets_predictions_metrics_of_the_first_process_alone(tmp_path):
    from hf_compat.callbacks.loggers import LoggerCallback

    calls = []
    callback = LoggerCallback(Recorded(calls, "logger"))
    args, state, control = of_ours(tmp_path, global_step=3)
    for is_first in (True, False):
        state.is_world_process_zero = is_first
        callback.on_train_begin(args, state, control, model=tiny_gpt2())
        callback.on_log(args, state, control, logs={"loss": 1.0, "text": "a"})
        callback.on_predict(args, state, control, metrics={"test_loss": 1.0, "text": "a"})
        callback.on_train_end(args, state, control)
    assert [name for name, _, _ in calls] == [
        f"logger.{name}" for name in ("log_hyperparams", "log_metrics", "save", "log_metrics", "save", "finalize")
    ]
    assert {"n_embd", "learning_rate"} <= set(calls[0][1][0])
    assert calls[1][1:] == (({"train/loss": 1.0, "train/global_step": 3},), {"step": 3})
    assert calls[3][1:] == (({"test/loss": 1.0},), {"step": 3})
    assert calls[5][1] == ("success",)


@pytest.mark.parametrize(
    ("variables", "missing", "out"),
    [
        ({}, (), ()),
        ({}, ("wandb",), ("wandb",)),
        ({"WANDB_DISABLED": "TRUE"}, (), ("wandb",)),
        ({"WANDB_DISABLED": "1"}, (), ("wandb",)),
        ({"WANDB_DISABLED": "false"}, (), ()),
    ],
)
def test_all_trackers_are_those_that_are_here_and_on(monkeypatch, variables, missing, out):
    monkeypatch.setattr(enums, "environment", variables)
    monkeypatch.setattr(enums, "is_installed", lambda module: module not in missing)
    expected = set(enums.PACKAGES) - {"flyte", "kubeflow", *out}
    assert set(enums.available_trackers()) == expected


@pytest.mark.parametrize(
    ("installed", "off", "trackers", "found"),
    [
        (True, "", ["wandb"], ["wandb", "kubeflow"]),
        (False, "", ["wandb"], ["wandb"]),
        (True, "true", ["wandb"], ["wandb"]),
        (True, "no", ["wandb"], ["wandb", "kubeflow"]),
        (True, "", ["kubeflow"], ["kubeflow"]),
    ],
)
def test_a_platforms_tracker_is_added_once(monkeypatch, installed, off, trackers, found):
    monkeypatch.setattr(enums, "environment", {"DISABLE_KUBEFLOW_INTEGRATION": off})
    monkeypatch.setattr(enums, "is_installed", lambda module: module == "transformers" and installed)
    assert enums.with_platforms_tracker(trackers) == found


def test_names_of_logs_are_upstreams():
    names = ("loss", "eval_loss", "test_a_b", "eval", "test", "evaluation_x", "train_x")
    logs = dict.fromkeys(names, 1)
    assert enums.rewrite_logs(logs) == transformers.integrations.integration_utils.rewrite_logs(logs)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("config", [None, SimpleNamespace(to_dict=lambda: {"width": 3}), SimpleNamespace(to_dict=1)])
def test_a_lightning_logger_is_written_by_the_first_process(is_first, config):
    seen = []
    noting = SimpleNamespace(
        log_hyperparams=lambda values: seen.append(values.get("width")),
        log_metrics=lambda logs, step: seen.append((logs, step)),
        save=lambda: seen.append("save"),
        finalize=seen.append,
    )
    callback, state = LoggerCallback(noting), TrainerState(global_step=4, is_world_process_zero=is_first)
    args, control, model = SimpleNamespace(to_sanitized_dict=dict), None, SimpleNamespace(config=config)
    callback.on_train_begin(args, state, control, model=model)
    callback.on_log(args, state, control, logs={"eval_loss": 0.5, "name": "x"})
    callback.on_predict(args, state, control, metrics={"test_loss": 0.5})
    callback.on_train_end(args, state, control)
    width = 3 if callable(getattr(config, "to_dict", None)) else None
    logs = [({"eval/loss": 0.5, "train/global_step": 4}, 4), "save", ({"test/loss": 0.5}, 4), "save", "success"]
    assert seen == ([width, *logs] if is_first else [])


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "KILLED"), (SystemExit(), "KILLED"), (ValueError(), "FAILED")]
)
def test_a_run_that_fails_is_marked(error, status):
    seen = []

    class Runs(MLflowRuns):
        def __init__(self):
            pass

        def finalize(self, status):
            seen.append(status)
            raise OSError("away")

    mark_as_failed([LoggerCallback(SimpleNamespace(finalize=seen.append)), Runs(), object()], error)
    assert seen == ["failed", status] and error.__notes__ == ["Runs could not end its run: OSError: away"]


@pytest.mark.parametrize(("step", "purge"), [(0, None), (1, 2), (7, 8)])
def test_points_after_the_checkpoint_are_replaced(tmp_path, monkeypatch, step, purge):
    made = []
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", lambda **facts: made.append(facts) or "a writer")
    args, state, _ = of_ours(tmp_path, global_step=step)
    callback = hf_compat.TensorBoardCallback()
    assert [callback.experiment(args, state) for _ in range(2)] == ["a writer"] * 2
    assert [facts["purge_step"] for facts in made] == [purge]


@pytest.mark.parametrize(
    ("step", "record", "options", "skip"),
    [
        (0, {"id": "a", "step": 4, "logs": 2}, {}, (-1, 0)),
        (1, {"id": "a", "step": 4, "logs": 2}, {"id": "a", "resume": "allow"}, (4, 2)),
        (1, {"id": "a"}, {"id": "a", "resume": "allow"}, (-1, 0)),
        (1, {"step": 4}, {}, (-1, 0)),
    ],
)
def test_a_run_of_wandb_begins_or_goes_on_when_it_is_asked_for(tmp_path, monkeypatch, step, record, options, skip):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    (tmp_path / "trackers.json").write_text(json.dumps({"wandb": record}))
    begun, callback = [], hf_compat.WandbCallback()
    assert callback._skip_to == callback._logged == (-1, 0)
    run = SimpleNamespace(id="made")
    callback._wandb = SimpleNamespace(run=None)

    def init(**given):
        begun.append(given)
        callback._wandb.run = run

    callback._wandb.init = init
    args, state, _ = of_ours(tmp_path, global_step=step)
    args.run_name = None
    assert [callback.experiment(args, state) for _ in range(2)] == [run, run]
    assert begun == [{"project": "huggingface", **options}] and callback._skip_to == skip
    assert json.loads((tmp_path / "trackers.json").read_text())["wandb"] == {**record, "id": "made"}
